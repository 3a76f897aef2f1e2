"""What an engine needs of memory, predicted from the shapes of a model (`footprint.py`) alone.

The prediction is what weights, slots, working buffers and snapshots add to the bare process. Pages
of mapped weight files are counted apart: the system can take them back. Working buffers of the
forward and of the vocabulary head are added up although they are used one after another: an
allocator can seldom serve the second from what the first gave back. Those of compiled operations
are one piece of memory, kept from call to call, which is as large as the largest call needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sfumato import ops
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.step.batch import WIDTHS, StepBatch, width_for
from sfumato.diffusion.step.reads import most_rows, room_tokens
from sfumato.engine.engine_config import TURN, EngineConfig
from sfumato.engine.memory import kernel_memory
from sfumato.engine.memory.device_overhead import held_bytes, overhead_bytes
from sfumato.engine.memory.footprint import ModelFootprint
from sfumato.model.cache import (
    BLOCK,
    slot_bytes,
    slot_sizes,
    snapshot_bytes,
)
from sfumato.model.head_memory import head_bytes
from sfumato.model.placement import serving_kernels
from sfumato.model.question_pool import MOST
from sfumato.model.question_pool import pool_bytes as question_bytes
from sfumato.model.truncate import cutoff_bytes
from sfumato.ops.cpu.attention import WINDOWS, packs
from sfumato.ops.narrow_cache import beside_bytes, is_narrow, stored_width

# What torch's and OpenMP's first work leaves behind (6 MB on Linux), and what the C library keeps
# of memory that was given back, by pieces of up to 32 MiB.
LIBRARIES = 10 << 20
TORCH = 48 << 20  # what torch's own matrix products keep besides, where no compiled ones serve
MARKS = 8  # snapshots that are worth keeping for each slot
_FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Prediction:
    """Bytes, by what takes them."""

    weights: int
    mapped: int  # of the weights, pages of mapped files
    slots: int  # what they store, and the state of the canvases in them
    step: int  # a denoising step of all rows
    prefill: int  # of one chunk, or of a forward of reads
    snapshots: int  # of prompts, beside the slots
    libraries: int  # host memory
    reads: int = 0  # keys and values of questions that are being read, but those of long ones
    overhead: int = 0  # graphs, workspaces and code of a GPU
    kept: int = 0  # what compiled operations keep for the buffers of steps and prefills

    @property
    def working(self) -> int:
        return max(self.step, self.prefill) + self.kept + self.reads + self.overhead

    @property
    def total(self) -> int:
        """All of it, on whatever device."""
        return self.weights + self.slots + self.working + self.snapshots + self.libraries

    @property
    def anonymous(self) -> int:
        """The part that is the process's private memory on a CPU."""
        return self.total - self.mapped


def predict(footprint: ModelFootprint, config: EngineConfig, larger: int = 0) -> Prediction:
    """What an engine of this layout takes at most. larger: positions of a slot beside those of the
    layout, for which steps need buffers; the slot itself does not count."""
    model, rows = footprint.config, config.slots
    context = min(max(config.context, larger), model.context_length)
    canvases = rows * model.canvas_length
    chunk = max(config.prefill_chunk, 1)
    kernels = serving_kernels(footprint.device, footprint.dtype, footprint.cache_dtype)
    # One operation for each pool; a larger slot is a pool of one.
    pools = (rows, config.context), (1, larger)
    one = snapshot_bytes(model, min(config.context, model.context_length), footprint.cache_dtype)
    if footprint.device.type == "cpu":
        seen = _seen(footprint, model.canvas_length, context, causal=False)
    else:
        seen = max(_seen_of_pool(footprint, *pool, kernels) for pool in pools)
    step = _forward(footprint, canvases, seen, kernels)
    if footprint.is_home:
        step += _head(footprint, rows, kernels) + cutoff_bytes(model, canvases)
    chunk_seen = _seen_of_chunk(footprint, chunk, context, kernels)
    kept = max(_kept(footprint, canvases, seen), _kept(footprint, chunk, chunk_seen))
    read, questions = _reads(footprint, rows, chunk, pools, kernels)
    return Prediction(
        weights=footprint.weights,
        mapped=footprint.mapped,
        slots=pool_bytes(footprint, rows, config.context) + _canvases(footprint, rows),
        step=step,
        prefill=max(_forward(footprint, chunk, chunk_seen, kernels), read),
        snapshots=min(config.snapshot_bytes, rows * MARKS * one),
        libraries=LIBRARIES + (0 if ops.multiplies_bf16(footprint.device) else TORCH),
        reads=(rows + _read_pieces(footprint, chunk))
        * slot_bytes(model, PIECE, footprint.cache_dtype)
        + questions,
        overhead=overhead_bytes(footprint.device, rows, max(step, read), footprint.captures),
        kept=kept,
    )


