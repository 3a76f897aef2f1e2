"""`sfumato run`: one question, one answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sfumato
from sfumato import catalog
from sfumato.cli import files, terminal
from sfumato.refused import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from sfumato.api import Model
    from sfumato.cli.display import Event
    from sfumato.cli.generation import Answer
    from sfumato.server.replay import Recorder


def main(args: argparse.Namespace) -> int:
    """Answer, and return the exit code. Raises ValueError or OSError for bad input."""
    question = _question(args.question)  # before the slow imports: the question may be missing
    if question is None:
        return 0
    if args.replay:  # before there is a reply to lose
        if Path(args.replay).suffix.lower() not in (".html", ".htm"):
            why = f"{args.replay}: the replay is a web page"
            raise Refused("replay", why, "name it FILE.html")
        files.check(args.replay, args.force, "replay")

    with terminal.loading():
        from sfumato.cli import INTERRUPTED, generation, pictures

    images = [(name, pictures.read(name, f"--image {name}")) for name in args.image]
    request = generation.request(args, [])  # a wrong option is refused before the model is loaded
    model = generation.load(args)
    generation.note_thinking(args, model)
    content = pictures.content(question, [pictures.part(*each, model) for each in images])
    messages = [*generation.opening(args), {"role": "user", "content": content}]
    request = replace(request, messages=messages)
    if not (args.json or args.no_visual):
        for _, image in images:
            pictures.show(image)
    recorder = _recorder(model) if args.replay else None
    seen = [partial(_recorded, recorder)] if recorder else []
    answer = generation.once(args, model, request, *seen)
    remark = None if answer.interrupted else generation.remark(answer, model)
    if recorder:
        packaged = model.packaged
        data = _replay(args, recorder, question, answer, remark or "", packaged, images)
        files.write(args.replay, data, args.force, "replay")
    if args.json:
        terminal.print_json(_report(answer))
    elif answer.interrupted:
        end = "; the end of the text is a draft, which had not settled" if answer.draft else ""
        print(f"(interrupted{end})", file=sys.stderr)
    elif remark:
        terminal.print_message("hint", remark)
    return INTERRUPTED if answer.interrupted else 0


def _question(words: list[str]) -> str | None:
    """The words of the command line, standard input, or the line typed at a prompt; None after
    Ctrl-D."""
    text: str | None
    if words and words != ["-"]:
        text = " ".join(words)
    elif not words and sys.stdin.isatty():
        text = _typed_question()
    else:
        text = files.read_text("-")
    if text is not None and not text.strip():
        raise ValueError("the question is empty")
    return text


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
        **({} if reply.verification is None else {"verification": asdict(reply.verification)}),
        "stats": stats,
    }


def _recorder(model: Model) -> Recorder:
    from sfumato.server.replay import Recorder

    tokenizer = model.tokenizer
    return Recorder(
        lambda token: tokenizer.token_text(token) if token < tokenizer.vocab_size else "",
        model.template.markers,
    )


def _recorded(recorder: Recorder, event: Event) -> Event:
    """Records an event, which is shown as it is."""
    if isinstance(event, sfumato.Draft):
        recorder.draft(event)
    elif isinstance(event, sfumato.Settled):
        recorder.settled(event)
    return event


def _replay(
    args: argparse.Namespace,
    recorder: Recorder,
    question: str,
    answer: Answer,
    hint: str,
    packaged: str | None,
    images: Sequence[tuple[str, Image]],
) -> str:
    """The page; `hint` stands below the reply of a packaged model. images: with their files."""
    from sfumato.cli.display import summary
    from sfumato.server.examples import page_texts, remark
    from sfumato.server.replay import document, thumbnail

    reply = answer.reply
    figures = summary(reply.stats) if reply else ["interrupted"]
    badge = page_texts(packaged)["demonstration"] or ""
    below = remark(packaged is not None, reply) if reply else ""
    if badge and hint and not below:
        below = f"{hint.capitalize()}."
    name = catalog.shown_name(args.model)
    shown = [thumbnail(image, Path(file).name) for file, image in images]
    return document(recorder.data(name, question, answer.text, figures, badge, below, shown))
