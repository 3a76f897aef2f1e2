"""`sfumato convert`: safetensors to GGUF and back, and GGUF to a GGUF of another format."""

from __future__ import annotations

import argparse
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from sfumato.cli.notes import print_message
from sfumato.cli.units import size
from sfumato.convert import Converted, convert


def main(args: argparse.Namespace) -> int:
    """Convert. Raises ValueError or OSError for what cannot be read, converted or written."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("converting", total=None)
        done = convert(
            args.source,
            args.out,
            args.to,
            force=args.force,
            progress=lambda count, total: bar.update(task, completed=count, total=total),
        )
    for note in done.notes:
        print_message("note", note)
    print(summary(done))
    return 0


def summary(done: Converted) -> str:
    """One line: what was written, and how many tensors are of which format."""
    counted = Counter(tensor.format for tensor in done.tensors).most_common()
    formats = ", ".join(f"{count} {name}" for name, count in counted)
    return f"{done.path}: {done.target}, {size(done.nbytes)} ({formats})"
