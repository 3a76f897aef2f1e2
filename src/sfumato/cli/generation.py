"""From options to a loaded model and one shown reply: what `run`, `chat` and `demo` share."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import sfumato
from sfumato.cli.arguments import DEVICES
from sfumato.cli.view.display import Display, Live, Plain, Silent, is_visual

if TYPE_CHECKING:
    from sfumato.api import Model, Reply

Message = dict[str, Any]

TINY = 256  # hidden size
LARGE = 100e6  # bytes; less is loaded before anybody wonders


@dataclass(frozen=True)
class Answer:
    """What one request came to."""

    reply: Reply | None  # None where a second Ctrl-C did not let it end
    text: str  # the reply's, or what of it was committed
    interrupted: bool  # whether Ctrl-C was pressed


def load(args: argparse.Namespace) -> Model:
    """The model that the options name. Raises ValueError or OSError, saying what is wrong."""
    _check_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)  # the compiled operations take as many
    with _progress() as told:
        model = sfumato.load(
            args.model,
            device=args.device,
            dtype=args.dtype,
            progress=told,
            activations=args.activations,
            quantize=args.quantize,
        )
    if not args.threads:
        spare_threads(model)
    return model


def _check_device(name: str) -> None:
    """Raises ValueError for what is no device anywhere; whether it is here, loading will tell."""
    try:
        torch.device("cpu" if name == "auto" else name)
    except RuntimeError:  # its message lists much that never ran a model
        raise ValueError(f"--device: {name!r} is none of {DEVICES}") from None


def spare_threads(model: Model) -> None:
    """Runs a tiny model on one thread: its products are so small that several threads mostly
    wait for each other, and on a busy machine for a hundred times as long as they compute."""
    if model.config.hidden_size <= TINY:
        torch.set_num_threads(1)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Tells a terminal how much of a large checkpoint has been loaded, and how long the rest may
    take, on a line that is gone afterwards."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("loading", visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=total > LARGE
        )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of generate() that the options stand for."""
    sampler = sfumato.SamplerConfig().options(
        max_steps=args.steps,
        sampler=args.sampler,
        entropy_bound=args.entropy_bound,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        **approximations(args),
    )
    return {
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "sampler": sampler,
        "thinking": args.thinking,
        "stop": args.stop,
    }


def approximations(args: argparse.Namespace) -> dict[str, Any]:
    """The sampler's options that let the pass over the vocabulary be less than exact."""
    few = args.soft_top_k
    return {"soft_skip": args.soft_skip, "soft_top_k": few and sfumato.SoftTopK(*few)}


def opening(args: argparse.Namespace) -> list[Message]:
    """The messages that every conversation begins with."""
    return [{"role": "system", "content": args.system}] if args.system else []


def answer(model: Model, messages: list[Message], display: Display, **request: Any) -> Answer:
    """Generate one reply and show it on the way.

    Ctrl-C ends it before the next step, with what was committed; a second one at once.
    """
    committed: list[str] = []
    try:
        with _ctrl_c() as pressed, display:
            for event in model.stream(messages=messages, cancelled=pressed, **request):
                if isinstance(event, sfumato.Commit):
                    committed.append(event.text)
                display.show(event)
                if isinstance(event, sfumato.Done):
                    for warning in event.reply.warnings:
                        print(f"sfumato: warning: {warning}", file=sys.stderr)
                    return Answer(event.reply, event.reply.text, pressed())
        raise AssertionError("a stream ends with Done")
    except KeyboardInterrupt:
        return Answer(None, "".join(committed), True)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has been pressed within; the second time it raises KeyboardInterrupt."""
    count = 0

    def handle(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    # Only the main thread may handle signals, and whoever ignores or handles this one has reasons.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = usual and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: count > 0
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def display(args: argparse.Namespace, model: Model, pause_s: float = 0.0) -> Display:
    """The display for one reply: a live canvas where the terminal can show one."""
    if getattr(args, "json", False):
        return Silent()
    if args.no_visual or not is_visual():
        return Plain()
    return Live(Console(highlight=False), model.tokenizer.decode, pause_s)
