"""`sfumato fill`: a text with holes, filled."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sfumato
from sfumato import Hole
from sfumato.api import Reply
from sfumato.cli import INTERRUPTED, generation, terminal
from sfumato.cli.arguments import sampler_options
from sfumato.cli.display import filling, show_diff
from sfumato.cli.files import TextFile, read_text
from sfumato.diffusion.constraints.hole import Part
from sfumato.engine import Request
from sfumato.options import exclusions

AT_MOST = 32  # tokens of the text at --at, where no option says
_HOLE = re.compile(r"\{\{(?:(\d{1,8})|<=\s*(\d{1,8})|([^{}|]+(?:\|[^{}|]+)+))\}\}")


@dataclass(frozen=True)
class _Task:
    """What is filled, and the file that it stands in."""

    parts: tuple[Part, ...]
    file: TextFile | None = None


def main(args: argparse.Namespace) -> int:
    """Fill, and print the text, or, of a file, what changes. Raises ValueError or OSError for bad
    input."""
    task = _task(args)
    if args.write:
        if task.file is None:
            raise ValueError("--write: there is no file; name one in place of the text")
        task.file.check_writable()
    request = _request(args, task)
    model = generation.load(args)
    if request.messages is None:
        request = replace(request, ids=model.fills.prompt(None) or _first(model, task))
    engine = generation.engine(model, request)
    display = generation.display(args, model, args.slow)
    generation.introduce(args, model)
    show = filling(display, shows_text=task.file is None)
    answer = generation.answer(engine, request, display, show)
    reply = answer.reply
    if reply is None or reply.filled is None:
        print("(interrupted; no hole was filled)", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        terminal.print_json(_report(reply))
    elif task.file is not None:
        show_diff(task.file.diff(reply.filled.text))
    if args.write and task.file is not None:
        terminal.print_message(
            "note", f"written; {task.file.write(reply.filled.text)} has the text before"
        )
    return 0


def _first(model: sfumato.Model, task: _Task) -> list[int]:
    raise ValueError(
        f"{model.path.name}: has no token that a text begins with; give --reply-to MESSAGE"
    )


def _request(args: argparse.Namespace, task: _Task) -> Request:
    messages: list[dict[str, Any]] | None = None
    if args.reply_to is not None:
        messages = [*generation.opening(args), {"role": "user", "content": args.reply_to}]
    elif args.system:
        raise ValueError("--system: belongs to a conversation; give --reply-to too")
    return Request(
        messages=messages,
        parts=task.parts,
        seed=args.seed,
        sampler=sfumato.SamplerConfig().options(**sampler_options(args)),
        drafts=True,
    )


def _task(args: argparse.Namespace) -> _Task:
    if args.at is not None:
        at_file = TextFile.read(args.text)
        return _Task(_at(at_file, args), at_file)
    for name in ("tokens", "at_most"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option}: belongs to --at; in a text, write {{{{6}}}} or {{{{<=6}}}}"
            )
    text, file = args.text, None  # type: str, TextFile | None
    if text == "-":
        text = read_text("-")
    elif not _HOLE.search(text) and Path(text).is_file():
        file = TextFile.read(text)
        text = file.text
    parts = holes_of(text)
    if not any(isinstance(part, Hole) for part in parts):
        raise ValueError(
            "the text has no hole: write {{6}} for 6 tokens, {{<=8}} for up to 8, or {{a|b}} for a "
            "or b; or name a place of a file with --at LINE:COLUMN"
        )
    return _Task(parts, file)


def holes_of(text: str) -> tuple[Part, ...]:
    """The parts of a text: {{6}}, {{<=8}} and {{a|b}} are holes; other braces are text. Raises
    ValueError for a hole that is none, such as {{0}}."""
    parts: list[Part] = []
    end = 0
    for match in _HOLE.finditer(text):
        exact, most, choices = match.groups()
        try:
            if choices is not None:
                hole = Hole(choices=choices.split("|"))
            else:
                hole = Hole(int(exact)) if exact else Hole(at_most=int(most))
        except ValueError as error:
            raise ValueError(f"{match[0]}: {error}") from None
        parts += [text[end : match.start()], hole]
        end = match.end()
    return tuple(part for part in (*parts, text[end:]) if part != "")


def _at(file: TextFile, args: argparse.Namespace) -> tuple[Part, ...]:
    """The parts of a file with a hole at a place."""
    place = re.fullmatch(r"(\d{1,8}):(\d{1,8})", args.at)
    if place is None:
        raise ValueError(f"--at: must be LINE:COLUMN, as 12:5, got {args.at!r}")
    line, column = map(int, place.groups())
    lines = file.text.split("\n")
    if not 1 <= line <= len(lines):
        raise ValueError(f"--at: {file.path} has {len(lines):,} lines, and no line {line}")
    if not 1 <= column <= len(lines[line - 1]) + 1:
        raise ValueError(
            f"--at: line {line} of {file.path} has {len(lines[line - 1])} columns; column {column} "
            "is beyond its end"
        )
    given = {"--tokens": args.tokens is not None, "--at-most": args.at_most is not None}
    exclusions.check(exclusions.FILL_AT, given)
    hole = Hole(args.tokens) if args.tokens else Hole(at_most=args.at_most or AT_MOST)
    before = sum(len(each) + 1 for each in lines[: line - 1]) + column - 1
    return tuple(p for p in (file.text[:before], hole, file.text[before:]) if p != "")


def _report(reply: Reply) -> dict[str, Any]:
    """The text and its holes as plain values."""
    filled = reply.filled
    assert filled is not None
    return {
        "text": filled.text,
        "holes": [
            {
                "text": hole.text,
                "tokens": len(hole.token_ids),
                "probability": hole.probability,
                "alternatives": [vars(each) for each in hole.alternatives],
            }
            for hole in filled.holes
        ],
        "steps": filled.stats.steps,
        "warnings": list(reply.warnings),
    }
