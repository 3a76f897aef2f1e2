"""How far a table is, on standard error: a bar with rate and time left at a terminal, and else a
line a minute. Knows no tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 60.0


@contextmanager
def progress(
    total: int, before: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many rows this run has done. total: rows of the table;
    before: of them, those that were done earlier."""
    if not sys.stderr.isatty():
        yield _lines(total, before, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("deciding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeLeft(),
    )
    start = clock()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=total, completed=before, rate="")

        def update(done: int) -> None:
            rate = done / max(clock() - start, 1e-9)
            bar.update(task, completed=before + done, rate=f"{rate:.3g} rows/s")

        yield update


def _lines(total: int, before: int, clock: Callable[[], float]) -> Callable[[int], None]:
    start = last = clock()

    def update(done: int) -> None:
        nonlocal last
        now = clock()
        if now - last < EVERY_S:
            return
        last, rate = now, done / (now - start)
        left = (total - before - done) / rate if rate else 0.0
        print(
            f"{before + done:,} of {total:,} rows, {rate:.3g} rows/s, {left / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )

    return update
