"""What the docs take from the code's tables: docs/options.md and docs/exclusions.md (`make options`
writes them), the formats in docs/conversion.md, the names of models in docs/serving.md, and the
models in docs/performance.md, the choices in docs/tuning.md, and the metrics of gateways in
docs/scale.md (to be pasted).

    python docs/tables.py options|exclusions|formats|models|catalogue|tuning|gateways

Tests hold that the files are up to date.
"""

from __future__ import annotations

import sys

from sfumato.catalog import CATALOGUE, MACHINES, PUBLISHED, gigabytes, step_seconds
from sfumato.cli import chat
from sfumato.cli.arguments import COMMANDS
from sfumato.options import SETTINGS, Setting
from sfumato.options.exclusions import EXCLUSIONS, Exclusion
from sfumato.options.table import OPTIONS, Option, options_of
from sfumato.options.tuning import TUNING
from sfumato.server.gateways import METRICS, GatewayMetric
from sfumato.values import Flag
from sfumato.weights.formats import BLOCKS, FLOAT, FORMATS, SCALED, Format

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


_FILES = """
## Files that commands write

No command replaces a file that it did not write itself in the same run, unless `--force` is
given: `--replay` of `run`, `--json`, `--csv` and `--plot` of `bench`, `--plot` of `eval`, `--out`
of `decide`, `eval` and `train`, the calibration of `calibrate`, the target of `convert` and
`merge`, and `/save` of `chat`. What cannot be written is refused before the work begins. A new
file appears under its name only when it is complete, and a symbolic link's target is replaced, not
the link. Pipes and devices (`/dev/null`, `>(…)`) are always written.

- `decide --out` and `eval --out` write rows as they come, and go on with a table of their own that
  is not complete. `pull` goes on with a download, and `tune --resume` with a run.
- `fill --write` and `edit --write` change a file in place, and keep a
  [backup](fill.md#what-is-written) beside it.
- `serve --audit-log` appends.
- `--force` of `pull` and `remove` has other meanings: `pull` downloads even where disk or memory is
  short, `remove` does not ask.
"""

_CHAT = """
## Commands of a chat

At the prompt of `sfumato chat` a line that begins with `/` is a command. Tab completes commands
and names of files.

| Command | |
|---|---|
"""

_CHAT_NOTES = """
`/retry` takes the next seed where `/seed`, `/steps` and `/thinking` are as they were, since the
same seed gives the same answer. An answer stays until a retry has another. `/undo` takes back up
to 100 changes, one at a time. A question whose answer Ctrl-C or an error has ended before any
text is not part of the conversation; `/retry` asks it again.

`/save` writes a JSON array of messages with `role` and `content`; the settings are not in it.
`/load` reads such files alone, of up to 16 MiB and 10,000 messages: a system message or none,
then questions with their answers. The system message of the file takes the place of `--system`,
until `/clear`. Of pictures the file has the names of their files, which `/load` reads again.

`/image FILE` puts a picture to the next question, and shows it where the terminal has 256 colours.
`/clear` and `/load` drop pictures that no question has taken yet.
"""


_EXCLUSIONS = """\
# What does not go together

`make options` writes this page from [the table](../src/sfumato/options/exclusions.py); edit that
file instead. The checks and their messages come from the same rows.

Each row has a field, or one choice of it, and others that a request cannot have beside it. Fields
have the names of Python, bodies and the command line. The errors of a dialect that calls a field
otherwise have the name of its body.
"""


def options() -> str:
    """The whole of docs/options.md."""
    lines = ["| Option | Values | Default | Commands | |", "|---|---|---|---|---|"]
    lines += [_option(option) for option in sorted(OPTIONS, key=lambda option: option.name)]
    settings = "\n".join(map(_setting, SETTINGS)) + "\n"
    options = "## All options\n\n" + "\n".join(lines) + "\n"
    slashed = [_cells(f"`{chat.USAGES[name]}`", does) for name, (_, does) in chat.COMMANDS.items()]
    return "".join(
        (
            *(_INTRODUCTION, options, _FILES, _SETTINGS, settings, _CHAT),
            *("\n".join(slashed), "\n", _CHAT_NOTES, _COMPLETION),
        )
    )


