"""What an engine needs of memory, predicted from a model's shapes and the bytes of its weights.

The weights are counted before loading from what a checkpoint's headers say, afterwards from the
weights themselves. What kernels for GPUs allocate is `ops.triton.workspaces`'s, the sizes of blocks
are those of torch's caching allocator for CUDA and ROCm, and what a graph and a library take is an
assumption until a device confirms or corrects it.

The prediction is what weights, slots, working buffers and snapshots add to the bare process. Pages
of mapped weight files are counted apart: the system can take them back. Working buffers of the
forward and of the vocabulary head are added up although they are used one after another: an
allocator can seldom serve the second from what the first gave back. Those of compiled operations
are one piece of memory, kept from call to call, which is as large as the largest call needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sfumato import ops
from sfumato.diffusion.constraints.read import PIECE
from sfumato.diffusion.step.batch import WIDTHS, StepBatch, width_for
from sfumato.diffusion.step.captured import most_rows, room_tokens
from sfumato.diffusion.step.graphs import READS, most_graphs
from sfumato.engine.engine_config import KEPT_PICTURES, READ_TOKENS, EngineConfig
from sfumato.media.patches import BUDGETS
from sfumato.model.cache import BLOCK, MOST, slot_bytes, slot_sizes, snapshot_bytes
from sfumato.model.cache import pool_bytes as question_bytes
from sfumato.model.head import head_bytes
from sfumato.model.layer_devices import Placement, layer_of_experts, make_placement
from sfumato.model.loading import loaded_bytes, output_name, viewed_bytes
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.network import Network
from sfumato.model.placement import cache_dtype, serving_kernels
from sfumato.model.quantization import as_codes
from sfumato.model.streamed_layers import aligned, buffers_of, kept_bytes
from sfumato.model.truncate import cutoff_bytes
from sfumato.model.vision.config import VisionConfig
from sfumato.model.vision.loading import Tower
from sfumato.ops import gpu
from sfumato.ops.cpu.attention import WINDOWS, packs
from sfumato.ops.narrow_cache import beside_bytes, is_narrow, stored_width
from sfumato.ops.triton import workspaces
from sfumato.ops.triton.workspaces import rounded_up
from sfumato.weights.checkpoint import Checkpoint

MIB = 1 << 20
SMALL, LARGE = 1 * MIB, 10 * MIB  # bounds of tensors that share a segment
GRAIN, SMALL_SEGMENT, SEGMENT = 512, 2 * MIB, 20 * MIB

GRAPH = 8 * MIB  # of the driver, for the thousand kernels of a step; assumed
WORKSPACE = 32 * MIB  # of cuBLAS and of cuBLASLt on Hopper, for each stream; smaller on others
STREAMS = 2  # that multiply: the current one, and that of captures
CODE = 256 * MIB  # kernels, which are loaded when they first run; assumed


def held_bytes(sizes: Iterable[int], device: torch.device) -> int:
    """What an allocator holds for tensors of these bytes that live together: on a CUDA device in
    blocks, elsewhere their sum.

    Tensors up to SMALL share segments of 2 MiB, those below LARGE segments of 20 MiB, and larger
    ones have one of their own, a multiple of 2 MiB.
    """
    if not gpu.is_gpu(device):
        return sum(sizes)
    small = own = 0
    shared: list[int] = []
    for size in sizes:
        if size <= SMALL:
            small += rounded_up(size, GRAIN)
        elif size < LARGE:
            _place(rounded_up(size, GRAIN), shared)
        else:
            own += rounded_up(size, SMALL_SEGMENT)
    return rounded_up(small, SMALL_SEGMENT) + len(shared) * SEGMENT + own


def _place(size: int, free: list[int]) -> None:
    """Takes room of the fullest segment that has it, as the allocator does, or opens one."""
    fitting = [room for room in free if room >= size]
    if fitting:
        room = min(fitting)
        free.remove(room)
    else:
        room = SEGMENT
    free.append(room - size)


def overhead_bytes(device: torch.device, rows: int, step: int, captures: bool = True) -> int:
    """Graphs of steps and of reads, workspaces and code of an engine of so many rows; step: bytes
    of its buffers; captures: whether there are graphs.

    Captured steps share a memory pool of their own, which the first run of a step, without a
    graph, cannot use: the buffers of a step are held twice.
    """
    if not gpu.is_gpu(device):
        return 0
    # A side stream's few tokens take a segment of its own; the thread that warms up has its own
    # ones beside those of the thread that serves.
    libraries = STREAMS * (2 * WORKSPACE + 2 * SEGMENT) + CODE
    return libraries + (step + (most_graphs(rows) + READS) * GRAPH if captures else 0)


@dataclass(frozen=True)
class ModelFootprint:
    """A model as far as memory goes, or the part of it that is on one device."""

    config: ModelConfig  # with the layers that are on the device, one at least
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    weights: int  # bytes, loaded
    mapped: int = 0  # of these, pages of mapped files
    # Of the weights, the experts of each layer; none once it is loaded.
    experts: tuple[int, ...] = field(default=(), compare=False)
    placement: Placement | None = field(default=None, compare=False)  # None: all on the device
    kept: int = field(default=0, compare=False)  # bytes of streamed layers in the host's memory
    vision: VisionConfig | None = None  # of the tower, where the model has one and it is there

    @property
    def is_home(self) -> bool:
        """Whether embedding, head and the state of canvases are on the device."""
        return self.placement is None or self.placement.device == self.device

    @property
    def captures(self) -> bool:
        """Whether forwards are captured as graphs there."""
        mixed = self.placement is not None and self.placement.is_mixed
        return gpu.is_gpu(self.device) and not mixed

    @property
    def kernels(self) -> frozenset[str]:
        """The operations that kernels for GPUs serve."""
        return serving_kernels(self.device, self.dtype, self.cache_dtype)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled operations for CPUs serve."""
        return ops.multiplies_bf16(self.device) and self.cache_dtype == torch.bfloat16

    @property
    def packed(self) -> torch.dtype | None:
        """What compiled attention packs keys and values as; None where torch attends."""
        return packs(self.cache_dtype, self.dtype) if self.device.type == "cpu" else None

    def in_slots(self, capacity: int) -> Iterator[tuple[LayerConfig, int]]:
        """Each layer, and the positions that a slot of so many has of it."""
        return zip(self.config.layers, slot_sizes(self.config, capacity), strict=True)

    def seen(self, context: int) -> Iterator[tuple[LayerConfig, int]]:
        """Each layer, and the positions of a context that it sees."""
        window = min(context, self.config.sliding_window + BLOCK)
        return ((each, window if each.sliding else context) for each in self.config.layers)

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        cache_type: str | None = None,
        placement: Placement | None = None,
        tower: Tower | None = None,
    ) -> ModelFootprint:
        """A model that is not loaded yet, but for what the placement has on other devices. Raises
        ValueError as `cache_dtype`."""
        placement = placement or make_placement(device, len(config.layers))
        checkpoint = as_codes(checkpoint, placement.of)
        tensors = [
            (name, info)
            for name, info in checkpoint.tensors.items()
            if placement.of(name) == device
        ]
        sizes: list[int] = []
        views, head = 0, output_name(checkpoint.tensors)
        experts, streamed = [0] * len(config.layers), [0] * len(config.layers)
        for name, info in tensors:
            size = loaded_bytes(name, info, device, dtype, head)
            if (layer := placement.streamed_layer(name)) is not None:
                streamed[layer] += aligned(size)
                continue
            sizes.append(size)
            views += viewed_bytes(name, info, device, dtype) if checkpoint.is_view(name) else 0
            if (layer := layer_of_experts(name)) is not None:
                experts[layer] += size
        vision = None
        if tower is not None and placement.device == device:
            vision, own = tower
            for name, info in own.tensors.items():
                vector = len(info.shape) < 2  # as it is stored
                sizes.append(info.nbytes if vector else loaded_bytes(name, info, device, dtype))
                views += viewed_bytes(name, info, device, dtype) if own.is_view(name) else 0
        layers = [size for size in streamed if size]
        return cls(
            _layers_on(config, placement, device),
            device,
            dtype,
            cache_dtype(checkpoint, placement.device, dtype, cache_type),
            held_bytes([*sizes, *buffers_of(layers)], device),
            views,
            tuple(experts),
            placement,
            kept_bytes(layers),
            vision,
        )

    @classmethod
    def of_network(cls, network: Network, device: torch.device | None = None) -> ModelFootprint:
        """The part of a loaded model on a device, None for the network's own. Which of its weights
        are mapped is not known any more."""
        device, placement = device or network.device, network.placement
        config = _layers_on(network.config, placement, device)
        values: list[Any] = [*(network.head.output or ())]
        if placement.streamed:  # their weights are views of these buffers
            values += [each for streams in network.transformer.streams for each in streams.buffers]
        tower = network.tower if device == network.device else None
        modules = [
            module
            for name, module in network.transformer.named_modules()
            if placement.streamed_layer(f"{name}.") is None
        ]
        for module in (*modules, *(() if tower is None else tower.modules())):
            values += [*module.parameters(recurse=False), *vars(module).values()]
        at = device.type, device.index or 0
        weights = [value for value in values if hasattr(value, "nbytes")]
        sizes = [w.nbytes for w in weights if (w.device.type, w.device.index or 0) == at]
        kinds = network.dtype, network.cache_dtype, held_bytes(sizes, device)
        vision = None if tower is None else tower.config
        return cls(config, device, *kinds, placement=placement, vision=vision)


