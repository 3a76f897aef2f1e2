"""The command line: its commands, built from the table of options, and where values come from.

The command line comes before the environment, that before the file, and the file before the
default. Every value keeps its origin, so that a message can name it. Imports no command, so that
`sfumato --help` stays quick.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sfumato import __version__
from sfumato.cli import terminal
from sfumato.options import DENOISING, SETTINGS, setting
from sfumato.options.table import GROUP_NOTES, OPTIONS, PREFIX, Option, options_of
from sfumato.refused import Refused
from sfumato.values import Choice, Each, Flag, Kind, Path, Text

_EPILOG = (
    "Options can also be set by environment variables (--max-tokens: SFUMATO_MAX_TOKENS) and in a "
    "TOML file (--config); docs/options.md lists them all."
)


# No options; the modules that need them read them.
OTHER_VARIABLES = (f"{PREFIX}ISA", f"{PREFIX}DEBUG", f"{PREFIX}OFF")
FILE, ENVIRONMENT, COMMAND_LINE = 1, 2, 3  # ranks of sources; a default has rank 0
_ALIKE = 0.85  # names that differ in a letter or two
_COMMANDS = sorted({name for option in OPTIONS for name in option.commands})
SHELLS = ("bash", "zsh", "fish")
_NAME = "a name, as sdar-1.7b, or hf:owner/name, or hf:owner/name:file"
_CHECKPOINT = "a GGUF file, a file or folder of safetensors, or a name as `pull` takes it"


@dataclass(frozen=True)
class Argument:
    """What a command takes without a name."""

    name: str
    help: str
    kind: Kind = field(default_factory=Text)
    count: str = ""  # argparse's nargs: "", "?" or "*"


@dataclass(frozen=True)
class Command:
    """A command, and the module in sfumato.cli that does it."""

    name: str
    help: str
    arguments: tuple[Argument, ...] = ()
    module: str = ""  # the command's name where it is not given
    examples: tuple[str, ...] = ()  # each with what it does behind two spaces and #


COMMANDS = (
    Command(
        "run",
        "answer one question",
        (
            Argument(
                "question",
                "the question, in quotes or not; without it, or for -, standard input is read",
                count="*",
            ),
        ),
        examples=(
            'sfumato run "What is the capital of France?"',
            'sfumato run -m model.gguf --max-tokens 64 "Why is the sky blue?"',
            "sfumato run --json - < question.txt | jq -r .text",
        ),
    ),
    Command(
        "chat",
        "hold a conversation",
        examples=(
            "sfumato chat -m model.gguf --seed 7",
            'sfumato chat --system "Answer in one sentence."',
        ),
    ),
    Command(
        "fill",
        "fill the holes of a text: {{6}} has 6 tokens, {{<=8}} up to 8, {{a|b}} is a or b",
        (Argument("text", "the text, or a file; - is standard input"),),
        examples=(
            'sfumato fill "The capital of France is {{<=4}}."',
            "sfumato fill main.py --at 12:5 --at-most 40 -m model.gguf",
        ),
    ),
    Command(
        "edit",
        "change a file as an instruction says, and show what changes",
        (
            Argument("file", "the file", Path()),
            Argument("instruction", "what to change, in quotes or not", count="+"),
        ),
        module="fill",
        examples=(
            'sfumato edit letter.txt "Make it shorter." -m model.gguf',
            'sfumato edit letter.txt "Make it shorter." -m model.gguf --write',
        ),
    ),
    Command(
        "decide",
        "answer questions about each row of a table with probabilities, without writing text",
        (Argument("table", "a CSV, TSV or JSON Lines file; or use --state", Path(), count="?"),),
        examples=(
            'sfumato decide -q questions.toml --state "Charged twice!"',
            "sfumato decide mails.csv -q questions.toml > answers.csv",
            "sfumato decide mails.csv -q questions.toml -o answers.csv  # resumes",
        ),
    ),
    Command(
        "calibrate",
        "fit the probabilities of decisions to labelled rows",
        module="decide",
        examples=("sfumato calibrate -q questions.toml --labelled labelled.csv -m model.gguf",),
    ),
    Command(
        "perplexity",
        "measure how well the causal mode predicts a text",
        (Argument("file", "a file of UTF-8 text; - is standard input", Path()),),
        module="train",
        examples=("sfumato perplexity book.txt -m model.gguf --context 4096",),
    ),
    Command(
        "serve",
        "serve a model over HTTP, to OpenAI's clients and as a web page",
        examples=(
            "sfumato serve --open",
            "sfumato serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt",
            "sfumato serve -m large=model.gguf -m toy=embedded",
        ),
    ),
    Command(
        "deploy",
        "serve a model over HTTP by several replicas, on Ray Serve",
        (Argument("to", "ray", Choice(("ray",))),),
        examples=(
            "sfumato deploy ray -m model.gguf --replicas 3  # docs/scale.md",
            "sfumato deploy ray -m model.gguf --replicas 2 --replica-gpus 1",
        ),
    ),
    Command(
        "batch",
        "answer the requests of a file, a line each in OpenAI's form; goes on where it was stopped",
        (Argument("file", "JSON Lines with custom_id, method, url and body", Path()),),
        examples=("sfumato batch requests.jsonl -o results.jsonl -m model.gguf",),
    ),
    Command(
        "mcp",
        "give a model to an editor or an agent as tools (MCP): decide, fill, generate",
        examples=("sfumato mcp -m model.gguf  # docs/agents.md: how editors start it",),
    ),
    Command(
        "demo",
        "watch the embedded model solve a Sudoku and answer questions",
        examples=("sfumato demo --seed 3",),
    ),
    Command(
        "inspect",
        "list what is in a checkpoint, without loading it",
        (Argument("path", f"{_CHECKPOINT}; default: embedded", Path(), count="?"),),
        module="checkpoint",
        examples=("sfumato inspect model.gguf --tensors",),
    ),
    Command(
        "convert",
        "turn a checkpoint or an adapter into GGUF or safetensors, or quantize it",
        (
            Argument("source", f"{_CHECKPOINT}; or an adapter, with -m"),
            Argument("out", "a file that ends in .gguf, or else a folder of safetensors"),
        ),
        module="checkpoint",
        examples=(
            "sfumato convert folder model.gguf --to q4_k_m",
            "sfumato convert adapter adapter.gguf -m model.gguf",
        ),
    ),
    Command(
        "merge",
        "add an adapter to the weights of its base",
        (
            Argument("base", _CHECKPOINT),
            Argument("adapter", "a folder of PEFT, or a GGUF file"),
        ),
        module="checkpoint",
        examples=("sfumato merge model.gguf adapter -o merged.gguf",),
    ),
    Command(
        "doctor",
        "estimate which models fit this machine, and how fast DiffusionGemma is",
        examples=("sfumato doctor --json",),
    ),
    Command(
        "pull",
        "download a model; without a name, list what is published",
        (Argument("name", _NAME, count="?"),),
        examples=(
            "sfumato pull sdar-1.7b",
            "sfumato pull hf:unsloth/diffusiongemma-26B-A4B-it-GGUF:Q4_K_M",
        ),
    ),
    Command(
        "list",
        "list the models on this machine, and those that can be downloaded",
        module="models",
        examples=("sfumato list", "sfumato list --json | jq -r '.models[].path'"),
    ),
    Command(
        "remove",
        "remove a model from this machine, after a question",
        (Argument("name", "a name that `sfumato list` shows"),),
        module="models",
        examples=("sfumato remove sdar-1.7b",),
    ),
    Command(
        "verify-model",
        "load a model and write five fixed answers, for a report on published weights",
        (Argument("path", f"{_CHECKPOINT}; default: embedded", Path(), count="?"),),
        module="verify",
        examples=("sfumato verify-model sdar-1.7b --quantize q8_0",),
    ),
    Command(
        "tune",
        "tune a model on conversations: an adapter, or all weights",
        module="tuning",
        examples=(
            "sfumato tune -m model.gguf --data chats.jsonl --out run",
            "sfumato tune -m model.gguf --data chats.jsonl --out run --resume",
        ),
    ),
    Command("train", "train a model by a recipe", examples=("sfumato train --out folder",)),
    Command(
        "eval",
        "measure how many tasks a model does right: a file's, or its recipe's held-out ones",
        module="evaluate",
        examples=(
            "sfumato eval --count 50",
            "sfumato eval -m model.gguf --tasks facts -o facts-answers.jsonl  # resumes",
            "sfumato eval -m model.gguf --tasks facts --curves 4,8,16,48 --plot curve.svg",
        ),
    ),
    Command(
        "bench",
        "measure how fast a model, or a server, is",
        examples=(
            "sfumato bench -m model.gguf --where",
            "sfumato bench --url http://127.0.0.1:8080/v1 --concurrency 1,4",
        ),
    ),
    Command(
        "completion",
        "print what makes a shell complete commands and options",
        (Argument("shell", "bash, zsh or fish", Choice(SHELLS)),),
        module="arguments",
        examples=('eval "$(sfumato completion bash)"',),
    ),
    Command("version", "print the version", module="arguments"),
    Command(
        "help",
        "print this help, or that of a command",
        (Argument("about", "the command", count="?"),),
        module="arguments",
    ),
)


class _Help(argparse.HelpFormatter):
    """Breaks lines between words alone, so that what is copied is whole; an example that is too
    long goes on behind a backslash, as a shell takes it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        if prog == "sfumato":  # argparse computes the column of commands without their indent
            self._action_max_length = 4 + max(len(command.name) for command in COMMANDS)
        elif self._width < _NARROW:
            self._max_help_position = 8

    def _format_usage(self, usage: str | None, *rest: Any) -> str:
        if usage is not None:
            usage = "\n".join(_lines(usage, self._width - 2, first=len("usage: ")))
        return super()._format_usage(usage, *rest)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            _example(each.strip(), width) if each[:1] == " " else _wrap(each, width) or [""]
            for each in text.splitlines()
        )
        return "\n".join(indent + line for part in lines for line in part)


