"""Where the time of a denoising step goes: a pass of its own, with timers around its parts.

The timers are hooks on the network's modules. They cost little, but the figures of a report are
taken without them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.bench.metrics import PARTS, Values
from sfumato.bench.subject import Subject
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.model.attention import Attention
from sfumato.model.experts import Experts, Router
from sfumato.model.layers import GatedMLP
from sfumato.model.network import Network
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt

_MODULES: dict[type[nn.Module], str] = {
    Attention: "attention_ms",
    GatedMLP: "dense_ms",
    Router: "experts_ms",
    Experts: "experts_ms",
}


@torch.no_grad()
def where_it_goes(subject: Subject, ids: Tensor, config: SamplerConfig, seed: int) -> Values:
    """The parts of every step of one canvas after the prompt ids int64 [n].

    config: complete. The steps are those of the `Denoiser` that serves, with clocks around it.
    """
    network = subject.network
    # The reply has room for one canvas, as far as its checks and processors go.
    plan, _ = subject.model.plan_reply(len(ids), config.canvas_length or 1, seed, config)
    slot = network.new_slot(max(1, len(ids)))
    network.encode([ids], [slot])
    make = partial(Canvas.of, network=network)
    canvas = make(ReplyTask(plan, Prompt(ids.tolist(), ()), make).next_canvas())
    values: Values = {key: [] for key in ("where_step_ms", *PARTS)}
    denoiser = Denoiser(network, rows=1)
    with _module_timers(network) as spent, _forward_timer(network) as forwards:
        while not canvas.done:
            spent.clear()
            start = _now(network)
            result = denoiser.forward([canvas], [slot])
            scored = _now(network)
            for row in denoiser.advance(result):
                if isinstance(row, Exception):
                    raise row
            end = _now(network)
            began, forward = forwards.pop()
            # What the step is drawn with is made before the network's forward.
            sampler = (began - start) + (end - scored)
            step = {"where_step_ms": end - start, "head_ms": scored - forward}
            step |= {"sampler_ms": sampler, "rest_ms": forward - began - sum(spent.values())}
            for key, milliseconds in (step | spent).items():
                values[key].append(milliseconds)
    return values


@contextmanager
def _module_timers(network: Network) -> Iterator[dict[str, float]]:
    """The milliseconds that modules took since the mapping was last cleared, by metric."""
    spent: dict[str, float] = defaultdict(float)
    began: list[float] = []

    def before(*_: Any) -> None:
        began.append(_now(network))

    def after(module: nn.Module, *_: Any) -> None:
        key = next(key for kind, key in _MODULES.items() if isinstance(module, kind))
        spent[key] += _now(network) - began.pop()

    handles = []
    for module in network.transformer.modules():
        if isinstance(module, tuple(_MODULES)):
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _forward_timer(network: Network) -> Iterator[list[tuple[float, float]]]:
    """When each forward of the network began and ended, in milliseconds."""
    times: list[tuple[float, float]] = []
    serve = network.denoise_batch

    def timed(*inputs: Any) -> Tensor:
        began = _now(network)
        hidden = serve(*inputs)
        times.append((began, _now(network)))
        return hidden

    network.denoise_batch = timed  # type: ignore[assignment, method-assign]
    try:
        yield times
    finally:
        del network.denoise_batch  # the class's own serves again


def _now(network: Network) -> float:
    """Milliseconds, once the device has done all that it was given."""
    network.synchronize()
    return time.perf_counter() * 1e3
