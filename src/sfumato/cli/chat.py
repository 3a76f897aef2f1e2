"""`sfumato chat`: a conversation. Knows the commands that begin with a slash."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from glob import escape, glob
from pathlib import Path
from typing import Any

from sfumato import catalog
from sfumato.cli import INTERRUPTED, complain, files, generation, pictures
from sfumato.cli.arguments import nearest
from sfumato.cli.terminal import named, print_message, wrapped
from sfumato.embedded_questions import EARLIER_TURNS
from sfumato.engine import Engine, EngineError, TooLarge
from sfumato.options import LAST_SEED, MOST_STEPS
from sfumato.server.examples import CANNOT
from sfumato.values import Whole, quoted

ASK = 'ask a whole question, as "What is the capital of Japan?", or /clear the conversation'
READS = f"It reads the last {EARLIER_TURNS} turns before a question; /clear begins anew."
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
        generation.note_thinking(args, self.model)
        self.engine: Engine | None = None  # made for the first answer
        self.talk = Conversation(generation.opening(args))
        self._pictures: list[dict[str, Any]] = []  # that the next question is about
        self._answered_with: tuple[Any, ...] | None = None  # settings of the last question

    def greeting(self) -> str:
        """The model's name, and the command that lists the others."""
        name = getattr(self.args, "asked_for", catalog.shown_name(self.args.model))
        toy = generation.toy(self.model)
        known = [f"{toy} {READS}"] if toy else []
        return "\n".join(map(wrapped, [f"{name} · /help lists the commands", *known]))

    def take(self, text: str) -> None:
        """Run a command or answer a message; an error is reported, and the chat goes on."""
        try:
            if text.startswith("/") and "\n" not in text:
                self._command(*text[1:].split(maxsplit=1))
            elif text:
                content, self._pictures = pictures.content(text, self._pictures), []
                self._answer(self.talk.messages, content)
        except (ValueError, OSError) as error:
            complain(error)

    def _answer(self, before: list[generation.Message], content: Content) -> None:
        """Answers a question that follows the messages before it."""
        messages = [*before, {"role": "user", "content": content}]
        is_new = before is self.talk.messages
        if is_new:  # a question that is asked again keeps its answer until there is another
            self.talk.unanswered = content
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
        elif hint := generation.remark(answer, self.model, "/steps"):
            print_message("hint", f"{hint}; {ASK}" if hint == CANNOT else hint)
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
            meant = nearest(name, COMMANDS)
            near = f"did you mean /{meant[0]}?" if meant else "/help lists those that there are"
            raise ValueError(f"/{name}: no such command; {near}")
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
        match name:
            case "clear":
                self._pictures = []
                self.talk.change(generation.opening(self.args))
            case "image":
                self._attach(value)
            case "retry":
                self._take_next_seed()
            case "undo":
                self.talk.undo()
                self._show_length()
            case "seed":
                self.args.seed = Whole(0, LAST_SEED).parse(value)
            case "steps":
                self.args.steps = Whole(1, MOST_STEPS).parse(value)
            case "thinking":
                if value not in ("on", "off"):
                    raise ValueError(f"{value!r} is neither on nor off")
                self.args.thinking = value == "on"
                generation.note_thinking(self.args, self.model)
            case "save":
                first, _, rest = value.partition(" ")
                force = first == FORCE and bool(rest.strip())
                path = Path(rest.strip() if force else value).expanduser()
                saved = [_plain(message) for message in self.talk.messages]
                text = json.dumps(saved, ensure_ascii=False, indent=2) + "\n"
                files.write(str(path), text, force)
            case "load":
                messages = load(Path(value).expanduser())
                self.talk.change([self._with_pictures(message) for message in messages])
                self._pictures = []
                self._show_length()
            case "help":
                print(help_text())

    def _attach(self, name: str) -> None:
        """Puts a picture to the next question. Raises ValueError for what is none, and where the
        model reads none."""
        image = pictures.read(name, name)
        self._pictures.append(pictures.part(name, image, self.model))
        if not self.args.no_visual:
            pictures.show(image)
        count = len(self._pictures)
        print(f"(the next question has {count} picture{'s' * (count != 1)})")

    def _with_pictures(self, message: generation.Message) -> generation.Message:
        """A message of a file, with the pictures whose files it names."""
        content = message["content"]
        if not isinstance(content, str):
            names = [part.get("path") for part in content]
            content = [
                part if name is None else pictures.part(name, pictures.read(name, name), self.model)
                for name, part in zip(names, content, strict=True)
            ]
        return {**message, "content": content}

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
    if not is_libedit:  # which has no such variable
        # Python turns it off; a paste of several lines is one message then.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _typed() -> str:
    """The text of the line that is being edited; empty where Python has no line editor."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline else ""


Content = str | list[dict[str, Any]]
"""The content of a user's message: a text, or pictures and a text."""

FORCE = "--force"  # of /save
MOST_FILES = 200  # that Tab offers
COMMANDS = {
    "clear": ("", "forget the conversation"),
    "retry": ("", "answer the last question again, with the next seed or what was set since"),
    "undo": ("", "take back the last turn, or the last /retry, /clear or /load"),
    "image": ("FILE", "a picture that the next question is about; several make several"),
    "seed": ("N", "random seed of the next answers"),
    "steps": ("N", "denoising steps per canvas at most"),
    "thinking": ("on|off", "let the model think before it answers"),
    "save": (f"[{FORCE}] FILE", f"write the conversation as JSON; {FORCE} replaces a file"),
    "load": ("FILE", "go on with a conversation that /save has written"),
    "help": ("", "these lines"),
    "quit": ("", "leave, as Ctrl-D does"),
}
"""The argument of each command, and what the command does."""