_NARROW = 60  # columns of a terminal in which help stands below the options
_QUOTED = r"""\[[^\]]*\]|"[^"]*"|'[^']*'"""
_SHELL_WORD = re.compile(rf"-\S+ (?:{_QUOTED}|[^\s|<>-]\S*)|{_QUOTED}|\S+")  # options with a value


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _lines(text: str, width: int, first: int = 0, end: str = "") -> list[str]:
    """A command in lines of that width, all but the first indented and all but the last with `end`;
    what is in quotes or brackets stays whole. first: columns before the first line."""
    lines, room = [""], width - first
    for word in _SHELL_WORD.findall(text):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) + len(end) > room:
            lines[-1] += end
            lines.append(" ")
            room = width
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _example(text: str, width: int) -> list[str]:
    """An example, with what it does behind it, or in lines of its own where both are too long."""
    if len(text) + 2 <= width:
        return [f"  {text}"]
    command, _, does = text.partition("  # ")
    lines = [f"  {line}" for line in _lines(command, width - 2, end=" \\")]
    return lines + [f"    # {line}" for line in _wrap(does, width - 6)]


class _Parser(argparse.ArgumentParser):
    """Reports errors as every other part of the command line does."""

    def error(self, message: str) -> NoReturn:
        terminal.print_message("error", f"{message} (see {self.prog} --help)")
        self.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises OSError where the output is full, which argparse's own does not say."""
        (file or sys.stderr).write(message)


