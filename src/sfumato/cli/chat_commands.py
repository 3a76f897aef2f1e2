"""The commands of `sfumato chat`: names, help and completion. Loads nothing heavy."""

from __future__ import annotations

import os
from glob import escape, glob

from sfumato.cli.notes import wrapped

FORCE = "--force"  # of /save
MOST_FILES = 200  # that Tab offers
COMMANDS = {
    "clear": ("", "forget the conversation"),
    "retry": ("", "answer the last question again, with the next seed or what was set since"),
    "undo": ("", "take back the last turn, or the last /retry, /clear or /load"),
    "seed": ("N", "random seed of the next answers"),
    "steps": ("N", "denoising steps per canvas at most"),
    "thinking": ("on|off", "let the model think before it answers"),
    "save": (f"[{FORCE}] FILE", f"write the conversation as JSON; {FORCE} replaces a file"),
    "load": ("FILE", "go on with a conversation that /save has written"),
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
