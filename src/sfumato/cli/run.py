"""`sfumato run`: one question, one answer."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.cli import notes, output
from sfumato.cli.glyphs import speaks_unicode

if TYPE_CHECKING:
    from sfumato.cli.generation import Answer


def main(args: argparse.Namespace) -> int:
    """Answer, and return the exit code. Raises ValueError or OSError for bad input."""
    question = _question(args.question)  # before the slow imports: the question may be missing
    if question is None:
        return 0
    if args.replay:
        _check_replay(args.replay, args.force)

    with notes.loading():
        from sfumato.cli import INTERRUPTED, embedded, generation, replay

    messages = [*generation.opening(args), {"role": "user", "content": question}]
    request = generation.request(args, messages)
    model = generation.load(args)
    engine = generation.engine(model, request)
    if embedded.is_embedded(model) and not args.json and sys.stderr.isatty():
        print(notes.wrapped(embedded.TOY) + "\n", file=sys.stderr)
    display = generation.display(args, model, args.slow)
    recording = replay.Recording(display, model) if args.replay else None
    answer = generation.answer(engine, request, recording or display)
    remark = None if answer.interrupted else embedded.remark(answer, model)
    if recording:
        name = Path(args.model).name if args.model else "sfumato-embedded"
        recording.write(args.replay, args.force, name, question, answer, remark or "")
    if args.json:
        plain = not speaks_unicode(sys.stdout)
        print(json.dumps(_report(answer), ensure_ascii=plain, indent=2))
    elif answer.interrupted:
        end = "; the end of the text is a draft, which had not settled" if answer.draft else ""
        print(f"(interrupted{end})", file=sys.stderr)
    elif remark:
        notes.print_message("hint", remark)
    return INTERRUPTED if answer.interrupted else 0


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error}") from None


def _question(words: list[str]) -> str | None:
    """The words of the command line, standard input, or the line typed at a prompt; None after
    Ctrl-D."""
    text: str | None
    if words and words != ["-"]:
        text = " ".join(words)
    elif not words and sys.stdin.isatty():
        text = _typed_question()
    else:
        text = _standard_input()
    if text is not None and not text.strip():
        raise ValueError("the question is empty")
    return text


def _check_replay(name: str, force: bool) -> None:
    """Raises ValueError where the file could not be written: before there is a reply to lose."""
    if Path(name).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--replay {name}: the replay is a web page, name it FILE.html")
    output.check(name, force, "--replay")


def _typed_question() -> str | None:
    prompt = "Your question: "
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives arrow keys to input())
    else:  # standard output is a file, which the prompt does not belong in
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None


def _report(answer: Answer) -> dict[str, Any]:
    """The reply as plain values. After Ctrl-C also the draft of the canvas that had not settled; a
    second Ctrl-C leaves the committed text and the draft, and no figures."""
    reply, account = answer.reply, answer.account
    draft = {"draft": answer.draft} if answer.draft else {}
    if reply is None or account is None:
        return {"text": answer.text, **draft, "stop_reason": "cancelled"}
    stats = asdict(reply.stats) | {
        "cached_tokens": account.cached_tokens,
        "tokens_per_forward": reply.stats.tokens_per_forward,
    }
    return {
        "text": reply.text,
        **draft,
        "thought": reply.thought,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
        "stop_reason": reply.stop_reason,
        "warnings": list(reply.warnings),
        "stats": stats,
    }
