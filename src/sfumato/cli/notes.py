"""Lines on standard error: messages, and at a terminal also what is waited for and how far it is.

Knows no models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOADING = "loading …"


@contextmanager
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
    print(message(f"sfumato: {kind}: {text}"), file=sys.stderr)


def message(text: str) -> str:
    """The text of a message for standard error, wrapped where that is a terminal."""
    return wrapped(text) if sys.stderr.isatty() else text


def wrapped(text: str, first: str = "", indent: str = "") -> str:
    """The text in lines of a terminal's width, broken between words alone: a longer word, as a
    path, can be copied. The first line begins with `first`, the others with `indent`."""
    import shutil
    import textwrap

    return textwrap.fill(
        text,
        max(20, shutil.get_terminal_size().columns - 1),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes how many of how many are done, and shows a bar and the time
    left, which are erased at the end."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeLeft())
    # Lines on standard output go above the bar in a terminal, and unchanged into a file.
    both = sys.stdout.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=both
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