USAGES = {name: f"/{name} {argument}".rstrip() for name, (argument, _) in COMMANDS.items()}


def help_text() -> str:
    """The commands and keys, in lines of the terminal's width."""
    commands = named([(USAGES[name], does) for name, (_, does) in COMMANDS.items()])
    long = "A line that ends in \\ goes on in the next; pasted lines are one message."
    keys = (
        "Ctrl-C ends an answer, or clears a line; again, on an empty line, it leaves. Ctrl-L "
        "clears the screen."
    )
    return "\n".join([*commands, wrapped(long), wrapped(keys)])


def completions(line: str) -> list[str]:
    """What a line may become: commands, what they take, and files."""
    name, space, value = line[1:].partition(" ")
    if not line.startswith("/"):
        return []
    if not space:
        commands = [each for each in COMMANDS if each.startswith(name)]
        return [f"/{each}{' ' * bool(COMMANDS[each][0])}" for each in commands]
    kind = COMMANDS[name][0] if name in COMMANDS else ""
    if kind.endswith("FILE"):
        given, file = "", value
        if name == "save" and value.startswith(f"{FORCE} "):
            given, file = f"{FORCE} ", value.removeprefix(f"{FORCE} ")
        paths = sorted(glob(f"{escape(os.path.expanduser(file))}*"))[:MOST_FILES]
        return [f"/{name} {given}{path}{'/' * os.path.isdir(path)}" for path in paths]
    words = kind.split("|") if "|" in kind else []
    return [f"/{name} {each}" for each in words if each.startswith(value)]


MOST_MESSAGES = 10_000  # of a file
MOST_PARTS = 100  # of a message of a file: pictures and texts
MOST_UNDONE = 100  # changes that can be taken back


class Conversation:
    """The messages so far, without thoughts. Every change can be taken back."""

    def __init__(self, messages: list[generation.Message]) -> None:
        self.messages = messages
        self.unanswered: Content | None = None  # the last question, where it has no answer
        self._before: deque[list[generation.Message]] = deque(maxlen=MOST_UNDONE)

    def change(self, messages: list[generation.Message]) -> None:
        """Puts other messages in place of those that there are."""
        self._before.append(self.messages)
        self.messages, self.unanswered = messages, None

    def undo(self) -> None:
        """Takes back the last change, or the question that has no answer. Raises ValueError where
        there is none."""
        if self.unanswered is None:
            if not self._before:
                raise ValueError("there is nothing to take back")
            self.messages = self._before.pop()
        self.unanswered = None

    def last_question(self) -> tuple[list[generation.Message], Content]:
        """The messages before the last question, and the question. Raises ValueError where there
        is none."""
        if self.unanswered is not None:
            return self.messages, self.unanswered
        if len(self.messages) < 2:  # a system message alone, or none
            raise ValueError("there is no question yet")
        return self.messages[:-2], self.messages[-2]["content"]


def load(path: Path) -> list[generation.Message]:
    """What `save` has written. Raises ValueError for anything else, and OSError."""
    data = files.read_bytes(str(path))
    try:
        messages = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({str(error)[:100]})") from None
    if not isinstance(messages, list):
        raise ValueError(f"{path}: has no list of messages, as /save writes")
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"{path}: has more than {MOST_MESSAGES:,} messages")
    _check(path, messages)
    return messages


def _plain(message: generation.Message) -> generation.Message:
    """The message as a file has it: pictures by the names of their files."""
    content = message["content"]
    if not isinstance(content, str):
        content = [{k: v for k, v in part.items() if k != "patches"} for part in content]
    return {**message, "content": content}


def _is_content(content: Any, may_show: bool) -> bool:
    """Whether it is a text or, where there may be pictures, what `pictures.content` makes."""
    if not (may_show and isinstance(content, list)):
        return isinstance(content, str)
    return 0 < len(content) <= MOST_PARTS and all(map(_is_part, content))


def _is_part(part: Any) -> bool:
    match part:
        case {"type": "image", "path": str(), **rest} | {"type": "text", "text": str(), **rest}:
            return not rest
    return False


def _check(path: Path, messages: list[Any]) -> None:
    """Raises ValueError where the messages are no conversation: a system message or none, then
    questions with their answers."""
    first = messages[0] if messages else None
    has_system = isinstance(first, dict) and first.get("role") == "system"
    for number, message in enumerate(messages):
        role = "user" if (number - has_system) % 2 == 0 else "assistant"
        role = "system" if has_system and number == 0 else role
        where = f"{path}: message {number + 1}"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"{where}: must have a role and a content and nothing else")
        if message["role"] != role:
            raise ValueError(f"{where}: must have the role {role}, not {quoted(message['role'])}")
        if not _is_content(message["content"], may_show=role == "user"):
            raise ValueError(f"{where}: its content must be text (a question's: pictures and text)")
    if (len(messages) - has_system) % 2:
        raise ValueError(f"{path}: message {len(messages)}: is a question without an answer")
