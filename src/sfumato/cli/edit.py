"""`sfumato edit`: a file, changed as an instruction says. Its canvases begin as the file's text."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sfumato.api import Reply
from sfumato.cli import INTERRUPTED, generation, terminal
from sfumato.cli.display import filling, show_diff
from sfumato.cli.files import TextFile
from sfumato.diffusion.prediction import PredictedText
from sfumato.refused import Refused
from sfumato.text_side import EDIT_ROOM, edit_message

_FENCE = "```"


def main(args: argparse.Namespace) -> int:
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
        terminal.print_json(_report(text, lines, reply, backup))
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


def _report(text: str, lines: list[str], reply: Reply, backup: Path | None) -> dict[str, Any]:
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
