"""One step of each usual kind before the first request, which else waits for kernels to compile.

Kernels are compiled where they first run, which takes up to minutes where nothing was compiled
before.  Works in empty slots, and leaves them empty.  Knows no requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.constraints.decision_plan import NoiseKey
from sfumato.diffusion.constraints.read import CanvasRow, read_canvases
from sfumato.diffusion.constraints.read_template import NOISE, ReadCanvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import WIDTHS, Commit
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.model.cache import Slot
from sfumato.model.devices import fetch_together
from sfumato.model.network import PREFILL_CHUNK
from sfumato.model.segments import Scratch

log = logging.getLogger(__name__)


def warm_up(
    denoiser: Denoiser,
    slots: Sequence[Slot],
    config: SamplerConfig,
    forwards: ReadForwards | None = None,
) -> None:
    """Encodes a chunk of a prompt, denoises and commits a canvas with one row and with all of them,
    and reads a question, as `forwards` has it. slots: of all rows, empty ones; config: of a canvas,
    complete."""
    began = time.perf_counter()
    log.info("one step of each kind is run; kernels that were never compiled take up to minutes")
    try:
        _encode(denoiser, slots, config)
        for rows in sorted({1, len(slots)}):
            _step(denoiser, slots[:rows], config)
        _read(denoiser, slots[0], forwards)
        denoiser.network.synchronize()
    finally:
        for slot in slots:
            slot.reset()
    log.info("the steps before the first request took %.1f s", time.perf_counter() - began)


def _encode(denoiser: Denoiser, slots: Sequence[Slot], config: SamplerConfig) -> None:
    """A whole chunk, as far as a canvas fits behind it; a token in the other slots."""
    assert config.canvas_length
    chunk = max(1, min(PREFILL_CHUNK, slots[0].room() - config.canvas_length))
    denoiser.network.encode([_ids(chunk)], slots[:1])
    if slots[1:]:
        denoiser.network.encode([_ids(1)] * len(slots[1:]), slots[1:])


def _step(denoiser: Denoiser, slots: Sequence[Slot], config: SamplerConfig) -> None:
    """Runs a step of as many rows as slots: denoises all of them, then commits the first."""
    assert config.canvas_length
    network = denoiser.network
    size, device = network.config.vocab_size, network.device
    canvases = [Canvas(config, Noise(row, 0), size, device) for row in range(len(slots))]
    steps: list[list[Canvas]] = [canvases]
    if room := min(config.canvas_length, slots[0].room()):
        steps.append([Commit(_ids(room).tolist(), config, network), *canvases[1:]])
    for step in steps:
        for result in denoiser.launch(step, slots).results():
            if isinstance(result, Exception):
                raise result


def _read(denoiser: Denoiser, slot: Slot, forwards: ReadForwards | None) -> None:
    """A canvas of one question, whose label mass is wanted."""
    network, scratch = denoiser.network, Scratch(slot)
    if forwards is not None:
        forwards.place(scratch, 1)
    network.encode_beside([_ids(1)], [scratch])
    width = min(WIDTHS[0], network.config.canvas_length)
    canvas = ReadCanvas((NOISE, *([0] * (width - 1))), (0,), ((0, 1),))
    row = CanvasRow(scratch, canvas, NoiseKey(0, ()), 0, True)
    fetch_together([read_canvases(network, [row], 1, forwards)])


def _ids(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)