class CommandLine:
    """The parser of every command.

    Options that are not given are not in what it parses: their values come from elsewhere.
    """

    def __init__(self) -> None:
        self.parser = _Parser(
            prog="sfumato",
            description="Run, inspect and tune block-diffusion language models.",
            formatter_class=_Help,
            allow_abbrev=False,
            epilog="sfumato COMMAND --help says more about a command. " + _EPILOG,
        )
        self.parser.add_argument("--version", action="version", version=f"sfumato {__version__}")
        added = self.parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
        self.commands: dict[str, argparse.ArgumentParser] = {}
        self.actions: list[tuple[argparse.Action, Kind]] = []  # each with the kind of its values
        for command in COMMANDS:
            parser = added.add_parser(
                command.name,
                help=command.help,
                description=command.help[0].upper() + command.help[1:] + ".",
                usage=_usage(command),
                epilog=_epilog(command),
                formatter_class=_Help,
                allow_abbrev=False,
            )
            parser.set_defaults(module=command.module or command.name)
            self.actions += _add(parser, command)
            self.commands[command.name] = parser

    def parse_args(
        self, argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> argparse.Namespace:
        """The chosen command's options from all sources; their origins are in `args.origins`.

        Without a command `args.command` is None, and `args` has nothing else. Raises SystemExit
        after --help and after an error, OSError where a file of options cannot be read.
        """
        words = sys.argv[1:] if argv is None else argv
        self._check_first(words)
        args, rest = self.parser.parse_known_args(words)
        if args.command is None:
            if rest:
                self.parser.error(f"unrecognized arguments: {' '.join(rest)}")
            return args
        parser = self.commands[args.command]
        _take_words(args, rest, parser)
        try:
            values, origins = resolve(args.command, vars(args), environment)
        except ValueError as error:
            parser.error(str(error))
        return argparse.Namespace(**vars(args) | values, origins=origins)

    def _check_first(self, words: Sequence[str]) -> None:
        """The first word: an unknown command gets the nearest ones, and an option of a command, in
        front of the command or without any, where it belongs."""
        first = words[0].partition("=")[0] if words else ""
        if first and not first.startswith("-") and first not in self.commands:
            near = " or ".join(nearest(first, self.commands))
            meant = f"did you mean {near}?" if near else f"there are {', '.join(self.commands)}"
            self.parser.error(f"there is no command {first!r}; {meant}")
        if owners := _owners(first):
            self.parser.error(f"{first} belongs to a command: sfumato {owners[0]} {first} …")
        if first.startswith("-") and first not in ("-h", "--help", "--version"):
            self.parser.error(f"unrecognized arguments: {first}")


def main(args: argparse.Namespace) -> int:
    """`sfumato version`, `sfumato help`, and `sfumato completion`: a script for bash, zsh or fish,
    made from the parser by shtab."""
    line = CommandLine()
    if args.command == "version":
        print(f"sfumato {__version__}")
    elif args.command == "help":
        if args.about is not None:
            line.parse_args([args.about, "--help"])
        line.parser.print_help()
    else:
        import shtab

        for action, kind in line.actions:
            if isinstance(getattr(kind, "item", kind), Path):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(line.parser, args.shell))
    return 0


