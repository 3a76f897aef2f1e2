"""What a person sees of a command: messages, what is waited for and how far it is, sizes, tables.

Knows no models and no commands. Loads nothing heavy before it is shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TextIO

from sfumato.values import size as size

_LOADING = "loading …"
EVERY_S = 60.0  # between two lines of progress, where there is no terminal


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Shows "loading …" at a terminal, on a line that is erased at the end."""
    shown = sys.stderr.isatty()
    if shown:
        print(_LOADING, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(" " * len(_LOADING), end="\r", file=sys.stderr, flush=True)


def print_message(kind: str, text: str) -> None:
    """A message: "sfumato: error: …". In a file it is one line; at a terminal it is wrapped."""
    text = f"sfumato: {kind}: {text}"
    print(wrapped(text, file=sys.stderr) if sys.stderr.isatty() else text, file=sys.stderr)


def print_json(value: object) -> None:
    """Plain values on standard output, as JSON that the output can show."""
    import json

    print(json.dumps(value, ensure_ascii=not speaks_unicode(sys.stdout), indent=2))


def print_report(as_json: bool, value: object, lines: Iterable[str]) -> None:
    """A report on standard output: as JSON, or its lines for people."""
    if as_json:
        print_json(value)
    else:
        print_lines(lines, sys.stdout)


def print_lines(lines: Iterable[str], file: TextIO) -> None:
    """Lines for people. At a terminal one that is too long is broken between words."""
    width = columns(file) if file.isatty() else None
    for line in "\n".join(lines).split("\n"):
        if width is not None and len(line) > width:
            text = line.lstrip()
            indent = line[: len(line) - len(text)]
            line = wrapped(text, indent, f"{indent}    ", file)
        print(line, file=file)


def columns(file: TextIO | None = None) -> int:
    """Columns of the terminal that a stream goes to (None: standard output): what COLUMNS says,
    else the terminal's own, and 80 where the stream is a file."""
    if not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            return os.get_terminal_size((file or sys.stdout).fileno()).columns or 80
    import shutil

    return shutil.get_terminal_size().columns


def wrapped(text: str, first: str = "", indent: str = "", file: TextIO | None = None) -> str:
    """The text in lines of a terminal's width, broken between words alone: a longer word, as a
    path, can be copied. The first line begins with `first`, the others with `indent`. file: what
    the text is printed to, see `columns`."""
    import textwrap

    return textwrap.fill(
        text,
        max(20, columns(file) - 1),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def named(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and texts in two columns, in lines of the terminal's width."""
    indent = 2 + max(len(name) for name, _ in rows)
    return [wrapped(text, f"{name:<{indent}}", " " * indent) for name, text in rows]


@contextlib.contextmanager
def handling(signals: Iterable[int], handler: Callable[..., object], usual: Any) -> Iterator[None]:
    """Within, signals that are handled as usual go to the handler.

    A signal that is ignored (nohup), or has another handler, is the choice of the program that
    called this one, and only the main thread may handle signals."""
    here = threading.current_thread() is threading.main_thread()
    ours = [each for each in signals if here and signal.getsignal(each) is usual]
    for each in ours:
        signal.signal(each, handler)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, usual)


class Advance(Protocol):
    """Takes how many of how many are done, and what else the bar says."""

    def __call__(self, done: int, total: int, more: str = "", /) -> None: ...


@contextlib.contextmanager
def progress(
    what: str,
    in_bytes: bool = False,
    least: float = 0.0,
    every_s: float = EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Shows a bar and the time left at a terminal, which are erased at the end; elsewhere a line
    every so many seconds.

    in_bytes: counts are bytes; least: a smaller total is not shown."""
    if not sys.stderr.isatty():
        last, shown = clock(), size if in_bytes else "{:,}".format

        def line(done: int, total: int, more: str = "", /) -> None:
            nonlocal last
            if total > least and clock() - last >= every_s:
                last = clock()
                counts = f"{what}: {shown(done)} of {shown(total)}"
                print(", ".join(filter(None, [counts, more])), file=sys.stderr, flush=True)

        yield line
        return
    from rich import progress as bars
    from rich.console import Console

    counts = bars.DownloadColumn() if in_bytes else bars.MofNCompleteColumn()
    more = bars.TextColumn("{task.fields[more]}")
    columns = (bars.TextColumn(what), bars.BarColumn(), counts, more, bars.TimeRemainingColumn())
    # Lines on standard output go above the bar in a terminal, and unchanged into a file.
    both, console = sys.stdout.isatty(), Console(stderr=True, soft_wrap=True)
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=both) as bar:
        task = bar.add_task(what, total=None, visible=not least, more="")
        yield lambda done, total, more="": bar.update(
            task, completed=done, total=total, visible=total > least, more=more
        )


@contextlib.contextmanager
def rows_progress(
    total: int,
    before: int,
    clock: Callable[[], float] = time.monotonic,
    what: str = "deciding rows",
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many rows of a table this run has done, and shows it with
    the rate. total: rows of the table; before: of them, those that were done earlier; what: is done
    to which rows, in two words."""
    start, has_bar = clock(), sys.stderr.isatty()

    def update(done: int) -> None:
        rate = done / max(clock() - start, 1e-9)
        left = (total - before - done) / rate if rate else 0.0
        left_text = "" if has_bar else f", {left / 60:.0f} min left"
        show(before + done, total, f"{rate:.3g} {what.split()[-1]}/s{left_text}")

    with progress(what, clock=clock) as show:
        show(before, total, "")
        yield update


# One cell for one cell, so that nothing that was laid out moves.
STAND_INS = str.maketrans(
    {"·": "-", "━": "#", "╌": ".", "›": ">", "…": ".", "×": "x", "→": ">", "─": "-", "│": "|"}
    | dict.fromkeys("┌┬┐├┼┤└┴┘", "+")
)


def speaks_unicode(stream: object) -> bool:
    """Whether a text stream can encode everything; one without an encoding has no trouble."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def stand_in(error: UnicodeError) -> tuple[str, int]:
    """An error handler for codecs: our own glyphs become ASCII, anything else a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(c if c.isascii() else "?" for c in lost.translate(STAND_INS)), error.end


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equally many cells as lines, columns aligned on the left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