def _layers_on(config: ModelConfig, placement: Placement, device: torch.device) -> ModelConfig:
    """The model with the layers of a device alone; with the last one where it has none, so that a
    device with embeddings or experts is charged for a layer's keys too many rather than too few."""
    pairs = zip(config.layers, placement.layers, strict=True)
    layers = tuple(layer for layer, at in pairs if at == device)
    return replace(config, layers=layers or config.layers[-1:])


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
    prefill: int  # of one chunk, of a forward of reads, or of the vision tower's layers
    snapshots: int  # of prompts, beside the slots
    libraries: int  # host memory
    reads: int = 0  # keys and values of questions that are being read, but those of long ones
    overhead: int = 0  # graphs, workspaces and code of a GPU
    kept: int = 0  # what compiled operations keep for the buffers of steps and prefills
    pictures: int = 0  # soft tokens that are kept or that rows hold, and the picture under way

    @property
    def working(self) -> int:
        buffers = max(self.step, self.prefill) + self.kept
        return buffers + self.reads + self.pictures + self.overhead

    @property
    def beside_weights(self) -> int:
        """What an engine takes of its model's device, the weights aside."""
        return self.slots + self.working + self.snapshots

    @property
    def total(self) -> int:
        """All of it, on whatever device."""
        return self.weights + self.beside_weights + self.libraries


