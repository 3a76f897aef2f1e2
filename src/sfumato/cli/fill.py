"""`sfumato fill` and `sfumato edit`: a text with holes, filled, and a file, changed as an
instruction says. The canvases of an edit begin as the file's text.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sfumato import Hole
from sfumato.api import Reply
from sfumato.cli import INTERRUPTED, generation, terminal
from sfumato.cli.display import filling, show_diff
from sfumato.cli.files import TextFile, read_text
from sfumato.diffusion.constraints.hole import Part
from sfumato.diffusion.prediction import PredictedText
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.text_side import EDIT_ROOM, edit_message

AT_MOST = 32  # tokens of the text at --at, where no option says
_HOLE = re.compile(r"\{\{(?:(\d{1,8})|<=\s*(\d{1,8})|([^{}|]+(?:\|[^{}|]+)+))\}\}")


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    return _fill(args) if args.command == "fill" else _edit(args)


def _fill(args: argparse.Namespace) -> int:
    """Fill, and print the text, or, of a file, what changes. Raises ValueError or OSError for bad
    input."""
    parts, file = _task(args)
    if args.write:
        if file is None:
            raise Refused("write", "there is no file", "name one in place of the text")
        file.check_writable()
    messages: list[dict[str, Any]] | None = None
    if args.reply_to is not None:
        messages = [*generation.opening(args), {"role": "user", "content": args.reply_to}]
    elif args.system:
        raise Refused("system", "belongs to a conversation", "give --reply-to too")
    request = generation.request(args, messages, parts=parts)
    model = generation.load(args)
    if messages is None:
        request = replace(request, ids=model.fills.no_prompt)
        if not request.ids and isinstance(parts[0], Hole):
            raise ValueError(
                f"{model.path.name}: has no token that a text begins with; begin with text before "
                "the hole, or give --reply-to MESSAGE"
            )
    answer = generation.once(args, model, request, partial(filling, shows_text=file is None))
    reply = answer.reply
    if reply is None or reply.filled is None:
        print("(interrupted; no hole was filled)", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        terminal.print_json(_report(reply))
    elif file is not None:
        show_diff(file.diff(reply.filled.text))
    if args.write and file is not None:
        backup = file.write(reply.filled.text)
        terminal.print_message("note", f"written; {backup} has the text before")
    return 0


def _task(args: argparse.Namespace) -> tuple[tuple[Part, ...], TextFile | None]:
    """What is filled, and the file that it stands in."""
    if args.at is not None:
        at_file = TextFile.read(args.text)
        return _at(at_file, args), at_file
    for name in ("tokens", "at_most"):
        if getattr(args, name) is not None:
            raise Refused(name, "belongs to --at", "in a text, write {{6}} or {{<=6}}")
    text, file = args.text, None  # type: str, TextFile | None
    if text == "-":
        text = read_text("-")
    elif not _HOLE.search(text) and os.path.isfile(text):
        file = TextFile.read(text)
        text = file.text
    parts = holes_of(text)
    if not any(isinstance(part, Hole) for part in parts):
        raise ValueError(
            "the text has no hole: write {{6}} for 6 tokens, {{<=8}} for up to 8, or {{a|b}} for a "
            "or b; or name a place of a file with --at LINE:COLUMN"
        )
    return parts, file


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
        raise Refused("at", f"must be LINE:COLUMN, as 12:5, got {args.at!r}")
    line, column = map(int, place.groups())
    lines = file.text.split("\n")
    if not 1 <= line <= len(lines):
        raise Refused("at", f"{file.path} has {len(lines):,} lines, and no line {line}")
    if not 1 <= column <= len(lines[line - 1]) + 1:
        raise Refused(
            "at",
            f"line {line} of {file.path} has {len(lines[line - 1])} columns",
            f"column {column} is beyond its end",
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


_FENCE = "```"


def _edit(args: argparse.Namespace) -> int:
    """Change the text, and show the difference. Raises ValueError or OSError for bad input."""
    file = TextFile.read(args.file)
    if args.write:
        file.check_writable()
    instruction = " ".join(args.instruction)
    if not file.text.strip() or not instruction.strip():
        raise ValueError(f"{file.path if instruction.strip() else 'the instruction'}: is empty")
    model = generation.load(args)
    if args.write and not args.force and generation.is_embedded(model):
        raise Refused(
            "write",
            "the embedded model has not learnt to change files and would replace the text by "
            "another",
            "-m PATH loads a real model, and --force writes all the same",
        )
    tokens = len(model.tokenizer.encode(file.text, special=False))
    request = generation.request(
        args,
        [*generation.opening(args), edit_message(file.text, instruction)],
        max_tokens=args.max_tokens or 2 * tokens + EDIT_ROOM,
        prediction=PredictedText(file.text, args.strength),
    )
    answer = generation.once(args, model, request, partial(filling, shows_text=False))
    reply = answer.reply
    if answer.interrupted or reply is None:
        print("(interrupted; nothing was changed)", file=sys.stderr)
        return INTERRUPTED
    if reply.stop_reason == "max_tokens":
        raise ValueError(
            f"the changed text is longer than {request.max_tokens} tokens, and nothing was "
            "written; raise --max-tokens"
        )
    text = edited(file.text, reply.text)
    lines = file.diff(text)
    if lines and not args.json:
        show_diff(lines)
    backup, failure = None, None
    if args.write and lines:
        try:
            backup = _write(args, file, text, reply)
        except (ValueError, OSError) as error:  # once the text has been shown
            failure = error
    if args.json:
        terminal.print_json(_edit_report(text, lines, reply, backup))
    if failure is not None:
        raise failure
    if backup is not None:
        terminal.print_message("note", f"written; {backup} has the text before")
    elif not lines and not args.json:
        terminal.print_message("note", "nothing changes")
    return 0


def _write(args: argparse.Namespace, file: TextFile, text: str, reply: Reply) -> Path:
    """Writes the file, and returns the path of the backup. Raises as `TextFile.write` does, and
    ValueError where the text may not be what the instruction asks for."""
    doubts = [] if args.force else _doubts(reply, text)
    if doubts:
        raise ValueError(
            f"{file.path}: was not written: {', and '.join(doubts)}; look at the change, then try "
            "another --seed or more --steps, or write it all the same with --force"
        )
    return file.write(text)


def _edit_report(text: str, lines: list[str], reply: Reply, backup: Path | None) -> dict[str, Any]:
    """The text and what it changes, as plain values."""
    return {
        "text": text,
        "diff": lines,
        "steps": reply.stats.steps,
        "accepted_prediction_tokens": reply.stats.accepted_prediction,
        "warnings": list(reply.warnings),
        "written": backup is not None,
        "backup": None if backup is None else str(backup),
    }


def _doubts(reply: Reply, text: str) -> list[str]:
    """Why the text may not be what the instruction asks for."""
    stats = reply.stats
    capped, dropped = stats.convergence.count("step_cap"), stats.dropped_predictions
    doubts = {
        f"{dropped} of {stats.canvases} canvases did not settle from the file's text and were "
        "drawn without it": dropped,
        f"{capped} of {stats.canvases} canvases did not settle": capped,
        "nothing is left of the text": not text.strip(),
    }
    return [doubt for doubt, is_there in doubts.items() if is_there]


def edited(before: str, reply: str) -> str:
    """The text of a reply: without a fence of code that the model has put around it, and with the
    line end, or none, that the text before had at its end."""
    lines = reply.strip("\n").split("\n")
    is_fenced = len(lines) > 2 and lines[0].startswith(_FENCE) and lines[-1] == _FENCE
    if is_fenced and not before.lstrip().startswith(_FENCE):
        reply = "\n".join(lines[1:-1])
    return reply.rstrip("\n") + before[len(before.rstrip("\n")) :]
