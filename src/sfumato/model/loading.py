"""Loads a checkpoint's tensors into a network, one at a time; quantized tensors stay quantized.

Every tensor of the checkpoint is used, or the load fails and names it. A tensor that is needed as
it is in the file (the embedding's blocks, floats of the wanted dtype on a CPU) is a view of the
mapped file, without a copy. Other matrices may be packed for faster operations (see `ops.pack`),
those of a bfloat16 file too: packing replaces the view by memory of the process.

On a CUDA device tensors arrive through page-locked buffers: while the device copies one buffer, the
host fills the next from the mapped file, so that reading and copying overlap.  A tensor changes its
dtype on the way, so that the device never holds it twice.  Weights of streamed layers are kept in
the host's memory until all are known.

Which is faster for layers that a card has no room for, the CPU, or the card with weights that
stream to it, is tried: one layer is loaded on both and timed, and so are copies to the card.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sfumato import ops, threads
from sfumato.model.cache import KVPool
from sfumato.model.devices import is_out_of_memory
from sfumato.model.families import family_of
from sfumato.model.head import CHUNK
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.model_config import ConfigError, ModelConfig
from sfumato.model.network import Network
from sfumato.model.placement import Clock, cache_dtype, medians
from sfumato.model.quantization import as_codes
from sfumato.model.segments import PaddedRows, RowPart
from sfumato.model.streamed_layers import HostMemory, KeptLayer, StreamedLayers, aligned
from sfumato.model.transformer import Block, Rotary, Transformer, make_block, rotary_key
from sfumato.ops import gpu, packing
from sfumato.ops.registry import PANELS, watched
from sfumato.ops.side_copies import side_copies
from sfumato.ops.triton.self_test import Sizes
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.files.tensorfile import FileSizes
from sfumato.weights.formats import QuantizedTensor, Stored, Weight, float_dtype

_log = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
"""The embedding, and the output layer where that is another weight."""
FLOAT16_HEADROOM = 16
"""How many times the largest number of the trial must fit into float16: other texts have larger."""
_PROMPT, _CANVAS = 48, 32  # tokens of the trial

Read = Tensor | Stored
Progress = Callable[[int, int], None]
"""(bytes loaded so far, bytes in all)"""

BUFFER = 64 << 20  # bytes: a few ms of copying, beside which a start costs nothing
BUFFERS = 2  # one is filled while the other is copied


class CudaCopies:
    """Copies on a stream of their own, which later work of the current stream waits for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._current = torch.cuda.current_stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 memory of the host from which the device copies by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Starts a copy of a buffer to the device; the result waits until it is done."""
        self._stream.wait_stream(self._current)  # the target's memory may be in use until here
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        target.record_stream(self._stream)
        self._current.wait_event(done)
        return done.synchronize


class Mover:
    """Moves loaded values to a device one after another, by page-locked buffers where the device
    copies from them. Its buffers live as long as it does."""

    def __init__(
        self, device: torch.device, copies: CudaCopies | None = None, buffer: int = BUFFER
    ) -> None:
        """copies: None for those of a GPU; buffer: bytes of each, a multiple of 8."""
        self._device, self._buffer = device, buffer
        self._copies = CudaCopies(device) if copies is None and gpu.is_gpu(device) else copies
        self._free: deque[Tensor] = deque()
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def to(self, value: Tensor | Stored, dtype: torch.dtype) -> Tensor | Stored:
        """A float tensor in a dtype, or a weight in another form as it is, on the device. The value
        may change afterwards, where it is copied."""
        if isinstance(value, Stored):
            return value.moved(self._as_it_is)
        return self._moved(value, dtype)

    def wait(self) -> None:
        """Waits for what is still being copied: what is packed next must be on the device."""
        while self._busy:
            self._end_first()

    def _as_it_is(self, part: Tensor) -> Tensor:
        return self._moved(part.view(torch.uint8), torch.uint8).view(part.dtype)

    def _moved(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._copies is None or value.device.type != "cpu":
            return value.to(self._device, dtype)
        target = torch.empty(value.shape, dtype=dtype, device=self._device)
        values, places = value.reshape(-1), target.view(-1)
        start = 0
        while start < len(values):
            if len(self._busy) == BUFFERS:
                self._end_first()
            buffer = self._free.popleft() if self._free else self._copies.buffer(self._buffer)
            room = buffer.view(dtype)
            stop = min(start + len(room), len(values))
            part = room[: stop - start]
            part.copy_(values[start:stop])
            self._busy.append((buffer, self._copies.start(places[start:stop], part)))
            start = stop
        return target

    def _end_first(self) -> None:
        """Waits for the copy that was started first."""
        buffer, done = self._busy.popleft()
        done()
        self._free.append(buffer)


def place(module: nn.Module, leaf: str, value: Weight) -> None:
    """Puts a weight where `module.leaf` was."""
    if isinstance(value, Tensor):
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    else:
        delattr(module, leaf)
        setattr(module, leaf, value)


class KeptWeights:
    """The weights of a network as they are put into it; those of streamed layers are kept in the
    host's memory until all are known."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._memory: dict[torch.device, HostMemory] = {}
        self._layers: dict[torch.device, dict[int, KeptLayer]] = {}

    def put(self, transformer: Transformer, name: str, value: Weight) -> None:
        """Puts a weight, as its device computes with it, where its canonical name says."""
        path, _, leaf = name.rpartition(".")
        module = transformer.get_submodule(path)
        number = self._placement.streamed_layer(name)
        if number is None:
            place(module, leaf, value)
            return
        device = self._placement.layers[number]
        if device not in self._memory:
            self._memory[device], self._layers[device] = HostMemory(side_copies(device)), {}
        layer = self._layers[device].setdefault(number, KeptLayer(self._memory[device]))
        layer.keep(value, partial(place, module, leaf))

    def stream(self, transformer: Transformer) -> None:
        """Makes the buffers of the streamed layers; none of them can be computed before."""
        streams = []
        for device, layers in self._layers.items():
            streams.append(StreamedLayers(device, layers, self._memory[device].copies))
            for number in layers:
                transformer.blocks[number].present = partial(streams[-1].present, number)
        transformer.streams = tuple(streams)


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration that a checkpoint's metadata describe. Raises ConfigError, naming the
    checkpoint and the field."""
    read, metadata = family_of(checkpoint).config, checkpoint.metadata
    try:
        if checkpoint.kind == "safetensors":
            return read.from_hf(metadata["config"], metadata.get("generation_config") or {})
        return read.from_gguf(checkpoint)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error


def skeleton(config: ModelConfig) -> Transformer:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config).requires_grad_(False)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor that a checkpoint of this config holds."""
    return {name: tuple(p.shape) for name, p in skeleton(config).named_parameters()}