def predict(footprint: ModelFootprint, config: EngineConfig, larger: int = 0) -> Prediction:
    """What an engine of this layout takes at most. larger: positions of a slot beside those of the
    layout, for which steps need buffers; the slot itself does not count."""
    model, rows, stored = footprint.config, config.slots, footprint.cache_dtype
    context = min(max(config.context, larger), model.context_length)
    home = footprint.device if footprint.placement is None else footprint.placement.device
    canvases, chunk = rows * model.canvas_length, config.chunk_on(home)
    # One operation for each pool; a larger slot is a pool of one.
    pools = (rows, config.context), (1, larger)
    one = snapshot_bytes(model, min(config.context, model.context_length), stored)
    if footprint.device.type == "cpu":
        seen = _seen(footprint, model.canvas_length, context, causal=False)
    else:
        seen = max(_seen_of_pool(footprint, *pool) for pool in pools)
    step = _forward(footprint, canvases, seen)
    slots = pool_bytes(footprint, rows, config.context)
    if footprint.is_home:
        step += _head(footprint, rows) + cutoff_bytes(model, canvases)
        slots += state_bytes(footprint, rows)
    # A picture goes into one chunk, however large.
    encoded = chunk if footprint.vision is None else max(chunk, BUDGETS[-1])
    chunk_seen = _seen_of_chunk(footprint, encoded, context)
    together = config.prefill_chunk or READ_TOKENS
    read, questions = _reads(footprint, rows, together, pools)
    # Each decision has a piece of a question that goes on in the next step.
    tokens = min(READ_TOKENS, chunk) if footprint.device.type == "cpu" else together
    pieces = rows + -(-tokens // PIECE)
    return Prediction(
        weights=footprint.weights,
        mapped=footprint.mapped,
        slots=slots,
        step=step,
        prefill=max(_forward(footprint, encoded, chunk_seen), read, _tower(footprint)),
        snapshots=min(config.snapshot_bytes, rows * MARKS * one),
        libraries=LIBRARIES + (0 if ops.multiplies_bf16(footprint.device) else TORCH),
        reads=pieces * slot_bytes(model, PIECE, stored) + questions,
        overhead=overhead_bytes(footprint.device, rows, max(step, read), footprint.captures),
        kept=max(_kept(footprint, canvases, seen), _kept(footprint, encoded, chunk_seen)),
        pictures=_pictures(footprint, rows),
    )


def largest_picture(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the soft tokens of a picture of the largest size."""
    return BUDGETS[-1] * config.hidden_size * dtype.itemsize


def _pictures(footprint: ModelFootprint, rows: int) -> int:
    """Soft tokens that are kept, and one picture of each row; and of one more its patches, which
    wait between two slices of the tower's layers."""
    if (vision := footprint.vision) is None:
        return 0
    under_way = _patches(vision) * vision.hidden_size * footprint.dtype.itemsize
    return (KEPT_PICTURES + rows) * largest_picture(footprint.config, footprint.dtype) + under_way


def _tower(footprint: ModelFootprint) -> int:
    vision = footprint.vision
    return 0 if vision is None else tower_bytes(vision, footprint.dtype.itemsize)


def tower_bytes(vision: VisionConfig, size: int) -> int:
    """Buffers of a layer of the vision tower for a picture of the largest size; size: bytes of an
    activation."""
    # Queries, keys and values as projected, and normed and turned in float32.
    heads = vision.head_dim * (vision.num_heads + 2 * vision.kv_heads) * (size + _FLOAT)
    widest = max(heads, 3 * vision.intermediate_size * size)
    return _patches(vision) * (widest + 3 * vision.hidden_size * max(size, _FLOAT))


def _patches(vision: VisionConfig) -> int:
    """How many patches a picture of the largest size has."""
    return BUDGETS[-1] * vision.pool**2


def pool_bytes(footprint: ModelFootprint, slots: int, capacity: int) -> int:
    """The tensors of a pool of slots: keys and values of each layer."""
    stored = footprint.cache_dtype
    tensors = [
        slots * layer.kv_heads * size * stored_width(layer.head_dim, stored) * stored.itemsize
        for layer, size in footprint.in_slots(capacity)
    ]
    return held_bytes([*tensors, *tensors], footprint.device)


def state_bytes(footprint: ModelFootprint, rows: int) -> int:
    """The state of canvases: batches of `rows` rows for every width that requests may name, with
    the history that the built-in rules look at. And the vectors that prompts are pooled to."""
    model = footprint.config
    widths = {width_for(width, model.canvas_length) for width in (*WIDTHS, model.canvas_length)}
    sizes = (model.hidden_size, footprint.dtype, torch.device("meta"))
    batches = (StepBatch.allocate(rows, width, 1, *sizes) for width in widths)
    return sum(batch.nbytes for batch in batches) + rows * model.hidden_size * _FLOAT


def _reads(
    footprint: ModelFootprint, rows: int, chunk: int, pools: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Buffers of a forward of reads whose shapes are fixed, and what these keep; where a device
    captures no forwards there are none. Questions that find no place are counted beside that.
    pools: of slots, how many each has and of how many positions."""
    model, device = footprint.config, footprint.device
    if not footprint.captures:
        return 0, 0
    tokens = room_tokens(model.canvas_length)
    if "attend_padded" in footprint.kernels:
        longest = max(capacity for _, capacity in pools)
        seen = max(
            workspaces.attention_bytes(
                tokens, model.num_heads, layer.head_dim, size, device, "read"
            )
            for layer, size in footprint.in_slots(longest)
        )
    else:
        seen = max(_seen_of_reads(footprint, *pool, tokens) for pool in pools)
    sizes = question_bytes(model, question_places(rows, chunk), footprint.cache_dtype)
    room = tokens * model.hidden_size * footprint.dtype.itemsize
    return _forward(footprint, tokens, seen), held_bytes([*sizes, room, room], device)


def question_places(rows: int, chunk: int) -> int:
    """Places for the questions of so many decisions and of a step's tokens."""
    return min(MOST, (rows + -(-chunk // PIECE)) * PIECE)


def _head(footprint: ModelFootprint, rows: int) -> int:
    """Buffers of the vocabulary head; kernels do not serve it where its weight is quantized."""
    model, device, dtype = footprint.config, footprint.device, footprint.dtype
    of_torch = head_bytes(model, dtype, rows, ops.multiplies_bf16(device))
    if "vocabulary_pass" not in footprint.kernels:
        return of_torch
    shape = rows * model.canvas_length, model.vocab_size, model.hidden_size
    return max(of_torch, workspaces.head_bytes(*shape, dtype.itemsize, device))


def _kept(footprint: ModelFootprint, tokens: int, seen: int) -> int:
    """What the compiled operations of a forward keep: the buffers of the attention, `seen`, or the
    result of each expert that a token has chosen, whichever is more; see `sf_workspace_bytes`."""
    if not footprint.is_compiled:
        return seen if footprint.packed is not None else 0
    model = footprint.config
    return max(seen, tokens * model.experts_per_token * model.hidden_size * _FLOAT)


def _forward(footprint: ModelFootprint, tokens: int, seen: int) -> int:
    """Buffers of a forward of `tokens` tokens but for those that compiled operations keep; seen:
    those of its attention's keys and values."""
    model, size = footprint.config, footprint.dtype.itemsize
    # Queries as projected, and normed and turned in float32; keys and values in both forms.
    heads = max(layer.head_dim * (model.num_heads + layer.kv_heads) for layer in model.layers)
    projected = tokens * heads * (size + 2 * _FLOAT)
    stream = 4 * tokens * model.hidden_size * max(size, _FLOAT)
    if footprint.packed is not None:  # compiled attention keeps what it packs
        seen = _narrowed(footprint, tokens)
    if footprint.is_compiled:
        return projected + (0 if footprint.packed is None else seen) + stream
    # Torch gathers each token's experts; kernels do not serve them where they are quantized.
    experts = 3 * tokens * model.experts_per_token * model.hidden_size * size
    if "experts" in footprint.kernels:
        experts = max(experts, _expert_kernels(footprint, tokens))
    return max(projected + seen, experts) + stream


def _expert_kernels(footprint: ModelFootprint, tokens: int) -> int:
    """A layer's experts by kernels, the choice of them included."""
    model, size = footprint.config, footprint.dtype.itemsize
    shape = model.num_experts, model.expert_size, model.hidden_size
    experts = workspaces.expert_bytes(tokens, model.experts_per_token, *shape, size)
    return experts + workspaces.route_bytes(tokens, model.num_experts)


def _narrowed(footprint: ModelFootprint, tokens: int) -> int:
    """Keys and values of new tokens as a narrow cache stores them, which the library attends to."""
    model, stored = footprint.config, footprint.cache_dtype
    if not is_narrow(stored):
        return 0
    heads = max(layer.kv_heads * stored_width(layer.head_dim, stored) for layer in model.layers)
    return 2 * tokens * heads * stored.itemsize + beside_bytes(tokens * heads, stored)


def _seen_of_chunk(footprint: ModelFootprint, tokens: int, context: int) -> int:
    """Keys and values of one row and layer, as a chunk of a prompt reads them: where kernels do not
    serve, as `_seen`, else joined."""
    layers, seen = list(footprint.seen(context)), 0
    if footprint.vision is not None:  # torch attends where soft tokens see later ones
        own = [
            _joined(footprint, layer, held, BUDGETS[-1]) for layer, held in layers if layer.sliding
        ]
        seen = max(own, default=0)
    if "attend" not in footprint.kernels:
        return max(seen, _seen(footprint, tokens, context, causal=True))
    size = footprint.dtype.itemsize
    of_kernels = (
        workspaces.prefill_bytes(
            keys + tokens, layer.kv_heads, layer.head_dim, size, footprint.device
        )
        for layer, keys in layers
    )
    return max(seen, *of_kernels)


def _seen(footprint: ModelFootprint, longest: int, context: int, causal: bool) -> int:
    """Keys and values of one row and layer, of `longest` new tokens: where rows are attended one
    after another."""
    model, packed, seen = footprint.config, footprint.packed, 0
    for layer, held in footprint.seen(context):
        keys = held + longest
        if packed is not None:  # some keys at a time, with the state of all queries between them
            at_once, state = min(keys, WINDOWS[packed]), 0
            if keys > WINDOWS[packed]:
                state = longest * model.num_heads * (layer.head_dim + 2) * _FLOAT
            panels = 2 * at_once * layer.kv_heads * layer.head_dim * packed.itemsize
            seen = max(seen, panels + state)
            continue
        seen = max(seen, _joined(footprint, layer, held, longest, causal))
    return seen


def _joined(
    footprint: ModelFootprint, layer: LayerConfig, held: int, longest: int, causal: bool = True
) -> int:
    """Keys and values of a layer that torch attends to, joined with those of `longest` tokens, and
    the mask of these."""
    size, keys = footprint.dtype.itemsize, held + longest
    # What is widened stays while it is joined with the new tokens' own.
    copied = 6 if is_narrow(footprint.cache_dtype) else 4
    numbers = keys * layer.kv_heads * layer.head_dim
    copies = copied * numbers * size + beside_bytes(numbers, footprint.cache_dtype)
    return copies + (layer.kv_heads * longest * keys * (1 + size) if causal else 0)


def _seen_of_pool(footprint: ModelFootprint, rows: int, capacity: int) -> int:
    """What kernels take of all rows of a pool, which read its slots where they are: the parts of
    long prefixes. Else keys and values of one layer and all rows, as the reference's
    `attend_padded` copies them: those of whole slots are gathered, in the dtype of the cache and
    then in that of the step, and joined with the canvas's; the joined keys stay while the values
    are joined.

    Scores are not counted: torch's fused attention holds none. Measured on no device."""
    model = footprint.config
    if "attend_padded" not in footprint.kernels:
        return _gathered(footprint, rows, capacity, model.canvas_length, 0)
    queries = rows * model.canvas_length, model.num_heads
    return max(
        workspaces.attention_bytes(*queries, layer.head_dim, size, footprint.device)
        for layer, size in footprint.in_slots(capacity)
    )


def _seen_of_reads(footprint: ModelFootprint, slots: int, capacity: int, tokens: int) -> int:
    """Keys and values of reads of so many tokens over a pool of slots, as the reference's
    `attend_padded` copies them: with the keys of each row's question."""
    rows = most_rows(tokens, WIDTHS[0], slots, frozenset())
    return _gathered(footprint, rows, capacity, tokens // rows, PIECE)


def _gathered(footprint: ModelFootprint, rows: int, capacity: int, width: int, beside: int) -> int:
    """Keys and values of rows as torch gathers those of their slots, and `beside` more of each row,
    and joins them with those of its canvas. What the cache holds in another dtype lives beside the
    copy that is made of it, and no longer when the values are joined."""
    dtype, stored = footprint.dtype, footprint.cache_dtype
    seen = 0
    for layer, size in footprint.in_slots(capacity):
        lanes = rows * layer.kv_heads
        keys = -(-(size + beside + width) // BLOCK) * BLOCK
        held = stored_width(layer.head_dim, stored) * stored.itemsize if stored != dtype else 0
        numbers = lanes * (size + beside) * layer.head_dim
        joined = lanes * keys * layer.head_dim * dtype.itemsize
        in_between = lanes * (size + beside) * held + beside_bytes(numbers, stored)
        seen = max(seen, joined + numbers * dtype.itemsize + max(joined, in_between))
    return seen
