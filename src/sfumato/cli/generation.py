"""From options to a loaded model and one shown reply: what `run`, `chat` and `demo` share.

Replies come from an engine without a thread: the code that shows a reply calls `step()` itself.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import sfumato
from sfumato.api import Model, Reply
from sfumato.catalog import EMBEDDED
from sfumato.cli import terminal
from sfumato.cli.arguments import sampler_options
from sfumato.cli.display import CanvasDrawing, Display, Live, Plain, is_visual
from sfumato.cli.display import Event as ReplyEvent
from sfumato.diffusion.noise import Noise
from sfumato.engine import (
    Account,
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    Request,
    TooLarge,
    own_engine,
)
from sfumato.engine.memory.guard import Subject, check_placed, most_gpu_layers
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.model.cache import snapshot_bytes
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import make_placement
from sfumato.model.loading import config_of, faster_other_layers
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantization import quantized_on_load
from sfumato.model.vision.loading import find_tower
from sfumato.options.table import DEVICES
from sfumato.refused import Refused
from sfumato.server.examples import CANNOT, is_answered, page_texts
from sfumato.text_side import Verification
from sfumato.weights.checkpoint import fingerprint

Message = dict[str, Any]

PAUSE_S = 0.4  # that a frame of a slow display stays
_ADVICE = "lower --max-tokens, or free some memory"
LARGE = 100e6  # bytes; a smaller checkpoint is loaded at once
_KNOWS = "it solves 4x4 Sudoku, answers a fixed set of simple questions"
_MORE = "(docs/embedded-model.md). -m loads a real one (sfumato list)."
TOYS = {
    "embedded": f"The embedded model is a toy: {_KNOWS}, and writes small JSON objects {_MORE}",
    "embedded-masks": f"This model is a toy: {_KNOWS}, and fills canvases of masks {_MORE}",
}
"""Sentences about the abilities of each model in the package."""

ADAPTER = "adapter"
"""The name of the adapter of a command that loads one."""

NO_DECISION = "this model has not learnt to decide: its answers mean nothing"
NO_THOUGHT = "the embedded model has not learnt to think, and answers at once"


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
    check_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)  # the compiled operations take as many
    choose_layers(args, _one_slot)
    with terminal.progress("loading", in_bytes=True, least=LARGE) as progress:
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
            mmproj=args.mmproj,
            adapters=_adapters(args),
        )
    return model


def _adapters(args: argparse.Namespace) -> Mapping[str, str]:
    """The paths of adapters by their names; a command that loads one calls it ADAPTER."""
    given = getattr(args, "adapter", None) or {}
    return {ADAPTER: given} if isinstance(given, str) else given


def _one_slot(longest: int) -> EngineConfig:
    """The engine that `--gpu-layers auto` leaves room for; longest: the model's context."""
    return EngineConfig(slots=1, context=min(EngineConfig.context, longest), snapshot_bytes=0)


def weights_of(args: argparse.Namespace) -> str:
    """A fingerprint of the weights of that model, which it does not load. Raises ValueError or
    OSError."""
    return fingerprint(open_checkpoint(args.model or EMBEDDED))


def loaded_as(args: argparse.Namespace) -> dict[str, Any]:
    """The model and how it is loaded, as plain values: its numbers depend on these. Raises as
    `weights_of`."""
    return {
        "model": args.model or "embedded",
        "weights": weights_of(args),
        **({"adapter": args.adapter} if args.adapter else {}),
        **{key: getattr(args, key) for key in ("dtype", "activations", "quantize", "cache_type")},
    }


def check_device(name: str) -> None:
    """Raises ValueError for a name that is no device; loading says whether this machine has it."""
    try:
        torch.device("cpu" if name in ("auto", "gpu") else name)
    except RuntimeError:  # its message lists many devices that cannot run a model
        raise Refused("device", f"{name!r} is none of {DEVICES}") from None


def request(args: argparse.Namespace, messages: list[Message] | None, **fields: Any) -> Request:
    """The request that the options describe; fields: what else it has. Raises ValueError for a
    wrong option."""
    given, names = vars(args), ("max_tokens", "thinking", "stop", "verify")
    fields = {name: given[name] for name in names if name in given} | fields
    if given.get("adapter"):
        fields["adapter"] = ADAPTER
    sampler = sfumato.SamplerConfig().options(**sampler_options(args))
    return Request(messages=messages, seed=args.seed, sampler=sampler, drafts=True, **fields)


def opening(args: argparse.Namespace) -> list[Message]:
    """The messages that every conversation begins with."""
    return [{"role": "system", "content": args.system}] if args.system else []