def load_network(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    activations: str = "int8",
    cache_type: str | None = None,
    placement: Placement | None = None,
) -> Network:
    """Loads every tensor to `device`, or where the `placement` on that device says; float matrices
    become `dtype`, quantized ones stay.

    activations: "int8" or "bf16", to what a CPU rounds them for products with quantized weights;
    with AMX "int8" is for those of experts alone (see `ops.pack`).
    cache_type: see `cache_dtype`. Raises ConfigError or CheckpointError, naming the field or the
    tensors, and ValueError for other arguments, before any tensor is read.
    """
    if activations not in ops.ACTIVATIONS:
        raise Refused("activations", f"{activations!r} is none of {', '.join(ops.ACTIVATIONS)}")
    stored = cache_dtype(checkpoint, device, dtype, cache_type)
    config = config_of(checkpoint)
    placement = placement or make_placement(device, len(config.layers))
    assert placement.device == device, "placement: is of a network on another device"
    transformer = skeleton(config)
    expected = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
    checkpoint.check_tensors(expected)
    checkpoint = _prepared(checkpoint, config, placement, frozenset(expected))
    total = sum(checkpoint.tensors[name].nbytes for name in expected)
    done, output, head = 0, None, output_name(expected)
    movers = {at: Mover(at) for at in placement.devices}
    kept = KeptWeights(placement)
    for name, following in zip(expected, [*list(expected)[1:], None], strict=True):
        if following is not None and placement.of(following).type != "cpu":
            checkpoint.prefetch(following)  # is read from disk while this one is copied
        mover = movers[placement.of(name)]
        value = _converted(checkpoint.read(name), name, mover, dtype)
        if name == head:
            output = _output(value, activations)
        is_kept = placement.streamed_layer(name) is not None
        if is_kept or _is_packed(name, checkpoint.tensors[name], placement.of(name)):
            mover.wait()
        kept.put(transformer, name, _packed(value, name, activations))
        del value  # before the next one is converted
        done += checkpoint.tensors[name].nbytes
        if progress is not None:
            progress(done, total)
    for mover in movers.values():
        mover.wait()
    set_devices(transformer, placement)
    kept.stream(transformer)
    network = Network(transformer, device, dtype, stored, output, placement)
    network.files = FileSizes(checkpoint.files.values())
    threads.suit(network, config.hidden_size)
    return network


