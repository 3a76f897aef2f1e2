"""The whole step on a device: random weights of a preset, rows of canvases, times of steps.

For `gpu_first.py`: times and a profile of the step, what a graph gives, and the figures that a
release promises.  The step is the `Denoiser`'s that serves requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.gpu_timing import synchronize
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sfumato.device_trial import network_of
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE, fixed_steps
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.diffusion.step.denoiser import Pending
from sfumato.diffusion.step.graphs import RUNS, StepGraphs, graph_backend
from sfumato.model.cache import MOST, QuestionPool, Slot
from sfumato.model.devices import fetch_together
from sfumato.model.network import Network
from sfumato.model.scores import label_scores
from sfumato.model.segments import Suffix
from sfumato.model.transformer import Experts

FIRST = 4  # steps of a canvas that are not timed: kernels are compiled, graphs captured


def canvases(network: Network, rows: int, steps: int, width: int | None = None) -> list[Canvas]:
    """Canvases of so many steps, which never settle by themselves."""
    length = width or network.config.canvas_length
    config = replace(fixed_steps(steps).over(REFERENCE), canvas_length=length)
    vocab, device = network.config.vocab_size, network.device
    return [Canvas(config, Noise(seed, 0), vocab, device) for seed in range(rows)]


def prompts(network: Network, rows: int, tokens: int) -> list[Tensor]:
    """Random token ids, int64 [tokens] on the host."""
    random = torch.Generator().manual_seed(7)
    vocab = network.config.vocab_size
    return [torch.randint(vocab, (tokens,), generator=random) for _ in range(rows)]


def filled_slots(network: Network, rows: int, prefix: int) -> list[Slot]:
    """Slots of one pool that hold a random prefix each."""
    slots = network.new_slots(rows, prefix + network.config.canvas_length)
    for slot, ids in zip(slots, prompts(network, rows, prefix), strict=True):
        network.encode([ids], [slot])
    return slots


class RepeatedCalls:
    """Stands in for graphs where there are none: a replay calls the function again."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


@dataclass(frozen=True)
class Steps:
    """Steps of some canvases: their times, and the drafts of each step."""

    times: list[float]  # ms, from one result on the host to the next
    drafts: list[list[Draft | Exception | None]]
    captured: int = 0  # graphs

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times)


def timed_steps(
    network: Network, rows: Sequence[Canvas], slots: Sequence[Slot], steps: int, graphs: bool
) -> Steps:
    """Steps the canvases; graphs: captured once it has run a few times, and read one step
    late, as an engine does."""
    backend = (graph_backend(network.device) or RepeatedCalls()) if graphs else None
    denoiser = Denoiser(network, len(rows), backend)
    device_graphs = denoiser.graphs
    times: list[float] = []
    drafts: list[list[Draft | Exception | None]] = []
    pending: list[Pending] = []
    began = time.perf_counter()

    def read() -> None:
        nonlocal began
        drafts.append(pending.pop(0).results())
        now = time.perf_counter()
        times.append(1e3 * (now - began))
        began = now

    for _ in range(steps):
        pending.append(denoiser.launch(rows, slots))
        if device_graphs is not None:
            device_graphs.capture_next()
        while len(pending) > (1 if graphs else 0):
            read()
    while pending:
        read()
    return Steps(times, drafts, device_graphs.captured if device_graphs is not None else 0)


def step_times(
    network: Network, rows: int, prefix: int, steps: int, width: int | None = None
) -> dict[str, Any]:
    """Milliseconds of the steps of one canvas a row, from one result on the host to the next: what
    a step costs a request, with every wait in it."""
    slots = filled_slots(network, rows, prefix)
    row_canvases = canvases(network, rows, steps + FIRST, width)
    taken = timed_steps(network, row_canvases, slots, steps + FIRST, graphs=True)
    times = taken.times[FIRST:]
    return {
        "rows": rows,
        "prefix": prefix,
        "width": row_canvases[0].length,
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "steps": len(times),
        "graphs": taken.captured,
    }


