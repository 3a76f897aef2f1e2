"""`sfumato chat`: a conversation. Knows the commands that begin with a slash."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from sfumato.cli import INTERRUPTED, complain, generation

HELP = """\
/clear            forget the conversation
/seed N           random seed of the next answers
/steps N          denoising steps per canvas at most
/thinking on|off  let the model think before it answers
/save FILE        write the conversation as JSON
/help             these lines
/quit             leave, as Ctrl-D does
A line that ends in \\ goes on in the next. Ctrl-C ends an answer, and at the prompt the chat."""


def main(args: argparse.Namespace) -> int:
    """Talk until Ctrl-D, /quit or Ctrl-C. Raises ValueError or OSError for bad options."""
    if sys.stdin.isatty():
        _edit_lines()
    generation.options(args)  # a wrong option is told before the wait for the model
    chat = Chat(args)
    while True:
        try:
            text = _read()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            return INTERRUPTED
        if text in ("/quit", "/exit"):
            return 0
        chat.take(text)


class Chat:
    """The model, the options as they stand, and the messages so far, without thoughts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = generation.load(args)
        self.messages = generation.opening(args)

    def take(self, text: str) -> None:
        """Obey a command or answer a message; what is wrong with it is told in one line."""
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
        request = generation.options(self.args)
        answer = generation.answer(self.model, messages, display, **request)
        if answer.interrupted:
            print("(interrupted)")
        if sys.stdin.isatty():
            print()
        # What was committed before Ctrl-C was said, and stays; a turn without words does not.
        if answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _command(self, name: str = "", value: str = "") -> None:
        if name == "clear":
            self.messages = generation.opening(self.args)
        elif name == "seed":
            self.args.seed = _whole(value, 0)
        elif name == "steps":
            self.args.steps = _whole(value, 1)
        elif name == "thinking" and value in ("on", "off"):
            self.args.thinking = value == "on"
        elif name == "save" and value:
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
            Path(value).expanduser().write_text(text, encoding="utf-8")
        elif name == "help":
            print(HELP)
        else:
            raise ValueError(f"/{f'{name} {value}'.strip()}: not a command; /help lists them")


def _read() -> str:
    """A message of one or more lines; the prompt shows only where somebody types."""
    prompt = "› " if sys.stdin.isatty() else ""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… " if prompt else ""))
    return "\n".join(lines).strip()


def _edit_lines() -> None:
    """Arrow keys and history for input(), where Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is what turns it on)


def _whole(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise ValueError(f"{text!r} is not a whole number from {low} on")
    return int(text)