def engine(model: Model, first: Request, context: int = 1, kept: int = 0) -> Engine:
    """An engine for one request at a time, in a slot that the `first` one fits, of `context`
    positions at least. It makes larger ones for those that need them, where the memory allows.

    kept: how many prompts are remembered, in host memory, for others that begin like them.
    Raises ValueError where the first request cannot be done, or the memory does not suffice.
    """
    longest, points = model.config.context_length, snapshot_points_of(model)
    context = max(context, prepare(model, first, longest, points).task.claim.positions)
    one = snapshot_bytes(model.config, context, model.network.cache_dtype)
    return own_engine(model, EngineConfig(1, context, snapshot_bytes=kept * one), _ADVICE)


Seen = Callable[[ReplyEvent], ReplyEvent | None]
"""A command's filter of events: returns the event to show, or None."""


def once(
    args: argparse.Namespace, model: Model, request: Request, seen: Seen = lambda event: event
) -> Answer:
    """One reply, on an engine of its own. Raises as `engine` and `answer` do."""
    own = engine(model, request)
    if (known := toy(model)) and not args.json and sys.stderr.isatty():
        print(terminal.wrapped(known, file=sys.stderr) + "\n", file=sys.stderr)
    return answer(own, request, display(args, model, args.slow), seen)


def answer(
    engine: Engine, request: Request, display: Display, seen: Seen = lambda event: event
) -> Answer:
    """Generate one reply and show it on the way. Raises ValueError where the request fails.

    The first Ctrl-C ends the reply before the next step, with the committed text and the last
    draft; a second one at once, which the engine may not survive.
    """
    committed = list[str]()
    draft: sfumato.Draft | None = None  # of the canvas under way
    try:
        with (
            counted() as presses,
            display,
            closing(_events(engine, request, presses)) as events,
        ):
            for event in events:
                if isinstance(event, Failed):
                    raise _advised(event.refused or ValueError(event.message))
                if isinstance(event, sfumato.Settled):
                    committed.append(event.text)
                before, draft = draft, event if isinstance(event, sfumato.Draft) else None
                shown = seen(sfumato.Done(event.reply) if isinstance(event, Finished) else event)
                if shown is not None:
                    display.show(shown)
                if isinstance(event, Finished):
                    end = event
                    break
            else:
                raise AssertionError("a request ends in Finished or Failed")
        for line in end.reply.warnings:  # below the text, whose last line has ended
            terminal.print_message("note", line)
        if not display.is_silent and (read := end.reply.verification) is not None:
            terminal.print_message("note", verified(read))
        reply, interrupted = end.reply, presses.count > 0
        last = before.text if before and reply.stop_reason == "cancelled" else ""
        return Answer(reply, reply.text, interrupted, end.account, last)
    except KeyboardInterrupt:
        return Answer(None, "".join(committed), True, draft=draft.text if draft else "")


MOST_SHOWN = 5  # doubts of a note


def verified(read: Verification) -> str:
    """The agreement and the doubts of a second reader, in words."""
    share = f"{read.agreement:.0%} of the tokens are the causal mode's own choice"
    if not read.doubts:
        return f"{share}, and it doubts none of the text"
    shown = ", ".join(repr(doubt.text.strip() or doubt.text) for doubt in read.doubts[:MOST_SHOWN])
    more = len(read.doubts) - MOST_SHOWN
    doubts = f"{share}; it doubts {shown}" + (f" and {more} more" if more > 0 else "")
    return doubts if read.other is None else f"{doubts}; undecided, it would say {read.other!r}"


def _events(engine: Engine, request: Request, presses: Presses) -> Generator[Event, None, None]:
    """A request's events. The request is cancelled when Ctrl-C is pressed, and when the
    caller takes no more events."""
    events: deque[Event] = deque()
    try:
        handle = engine.submit(request, events.append)
    except TooLarge as error:
        raise _advised(error) from error
    try:
        presses.on_first = handle.cancel
        if presses.count:  # before there was a handle
            handle.cancel()
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
        return Display()
    if args.no_visual or not is_visual():
        return Plain()
    length, vocabulary = model.config.canvas_length, model.config.vocab_size
    return Live(
        Console(highlight=False),
        model.tokenizer.decode,
        PAUSE_S if slow else 0.0,
        noise=lambda canvas: Noise(args.seed, canvas).tokens(0, length, vocabulary).tolist(),
        view=view,
    )