def load_layer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    number: int,
    device: torch.device,
    dtype: torch.dtype,
    activations: str,
) -> Block:
    """One layer on a device, as `load_network` loads it."""
    with torch.device("meta"):
        block = make_block(config, config.layers[number]).requires_grad_(False)
    prefix = f"layers.{number}."
    names = [prefix + name for name, _ in block.named_parameters()]
    placement = make_placement(device, len(config.layers))
    checkpoint = _prepared(checkpoint, config, placement, frozenset(names))
    mover = Mover(device)
    for name in names:
        path, _, leaf = name.removeprefix(prefix).rpartition(".")
        value = _converted(checkpoint.read(name), name, mover, dtype)
        mover.wait()
        place(block.get_submodule(path), leaf, _packed(value, name, activations))
    return block


def set_devices(transformer: Transformer, placement: Placement) -> None:
    """Says to each layer, and to its experts, on which device their weights are."""
    parts = zip(transformer.blocks, placement.layers, placement.experts, strict=True)
    for block, own, experts in parts:
        block.device = own if own != placement.device else None
        if block.experts is not None:
            block.experts.device = experts if experts != own else None


def _prepared(
    checkpoint: Checkpoint,
    config: ModelConfig,
    placement: Placement,
    names: frozenset[str],
) -> Checkpoint:
    """Tests the kernels of each GPU, before weights fill its memory; the checkpoint, whose codes
    stay such where these serve."""
    held = as_codes(checkpoint, placement.of)
    tested: frozenset[str] = frozenset()
    while not (formats := frozenset(held.tensors[name].format for name in names)) <= tested:
        tested |= formats
        for device in filter(gpu.is_gpu, placement.devices):
            ops.prepare(device, _sizes(config), tested)
        # Where tests failed, tensors become others, whose kernels are tested in their turn.
        held = as_codes(checkpoint, placement.of)
    return held


def _sizes(config: ModelConfig) -> Sizes:
    """With what the operations of a network are tried."""
    heads, hidden, inner = config.num_heads, config.hidden_size, config.intermediate_size
    kinds = dict.fromkeys((heads, x.kv_heads, x.head_dim, x.sliding) for x in config.layers)
    products = [(hidden, inner)] if inner else []
    for _, kv_heads, d, _ in kinds:
        products += [(heads * d, hidden), (kv_heads * d, hidden), (hidden, heads * d)]
    products = list(dict.fromkeys(products))
    sizes = Sizes(hidden, tuple(products), tuple(kinds), vocabulary=config.vocab_size)
    if not config.num_experts:
        return sizes
    router = config.num_experts, config.experts_per_token
    return replace(sizes, expert=config.expert_size, router=router)


def output_name(names: Collection[str]) -> str:
    """Which of a network's tensors is its output layer."""
    return OUTPUT if OUTPUT in names else EMBEDDING


def _output(embedding: Read, activations: str) -> list[Weight] | None:
    """A second copy of a quantized output layer for the head: packed, chunk by chunk. The blocks
    stay too, because rows are read from them one by one; they may be a view of the mapped file."""
    if not isinstance(embedding, QuantizedTensor):
        return None
    rows, columns = embedding.shape
    if not _is_copied(embedding.format.name, embedding.shape, embedding.device):
        return None
    # All full chunks at once, as a stack of matrices: one allocation, filled by one call.
    chunks = rows // CHUNK
    blocks = embedding.data[: chunks * CHUNK].view(chunks, CHUNK, embedding.data.shape[1])
    stacked = QuantizedTensor(blocks, embedding.format, (chunks, CHUNK, columns))
    packed = ops.pack(stacked, activations, "linear")
    output: list[Weight] = [packed[i] for i in range(chunks)]
    if rows % CHUNK:
        output.append(ops.pack(embedding[chunks * CHUNK :], activations))
    return output


def _converted(value: Read, name: str, mover: Mover, dtype: torch.dtype) -> Read:
    if isinstance(value, Tensor):
        dtype = _kept_dtype(name, value.ndim, value.dtype, dtype)
    return mover.to(value, dtype)


def _packed(value: Read, name: str, activations: str) -> Weight:
    return ops.pack(value, activations, _operation(name))


def _is_packed(name: str, info: TensorInfo, device: torch.device) -> bool:
    return ops.packs(info.format, info.shape, device, _operation(name))


def _operation(name: str) -> str | None:
    """The operation for whose kernels a tensor's layout is free; see `packing.form_on`. Rows of the
    embedding and of the output layer are also read one by one, as the pass over the vocabulary
    does, and a router must stay exact: its choice is discrete."""
    if name in (EMBEDDING, OUTPUT):
        return "vocabulary_pass"
    return "" if ".router." in name else None


