"""From options to a loaded model and one shown reply: what `run`, `chat` and `demo` share.

Replies come from an engine without a thread: the code that shows a reply calls `step()` itself.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import sfumato
from sfumato.api import EMBEDDED
from sfumato.cli import interrupt, notes, placed
from sfumato.cli.arguments import label
from sfumato.cli.decoding import sampler_options
from sfumato.cli.interrupt import Presses
from sfumato.cli.view.canvas import CanvasDrawing
from sfumato.cli.view.display import Display, Live, Plain, Silent, is_visual
from sfumato.diffusion.noise import Noise
from sfumato.engine import Engine, EngineConfig, EngineError, Failed, Finished, Request, TooLarge
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.model.cache import snapshot_bytes
from sfumato.model.families import open_checkpoint
from sfumato.options import MOST_STEPS
from sfumato.options.table import DEVICES
from sfumato.weights.checkpoint import fingerprint

if TYPE_CHECKING:
    from sfumato.api import Model, Reply
    from sfumato.engine import Account, Event

Message = dict[str, Any]

PAUSE_S = 0.4  # that a frame of a slow display stays
_ADVICE = "lower --max-tokens, or free some memory"
LARGE = 100e6  # bytes; a smaller checkpoint is loaded at once


@dataclass(frozen=True)
class Answer:
    """The result of one request."""

    reply: Reply | None  # None where a second Ctrl-C ended it at once
    text: str  # of the reply, or the part that was committed
    interrupted: bool  # whether Ctrl-C was pressed
    account: Account | None = None  # the reply's
    draft: str = ""  # of the canvas that Ctrl-C ended before it settled


def load(args: argparse.Namespace) -> Model:
    """The model that the options name. Raises ValueError or OSError, saying what is wrong."""
    check_device(args.device, label(args, "device"))
    if args.threads:
        torch.set_num_threads(args.threads)  # the compiled operations take as many
    placed.choose_layers(args, _one_slot)
    with _progress() as progress:
        model = sfumato.load(
            args.model,
            device=args.device,
            dtype=args.dtype,
            progress=progress,
            activations=args.activations,
            quantize=args.quantize,
            cache_type=args.cache_type,
            experts_on_cpu=args.experts_on_cpu,
            gpu_layers=args.gpu_layers,
            split=args.split,
            other_layers=args.other_layers,
        )
    return model


def _one_slot(longest: int) -> EngineConfig:
    """The engine that `--gpu-layers auto` leaves room for; longest: the model's context."""
    return EngineConfig(slots=1, context=min(EngineConfig.context, longest), snapshot_bytes=0)


def weights_of(args: argparse.Namespace) -> str:
    """A fingerprint of the weights of that model, which it does not load. Raises ValueError or
    OSError."""
    return fingerprint(open_checkpoint(args.model or EMBEDDED))


def check_device(name: str, given: str = "--device") -> None:
    """Raises ValueError for a name that is no device; loading says whether this machine has it.

    given: where the name comes from, for the message."""
    try:
        torch.device("cpu" if name == "auto" else name)
    except RuntimeError:  # its message lists many devices that cannot run a model
        raise ValueError(f"{given}: {name!r} is none of {DEVICES}") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows at a terminal how much of a large checkpoint is loaded and how long the rest may take,
    on a line that is erased at the end."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("loading", visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=total > LARGE
        )


def request(args: argparse.Namespace, messages: list[Message]) -> Request:
    """The request that the options describe. Raises ValueError for a wrong option."""
    return Request(
        messages=messages,
        max_tokens=args.max_tokens,
        seed=args.seed,
        sampler=sfumato.SamplerConfig().options(**sampler_options(args)),
        thinking=args.thinking,
        stop=args.stop,
        drafts=True,
    )


def opening(args: argparse.Namespace) -> list[Message]:
    """The messages that every conversation begins with."""
    return [{"role": "system", "content": args.system}] if args.system else []