def _usage(command: Command) -> str:
    """The first line of help: what a command needs, and not each of its options."""
    arguments = [
        {"": one.name, "?": f"[{one.name}]", "*": f"[{one.name} ...]"}.get(
            one.count, f"{one.name} ..."
        )
        for one in command.arguments
    ]
    options = options_of(command.name)
    needed = [f"{option.flag} {option.metavar}" for option in options if option.required]
    return " ".join(["sfumato", command.name, *needed, *["[options]"] * bool(options), *arguments])


def _epilog(command: Command) -> str | None:
    """Below the options: examples, and where else options can be set."""
    examples = "\n".join(["examples:", *(f"  {each}" for each in command.examples)])
    parts = [examples] * bool(command.examples) + [_EPILOG] * bool(options_of(command.name))
    return "\n\n".join(parts) or None


def _owners(flag: str) -> list[str]:
    """The commands that have an option, in the order of help."""
    named = {
        name
        for option in OPTIONS
        if flag in (option.flag, option.off, option.short and f"-{option.short}")
        for name in option.commands
    }
    return [command.name for command in COMMANDS if flag and command.name in named]


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names that a wrong word may stand for: those that begin with it, or the one most alike;
    none where no name is near."""
    from difflib import get_close_matches

    names = list(names)
    return [name for name in names if name.startswith(word)] or get_close_matches(word, names, 1)


_SCHEMAS = (
    "JSON schemas are for Python (generate(…, schema=…)), for HTTP (response_format) and "
    "for the page's JSON view: docs/grammars.md"
)
_ELSEWHERE = dict.fromkeys(("--schema", "--json-schema", "--response-format"), _SCHEMAS) | {
    "--grammar": "grammars are for HTTP: docs/grammars.md",
    "--tools": "tools are for Python and HTTP: docs/api.md",
}
"""Options that people expect and no command has, and where what they mean is."""


def _unknown(words: Sequence[str], command: str) -> str:
    """What is said of words that a command does not take."""
    message = f"unrecognized arguments: {' '.join(words)}"
    first = next((word for word in words if word.startswith("--")), "").partition("=")[0]
    if owners := _owners(first):
        return f"{message}; {first} is an option of {', '.join(owners)}"
    if first in _ELSEWHERE:
        return f"{message}; {_ELSEWHERE[first]}"
    near = nearest(first, [option.flag for option in options_of(command)]) if first else []
    return f"{message}; did you mean {' or '.join(near)}?" if near else message


def origin_of(args: argparse.Namespace, key: str) -> Origin:
    """Where an option's value comes from."""
    default = Origin(0, f"--{key.replace('_', '-')}")
    origin: Origin = getattr(args, "origins", {}).get(key, default)
    return origin


