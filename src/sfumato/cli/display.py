"""Showing the events of a reply: as a live canvas in a terminal, as plain text anywhere else.

`CanvasDrawing` makes styled lines of drafts, and knows no terminal and no clock. The number of
lines is set when a canvas begins and holds until it is committed, so that nothing below it moves.
Every position may change until then, and is drawn so: an accepted one merely stops being dim. A
canvas changes many times before it is done. Broken afresh each time, its lines would jump about; so
breaks stay at the tokens where they were as long as the lines fit.

A `Display` is a context manager around one stream. After it, what was committed stays, and of a
reply that was interrupted the last draft too. Knows no models and no requests.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, Self

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from sfumato import Done, Draft, Settled
from sfumato.cli.terminal import STAND_INS, speaks_unicode
from sfumato.text_side import Doubt

_UNDECODED = "\ufffd"
_REORDERING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def harmless(text: str) -> str:
    """Text in which only newlines control the terminal: a model may write escape codes too."""
    if text.isprintable():
        return text
    return "".join(map(_harmless_character, text.replace("\r\n", "\n").replace("\t", "    ")))


def _harmless_character(character: str) -> str:
    if character == "\n":
        return character
    unsafe = unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERING
    return "·" if unsafe else character


class Pieces:
    """Decodes token by token, so that each token of a canvas keeps its place.

    `decode` turns ids into text, special tokens into nothing.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._one = cache(lambda token: harmless(decode([token])))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; of the bytes of one character, the first has it all."""
        texts = [self._one(token) for token in ids]
        place = 0
        for undecoded, run in groupby(texts, key=lambda piece: _UNDECODED in piece):
            stop = place + len(list(run))
            if undecoded:
                joined = harmless(self._decode(list(ids[place:stop])))
                if _UNDECODED not in joined:
                    texts[place:stop] = [joined] + [""] * (stop - place - 1)
            place = stop
        return texts


class Fragment(NamedTuple):
    """Part of a line: text without newlines, and the index of the piece that it comes from."""

    piece: int
    text: str


Line = list[Fragment]


class Wrapped(NamedTuple):
    """The lines, and the indices of the pieces that begin a line where no newline made them."""

    lines: list[Line]
    breaks: frozenset[int]


def wrap(pieces: Sequence[str], width: int, earlier: frozenset[int] | None = None) -> Wrapped:
    """Break before words; a newline in a piece ends a line; nothing is wider than `width` cells.

    `earlier` are the breaks of the draft before. Without them lines are filled to seven eighths, so
    that they can grow a little later. A space at which a line is broken is not shown.
    """
    words = _word_widths(pieces)
    limit = width if earlier is not None else max(1, width - width // 8)
    lines: list[Line] = [[]]
    breaks: set[int] = set()
    column = 0
    for index, piece in enumerate(pieces):
        for number, part in enumerate(piece.split("\n")):
            if number:
                lines.append([])
                column = 0
            if not part:
                continue
            begins = part[0] == " " or (index > 0 and pieces[index - 1][-1:] == " ")
            need = words[index] if begins and words[index] <= width else cell_len(part)
            held = earlier is not None and index in earlier and begins and column >= width // 2
            if column and (held or column + need > limit):
                lines.append([])
                breaks.add(index)
                part, column = part.lstrip(" "), 0
            for nth, chunk in enumerate(chop_cells(part, width) if part else ()):
                if nth:
                    lines.append([])
                    column = 0
                lines[-1].append(Fragment(index, chunk))
                column += cell_len(chunk)
    return Wrapped(lines, frozenset(breaks))


def _word_widths(pieces: Sequence[str]) -> list[int]:
    """For each piece, the cells from its start to the next space or newline after it."""
    widths = [0] * len(pieces)
    following = 0
    for index in range(len(pieces) - 1, -1, -1):
        piece = pieces[index]
        head = piece.split("\n")[0]
        ends = "\n" in piece or piece[-1:] == " " != piece
        widths[index] = cell_len(head) + (0 if ends else following)
        # A piece that opens with white space is where the word before it has ended.
        following = 0 if piece[:1].isspace() else widths[index]
    return widths


# By steps since the token changed: a fresh one glows, and fades.
GLOW = ("bold bright_yellow", "bright_yellow", "yellow")
HAZE_GLOW = ("yellow", "dim yellow", "dim yellow")
SETTLED, HAZE, THOUGHT = "", "dim", "dim italic"
DOUBTED = "underline"

LEAST_WIDTH = 4  # a wide character and room to break
_CELLS_PER_TOKEN = 4.5  # of English text in a large vocabulary
_TOKENS_PER_LINE = 10  # of text in short lines: code, lists, boards


class CanvasDrawing:
    """One reply's canvases, one after another.

    `carry` is the last line of what has been committed, to which the next canvas adds.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._pieces = Pieces(decode)
        self.carry = Text()
        self._canvas = -1
        self._ids: list[int] = []
        self._accepted: list[bool] = []
        self._ages: list[int] = []
        self._breaks: frozenset[int] | None = None
        self._size: tuple[int, int] | None = None
        self._rows = 0

    def draft(self, canvas: int, ids: Sequence[int], accepted: Sequence[bool]) -> None:
        """Take in a draft. Tokens that differ from the draft before begin to glow."""
        if canvas != self._canvas or len(ids) != len(self._ids):
            self._canvas, self._ages, self._breaks, self._size = canvas, [0] * len(ids), None, None
        else:
            pairs = zip(ids, self._ids, self._ages, strict=True)
            self._ages = [age + 1 if new == old else 0 for new, old, age in pairs]
        self._ids, self._accepted = list(ids), list(accepted)

    def commit(
        self, text: str, width: int, thought: str = "", doubted: Sequence[range] = ()
    ) -> list[Text]:
        """End the canvas with what it adds; returns the lines that are now complete. doubted:
        characters of the text, which are underlined.

        The unfinished last line stays in `carry`.
        """
        self._ids, self._ages, self._accepted, self._size = [], [], [], None
        return [*self._add(thought, THOUGHT, width), *self._add(text, SETTLED, width, doubted)]

    def _add(self, text: str, style: str, width: int, doubted: Sequence[range] = ()) -> list[Text]:
        if not text:
            return []
        complete = self.finish() if self.carry.style != style else []
        joined, at = self.carry.copy(), 0
        joined.style = style
        for run in doubted:
            joined.append(harmless(text[at : run.start]))
            joined.append(harmless(text[run.start : run.stop]), DOUBTED)
            at = run.stop
        joined.append(harmless(text[at:]))
        words, end = re.findall(r"\s|\S+", joined.plain), 0
        for line in wrap(words, _usable(width), frozenset()).lines:
            shown = "".join(part.text for part in line)
            # The space at which a line is broken is in none.
            start = joined.plain.index(shown, end)
            end = start + len(shown)
            complete.append(joined[start:end])
        self.carry = complete.pop()
        return complete

    def abandon(self, text: str, width: int, height: int) -> list[Text]:
        """End the canvas before it has settled: `text`, which belongs before it, and the draft as
        it stands, in lines."""
        if not self._ids:
            return [*self.commit(text, width), *self.finish()]
        above = self._add(text, SETTLED, width)
        draft = self.lines(width, height)
        while draft and not draft[-1].plain.strip():
            draft.pop()
        self.commit("", width)
        self.carry = Text()
        return [*above, *draft]

    def finish(self) -> list[Text]:
        """The last line, when nothing follows it."""
        last, self.carry = self.carry, Text()
        return [last] if last else []

    @property
    def accepted(self) -> int:
        """Accepted positions that have something to show."""
        shown = self._pieces(self._ids)
        return sum(bool(piece) and ok for piece, ok in zip(shown, self._accepted, strict=True))

    @property
    def share(self) -> float:
        """The accepted share of the canvas, 0 to 1; it may fall again."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else 0.0

    def lines(self, width: int, height: int) -> list[Text]:
        """The canvas in at most `height` lines of at most `width` cells.

        While a canvas is being denoised there are always equally many, unless the size changes.
        """
        width = _usable(width)
        if self._size != (width, height):
            self._size, self._breaks = (width, height), None
            length = len(self._ids)
            prose = math.ceil((self.carry.cell_len + length * _CELLS_PER_TOKEN) / width)
            most = max(prose, math.ceil(length / _TOKENS_PER_LINE))
            self._rows = max(1, min(height, most))
        wrapped = wrap([self.carry.plain, *self._pieces(self._ids)], width, self._breaks)
        self._breaks = wrapped.breaks
        drawn = [self._draw(line) for line in wrapped.lines[: self._rows]]
        return drawn + [Text() for _ in range(self._rows - len(drawn))]

    def _draw(self, line: Line) -> Text:
        text = Text()
        for style, run in groupby(line, key=lambda part: self._style(part.piece - 1)):
            text.append("".join(part.text for part in run), style)
        return text

    def _style(self, position: int) -> str:
        if position < 0:  # the carry, which is the first piece
            return str(self.carry.style)
        age, accepted = self._ages[position], self._accepted[position]
        if age < len(GLOW):
            return GLOW[age] if accepted else HAZE_GLOW[age]
        return SETTLED if accepted else HAZE


def _usable(width: int) -> int:
    return max(LEAST_WIDTH, width)


_BAR = 7  # so that all fits a terminal of 80 columns in one line
_SEPARATOR = " · "
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_END_OF_LINE, _REST_OF_SCREEN = "\x1b[K", "\x1b[J"
_DIFF = {"+": "green", "-": "red", "@": "cyan"}

Event = Draft | Settled | Done

MOST_WIDTH = 100  # longer lines are hard to read
FRAME_S = 1 / 30  # drawing more often would slow the model down


def speed(steps: int, seconds: float, visible: int) -> list[str]:
    """ms per step, tokens per forward, visible tokens per second; nothing before there is any.

    Numbers are padded, so that nothing beside or below them moves while they change.
    """
    if not steps or seconds <= 0:
        return []
    return [
        f"{_round(seconds / steps * 1000)} ms/step",
        f"{_round(visible / steps)} tok/forward",
        f"{_round(visible / seconds)} tok/s",
    ]


def progress(canvas: int, step: int, max_steps: int, share: float) -> list[str]:
    """Canvas and step, counted from 1, and a bar of the accepted share of the canvas."""
    full = round(share * _BAR)
    bar = "━" * full + "╌" * (_BAR - full)
    return [f"canvas {canvas + 1}", f"step {step:{len(str(max_steps))}}/{max_steps}", bar]


def summary(stats: Any) -> list[str]:
    """Tokens, steps and times of a finished reply, from its Stats; loading and drawing are not in
    them."""
    steps, canvases = sum(stats.steps), stats.canvases
    if not steps:
        return []
    seconds = stats.prefill_s + stats.denoise_s + stats.commit_s
    figures = speed(steps, seconds, stats.output_tokens)
    if not stats.output_tokens:  # rates of tokens would be zeros
        figures = figures[:1]
    return [
        f"{_count(steps, 'step')} in {_count(canvases, 'canvas', 'canvases')}",
        *map(str.strip, figures),
    ]


def lines(fields: list[str], width: int, most: int) -> list[Text]:
    """The fields on dim lines of `width` cells, broken between fields where that is possible; what
    exceeds `most` lines is left out."""
    rows: list[str] = []
    for field in fields:
        if rows and len(rows[-1] + _SEPARATOR + field) <= width:
            rows[-1] += _SEPARATOR + field
        else:
            rows += textwrap.wrap(field, width, break_on_hyphens=False)
    return [Text(row, style="dim") for row in rows[:most]]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _round(value: float) -> str:
    """Three significant digits, without an exponent, in four characters while that is enough."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2  # 99.96 would become 100.0
    return f"{value:4.{digits}f}"