def _option(option: Option) -> str:
    name = f"`-{option.short}`, `{option.flag}`" if option.short else f"`{option.flag}`"
    values = "" if isinstance(option.kind, Flag) else option.kind.describe()
    default = f"`{option.shown_default}`" if option.shown_default else ""
    all_of_them = len(option.commands) == sum(bool(options_of(c.name)) for c in COMMANDS)
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


def tuning() -> str:
    """The table of docs/tuning.md."""
    rows = [
        _cells(
            f"`{each.name}`",
            f"`--{each.name.replace('_', '-')}`",
            each.kind.describe(),
            "" if each.default is None else f"`{each.kind.show(each.default)}`",
            each.help,
        )
        for each in TUNING
    ]
    return "\n".join(
        ["| Python | Option | Values | Default | |", "|---|---|---|---|---|", *rows, ""]
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def exclusions() -> str:
    """docs/exclusions.md."""
    parts = [_EXCLUSIONS]
    for heading, rows in EXCLUSIONS.items():
        parts += [f"## {heading}", "", "| | does not go with | because |", "|---|---|---|"]
        parts += [_excluded(row) for row in rows] + [""]
    return "\n".join(parts).rstrip() + "\n"


def _excluded(row: Exclusion) -> str:
    words = {"one": row.one, "other": "…", "all": "them"}
    because = "; ".join(text.format(**words) for text in (row.why, row.advice) if text)
    return _cells(f"`{row.one}`", ", ".join(f"`{other}`" for other in row.others), because)


_WIDE = 2816
"""Columns by which the bytes of a row count: those of the 26B-A4B."""


def formats() -> str:
    """Every registered format, as Markdown."""
    head = ["| format | bits of a weight | read from | written | kernels of a GPU |"]
    return "\n".join([*head, "|---|---|---|---|---|", *map(_format, FORMATS.values())])


def _format(format: Format) -> str:
    bits = 8 * format.nbytes((1, _WIDE)) / _WIDE
    places = ["GGUF"] if format.ggml_type is not None else []
    places += ["safetensors"] if format.published or format.form != BLOCKS else []
    written = "yes" if format.encode and format.ggml_type is not None else "no"
    kernels = {FLOAT: "as bfloat16", SCALED: "codes"}.get(format.form)
    kernels = kernels or ("planes" if format.layout else "no: torch dequantizes it")
    cells = format.name, f"{bits:.4g}", ", ".join(places), written, kernels
    return f"| {' | '.join(cells)} |"


def models() -> str:
    """The table of docs/performance.md."""
    heads = ["format", "download", "size", "memory", *(f"s a step, {m.name}" for m in MACHINES)]
    rows = [heads, ["---"] * len(heads)]
    for entry in PUBLISHED:
        cells = [entry.format, f"`sfumato pull {entry.address}`"]
        cells += [gigabytes(entry.nbytes), gigabytes(entry.needs())]
        for machine in MACHINES:
            seconds = step_seconds(entry, machine)
            measured = entry.measured and machine is MACHINES[0]
            shown = "" if seconds is None else f"{seconds:.1f}"
            cells.append(f"**{shown}** measured" if measured else shown)
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def catalogue() -> str:
    """The rows of the models that have a name, in docs/serving.md."""
    rows = (
        (f"`{e.name}`", f"{e.title}, {e.format}", e.size, e.licence, e.good_for)
        for e in CATALOGUE.values()
    )
    return "\n".join(_cells(*row) for row in rows)


def gateways() -> str:
    """The table of docs/scale.md."""
    rows = [_cells(_gateway_names(each), each.kind, each.help, each.readers) for each in METRICS]
    return "\n".join(["| Metric | | | read by |", "|---|---|---|---|", *rows, ""])


def _gateway_names(metric: GatewayMetric) -> str:
    labels = f"{{{','.join(metric.labels)}}}"
    older = f", `{metric.older}`" if metric.older else ""
    return f"`{metric.name}{labels}`{older}"


PAGES = {
    "options": options,
    "exclusions": exclusions,
    "formats": formats,
    "models": models,
    "catalogue": catalogue,
    "tuning": tuning,
    "gateways": gateways,
}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
