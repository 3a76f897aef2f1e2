"""`sfumato chat`: a conversation. Knows the commands that begin with a slash."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.cli import INTERRUPTED, complain, embedded, generation
from sfumato.cli.notes import print_message, wrapped
from sfumato.options import LAST_SEED, MOST_STEPS
from sfumato.values import Whole

if TYPE_CHECKING:
    from sfumato.engine import Engine

EMBEDDED_NAME = "sfumato-embedded"
CONTEXT = 4096  # tokens of conversation before a larger cache slot has to be made
KEPT = 3  # prompts that later ones continue: of the system message, of the last turn, of this one
COMMANDS = {
    "clear": ("", "forget the conversation"),
    "seed": ("N", "random seed of the next answers"),
    "steps": ("N", "denoising steps per canvas at most"),
    "thinking": ("on|off", "let the model think before it answers"),
    "save": ("FILE", "write the conversation as JSON"),
    "help": ("", "these lines"),
    "quit": ("", "leave, as Ctrl-D does"),
}
"""Of each command: its argument, and what it does."""

USAGES = {name: f"/{name} {argument}".rstrip() for name, (argument, _) in COMMANDS.items()}


def help_text() -> str:
    """The commands and keys, in lines of the terminal's width."""
    width = max(map(len, USAGES.values())) + 2
    lines = [
        wrapped(does, f"{USAGES[name]:<{width}}", " " * width)
        for name, (_, does) in COMMANDS.items()
    ]
    lines.append(wrapped("A line that ends in \\ goes on in the next."))
    keys = "Ctrl-C ends an answer, or clears a line; again, on an empty line, it leaves."
    return "\n".join([*lines, wrapped(keys)])


def main(args: argparse.Namespace) -> int:
    """Converse until Ctrl-D, /quit or Ctrl-C. Raises ValueError or OSError for bad options."""
    terminal = sys.stdin.isatty()
    if terminal:
        _edit_lines()
    generation.request(args, [])  # a wrong option is refused before the model is loaded
    chat = Chat(args)
    if terminal:
        print(chat.greeting() + "\n")
    leaving = not terminal  # whether Ctrl-C at an empty prompt leaves
    while True:
        lines: list[str] = []
        try:
            text = _read(lines)
            leaving = not terminal
            if text in ("/quit", "/exit"):
                return 0
            chat.take(text)
        except EOFError:
            print()
            return 0
        except UnicodeDecodeError as error:
            complain(error)
        except KeyboardInterrupt:  # at the prompt, or just after an answer has ended
            print()
            if leaving and not lines and not _typed():
                print("(left)")
                return INTERRUPTED
            leaving = True
            print("(Ctrl-C again leaves)")


class Chat:
    """The model, the options as they stand, and the messages so far, without thoughts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = generation.load(args)
        self.engine: Engine | None = None  # made for the first answer
        self.messages = generation.opening(args)

    def greeting(self) -> str:
        """The model's name, and the command that lists the others."""
        path = Path(self.args.model).absolute().name if self.args.model else EMBEDDED_NAME
        name = getattr(self.args, "asked_for", path)
        toy = [embedded.TOY] if embedded.is_embedded(self.model) else []
        return "\n".join(map(wrapped, [f"{name} · /help lists the commands", *toy]))

    def take(self, text: str) -> None:
        """Run a command or answer a message; an error is reported, and the chat goes on."""
        try:
            if text.startswith("/"):
                self._command(*text[1:].split(maxsplit=1))
            elif text:
                self._answer(text)
        except (ValueError, OSError) as error:
            complain(error)

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        display = generation.display(self.args, self.model)
        request = generation.request(self.args, messages)
        try:
            if self.engine is None:
                context = min(CONTEXT, self.model.config.context_length)
                self.engine = generation.engine(self.model, request, context, KEPT)
            answer = generation.answer(self.engine, request, display)
        except ValueError as error:
            if "context" not in str(error) or self.messages == generation.opening(self.args):
                raise
            raise ValueError(f"{error}, or /clear the conversation") from error
        if answer.reply is None:  # a step was interrupted: the engine cannot go on
            self.engine = None
        if answer.interrupted:
            print("(interrupted)")
        elif hint := embedded.remark(answer, self.model, "/steps"):
            print_message("hint", hint)
        if sys.stdin.isatty():
            print()
        # Text that was committed before Ctrl-C stays in the conversation; an empty turn does not.
        if answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _command(self, name: str = "", value: str = "") -> None:
        if name not in COMMANDS:
            raise ValueError(f"/{name}: no such command; there are {', '.join(USAGES.values())}")
        try:
            self._obey(name, value)
        except ValueError as error:
            raise ValueError(f"/{name}: {error}; usage: {USAGES[name]}") from None

    def _obey(self, name: str, value: str) -> None:
        if not value and COMMANDS[name][0]:
            raise ValueError("it needs an argument")
        if value and not COMMANDS[name][0]:
            raise ValueError("it takes no argument")
        if name == "clear":
            self.messages = generation.opening(self.args)
        elif name == "seed":
            self.args.seed = Whole(0, LAST_SEED).parse(value)
        elif name == "steps":
            self.args.steps = Whole(1, MOST_STEPS).parse(value)
        elif name == "thinking":
            if value not in ("on", "off"):
                raise ValueError(f"{value!r} is neither on nor off")
            self.args.thinking = value == "on"
        elif name == "save":
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
            Path(value).expanduser().write_text(text, encoding="utf-8")
        elif name == "help":
            print(help_text())


def _read(lines: list[str]) -> str:
    """A message of one or more lines; a prompt is shown at a terminal only.

    `lines` is empty at first, and has the lines so far if Ctrl-C interrupts the reading.
    """
    prompts = ("› ", "… ") if sys.stdin.isatty() else ("", "")
    lines.append(input(prompts[0]))
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(prompts[1]))
    return "\n".join(lines).strip()


def _edit_lines() -> None:
    """Arrow keys and history for input(), where Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is what turns it on)


def _typed() -> str:
    """The text of the line that is being edited; empty where Python has no line editor."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline else ""