def in_options(args: argparse.Namespace, error: Refused) -> Refused:
    """The error with the names of options, where its fields are what an option of the command
    sets."""
    names = {option.key: origin_of(args, option.key).label for option in options_of(args.command)}
    keys = {each.name: each.option.replace("-", "_") for each in SETTINGS if each.option}
    return error.renamed(names | {name: names[key] for name, key in keys.items() if key in names})


def _take_words(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> None:
    """Adds the words after an option to those before the option, for a command that takes any
    number of words: argparse takes only the first run of words."""
    command = next(each for each in COMMANDS if each.name == args.command)
    many = [one.name for one in command.arguments if one.count == "*"]
    if rest and (not many or any(word.startswith("-") for word in rest)):
        parser.error(_unknown(rest, args.command))
    for name in many:
        setattr(args, name, [*getattr(args, name), *rest])


def _add(
    parser: argparse.ArgumentParser, command: Command
) -> Iterator[tuple[argparse.Action, Kind]]:
    for argument in command.arguments:
        how: dict[str, Any] = {"nargs": argument.count} if argument.count else {}
        how |= {"help": argument.help, "metavar": argument.name} | _reading(argument.kind)
        yield parser.add_argument(argument.name, **how), argument.kind
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in options_of(command.name):
        if option.group not in groups:
            note = GROUP_NOTES.get(option.group)
            title = f"{option.group} ({note})" if note else option.group
            groups[option.group] = parser.add_argument_group(title)
        yield _add_option(groups[option.group], option), option.kind


def _add_option(group: argparse._ActionsContainer, option: Option) -> argparse.Action:
    names = [f"-{option.short}"] * bool(option.short) + [option.flag]
    how: dict[str, Any] = {"dest": option.key, "default": argparse.SUPPRESS}
    if isinstance(option.kind, Flag):
        # Turns off what a variable or a file has turned on; --help does not list it.
        group.add_argument(option.off, action="store_false", help=argparse.SUPPRESS, **how)
    text = option.help + (f" ({option.shown_default})" if option.shown_default else "")
    how["help"] = text.replace("%", "%%")
    if isinstance(option.kind, Flag):
        return group.add_argument(*names, action="store_true", **how)
    if option.metavar:
        how["metavar"] = option.metavar
    if isinstance(option.kind, Each):
        return group.add_argument(*names, action="append", **how, **_reading(option.kind.item))
    if option.alone is not None:
        how |= {"nargs": "?", "const": option.alone}
        advice = f"; other words stand before {option.flag}, or write {option.flag} {option.alone}"
        return group.add_argument(*names, **how, **_reading(option.kind, advice))
    return group.add_argument(*names, **how, **_reading(option.kind))


def _reading(kind: Kind, advice: str = "") -> dict[str, Any]:
    """advice: what to do about a wrong value; without it, argparse itself says what a choice is."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}{advice}") from None

    choices = {"choices": kind.names} if isinstance(kind, Choice) else {}
    return choices if choices and not advice else {"type": parse, **choices}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: "--port", "SFUMATO_PORT", "port in sfumato.toml"."""

    rank: int  # COMMAND_LINE, ENVIRONMENT or FILE
    label: str


Entries = dict[str, tuple[Any, Origin]]
"""What a file says, by the names of options."""


def _entry(
    file: Mapping[str, Entries], command: str, option: Option
) -> tuple[Any, Origin] | tuple[()]:
    """The value of a command's option in a file, and its origin; the command's table comes first.

    A common key whose value this command refuses belongs to a command that takes the value: `json`
    is a path for bench, and true or false elsewhere."""
    own, common = (file.get(table, {}).get(option.name, ()) for table in (command, ""))
    return own or (common if common and _takes(option, common[0]) else ())


def resolve(
    command: str, given: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Every option of a command by key, and the origins of those that are not defaults.

    given: what the command line says, by key. Raises ValueError naming the origin of what is
    wrong, OSError for a file that cannot be read.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    file: Mapping[str, Entries] = {}
    for option in sorted(options_of(command), key=lambda option: option.name != "config"):
        key = option.key
        if key in given:
            values[key], origins[key] = given[key], Origin(COMMAND_LINE, option.flag)
        elif text := environment.get(option.variable):
            origins[key] = Origin(ENVIRONMENT, option.variable)
            values[key] = _read(option, origins[key], text, from_text=True)
        elif entry := _entry(file, command, option):
            given_there, origins[key] = entry
            values[key] = _read(option, origins[key], given_there)
        elif option.required:
            raise ValueError(
                f"{option.flag} is required (or {option.variable}, or a --config file)"
            )
        else:
            default = option.default
            values[key] = list(default) if isinstance(default, tuple) else default
        if option.name == "config" and values[key] is not None:
            file = read_file(values[key])
    return values, origins


def _read(option: Option, origin: Origin, given: Any, from_text: bool = False) -> Any:
    try:
        return option.kind.parse(given) if from_text else option.kind.accept(given)
    except ValueError as error:
        why = f"is not {option.kind.describe()}" if option.secret else str(error)
        if from_text and given.startswith(("tcp://", "udp://")):
            why += (
                '; Kubernetes sets this variable in every pod beside a service named "sfumato": '
                "rename the service, or set enableServiceLinks: false"
            )
        raise ValueError(f"{origin.label}: {why}") from None


def read_file(path: str) -> dict[str, Entries]:
    """The tables of a TOML file by command, and under "" the keys of all commands, with every key
    and every value checked. Raises ValueError or OSError."""
    import pathlib  # here: `sfumato --help` needs none

    from sfumato.decisions.question_file import read_toml

    raw = read_toml(pathlib.Path(path))
    tables = {name: value for name, value in raw.items() if isinstance(value, dict)}
    for name in tables:
        if name not in _COMMANDS:
            raise ValueError(f"{path}: unknown table [{name}]; {_nearest(name, _COMMANDS)}")
    common = {name: value for name, value in raw.items() if name not in tables}
    return {name: _entries(path, name, table) for name, table in {"": common, **tables}.items()}


def _entries(path: str, command: str, raw: Mapping[str, Any]) -> Entries:
    """The keys of a command's table, or the common ones, under the options' names."""
    entries: Entries = {}
    where = f"[{command}] of {path}" if command else path
    known = [option for option in OPTIONS if not command or command in option.commands]
    for written, value in raw.items():
        name = written.replace("_", "-")
        rows = [option for option in known if option.name == name]
        if name == "config":
            raise ValueError(f"config in {where}: a file cannot name another file")
        if not rows:
            names = [option.name for option in known if option.name != "config"]
            owners = sorted({owner for o in OPTIONS if o.name == name for owner in o.commands})
            what = f"it is an option of {', '.join(owners)}" if owners else _nearest(name, names)
            raise ValueError(f"{where}: unknown key {written!r}; {what}")
        if name in entries:
            raise ValueError(f"{where}: {name!r} is given twice, with - and with _")
        origin = Origin(FILE, f"{name} in {where}")
        if not any(_takes(option, value) for option in rows):
            _read(rows[0], origin, value)
        entries[name] = value, origin
    return entries


def _takes(option: Option, value: Any) -> bool:
    try:
        option.kind.accept(value)
    except ValueError:
        return False
    return True


def _nearest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    (best,) = get_close_matches(name, names, 1, 0.0)
    return f"the nearest name is {best!r}"


def suspicious(environment: Mapping[str, str]) -> list[str]:
    """Warnings of variables that are almost the name of an option."""
    known = {option.variable for option in OPTIONS} | set(OTHER_VARIABLES)
    strange = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if not strange:
        return []
    from difflib import get_close_matches

    nearest = ((name, get_close_matches(name, known, 1, _ALIKE)) for name in strange)
    return [f"{name} is not read; did you mean {near[0]}?" for name, near in nearest if near]


def sampler_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `SamplerConfig.options` takes, of the options that the command has."""
    given = vars(args)
    rows = [(each.name, each.option.replace("-", "_")) for each in DENOISING if each.option]
    values = {name: given[key] for name, key in rows if key in given}
    if counts := values.get("soft_top_k"):
        from sfumato import SoftTopK

        values["soft_top_k"] = SoftTopK(*counts)
    return values


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The options of sampling as fields of an HTTP body; what is not set is left out."""
    values = {setting(name).request_field: value for name, value in sampler_options(args).items()}
    return {k: v for k, v in values.items() if v is not None and v is not False}
