"""Which is faster for layers that a card has no room for: the CPU, or the card with weights that
stream to it.  One layer is loaded on both and timed, and so are copies to the card.

Knows no engine and no memory: how many layers there are is decided elsewhere.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch

from sfumato.model.cache import KVPool
from sfumato.model.devices import is_out_of_memory
from sfumato.model.layer_devices import OTHER_LAYERS
from sfumato.model.loading import load_layer
from sfumato.model.model_config import ModelConfig
from sfumato.model.placement import Clock, cache_dtype, medians
from sfumato.model.segments import PartRows, RowPart
from sfumato.model.streamed_layers import aligned
from sfumato.model.transformer import Block, Rotary, rotary_key
from sfumato.ops.side_copies import side_copies
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

ROUNDS = 3
COPIED = 256 << 20
"""Bytes of a copy that is timed, at most: many times what a copy needs to reach its rate."""


def check_other_layers(name: str) -> None:
    """Raises ValueError for what is neither "auto" nor a name of OTHER_LAYERS."""
    names = "auto", *OTHER_LAYERS
    if name not in names:
        raise Refused("other_layers", f"{name!r} is none of {', '.join(names)}")


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer at the rows of a canvas."""

    cpu_s: float
    card_s: float
    copy_s: float  # of its weights, from the host's memory to the card

    @property
    def faster(self) -> str:
        """The faster of OTHER_LAYERS, as if copies did not overlap with work, which may make
        streaming faster by the shorter of the two times at most."""
        return "stream" if self.copy_s + self.card_s < self.cpu_s else "cpu"


def faster_other_layers(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    activations: str = "int8",
    cache_type: str | None = None,
    clock: Clock = time.perf_counter,
) -> str:
    """The faster of OTHER_LAYERS for a model that is not loaded yet, which is logged with its
    times; "cpu" where the trial runs out of memory. Raises what reading a tensor raises."""

    def trial(at: torch.device, stored: torch.dtype) -> tuple[float, int]:
        # The first layer is among those that a card leaves first.
        layer = load_layer(checkpoint, config, 0, at, dtype, activations)
        return _seconds_of(layer, config, at, dtype, stored, clock), _nbytes(layer)

    try:
        stored = cache_dtype(checkpoint, device, dtype, cache_type)
        (cpu_s, _), (card_s, nbytes) = (trial(at, stored) for at in (torch.device("cpu"), device))
        times = LayerTimes(cpu_s, card_s, _copy_seconds(nbytes, device, clock))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("other layers: the CPU runs them, for %s has no memory for a trial", device)
        return "cpu"
    _log.info(
        "other layers: %s: a layer takes %.2f ms on the CPU, and %.2f ms on %s after %.2f ms of "
        "copying",
        *(times.faster, times.cpu_s * 1e3, times.card_s * 1e3, device, times.copy_s * 1e3),
    )
    return times.faster


def _nbytes(layer: Block) -> int:
    values = [v for m in layer.modules() for v in (*m.parameters(recurse=False), *vars(m).values())]
    return sum(aligned(value.nbytes) for value in values if hasattr(value, "nbytes"))


@torch.no_grad()
def _seconds_of(
    layer: Block,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype,
    clock: Clock,
) -> float:
    """A denoising forward of the layer over a canvas without a prefix."""
    kind, length = config.layers[0], config.canvas_length
    pool = KVPool(replace(config, layers=(kind,)), 1, 1, stored, device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    part = RowPart(pool, rows, length, torch.full_like(rows, length))
    positions = PartRows([part]).positions()
    rotary = Rotary((kind,)).tables(positions, dtype)[rotary_key(kind)]
    x = torch.sin(torch.arange(length * config.hidden_size, device=device).float())
    hidden = x.view(length, -1).to(dtype)
    works = [lambda: layer(hidden, rotary, PartRows([part]), 0, False)]
    return medians(works, device, clock, ROUNDS)[0]


def _copy_seconds(nbytes: int, device: torch.device, clock: Clock) -> float:
    """A copy of so many bytes, by the rate of at most COPIED of them."""
    size = min(nbytes, COPIED)
    copies = side_copies(device)
    source = copies.memory(size).zero_()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    works = [lambda: copies.start(target, [source])()]
    return medians(works, device, clock, ROUNDS)[0] * nbytes / size
