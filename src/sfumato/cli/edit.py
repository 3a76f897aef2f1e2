"""`sfumato edit`: a file, changed as an instruction says. Its canvases begin as the file's text."""

from __future__ import annotations

import argparse
import json
import sys

import sfumato
from sfumato.api import Model
from sfumato.cli import INTERRUPTED, generation, notes
from sfumato.cli.changes import TextFile, show
from sfumato.cli.decoding import sampler_options
from sfumato.cli.glyphs import speaks_unicode
from sfumato.cli.view.fill_display import FillDisplay
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Request
from sfumato.fills import EDIT_ROOM, edit_message

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
    request = _request(args, model, file.text, instruction)
    engine = generation.engine(model, request)
    display = FillDisplay(generation.display(args, model, args.slow), shows_text=False)
    answer = generation.answer(engine, request, display)
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
    if args.json:
        stats = reply.stats
        report = {
            "text": text,
            "diff": lines,
            "steps": stats.steps,
            "accepted_prediction_tokens": stats.accepted_prediction,
            "warnings": list(reply.warnings),
        }
        print(json.dumps(report, ensure_ascii=not speaks_unicode(sys.stdout), indent=2))
    elif lines:
        show(lines)
    else:
        notes.print_message("note", "nothing changes")
    if args.write and lines:
        file.write(text)
    return 0


def _request(args: argparse.Namespace, model: Model, text: str, instruction: str) -> Request:
    tokens = len(model.tokenizer.encode(text, special=False))
    return Request(
        messages=[*generation.opening(args), edit_message(text, instruction)],
        max_tokens=args.max_tokens or 2 * tokens + EDIT_ROOM,
        seed=args.seed,
        sampler=sfumato.SamplerConfig().options(**sampler_options(args)),
        prediction=PredictedText(text, args.strength),
        drafts=True,
    )


def edited(before: str, reply: str) -> str:
    """The text of a reply: without a fence of code that the model has put around it, and with the
    line end, or none, that the text before had at its end."""
    lines = reply.strip("\n").split("\n")
    is_fenced = len(lines) > 2 and lines[0].startswith(_FENCE) and lines[-1] == _FENCE
    if is_fenced and not before.lstrip().startswith(_FENCE):
        reply = "\n".join(lines[1:-1])
    return reply.rstrip("\n") + before[len(before.rstrip("\n")) :]