def touched_experts(network: Network, run: Callable[[], object]) -> float:
    """How many experts of a layer are chosen by some token of a forward, mean of all layers, in
    what `run` does."""
    counts: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        counts.append(inputs[1].unique().numel())

    hooks = [
        module.register_forward_pre_hook(count)
        for module in network.transformer.modules()
        if isinstance(module, Experts)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.mean(counts) if counts else 0.0


def touched_in_step(network: Network, rows: int, prefix: int, width: int | None = None) -> float:
    """`touched_experts` of a step of canvases of that width."""
    slots = filled_slots(network, rows, prefix)
    row_canvases, denoiser = canvases(network, rows, 2, width), Denoiser(network, rows)
    return touched_experts(network, lambda: denoiser.forward(row_canvases, slots))


def touched_in_prefill(network: Network, tokens: int) -> float:
    """`touched_experts` of a prompt that is encoded in one forward."""
    (ids,), slot = prompts(network, 1, tokens), network.new_slot(tokens)
    return touched_experts(network, lambda: network.encode([ids], [slot], chunk=tokens))


def prefill_rate(network: Network, tokens: int, chunk: int, runs: int = 3) -> float:
    """Tokens a second of encoding one prompt, median."""
    (ids,), rates = prompts(network, 1, tokens), []
    for _ in range(runs):
        slot = network.new_slot(tokens)
        synchronize(network.device)
        began = time.perf_counter()
        network.encode([ids], [slot], chunk=chunk)
        synchronize(network.device)
        rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates)


def first_draft_ms(network: Network, tokens: int, runs: int = 3) -> float:
    """From a prompt to its canvas after one step, median: set-up of the slot included."""
    (ids,), times = prompts(network, 1, tokens), []
    denoiser = Denoiser(network, 1)
    for _ in range(runs + 1):
        synchronize(network.device)
        began = time.perf_counter()
        slot = network.new_slot(tokens + network.config.canvas_length)
        network.encode([ids], [slot])
        denoiser.step(canvases(network, 1, 2), [slot])
        synchronize(network.device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def read_ms(
    network: Network, questions: int, question_tokens: int, prefix: int, width: int, runs: int = 5
) -> float:
    """Questions about one cached state, read apart, median: their tokens encoded beside the slot
    (none where there are no tokens), one canvas each, and the scores of four labels."""
    (slot,) = filled_slots(network, 1, prefix)
    vocab, times = network.config.vocab_size, []
    labels = [[number % vocab for number in range(5, 9)]] * questions
    graphs, forwards = _graphs_of_reads(network, questions * max(1, question_tokens))
    # A forward is captured after RUNS runs, and its first replay is not timed either.
    untimed = 1 if graphs is None else RUNS + 1
    for _ in range(untimed + runs):
        synchronize(network.device)
        began = time.perf_counter()
        suffixes = [Suffix(slot) for _ in range(questions)]
        if question_tokens:
            for suffix in suffixes:
                if forwards is not None:
                    forwards.place(suffix, question_tokens)
            network.encode_beside(prompts(network, questions, question_tokens), suffixes)
        read, wanted = prompts(network, questions, width), [[width - 1]] * questions
        hidden = (forwards or network).denoise_beside(read, suffixes, wanted)
        fetch_together([label_scores(network.head, hidden, labels)])
        times.append(1e3 * (time.perf_counter() - began))
        if graphs is not None:
            graphs.capture_next()
    return statistics.median(times[untimed:])


def _graphs_of_reads(
    network: Network, tokens: int
) -> tuple[StepGraphs, ReadForwards] | tuple[None, None]:
    """Graphs of a device, and forwards of reads with room for questions of so many tokens; on a CPU
    neither."""
    backend = graph_backend(network.device)
    if backend is None:
        return None, None
    graphs, kinds = StepGraphs(backend, 1), (network.cache_dtype, network.device)
    questions = QuestionPool(network.config, min(MOST, 2 * tokens + PIECE), PIECE, *kinds)
    return graphs, ReadForwards(network, graphs, questions)


def outside_ms(network: Network, prefix: int, steps: int, whole_ms: float) -> float | None:
    """Of a step, what does not depend on the number of layers: the line through the times of all
    layers and of the first fifth of them (of which as many are full), at no layers. None where
    there are too few layers."""
    layers = len(network.config.layers)
    part = layers // 5
    if part < 1 or part == layers:
        return None
    part_ms = step_times(network_of(network, range(part)), 1, prefix, steps)["median_ms"]
    return float(part_ms - part * (whole_ms - part_ms) / (layers - part))


def profiled(network: Network, prefix: int, most: int = 80) -> list[dict[str, Any]]:
    """The kernels of one step of one row, or on a CPU the operations: how often each runs, and its
    milliseconds in all, the slowest first."""
    on_device = network.device.type != "cpu"
    slots, row_canvases = filled_slots(network, 1, prefix), canvases(network, 1, FIRST)
    denoiser = Denoiser(network, 1)
    denoiser.step(row_canvases, slots)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities) as taken:
        denoiser.step(row_canvases, slots)
        synchronize(network.device)
    events: Any = taken.key_averages()
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows = [
        {"kernel": each.key[:120], "runs": each.count, "ms": getattr(each, name) / 1e3}
        for each in events
        if getattr(each, name) > 0
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:most]
