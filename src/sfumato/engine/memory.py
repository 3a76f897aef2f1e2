"""What an engine needs of memory, predicted from shapes alone, and whether it is there.

Predicted is what weights, slots, working buffers and snapshots add to the bare process. Pages of
mapped weight files are told apart: the system can take them back. Working buffers are those of the
forward and of the vocabulary head, one after another but added up: an allocator seldom has what
the one gave back in pieces that serve the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfumato import ops
from sfumato.engine.budget import Budget, budget, used_memory
from sfumato.engine.config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.model.cache import BLOCK, slot_bytes, snapshot_bytes
from sfumato.model.config import ModelConfig
from sfumato.model.head import head_bytes
from sfumato.model.loading import loaded_bytes, viewed_bytes
from sfumato.model.network import Network
from sfumato.model.placement import cache_dtype
from sfumato.model.truncate import cutoff_bytes
from sfumato.weights.checkpoint import Checkpoint

# What torch's and OpenMP's first work leaves behind (6 MB on Linux), and what the C library keeps
# of memory that was given back, by pieces of up to 32 MiB.
LIBRARIES = 10 << 20
TORCH = 48 << 20  # what torch's own matrix products keep besides, where no compiled ones serve
MARKS = 8  # snapshots that are worth keeping for each slot
_FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Subject:
    """A model as far as memory goes."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    weights: int  # bytes, loaded
    mapped: int = 0  # of these, pages of mapped files

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> Subject:
        """A model that is not loaded yet."""
        tensors = checkpoint.tensors.items()
        # Others than plain ones make their tensors as they are read.
        views = tensors if type(checkpoint) is Checkpoint else ()
        return cls(
            config,
            device,
            dtype,
            cache_dtype(checkpoint, device, dtype),
            sum(loaded_bytes(name, info, device, dtype) for name, info in tensors),
            sum(viewed_bytes(name, info, device, dtype) for name, info in views),
        )

    @classmethod
    def of_network(cls, network: Network) -> Subject:
        """A loaded model. Which of its weights are mapped is not known any more."""
        values = [v for module in network.transformer.modules() for v in _weights(module)]
        nbytes = sum(value.nbytes for value in (*values, *(network.head.output or ())))
        return cls(network.config, network.device, network.dtype, network.cache_dtype, nbytes)


def _weights(module: torch.nn.Module) -> list[Any]:
    own = [*module.parameters(recurse=False), *vars(module).values()]
    return [value for value in own if hasattr(value, "nbytes")]


@dataclass(frozen=True)
class Prediction:
    """Bytes, by what takes them."""

    weights: int
    mapped: int  # of the weights, pages of mapped files
    slots: int
    step: int  # a denoising step of all rows
    prefill: int  # of one chunk
    snapshots: int  # host memory
    libraries: int  # host memory

    @property
    def working(self) -> int:
        return max(self.step, self.prefill)

    @property
    def total(self) -> int:
        """All of it, on whatever device."""
        return self.weights + self.slots + self.working + self.snapshots + self.libraries

    @property
    def anonymous(self) -> int:
        """What of it is the process's own memory on a CPU."""
        return self.total - self.mapped


def predict(subject: Subject, config: EngineConfig) -> Prediction:
    """What an engine of this layout takes at most."""
    model, rows = subject.config, config.slots
    context = min(config.context, model.context_length)
    canvases = rows * model.canvas_length
    chunk = max(config.prefill_chunk, 1)
    one = snapshot_bytes(model, context, subject.cache_dtype)
    return Prediction(
        weights=subject.weights,
        mapped=subject.mapped,
        slots=rows * slot_bytes(model, config.context, subject.cache_dtype),
        step=_forward(subject, canvases, model.canvas_length, context, causal=False)
        + head_bytes(model, subject.dtype, rows, ops.multiplies_bf16(subject.device))
        + cutoff_bytes(model, canvases),
        prefill=_forward(subject, chunk, chunk, context, causal=True),
        snapshots=min(config.snapshot_bytes, rows * MARKS * one),
        libraries=LIBRARIES + (0 if ops.multiplies_bf16(subject.device) else TORCH),
    )