def _is_copied(format: str, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether an embedding of such blocks is packed once more, for a CPU's head."""
    return packing.form_on(format, shape, device) == PANELS


def _kept_dtype(name: str, ndim: int, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    # Routers compute in float32, and vectors (norms, scales) are cheap to keep as exact as stored.
    exact = ".router." in name or (ndim == 1 and stored == torch.float32)
    return torch.float32 if exact else dtype


def loaded_bytes(
    name: str, info: TensorInfo, device: torch.device, dtype: torch.dtype, head: str = EMBEDDING
) -> int:
    """What the tensor of this canonical name will take in memory, loaded as `load_network` does;
    head: the name of the network's output layer."""
    stored = float_dtype(info.format)
    if stored is None:
        format, size = info.format, info.nbytes
    else:
        kept = _kept_dtype(name, len(info.shape), stored, dtype)
        format = "BF16" if kept == torch.bfloat16 else "F32"
        size = math.prod(info.shape) * kept.itemsize
    held = format, info.shape, device
    if ops.packs(*held, _operation(name)):
        return ops.packed_bytes(*held)
    is_copied = name == head and stored is None and _is_copied(*held)
    return size + ops.packed_bytes(*held) if is_copied else size


def viewed_bytes(name: str, info: TensorInfo, device: torch.device, dtype: torch.dtype) -> int:
    """How many of a tensor's loaded bytes are pages of the mapped file, which take no memory of
    the process: those of a tensor that a CPU needs as it is in the file."""
    stored = float_dtype(info.format)
    if device.type != "cpu":
        return 0
    if stored is not None and _kept_dtype(name, len(info.shape), stored, dtype) != stored:
        return 0
    return 0 if _is_packed(name, info, device) else info.nbytes


def fits_float16(network: Network) -> bool:
    """Whether a network in float16 holds the numbers of a short prompt and a canvas, as
    `holds_float16` says."""

    def trial() -> None:
        vocab, config = network.config.vocab_size, network.config
        prompt = torch.arange(_PROMPT) * (vocab // _PROMPT) % vocab
        slot = network.new_slot(_PROMPT)
        network.encode([prompt], [slot])
        network.denoise([prompt[: min(_CANVAS, config.canvas_length)]], [slot])

    return holds_float16(trial, "this model's numbers")


def holds_float16(trial: Callable[[], object], what: str) -> bool:
    """Whether all that a trial in float16 hands from operation to operation is finite and far
    enough below float16's largest number; logged where it is not. what: whose numbers."""
    largest = 0.0

    def watch(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        nonlocal largest
        for value in arguments:
            if isinstance(value, Tensor) and value.dtype == torch.float16 and value.numel():
                highest = float(value.abs().amax())
                largest = max(largest, highest if highest == highest else float("inf"))

    with watched(watch), torch.no_grad():
        trial()
    fits = largest * FLOAT16_HEADROOM <= torch.finfo(torch.float16).max
    if not fits:
        _log.warning(
            "dtype: float32 in place of float16, which does not hold %s (%.3g in a trial, and %d "
            "times as much must fit)",
            *(what, largest, FLOAT16_HEADROOM),
        )
    return fits


ROUNDS = 3
COPIED = 256 << 20
"""Bytes of a copy that is timed, at most: many times what a copy needs to reach its rate."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer at the rows of a canvas."""

    cpu_s: float
    card_s: float
    copy_s: float  # of its weights, from the host's memory to the card

    @property
    def faster(self) -> str:
        """The faster of "cpu" and "stream", as if copies did not overlap with work, which may
        make streaming faster by the shorter of the two times at most."""
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
    """The faster of "cpu" and "stream" for a model that is not loaded yet, which is logged with its
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
    positions = PaddedRows([part]).positions()
    rotary = Rotary((kind,)).tables(positions, dtype)[rotary_key(kind)]
    x = torch.sin(torch.arange(length * config.hidden_size, device=device).float())
    hidden = x.view(length, -1).to(dtype)
    works = [lambda: layer(hidden, rotary, PaddedRows([part]), 0, False)]
    return medians(works, device, clock, ROUNDS)[0]


def _copy_seconds(nbytes: int, device: torch.device, clock: Clock) -> float:
    """A copy of so many bytes, by the rate of at most COPIED of them."""
    size = min(nbytes, COPIED)
    copies = side_copies(device)
    source = copies.memory(size).zero_()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    works = [lambda: copies.start(target, [source])()]
    return medians(works, device, clock, ROUNDS)[0] * nbytes / size
