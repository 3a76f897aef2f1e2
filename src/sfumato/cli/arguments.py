"""The command line, built from the table of options. Knows no option and no command by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from sfumato import __version__
from sfumato.cli import notes
from sfumato.cli.commands import COMMANDS, Command, command_of
from sfumato.cli.sources import Origin, resolve
from sfumato.options import SETTINGS
from sfumato.options.table import GROUP_NOTES, OPTIONS, Option, options_of
from sfumato.refused import Refused
from sfumato.values import Choice, Each, Flag, Kind

_EPILOG = (
    "Options can also be set by environment variables (--max-tokens: SFUMATO_MAX_TOKENS) and in a "
    "TOML file (--config); docs/options.md lists them all."
)


class _Commands(argparse.HelpFormatter):
    """Widens the column of command names, which argparse computes without their indent."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 4 + max(len(command.name) for command in COMMANDS)


class _Parser(argparse.ArgumentParser):
    """Reports errors as every other part of the command line does."""

    def error(self, message: str) -> NoReturn:
        notes.print_message("error", f"{message} (see {self.prog} --help)")
        self.exit(2)


class CommandLine:
    """The parser of every command.

    Options that are not given are not in what it parses: their values come from elsewhere.
    """

    def __init__(self) -> None:
        self.parser = _Parser(
            prog="sfumato",
            description="Run, inspect and tune block-diffusion language models.",
            formatter_class=_Commands,
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
                epilog=_EPILOG if options_of(command.name) else None,
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
        self._refuse_option_first(words)
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

    def _refuse_option_first(self, words: Sequence[str]) -> None:
        """An option of a command before the command, or without any: says where it belongs."""
        first = words[0].partition("=")[0] if words else ""
        commands = [
            name
            for option in OPTIONS
            if first in (option.flag, option.off, option.short and f"-{option.short}")
            for name in option.commands
        ]
        if first and commands:
            owner = next(command.name for command in COMMANDS if command.name in commands)
            self.parser.error(f"{first} belongs to a command: sfumato {owner} {first} …")


def build_parser() -> CommandLine:
    """The parser of every command; the chosen one's module name is in `args.module`."""
    return CommandLine()


def label(args: argparse.Namespace, key: str) -> str:
    """Where an option's value comes from, for a message: "--port", "SFUMATO_PORT" …"""
    origin: Origin | None = getattr(args, "origins", {}).get(key)
    return origin.label if origin else f"--{key.replace('_', '-')}"


def in_options(args: argparse.Namespace, error: Refused) -> Refused:
    """The error with the names of options, where its fields are what an option of the command
    sets."""
    names = {option.key: label(args, option.key) for option in options_of(args.command)}
    keys = {each.name: each.option.replace("-", "_") for each in SETTINGS if each.option}
    return error.renamed(names | {name: names[key] for name, key in keys.items() if key in names})


def rank(args: argparse.Namespace, key: str) -> int:
    """How strong the source of an option's value is; 0 for a default."""
    origin: Origin | None = getattr(args, "origins", {}).get(key)
    return origin.rank if origin else 0


def _take_words(args: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> None:
    """Adds the words after an option to those before the option, for a command that takes any
    number of words: argparse takes only the first run of words."""
    many = [one.name for one in command_of(args.command).arguments if one.count == "*"]
    if rest and (not many or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
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
    return group.add_argument(*names, **how, **_reading(option.kind))


def _reading(kind: Kind) -> dict[str, Any]:
    if isinstance(kind, Choice):
        return {"choices": kind.names}
    return {"type": _typed(kind)}


def _typed(kind: Kind) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
