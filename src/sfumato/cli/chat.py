"""`sfumato chat`: a conversation. Knows the commands that begin with a slash."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.cli import INTERRUPTED, complain, embedded, generation
from sfumato.cli.chat_commands import COMMANDS, FORCE, USAGES, completions, help_text
from sfumato.cli.conversation import Conversation, Message, load, save
from sfumato.cli.notes import print_message, wrapped
from sfumato.engine import EngineError, TooLarge
from sfumato.options import LAST_SEED, MOST_STEPS
from sfumato.values import Whole

if TYPE_CHECKING:
    from sfumato.engine import Engine

EMBEDDED_NAME = "sfumato-embedded"
CONTEXT = 4096  # tokens of conversation before a larger cache slot has to be made
KEPT = 3  # prompts that later ones continue: of the system message, of the last turn, of this one


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
    """The model, the options as they stand, and the conversation."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = generation.load(args)
        self.engine: Engine | None = None  # made for the first answer
        self.talk = Conversation(generation.opening(args))
        self._answered_with: tuple[Any, ...] | None = None  # settings of the last question

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
                self._answer(self.talk.messages, text)
        except (ValueError, OSError) as error:
            complain(error)

    def _answer(self, before: list[Message], text: str) -> None:
        """Answers a question that follows the messages before it."""
        messages = [*before, {"role": "user", "content": text}]
        is_new = before is self.talk.messages
        if is_new:  # a question that is asked again keeps its answer until there is another
            self.talk.unanswered = text
        self._answered_with = self._settings
        display = generation.display(self.args, self.model)
        request = generation.request(self.args, messages)
        try:
            if self.engine is None:
                context = min(CONTEXT, self.model.config.context_length)
                self.engine = generation.engine(self.model, request, context, KEPT)
            answer = generation.answer(self.engine, request, display)
        except (EngineError, TooLarge) as error:
            if before == generation.opening(self.args):
                raise
            advice = f"{error.advice}, or /clear the conversation"
            raise error.advising(advice) from error
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
            self.talk.change([*messages, {"role": "assistant", "content": answer.text}])

    @property
    def _settings(self) -> tuple[Any, ...]:
        return self.args.seed, self.args.steps, self.args.thinking

    def _take_next_seed(self) -> None:
        """Changes the seed where the last question would get the same answer again. Raises
        ValueError where there is no question."""
        self.talk.last_question()
        if self._settings == self._answered_with:
            self.args.seed = (self.args.seed + 1) % (LAST_SEED + 1)
            print(f"(seed {self.args.seed})")

    def _command(self, name: str = "", value: str = "") -> None:
        if name not in COMMANDS:
            raise ValueError(f"/{name}: no such command; there are {', '.join(USAGES.values())}")
        try:
            self._obey(name, value)
        except ValueError as error:
            raise ValueError(f"/{name}: {error}; usage: {USAGES[name]}") from None
        if name == "retry":
            self._answer(*self.talk.last_question())

    def _obey(self, name: str, value: str) -> None:
        if not value and COMMANDS[name][0]:
            raise ValueError("it needs an argument")
        if value and not COMMANDS[name][0]:
            raise ValueError("it takes no argument")
        if name == "clear":
            self.talk.change(generation.opening(self.args))
        elif name == "retry":
            self._take_next_seed()
        elif name == "undo":
            self.talk.undo()
            self._show_length()
        elif name == "seed":
            self.args.seed = Whole(0, LAST_SEED).parse(value)
        elif name == "steps":
            self.args.steps = Whole(1, MOST_STEPS).parse(value)
        elif name == "thinking":
            if value not in ("on", "off"):
                raise ValueError(f"{value!r} is neither on nor off")
            self.args.thinking = value == "on"
        elif name == "save":
            first, _, rest = value.partition(" ")
            force = first == FORCE and bool(rest.strip())
            path = Path(rest.strip() if force else value).expanduser()
            save(path, self.talk.messages, force)
        elif name == "load":
            self.talk.change(load(Path(value).expanduser()))
            self._show_length()
        elif name == "help":
            print(help_text())

    def _show_length(self) -> None:
        questions = sum(message["role"] == "user" for message in self.talk.messages)
        print(f"(the conversation has {questions} question{'s' * (questions != 1)})")


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
    """Arrow keys, history and completion for input(), where Python has them."""
    try:
        import readline
    except ImportError:
        return

    def candidate(line: str, number: int) -> str | None:
        lines = completions(line)
        return lines[number] if number < len(lines) else None

    readline.set_completer(candidate)
    readline.set_completer_delims("")  # the whole line is completed: names of files have spaces
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def _typed() -> str:
    """The text of the line that is being edited; empty where Python has no line editor."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline else ""