def pool_bytes(footprint: ModelFootprint, slots: int, capacity: int) -> int:
    """The tensors of a pool of slots: keys and values of each layer."""
    model, stored = footprint.config, footprint.cache_dtype
    tensors = [
        slots * layer.kv_heads * size * stored_width(layer.head_dim, stored) * stored.itemsize
        for layer, size in zip(model.layers, slot_sizes(model, capacity), strict=True)
    ]
    return held_bytes([*tensors, *tensors], footprint.device)


def _read_pieces(footprint: ModelFootprint, chunk: int) -> int:
    """Pieces of questions that a step encodes at most; of each decision one more goes on in the
    next step."""
    tokens = min(TURN, chunk) if footprint.device.type == "cpu" else chunk
    return -(-tokens // PIECE)


def _reads(
    footprint: ModelFootprint,
    rows: int,
    chunk: int,
    pools: Sequence[tuple[int, int]],
    kernels: frozenset[str],
) -> tuple[int, int]:
    """Buffers of a forward of reads whose shapes are fixed, and what these keep; where a device
    captures no forwards there are none. Questions that find no place are counted beside that.
    pools: of slots, how many each has and of how many positions."""
    model, device = footprint.config, footprint.device
    if not footprint.captures:
        return 0, 0
    tokens = room_tokens(model.canvas_length)
    if "read_attention" in kernels:
        longest = max(capacity for _, capacity in pools)
        seen = kernel_memory.read_bytes(model, tokens, longest, device)
    else:
        seen = max(_seen_of_reads(footprint, *pool, tokens) for pool in pools)
    sizes = question_bytes(model, question_places(rows, chunk), footprint.cache_dtype)
    room = tokens * model.hidden_size * footprint.dtype.itemsize
    return _forward(footprint, tokens, seen, kernels), held_bytes([*sizes, room, room], device)


def question_places(rows: int, chunk: int) -> int:
    """Places for the questions of so many decisions and of a step's tokens."""
    return min(MOST, (rows + -(-chunk // PIECE)) * PIECE)


def _canvases(footprint: ModelFootprint, rows: int) -> int:
    """What the network's own device has beside the keys and values of slots."""
    if not footprint.is_home:
        return 0
    return state_bytes(footprint, rows) + pooled_bytes(footprint, rows)


def state_bytes(footprint: ModelFootprint, rows: int) -> int:
    """The state of canvases: batches of `rows` rows for every width that requests may name, with
    the history that the built-in rules look at."""
    model = footprint.config
    widths = {width_for(width, model.canvas_length) for width in (*WIDTHS, model.canvas_length)}
    sizes = (model.hidden_size, footprint.dtype, torch.device("meta"))
    batches = (StepBatch.allocate(rows, width, 1, *sizes) for width in widths)
    return sum(batch.nbytes for batch in batches)


def pooled_bytes(footprint: ModelFootprint, rows: int) -> int:
    """The vectors that prompts are pooled to. Hidden states are the forward's own buffers."""
    return rows * footprint.config.hidden_size * _FLOAT


def _head(footprint: ModelFootprint, rows: int, kernels: frozenset[str]) -> int:
    """Buffers of the vocabulary head; kernels do not serve it where its weight is quantized."""
    model, device, dtype = footprint.config, footprint.device, footprint.dtype
    of_torch = head_bytes(model, dtype, rows, ops.multiplies_bf16(device))
    if "vocabulary_pass" not in kernels:
        return of_torch
    return max(of_torch, kernel_memory.head_bytes(model, rows, dtype, device))


def _kept(footprint: ModelFootprint, tokens: int, seen: int) -> int:
    """What the compiled operations of a forward keep: the buffers of the attention, `seen`, or the
    result of each expert that a token has chosen, whichever is more; see `sf_workspace_bytes`."""
    if not _compiled(footprint):
        return seen if _packs(footprint) is not None else 0
    model = footprint.config
    return max(seen, tokens * model.experts_per_token * model.hidden_size * _FLOAT)


def _forward(footprint: ModelFootprint, tokens: int, seen: int, kernels: frozenset[str]) -> int:
    """Buffers of a forward of `tokens` tokens but for those that compiled operations keep; seen:
    those of its attention's keys and values."""
    model, size = footprint.config, footprint.dtype.itemsize
    # Queries as projected, and normed and turned in float32; keys and values in both forms.
    heads = max(layer.head_dim * (model.num_heads + layer.kv_heads) for layer in model.layers)
    projected = tokens * heads * (size + 2 * _FLOAT)
    stream = 4 * tokens * model.hidden_size * max(size, _FLOAT)
    chosen = tokens * model.experts_per_token * model.hidden_size
    if _packs(footprint) is not None:
        seen = _narrowed(footprint, tokens)
    if _compiled(footprint):
        return projected + (0 if _packs(footprint) is None else seen) + stream
    # Torch gathers each token's experts; kernels do not serve them where they are quantized.
    experts = 3 * chosen * size
    if "experts" in kernels:
        experts = max(experts, kernel_memory.expert_bytes(model, tokens, footprint.dtype))
    return max(projected + seen, experts) + stream


def _narrowed(footprint: ModelFootprint, tokens: int) -> int:
    """Keys and values of new tokens as a narrow cache stores them, which the library attends to."""
    model, stored = footprint.config, footprint.cache_dtype
    if not is_narrow(stored):
        return 0
    heads = max(layer.kv_heads * stored_width(layer.head_dim, stored) for layer in model.layers)
    numbers = tokens * heads
    return 2 * numbers * stored.itemsize + beside_bytes(numbers, stored)


def _seen_of_chunk(
    footprint: ModelFootprint, tokens: int, context: int, kernels: frozenset[str]
) -> int:
    """Keys and values of one row and layer, as a chunk of a prompt reads them."""
    if "attend" not in kernels:
        return _seen(footprint, tokens, context, causal=True)
    shape = tokens, context, footprint.dtype, footprint.device
    taken = kernel_memory.prefill_bytes(footprint.config, *shape)
    if is_narrow(footprint.cache_dtype):
        taken += _widened_chunk(footprint, tokens, context)
    return taken


def _widened_chunk(footprint: ModelFootprint, tokens: int, context: int) -> int:
    """Keys and values of one row and layer, widened, as they stand while they are joined; those of
    the new tokens are narrow in between."""
    model, taken = footprint.config, 0
    for layer in model.layers:
        keys = min(context, model.sliding_window + BLOCK) if layer.sliding else context
        numbers = (keys + tokens) * layer.kv_heads * layer.head_dim
        beside = beside_bytes(numbers, footprint.cache_dtype)
        taken = max(taken, 2 * numbers * footprint.dtype.itemsize + beside)
    return taken


def _seen(footprint: ModelFootprint, longest: int, context: int, causal: bool) -> int:
    """Keys and values of one row and layer, of `longest` new tokens: where rows are attended one
    after another."""
    model, size = footprint.config, footprint.dtype.itemsize
    packed, seen = _packs(footprint), 0
    # What is widened stays while it is joined with the new tokens' own.
    copied = 6 if is_narrow(footprint.cache_dtype) else 4
    for layer in model.layers:
        keys = min(context, model.sliding_window + BLOCK) if layer.sliding else context
        keys += longest
        if packed is not None:  # some keys at a time, with the state of all queries between them
            at_once, state = min(keys, WINDOWS[packed]), 0
            if keys > WINDOWS[packed]:
                state = longest * model.num_heads * (layer.head_dim + 2) * _FLOAT
            panels = 2 * at_once * layer.kv_heads * layer.head_dim * packed.itemsize
            seen = max(seen, panels + state)
            continue
        numbers = keys * layer.kv_heads * layer.head_dim
        copies = copied * numbers * size + beside_bytes(numbers, footprint.cache_dtype)
        masks = layer.kv_heads * longest * keys * (1 + size) if causal else 0
        seen = max(seen, copies + masks)
    return seen


def _seen_of_pool(
    footprint: ModelFootprint, rows: int, capacity: int, kernels: frozenset[str] = frozenset()
) -> int:
    """What kernels take of all rows of a pool, which read its slots where they are; else keys and
    values of one layer and all rows, as the reference's `canvas_attention` copies them: those of
    whole slots are gathered, in the dtype of the cache and then in that of the step, and joined
    with the canvas's; the joined keys stay while the values are joined.

    Scores are not counted: torch's fused attention holds none. Measured on no device."""
    model = footprint.config
    if kernels >= kernel_memory.ATTENTION:
        parts = kernel_memory.attention_bytes(model, rows, capacity, footprint.device)
        return parts + _rounded(footprint, rows)
    return _gathered(footprint, rows, capacity, model.canvas_length, 0)


def _rounded(footprint: ModelFootprint, rows: int) -> int:
    """New keys and values of rows, some of which commit, as a narrow cache will hold them."""
    model, stored = footprint.config, footprint.cache_dtype
    if not is_narrow(stored):
        return 0
    widest = max(layer.kv_heads * layer.head_dim for layer in model.layers)
    numbers = rows * model.canvas_length * widest
    return 4 * numbers * footprint.dtype.itemsize + beside_bytes(numbers, stored)


def _seen_of_reads(footprint: ModelFootprint, slots: int, capacity: int, tokens: int) -> int:
    """As `_seen_of_pool`, of reads of so many tokens over a pool of slots, as the reference's
    `read_attention` copies them: with the keys of each row's question."""
    rows = most_rows(tokens, WIDTHS[0], slots, frozenset())
    return _gathered(footprint, rows, capacity, tokens // rows, PIECE)


def _gathered(footprint: ModelFootprint, rows: int, capacity: int, width: int, beside: int) -> int:
    """Keys and values of rows as torch gathers those of their slots, and `beside` more of each row,
    and joins them with those of its canvas. What the cache holds in another dtype lives beside the
    copy that is made of it, and no longer when the values are joined."""
    model, dtype, stored = footprint.config, footprint.dtype, footprint.cache_dtype
    seen = 0
    for layer, size in zip(model.layers, slot_sizes(model, capacity), strict=True):
        lanes = rows * layer.kv_heads
        keys = -(-(size + beside + width) // BLOCK) * BLOCK
        held = stored_width(layer.head_dim, stored) * stored.itemsize if stored != dtype else 0
        numbers = lanes * (size + beside) * layer.head_dim
        joined = lanes * keys * layer.head_dim * dtype.itemsize
        in_between = lanes * (size + beside) * held + beside_bytes(numbers, stored)
        seen = max(seen, joined + numbers * dtype.itemsize + max(joined, in_between))
    return seen


def _packs(footprint: ModelFootprint) -> torch.dtype | None:
    """What compiled attention packs keys and values as; None where torch attends."""
    on_host = footprint.device.type == "cpu"
    return packs(footprint.cache_dtype, footprint.dtype) if on_host else None


def _compiled(footprint: ModelFootprint) -> bool:
    return ops.multiplies_bf16(footprint.device) and footprint.cache_dtype == torch.bfloat16