class Region:
    """The last lines of a terminal, which are redrawn in place; finished lines scroll up above.

    A context manager; the cursor is hidden within, and rests below the region. Rich's live display
    counts its lines wrongly when a terminal gets narrower and folds them; here they are counted at
    the current width."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[Text] = []

    def __enter__(self) -> Region:
        self._write(_HIDE_CURSOR)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(_SHOW_CURSOR)

    def draw(self, lines: Sequence[Text], above: Sequence[Text] = ()) -> None:
        """Replace the region by `lines`, after `above`, which stay for good."""
        width = max(1, self._console.width)  # today's: the terminal has folded lines that are wider
        up = sum(max(1, -(-line.cell_len // width)) for line in self._shown)
        self._shown = list(lines)
        body = "".join(self._ansi(line) + _END_OF_LINE + "\n" for line in (*above, *lines))
        # In one write, so that the terminal never shows half of it.
        self._write((f"\x1b[{up}A" if up else "") + "\r" + body + _REST_OF_SCREEN)

    def _ansi(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        return capture.get()

    def _write(self, text: str) -> None:
        if not speaks_unicode(self._console.file):
            text = text.translate(STAND_INS)
        self._console.file.write(text)
        self._console.file.flush()


class Display:
    """What a reply is shown on. This one shows nothing: the reply is printed in another form."""

    is_silent = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, event: Event) -> None:
        """Takes in the next event of the stream."""


class Plain(Display):
    """The answer's text and a final newline on standard output, as it is committed; after Ctrl-C
    also the last draft of the canvas that had not settled."""

    def __init__(self) -> None:
        self.is_silent = False
        # A file or a program gets the exact text; at a terminal control codes are replaced.
        self._clean = harmless if sys.stdout.isatty() else str
        self._written = ""
        self._draft: Draft | None = None  # of the canvas under way

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


class Live(Display):
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
        self.is_silent = False
        self._console, self._clock, self._pause_s, self._noise = console, clock, pause_s, noise
        self._region = Region(console)
        self._view = view or CanvasDrawing(decode)
        self._steps, self._busy_s = 0, 0.0  # the time that the model takes, and not the drawing
        self._resumed_at = clock()
        self._progress: list[str] = []
        self._is_noise = False  # whether the frame is the noise before the first step
        self._text = ""  # the answer, as far as it is committed
        self._tokens = 0  # of it, and of the thought
        self._drawn_at = -FRAME_S
        self._held_until = -math.inf  # by the clock

    def __enter__(self) -> Self:
        self._region.__enter__()
        self._draw()
        self._resumed_at = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            interrupted = KeyboardInterrupt in error  # its type comes first
            self._region.draw([], self._abandoned("") if interrupted else self._view.finish())
        finally:  # Ctrl-C, pressed once more, must not leave a terminal without a cursor
            self._region.__exit__()

    def show(self, event: Event) -> None:
        self._busy_s += self._clock() - self._resumed_at
        if isinstance(event, Draft):
            self._steps += 1
            self._draft(event)
        elif isinstance(event, Settled):
            self._tokens += len(event.token_ids)
            doubted = [self._place(doubt) for doubt in event.doubts]
            self._text += event.text
            self._hold()
            self._held_until = -math.inf
            self._draw(above=self._view.commit(event.text, self._width, event.thought, doubted))
        else:
            text = _news(event, self._text)
            if event.reply.stop_reason == "cancelled":
                rest = self._abandoned(text)
            else:
                rest = [*self._view.commit(text, self._width), *self._view.finish()]
            self._region.draw([], above=[*rest, *self._summary(event)])
        self._resumed_at = self._clock()

    def _place(self, doubt: Doubt) -> range:
        """The characters of a canvas's text that are doubted; its text is not counted yet."""
        start = doubt.start - len(self._text)
        return range(max(0, start), max(0, start + len(doubt.text)))

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
        self._progress = progress(event.canvas, step, event.max_steps, self._view.share)
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
            visible = self._tokens + self._view.accepted
            fields = fields + speed(self._steps, self._busy_s, visible)
        free = self._console.height - 1  # but for the line where the cursor rests
        below = lines(fields or ["reading the prompt"], self._width, max(1, free // 2))
        canvas = self._view.lines(self._width, max(1, free - len(below)))
        self._region.draw([*canvas, *below], above or [])
        self._drawn_at = self._clock()

    def _summary(self, done: Done) -> list[Text]:
        fields = summary(done.reply.stats)
        if done.reply.stop_reason == "max_tokens":
            fields.insert(1, "cut off by --max-tokens")
        return lines(fields, self._width, self._console.height)

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


def filling(event: Event, shows_text: bool) -> Event | None:
    """The event to show while a given text is filled or changed, or None: drafts, and with the
    last event the complete text. All canvases of such a text stand in one place, so that none is
    shown when it settles.

    shows_text: False where the caller shows the text in another form."""
    if isinstance(event, Done):
        reply = event.reply
        text = reply.text if reply.filled is None else reply.filled.text
        return Done(replace(reply, text=text if shows_text else ""))
    return event if isinstance(event, Draft) else None


def show_diff(lines: list[str]) -> None:
    """A diff on standard output, coloured at a terminal."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    console = Console(highlight=False)
    for line in lines:
        style = "bold" if line[:3] in ("+++", "---") else _DIFF.get(line[:1], "")
        console.print(Text(harmless(line), style), soft_wrap=True)
