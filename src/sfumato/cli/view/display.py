"""Showing one reply's events: as a live canvas in a terminal, as plain text anywhere else.

A display is a context manager around one stream. After it, what was committed stays, and of a reply
that was interrupted the last draft too. Knows no models and no requests.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console
from rich.text import Text

from sfumato import Done, Draft, Settled
from sfumato.cli.view import footer
from sfumato.cli.view.canvas import CanvasDrawing
from sfumato.cli.view.region import Region
from sfumato.cli.view.token_text import harmless

Event = Draft | Settled | Done

MOST_WIDTH = 100  # longer lines are hard to read
FRAME_S = 1 / 30  # drawing more often would slow the model down


class Display(Protocol):
    """What a reply is shown on."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Take in the next event of the stream."""


class Plain:
    """The answer's text and a final newline on standard output, as it is committed; after Ctrl-C
    also the last draft of the canvas that had not settled."""

    def __init__(self) -> None:
        # A file or a program gets the exact text; at a terminal control codes are replaced.
        self._clean = harmless if sys.stdout.isatty() else str
        self._written = ""
        self._draft: Draft | None = None  # of the canvas under way

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if KeyboardInterrupt in error:  # its type comes first
            self._write_draft()
        if self._written:
            print(flush=True)

    def show(self, event: Event) -> None:
        if isinstance(event, Draft):
            self._draft = event
            return
        self._write(_news(event, self._written))
        if isinstance(event, Done) and event.reply.stop_reason == "cancelled":
            self._write_draft()
        self._draft = None

    def _write(self, text: str) -> None:
        print(self._clean(text), end="", flush=True)
        self._written += text

    def _write_draft(self) -> None:
        if self._draft is not None:
            self._write(self._draft.text)
            self._draft = None


class Silent(Plain):
    """Nothing: the reply is printed in another form at its end."""

    def show(self, event: Event) -> None:
        pass


class Live:
    """The canvas in place, its progress below, committed lines above.

    `pause_s` is the least time that a draft is shown: a small model is too quick for the eye. With
    a pause, a canvas begins with a frame of its noise; `noise` gives the token ids for the canvas's
    number.
    """

    def __init__(
        self,
        console: Console,
        decode: Callable[[list[int]], str],
        pause_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        noise: Callable[[int], list[int]] | None = None,
        view: CanvasDrawing | None = None,
    ) -> None:
        self._console, self._clock, self._pause_s, self._noise = console, clock, pause_s, noise
        self._region = Region(console)
        self._view = view or CanvasDrawing(decode)
        self._pace = footer.Pace(clock)
        self._progress: list[str] = []
        self._is_noise = False  # whether the frame is the noise before the first step
        self._text = ""  # the answer, as far as it is committed
        self._tokens = 0  # of it, and of the thought
        self._drawn_at = -FRAME_S
        self._held_until = -math.inf  # by the clock

    def __enter__(self) -> Self:
        self._region.__enter__()
        self._draw()
        self._pace.resume()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            interrupted = KeyboardInterrupt in error  # its type comes first
            self._region.draw([], self._abandoned("") if interrupted else self._view.finish())
        finally:  # Ctrl-C, pressed once more, must not leave a terminal without a cursor
            self._region.__exit__()

    def show(self, event: Event) -> None:
        self._pace.arrived(is_step=isinstance(event, Draft))
        if isinstance(event, Draft):
            self._draft(event)
        elif isinstance(event, Settled):
            self._tokens += len(event.token_ids)
            self._text += event.text
            self._hold()
            self._held_until = -math.inf
            self._draw(above=self._view.commit(event.text, self._width, event.thought))
        elif event.reply.stop_reason == "cancelled":
            rest = self._abandoned(_news(event, self._text))
            self._region.draw([], above=[*rest, *self._summary(event)])
        else:
            rest = self._view.commit(_news(event, self._text), self._width)
            self._region.draw([], above=[*rest, *self._view.finish(), *self._summary(event)])
        self._pace.resume()

    def _abandoned(self, text: str) -> list[Text]:
        """What stays of a canvas that is interrupted: text before it, and its last draft."""
        return self._view.abandon(text, self._width, max(1, self._console.height - 1))

    def _draft(self, event: Draft) -> None:
        ids = event.token_ids.tolist()
        if self._pause_s and event.step == 1 and self._noise:
            begun = event.noise  # of a text with holes, the text is in it
            noise = self._noise(event.canvas) if begun is None else begun.tolist()
            noise = noise[: len(ids)]
            self._frame(event, 0, noise, [False] * len(noise))
        self._frame(event, event.step, ids, event.accepted.tolist())

    def _frame(self, event: Draft, step: int, ids: list[int], accepted: list[bool]) -> None:
        self._hold()
        self._view.draft(event.canvas, ids, accepted)
        self._is_noise = step == 0
        self._progress = footer.progress(event.canvas, step, event.max_steps, self._view.share)
        if self._pause_s or step <= 1 or self._clock() - self._drawn_at >= FRAME_S:
            self._draw()
            self._held_until = self._drawn_at + self._pause_s

    def _hold(self) -> None:
        """Waits until the last frame has been shown for `pause_s`."""
        if self._pause_s:
            time.sleep(max(0.0, min(self._pause_s, self._held_until - self._clock())))

    def _draw(self, above: list[Text] | None = None) -> None:
        fields = self._progress
        if not self._is_noise:  # no step has been shown: there is nothing to measure
            fields = fields + self._pace.fields(self._tokens + self._view.accepted)
        free = self._console.height - 1  # but for the line where the cursor rests
        below = footer.lines(fields or ["reading the prompt"], self._width, max(1, free // 2))
        canvas = self._view.lines(self._width, max(1, free - len(below)))
        self._region.draw([*canvas, *below], above or [])
        self._drawn_at = self._clock()

    def _summary(self, done: Done) -> list[Text]:
        fields = footer.summary(done.reply.stats)
        if done.reply.stop_reason == "max_tokens":
            fields.insert(1, "cut off by --max-tokens")
        return footer.lines(fields, self._width, self._console.height)

    @property
    def _width(self) -> int:
        # One cell stays free: a full line makes some terminals wrap.
        return max(1, min(MOST_WIDTH, self._console.width - 1))


def _news(event: Event, so_far: str) -> str:
    """What an event adds to the answer: the last one may bring text that no canvas had alone."""
    if isinstance(event, Done):
        return event.reply.text.removeprefix(so_far)
    return event.text if isinstance(event, Settled) else ""


def is_visual() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
