"""The README's picture: the embedded model answers, drawn as an animated SVG of what its canvases
held at every step. A real run, slowed down.

    .venv/bin/python -m benchmarks.haze [docs/haze.svg]

A position is drawn as the token that it would commit where the step accepted it, and otherwise as
the random token that the next step finds there. The temperature is above the model's own, for at
that one it needs two or three steps a canvas, too few to look at.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import torch

import sfumato
from sfumato.diffusion.noise import Noise

QUESTION, SEED, TEMPERATURE = "Who are you?", 7, 1.6
NOISE_S, STEP_S, PAUSE_S, LAST_S = 1.0, 0.4, 0.8, 3.0
HAZE, FRESH, SETTLED = "haze", "fresh", "settled"
CELL, LINE, LEFT, TOP = 17.0, 38, 34, 104  # of a character, and of the text in the picture
COLOURS = {HAZE: "#59636e", FRESH: "#ffd75e", SETTLED: "#f0ece2"}

Cell = tuple[str, str]
"""A character and its state."""


@dataclass(frozen=True)
class Frame:
    """What the picture shows for a while."""

    lines: tuple[tuple[Cell, ...], ...]  # the canvases so far
    caption: str
    seconds: float


def frames(model: sfumato.Model) -> Iterator[Frame]:
    """The frames of one reply: for each canvas its noise, then every step."""
    done: list[tuple[Cell, ...]] = []
    sampler = sfumato.SamplerConfig(temperature=TEMPERATURE)
    drafts: list[sfumato.Draft] = []
    for event in model.stream(QUESTION, seed=SEED, sampler=sampler):
        if isinstance(event, sfumato.Draft):
            drafts.append(event)
        elif isinstance(event, sfumato.Settled):
            yield from _canvas(model, drafts, done)
            settled = event.text.ljust(len(drafts[-1].token_ids))
            done.append(tuple((letter, SETTLED) for letter in settled))
            drafts = []
    count = len(done)
    yield Frame(tuple(done), f"settled, {count} canvases", LAST_S)


def _canvas(
    model: sfumato.Model, drafts: Sequence[sfumato.Draft], done: Sequence[tuple[Cell, ...]]
) -> Iterator[Frame]:
    number, length = drafts[0].canvas, len(drafts[0].token_ids)
    noise, size = Noise(SEED, number), model.config.vocab_size
    start = _letters(model, noise.tokens(0, length, size))
    haze = tuple((letter, HAZE) for letter in start)
    yield Frame((*done, haze), f"canvas {number + 1}: random tokens", NOISE_S)
    before = torch.zeros(length, dtype=torch.bool)
    for draft in drafts:
        likely, random = (
            _letters(model, ids)
            for ids in (draft.token_ids, noise.tokens(draft.step, length, size))
        )
        accepted = draft.accepted.tolist()
        states = [
            HAZE if not now else SETTLED if old else FRESH
            for now, old in zip(accepted, before.tolist(), strict=True)
        ]
        line = tuple(
            (real if now else other, state)
            for now, real, other, state in zip(accepted, likely, random, states, strict=True)
        )
        caption = f"canvas {number + 1}, step {draft.step}: {sum(accepted)} of {length} accepted"
        last = draft is drafts[-1]
        yield Frame((*done, line), caption, PAUSE_S if last else STEP_S)
        before = draft.accepted


def _letters(model: sfumato.Model, ids: torch.Tensor) -> list[str]:
    """A character for each token; a blank for what has none to show."""
    shown = (model.tokenizer.decode([token]) for token in ids.tolist())
    return [text if len(text) == 1 and text.isprintable() else " " for text in shown]


def svg(shown: Sequence[Frame]) -> str:
    """The frames as one picture, that begins anew when it has ended. Where motion is not wanted,
    or not possible, it is the last frame."""
    total = sum(frame.seconds for frame in shown)
    width = int(2 * LEFT + CELL * max(len(line) for frame in shown for line in frame.lines))
    height = TOP + LINE * max(len(frame.lines) for frame in shown) + 40
    rules, groups, at = [], [], 0.0
    for number, frame in enumerate(shown):
        begin, end = 100 * at / total, 100 * (at + frame.seconds) / total
        at += frame.seconds
        hidden = "0%{opacity:0}" if number else ""
        rules.append(
            f"@keyframes f{number}{{{hidden}{begin:.2f}%{{opacity:1}}"
            + (f"{end:.2f}%,100%{{opacity:0}}" if end < 99.99 else "")
            + "}"
        )
        last = " last" if number == len(shown) - 1 else ""
        groups.append(
            f'<g class="f{last}" style="animation-name:f{number}">{_drawn(frame, height)}</g>'
        )
    colours = "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{_label(shown)}">\n'
        "<style>text{font:26px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
        f"white-space:pre}}.small{{font-size:15px;fill:#8b949e}}{colours}"
        f".f{{opacity:0;animation:{total:.1f}s step-end infinite}}.last{{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}}"
        f"{''.join(rules)}</style>\n"
        f'<rect width="{width}" height="{height}" rx="12" fill="#0d1117"/>\n'
        f'<text x="{LEFT}" y="52" fill="#7ee787">› {escape(QUESTION)}</text>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )


def _label(shown: Sequence[Frame]) -> str:
    text = "".join(letter for line in shown[-1].lines for letter, _ in line).strip()
    return escape(f"Random characters settle, step by step, into: {text}", {'"': "&quot;"})


def _drawn(frame: Frame, height: int) -> str:
    rows = []
    for row, line in enumerate(frame.lines):
        for state, run in groupby(enumerate(line), key=lambda item: item[1][1]):
            cells = [(column, letter) for column, (letter, _) in run if letter != " "]
            if not cells:
                continue
            places = " ".join(f"{LEFT + CELL * column:g}" for column, _ in cells)
            text = escape("".join(letter for _, letter in cells))
            rows.append(f'<text class="{state}" x="{places}" y="{TOP + LINE * row}">{text}</text>')
    rows.append(f'<text class="small" x="{LEFT}" y="{height - 22}">{escape(frame.caption)}</text>')
    return "".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws the README's picture.")
    parser.add_argument("out", nargs="?", default="docs/haze.svg", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    picture = svg(list(frames(sfumato.load())))
    Path(args.out).write_text(picture, encoding="utf-8")
    print(f"{args.out}: {len(picture.encode())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
