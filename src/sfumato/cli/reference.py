"""docs/options.md, made of the tables of options: `python -m sfumato.cli.reference`, or
`make options`. A test holds that the file is up to date."""

from __future__ import annotations

from sfumato.cli.commands import COMMANDS
from sfumato.options import OPTIONS, SETTINGS, Option, Setting
from sfumato.values import Flag

_INTRODUCTION = """\
# Options

`make options` writes this page from [`options/`](../src/sfumato/options); edit those files instead.

An option can be set in four places. The first place that names it decides:

1. the command line: `--max-tokens 512`
2. an environment variable: `SFUMATO_MAX_TOKENS=512`
3. a TOML file: `max-tokens = 512`
4. the default

```sh
sfumato serve --config sfumato.toml --port 9000       # or SFUMATO_CONFIG=sfumato.toml
```

```toml
# Above the first table: options for all commands that have them.
model = "models/diffusiongemma.gguf"
threads = 8

[serve]                       # for `sfumato serve` alone; it comes before the keys above
port = 8080
max-body = "16M"
strict = true
cors-origin = ["https://chat.example", "https://notes.example"]

[run]
max-tokens = 512
stop = ["\\n\\n"]
```

- The variable of an option is `SFUMATO_` and its name in capitals, with `_` for `-`. An empty
  variable counts as not set. A variable that is almost the name of an option gets a warning.
  A variable holds for every command that has the option; a table of a file is for one.
- In a file, `max-tokens` and `max_tokens` are the same key. All keys and values are checked,
  those of other commands too; an unknown key is an error. Paths are relative to the working
  directory, not to the file.
- An option without a value (`--strict`) is `true` or `false` in a file, and `1`, `true`, `yes`,
  `on` or `0`, `false`, `no`, `off` in a variable. `--no-strict` on the command line turns it off
  again; `--visual` does so for `--no-visual`.
- An option that may be given several times is an array in a file; in a variable its values
  stand between commas, or in a JSON array: `SFUMATO_STOP='["a, b", "c"]'`. The values of one
  place replace those of another; they are not added to them.
- A wrong value is refused with the place it comes from: `--port`, `SFUMATO_PORT`,
  `port in [serve] of sfumato.toml`. The key in `api-key` is not shown.
- Three variables are no options: `SFUMATO_ISA` ([cpu.md](cpu.md)), `SFUMATO_OFF`
  ([hardware.md](hardware.md#who-serves-each-operation)), and `SFUMATO_DEBUG=1`, which shows where
  in the program an error was found.

"""

_SETTINGS = """
## How a reply is decoded

The same choices in Python (`SamplerConfig`, `Request`), on the command line and in an HTTP body.
The default counts where neither the user nor the checkpoint says.

| Python | Option | HTTP field | Values | Default | Sampler | |
|---|---|---|---|---|---|---|
"""

_COMPLETION = """
## Shell completion

`sfumato completion SHELL` prints a script that completes commands, options and their values:

```sh
eval "$(sfumato completion bash)"       # in ~/.bashrc
eval "$(sfumato completion zsh)"        # in ~/.zshrc, after compinit
sfumato completion fish | source        # in ~/.config/fish/config.fish
```
"""


def page() -> str:
    """The whole of docs/options.md."""
    lines = ["| Option | Values | Default | Commands | |", "|---|---|---|---|---|"]
    lines += [_row(option) for option in sorted(OPTIONS, key=lambda option: option.name)]
    settings = "\n".join(map(_setting, SETTINGS)) + "\n"
    options = "## All options\n\n" + "\n".join(lines) + "\n"
    return _INTRODUCTION + options + _SETTINGS + settings + _COMPLETION


def _row(option: Option) -> str:
    name = f"`-{option.short}`, `{option.flag}`" if option.short else f"`{option.flag}`"
    values = "" if isinstance(option.kind, Flag) else option.kind.describe()
    default = f"`{option.shown_default}`" if option.shown_default else ""
    all_of_them = len(option.commands) == sum(c.name != "completion" for c in COMMANDS)
    commands = "all" if all_of_them else ", ".join(option.commands)
    needed = " (required)" if option.required else ""
    return _cells(name, values, default, commands, option.help + needed)


def _setting(setting: Setting) -> str:
    values = setting.kind.describe()
    if setting.request_field and setting.field_kind:
        values += f"; in HTTP {setting.field_kind.describe()}"
    nothing = setting.default is None or setting.default == ()
    return _cells(
        f"`{setting.name}`",
        setting.option and f"`--{setting.option}`",
        setting.request_field and f"`{setting.request_field}`",
        values,
        "" if nothing else f"`{setting.kind.show(setting.default)}`",
        setting.sampler,
        setting.help,
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