def _forward(subject: Subject, tokens: int, longest: int, context: int, causal: bool) -> int:
    """Buffers of a forward of `tokens` tokens, of which a row has `longest` at most."""
    model, size = subject.config, subject.dtype.itemsize
    layers = model.layers
    compiled = ops.multiplies_bf16(subject.device) and subject.cache_dtype == torch.bfloat16
    # Queries as projected, and normed and turned in float32; keys and values in both forms.
    heads = max(layer.head_dim * (model.num_heads + layer.kv_heads) for layer in layers)
    projected = tokens * heads * (size + 2 * _FLOAT)
    seen = 0
    for layer in layers:
        keys = min(context, model.sliding_window + BLOCK) if layer.sliding else context
        keys += longest
        copies = 2 * keys * layer.kv_heads * layer.head_dim * (2 if compiled else 2 * size)
        masks = layer.kv_heads * longest * keys * (1 + size) if causal and not compiled else 0
        seen = max(seen, copies + masks)
    # Torch gathers each token's experts; the compiled operation goes through few rows at a time.
    parts = 1 if compiled else 3 * model.experts_per_token
    experts = tokens * parts * model.hidden_size * size
    stream = 4 * tokens * model.hidden_size * max(size, _FLOAT)
    return max(projected + seen, experts) + stream


@dataclass(frozen=True)
class MemoryView:
    """Prediction and budget of an engine, as others see them."""

    prediction: Prediction
    budget: Budget | None  # on the model's device, before the engine took its share
    spare: int | None  # bytes for larger slots
    baseline: int | None = None  # bytes that the process held before, the weights with it


class Guard:
    """Watches that an engine stays within the memory there is. Made before its slots are."""

    def __init__(
        self,
        network: Network,
        config: EngineConfig,
        ask: Callable[[torch.device], Budget | None] = budget,
    ) -> None:
        """Raises EngineError where the slots and what steps need do not fit beside the weights."""
        self._subject, self._config, self._ask = Subject.of_network(network), config, ask
        self.prediction = predict(self._subject, config)
        self.baseline = used_memory(network.device)
        self.budget, host = ask(network.device), ask(torch.device("cpu"))
        self.spare: int | None = None  # bytes for larger slots; None: nobody knows
        own = self.prediction.slots + self.prediction.working
        aside = self.prediction.snapshots + self.prediction.libraries
        if network.device.type in ("cpu", "mps"):
            own += aside
        elif host is not None:
            check(aside, host, config.memory_margin, "prefix snapshots")
        if self.budget is not None:
            what = f"an engine of {config.slots} slots x {config.context:,} tokens"
            self.spare = check(own, self.budget, config.memory_margin, what)

    @property
    def view(self) -> MemoryView:
        return MemoryView(self.prediction, self.budget, self.spare, self.baseline)

    def added(self, capacities: Sequence[int]) -> int:
        """Bytes that larger slots of so many positions add, with what steps then take more."""
        subject, config = self._subject, self._config
        slots = (slot_bytes(subject.config, n, subject.cache_dtype) for n in capacities)
        longest = replace(config, context=max(config.context, *capacities))
        return sum(slots) + predict(subject, longest).working - self.prediction.working

    def lacks(self, capacities: Sequence[int], held: int | None) -> str | None:
        """Why such larger slots, all of them together, do not go beside the rest; None where they
        do. held: bytes that larger slots hold now, for what is left at present to count as well;
        None asks whether they ever can."""
        if self.spare is None or self.budget is None:
            return None
        need, left = self.added(capacities), self.spare
        now = None if held is None else self._ask(self._subject.device)
        if held is not None and now is not None:
            # Between steps their buffers count as free, and `held` can be given back.
            margin = int(self.budget.nbytes * self._config.memory_margin)
            left = min(left, now.nbytes - margin - self.prediction.working + held)
        if need <= left:
            return None
        return f"takes {need:,} bytes, and of memory {max(0, left):,} are left"


def check(need: int, there: Budget, margin: float, what: str) -> int:
    """The bytes that stay free, the margin aside. Raises EngineError where there are too few."""
    usable = int(there.nbytes * (1 - margin))
    if need > usable:
        raise EngineError(
            f"{what} needs {_size(need)}, and of {_size(there.nbytes)} ({there.source}) a margin "
            f"of {margin:.0%} leaves {_size(usable)}; lower --slots, --context or "
            "--snapshot-memory, or free some memory"
        )
    return usable - need


def check_load(
    subject: Subject,
    config: EngineConfig,
    ask: Callable[[torch.device], Budget | None] = budget,
) -> Prediction:
    """What a model that is not loaded yet will take, with its engine. Raises EngineError where
    that does not fit; pages of mapped files are counted, for without them every step reads the
    file again."""
    prediction, there = predict(subject, config), ask(subject.device)
    if there is not None:
        need = prediction.total
        if subject.device.type not in ("cpu", "mps"):
            need -= prediction.snapshots + prediction.libraries
        what = f"the model ({_size(prediction.weights)}) with {config.slots} slots"
        check(need, there, config.memory_margin, what)
    return prediction


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