def engine(model: Model, first: Request, context: int = 1, kept: int = 0) -> Engine:
    """An engine for one request at a time, in a slot that the `first` one fits, of `context`
    positions at least. It makes larger ones for those that need them, where the memory allows.

    kept: how many prompts are remembered, in host memory, for others that begin like them.
    A request here has no time limit, and as many steps as the library allows: its user can end it.
    Raises ValueError where the first request cannot be done, or the memory does not suffice.
    """
    context = max(context, _need(model, first))
    one = snapshot_bytes(model.config, context, model.network.cache_dtype)
    try:
        config = EngineConfig(
            slots=1,
            context=context,
            snapshot_bytes=kept * one,
            max_steps=MOST_STEPS,
            request_timeout_s=None,
        )
        return Engine(model, config)
    except EngineError as error:
        raise error.advising(_ADVICE) from error


def _need(model: Model, first: Request) -> int:
    """Positions that a request takes. Raises ValueError where it cannot be done."""
    longest, points = model.config.context_length, snapshot_points_of(model)
    return prepare(model, first, longest, points).task.claim.positions


def answer(engine: Engine, request: Request, display: Display) -> Answer:
    """Generate one reply and show it on the way. Raises ValueError where the request fails.

    The first Ctrl-C ends the reply before the next step, with the committed text and the last
    draft; a second one at once, which the engine may not survive.
    """
    committed: list[str] = []
    draft: sfumato.Draft | None = None  # of the canvas under way
    try:
        with (
            interrupt.counted() as presses,
            display,
            closing(_events(engine, request, presses)) as events,
        ):
            for event in events:
                if isinstance(event, Failed):
                    raise _advised(event.refused or ValueError(event.message))
                if isinstance(event, Finished):
                    display.show(sfumato.Done(event.reply))
                    for warning in event.reply.warnings:
                        notes.print_message("warning", warning)
                    reply, interrupted = event.reply, presses.count > 0
                    last = draft.text if draft and reply.stop_reason == "cancelled" else ""
                    return Answer(reply, reply.text, interrupted, event.account, last)
                draft = event if isinstance(event, sfumato.Draft) else None
                if isinstance(event, sfumato.Settled):
                    committed.append(event.text)
                display.show(event)
        raise AssertionError("a request ends in Finished or Failed")
    except KeyboardInterrupt:
        return Answer(None, "".join(committed), True, draft=draft.text if draft else "")


def _events(engine: Engine, request: Request, presses: Presses) -> Generator[Event, None, None]:
    """A request's events. The request is cancelled when Ctrl-C is pressed, and when the
    caller takes no more events."""
    events: deque[Event] = deque()
    try:
        handle = engine.submit(request, events.append)
    except TooLarge as error:
        raise _advised(error) from error
    try:
        presses.on_first(handle.cancel)
        while events or handle.terminal is None:
            if events:
                yield events.popleft()
            else:
                engine.step()
    finally:
        handle.cancel()


def _advised(error: ValueError) -> ValueError:
    """An engine's error, with the advice for a server replaced by that for the command line where
    the request as a whole has no room."""
    if isinstance(error, TooLarge) and error.field is None:
        return error.advising(_ADVICE)
    return error


def display(
    args: argparse.Namespace, model: Model, slow: bool = False, view: CanvasDrawing | None = None
) -> Display:
    """The display for one reply: a live canvas where the terminal can show one.

    slow: hold every frame, from the noise on; view: how canvases are drawn, where not as text.
    """
    if getattr(args, "json", False):
        return Silent()
    if args.no_visual or not is_visual():
        return Plain()
    return Live(
        Console(highlight=False),
        model.tokenizer.decode,
        PAUSE_S if slow else 0.0,
        noise=noise(model, args.seed),
        view=view,
    )


def noise(model: Model, seed: int) -> Callable[[int], list[int]]:
    """The tokens that each canvas of a reply begins with."""
    config = model.config
    return lambda canvas: (
        Noise(seed, canvas).tokens(0, config.canvas_length, config.vocab_size).tolist()
    )