class Presses:
    """Counts how often Ctrl-C was pressed; the second time it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Callable[[], None] = lambda: None  # called at the first press

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self.on_first()


@contextmanager
def counted() -> Iterator[Presses]:
    """Within, Ctrl-C is counted."""
    presses = Presses()
    with terminal.handling([signal.SIGINT], presses, signal.default_int_handler):
        yield presses


def toy(model: Model) -> str | None:
    """Returns the sentence of a model in the package; None: it is another."""
    return TOYS[model.packaged] if model.packaged else None


def is_embedded(model: Model) -> bool:
    """Whether it is one of the models in the package."""
    return model.packaged is not None


def note_thinking(args: argparse.Namespace, model: Model) -> None:
    """Says on standard error, before an answer, where thinking is asked of the embedded model."""
    if args.thinking and is_embedded(model):
        terminal.print_message("note", NO_THOUGHT)


def note_deciding(model: Model) -> None:
    """Says on standard error, before an answer, where a packaged model has not learnt to decide."""
    if model.packaged and page_texts(model.packaged)["decisions"] is None:
        terminal.print_message("note", NO_DECISION)


def remark(answer: Answer, model: Model, raises: str = "--steps") -> str | None:
    """The hint below a reply that may be wrong; None where the reply gives no reason for one.

    raises: the option or command that raises the limit of steps.
    """
    reply = answer.reply
    if reply is None:
        return None
    if is_embedded(model):
        return None if is_answered(reply) else CANNOT
    stats, capped = reply.stats, reply.stats.convergence.count("step_cap")
    if not capped:
        return None
    return (
        f"the text may be unsettled: {capped} of {stats.canvases} canvases hit the step cap "
        f"({max(stats.steps)}); {raises} raises it"
    )


def subject(args: argparse.Namespace) -> tuple[Subject, torch.device]:
    """The model that the options name, and its device. Raises ValueError or OSError."""
    checkpoint = open_checkpoint(Path(args.model) if args.model else EMBEDDED)
    config, device = config_of(checkpoint), pick_device(args.device)
    if args.quantize is not None:
        checkpoint = quantized_on_load(checkpoint, args.quantize, device)
    dtype = pick_dtype(args.dtype, checkpoint, device)
    tower = find_tower(checkpoint, config.hidden_size, args.mmproj)
    return Subject(checkpoint, config, dtype, args.cache_type, tower), device


def choose_layers(
    args: argparse.Namespace, layout: Callable[[int], EngineConfig], one_device: bool = False
) -> None:
    """Replaces "auto" of `--gpu-layers` and of `--other-layers` by what it stands for, and checks
    that every device holds its part, with the engine that `layout` gives for the longest context of
    the model. One line says which number of layers was chosen. one_device: whether a model that is
    on one device is checked too. Raises ValueError or OSError."""
    if not (one_device or args.gpu_layers is not None or args.experts_on_cpu or args.split):
        return
    if args.gpu_layers == "auto" and args.split:
        raise Refused("gpu_layers", "auto is for one card", "with --split name a number of layers")
    model, device = subject(args)
    engine = layout(model.config.context_length)
    if args.gpu_layers == "auto":
        args.gpu_layers = _most_layers(args, model, device, engine)
    given = device, len(model.config.layers), args.experts_on_cpu, args.gpu_layers, args.split
    placement = make_placement(*given)
    if placement.leaves_layers:
        _choose_other_layers(args, model, device)
        placement = make_placement(*given, other_layers=args.other_layers)
    check_placed(model, placement, engine)


def _most_layers(
    args: argparse.Namespace, model: Subject, device: torch.device, engine: EngineConfig
) -> int:
    """The number of layers that fit beside what the others take of the card."""
    layers, given = len(model.config.layers), (model, device, engine, args.experts_on_cpu)
    count, left = most_gpu_layers(*given), "on the CPU"
    if count < layers and device.type != "cpu":
        _choose_other_layers(args, model, device)
        if args.other_layers == "stream":
            left = "stream from the host's memory"
            count = most_gpu_layers(*given, other_layers=args.other_layers)
    where = f"{count} of {layers} layers on {device}"
    rest = "" if count == layers else f", {layers - count} {left}"
    terminal.print_message(
        "gpu-layers", f"{where}{rest}: as many as fit with {engine.context:,} positions"
    )
    return count


def _choose_other_layers(args: argparse.Namespace, model: Subject, device: torch.device) -> None:
    """Replaces "auto" of `--other-layers` by the faster of the others."""
    if args.other_layers == "auto":
        given = model.checkpoint, model.config, device, model.dtype
        args.other_layers = faster_other_layers(*given, args.activations, args.cache_type)
