"""The kernels of a denoising step or a prefill, each with its bytes, operations and milliseconds.

Costs come from shapes alone.  Every weight must be read once a step; the vocabulary head reads the
embedding twice for each GROUP of positions.  The experts' weights that are read are those of the
experts that some token chose: of independent, even choices the expected number.  Launches are those
of a denoising step, kernels and operations of torch; a test counts them in one.  Weights in planes
are unpacked by as many instructions each as `tiles.toml` says, where `python -m
benchmarks.gpu_unpack` counted them in machine code, once for each tile of tokens.

Milliseconds are a floor, and a prediction of what kernels reach.  The floor of a kernel is the
larger of its stored bytes at the device's bandwidth and its products at the rate of their kind,
those in float32 at bfloat16's.  No program is faster.  The prediction allows a kernel `REACHED` of
both rates, counts the bytes that kernels pass where they exceed the device's cache, and counts each
launch; what unpacks weights runs beside both, at one instruction of each lane a clock.  `REACHED`
and `LAUNCH_S` are assumptions until a device confirms or corrects them.

What devices can do at most is measured or published.  No program reaches a published rate: of one,
a device is taken to reach the same share as a large copy and a large product reached on the one
device where both are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rich.table import Table

from sfumato.bench.report import Values, number
from sfumato.model.loading import expected_shapes, output_name
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.network import Network
from sfumato.model.quantization import TARGETS, formats
from sfumato.model.transformer import rotary_key
from sfumato.ops import gpu
from sfumato.ops.torch_device import BESIDE
from sfumato.ops.triton.planes import LAYOUTS, PlaneTensor, plane_bytes, refusal
from sfumato.ops.triton.tiles import candidates, unpacking, use_for
from sfumato.ops.triton.workspaces import GROUP, head_chunk
from sfumato.refused import Refused
from sfumato.weights.checkpoint import TensorInfo
from sfumato.weights.formats import FORMATS, KINDS

Part = Literal["layers", "outside"]
"""Within the layers of the network, or outside: self-conditioning, head, sampler."""
Products = Literal["bf16", "float32", "FP8", "INT8"]


class Unpacked(NamedTuple):
    """Weights in planes that are multiplied by so many tokens each, and unpacked once for each tile
    of them; kernel and use: whose tile that is."""

    kernel: str
    format: str
    weights: float
    tokens: float
    use: str

    def instructions(self, target: str) -> float:
        """The instructions of threads, on an architecture."""
        tile = candidates(self.kernel, target)[self.use][0]
        passes = math.ceil(self.tokens / tile["TOKENS"])
        return passes * self.weights * unpacking(self.kernel, self.format, target)


@dataclass(frozen=True)
class KernelCost:
    """The work of one kernel, or of the same kernel in several layers, in a step."""

    name: str
    part: Part
    stored: float
    """Bytes of weights, keys and values: read from the device's memory in every step."""
    passed: float
    """Bytes that kernels pass to each other; a cache may hold them between two kernels."""
    flop: float
    """Floating-point operations of matrix products: two for each multiply-add."""
    launches: float = 1
    products: Products = "bf16"
    """The numbers that the matrix units multiply: FP8 and INT8 where weights are 8-bit codes."""
    beside: bool = False
    """Whether it runs on a second stream, beside the experts."""
    again: float = 0.0
    """Bytes of `stored` that are read once more: of the prediction, not of the floor."""
    unpacked: tuple[Unpacked, ...] = ()
    """Weights in planes: of the prediction too, where kernels serve."""

    def __add__(self, other: KernelCost) -> KernelCost:
        """Both, under the name of the first."""
        return replace(
            self,
            stored=self.stored + other.stored,
            passed=self.passed + other.passed,
            flop=self.flop + other.flop,
            launches=self.launches + other.launches,
            again=self.again + other.again,
            unpacked=self.unpacked + other.unpacked,
        )


def merged(costs: list[KernelCost]) -> list[KernelCost]:
    """One entry for each name and kind of products, in the order in which they first come."""
    joined: dict[tuple[str, Products], KernelCost] = {}
    for cost in costs:
        key = cost.name, cost.products
        joined[key] = joined[key] + cost if key in joined else cost
    return list(joined.values())


_ACTIVATION = 2  # bytes of a bfloat16 number
_EXACT = 4  # bytes of a float32 number
MATRICES = {
    "q, k, v projections": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "output projection": ("self_attn.o_proj.weight",),
    "dense MLP": tuple(f"mlp.{leaf}_proj.weight" for leaf in ("gate", "up", "down")),
    "experts, gate and up": ("experts.gate_up_proj",),
    "experts, down and sum": ("experts.down_proj",),
}
"""Kernel → the weights of a layer that it multiplies; other kernels multiply no weights."""
_PIECE, _READ_PIECE = 2048, 1024
"""Positions of the longest prefix of full layers that is one piece; see `tiles.toml`."""


@dataclass(frozen=True)
class StepShape:
    """How much a step works on. rows: canvases; width: positions of each."""

    rows: int = 1
    width: int = 256
    prefix: int = 512  # positions that each row's slot holds
    encodes: bool = False  # a prefill or commit: causal, writes the cache, has no head
    reads: bool = False  # a forward of reads, without what follows it

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def stored_bytes(config: ModelConfig, format: str = "bf16") -> dict[str, int]:
    """Bytes of every tensor of a checkpoint in a format of `sfumato convert`, by canonical name.
    Raises ValueError for another format."""
    if format not in TARGETS:
        raise Refused("format", f"{format!r} is none of {', '.join(TARGETS)}")
    shapes = expected_shapes(config)
    return {
        name: FORMATS[kind].nbytes(shapes[name])
        for name, kind in formats(shapes, TARGETS[format]).items()
    }


def held_bytes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes of a checkpoint's tensors as a GPU holds them: blocks in planes, codes as stored."""
    return {
        name: info.nbytes
        if info.format in KINDS or refusal(info.format, info.shape)
        else plane_bytes(info.format, info.shape)
        for name, info in tensors.items()
    }


def experts_touched(config: ModelConfig, tokens: int) -> float:
    """The expected number of experts of a layer that at least one of the tokens chooses."""
    if not config.num_experts:
        return 0.0
    missed = 1 - config.experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)


def step_costs(
    config: ModelConfig,
    shape: StepShape,
    stored: Mapping[str, int],
    touched: float | None = None,
    formats: Mapping[str, str] = MappingProxyType({}),
) -> list[KernelCost]:
    """All kernels of a step, layers joined.

    stored: bytes of each tensor, by canonical name; touched: how many experts of a layer some token
    chose, where it was counted (None: the expected number); formats: "FP8", "Q4_K", … of the
    tensors that are no floats, and of others or not.
    """
    if touched is None:
        touched = experts_touched(config, shape.tokens)
    costs = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        own = {
            name.removeprefix(prefix): nbytes
            for name, nbytes in stored.items()
            if name.startswith(prefix)
        }
        kernels = [
            *_attention(config, layer, shape, own),
            *(_dense(config, shape.tokens, own, "layers") if config.intermediate_size else ()),
            *(_experts(config, shape.tokens, own, touched) if config.num_experts else ()),
        ]
        for cost in kernels:
            # Of the matrices that the layer has: a full layer's values are its keys.
            names = [prefix + leaf for leaf in MATRICES.get(cost.name, ()) if leaf in own]
            kinds = {KINDS.get(formats.get(name, "")) for name in names}
            kind = kinds.pop() if len(kinds) == 1 else None  # one of bfloat16 counts for all
            of = touched if cost.name.startswith("experts") else 0.0
            unpacked = _unpacked(config, shape, stored, formats, names, of)
            costs.append(replace(cost, products=kind or cost.products, unpacked=unpacked))
        # Before attention (a tensor read, one written), after it (two read, three written), and at
        # the end of the layer (three read, one written).
        passed = (2 + 5 + 4) * shape.tokens * config.hidden_size * _ACTIVATION
        costs.append(KernelCost("norms and residuals", "layers", 0.0, passed, 0.0, 3))
    if not shape.encodes:
        costs += _outside(config, shape, stored, formats)
    return merged(_of_reads(costs, config, shape) if shape.reads else costs)


def _unpacked(
    config: ModelConfig, shape: StepShape, stored: Mapping[str, int], formats: Mapping[str, str],
    names: Iterable[str], touched: float = 0.0,
) -> tuple[Unpacked, ...]:  # fmt: skip
    """The tensors of these that are in planes; touched: how many experts of theirs are read. The
    tiles of a layer's products have as many tokens as those of the head and of experts' second."""
    share = touched / config.num_experts if touched else 1.0
    tokens = shape.tokens * (config.experts_per_token / touched if touched else 1.0)
    unpacked = []
    for name in (name for name in names if formats.get(name) in LAYOUTS):
        gated = name.endswith(("gate_proj.weight", "up_proj.weight"))
        kernel = "experts_gate_up" if touched else "linear_gated" if gated else "linear"
        weights = share * 256 * stored[name] / plane_bytes(formats[name], (1, 256))
        given = f"{kernel}_planes", formats[name], weights, tokens, use_for(shape.tokens)
        unpacked.append(Unpacked(*given))
    return tuple(unpacked)


def _of_reads(costs: list[KernelCost], config: ModelConfig, shape: StepShape) -> list[KernelCost]:
    """The kernels of a forward of reads: those of a step but for the ones behind the layers, and a
    copy of the hidden states."""
    rest = [cost for cost in costs if cost.name not in ("vocabulary head", "sampler")]
    fewer = [replace(cost, launches=4) if cost.name == "embedding" else cost for cost in rest]
    passed = 2.0 * shape.tokens * config.hidden_size * _ACTIVATION
    return [*fewer, KernelCost("copy of hidden states", "outside", 0.0, passed, 0.0)]


def _attention(
    config: ModelConfig, layer: LayerConfig, shape: StepShape, own: Mapping[str, int]
) -> list[KernelCost]:
    tokens, hidden, d = shape.tokens, config.hidden_size, layer.head_dim
    heads = config.num_heads * d
    both = 2 if "self_attn.v_proj.weight" in own else 1  # else its V is its raw K
    kv = layer.kv_heads * d * both
    names = MATRICES["q, k, v projections"]
    projected = heads + kv
    # The pieces of a long prefix are merged by a launch of its own.
    piece = _READ_PIECE if shape.reads else _PIECE
    launches = 1 if layer.sliding or shape.prefix + shape.width <= piece else 2
    held = min(shape.prefix, config.sliding_window - 1) if layer.sliding else shape.prefix
    cached = shape.rows * 2 * held * layer.kv_heads * d * _ACTIVATION
    new = 2 * tokens * layer.kv_heads * d * _ACTIVATION
    return [
        KernelCost(
            "q, k, v projections", "layers", sum(own.get(name, 0) for name in names),
            tokens * (hidden + projected) * _ACTIVATION, 2.0 * tokens * hidden * projected,
        ),
        KernelCost(
            "q and k norms, RoPE, cache", "layers", new if shape.encodes else 0.0,
            2 * tokens * (heads + 2 * layer.kv_heads * d) * _ACTIVATION, 0.0,
        ),
        KernelCost(
            "attention", "layers", cached, 2 * tokens * heads * _ACTIVATION + new,
            4.0 * shape.rows * _pairs(shape, config, layer) * heads, launches,
        ),
        KernelCost(
            "output projection", "layers", own["self_attn.o_proj.weight"],
            tokens * (heads + hidden) * _ACTIVATION, 2.0 * tokens * heads * hidden,
        ),
    ]  # fmt: skip


def _pairs(shape: StepShape, config: ModelConfig, layer: LayerConfig) -> float:
    """Pairs of a query and a key that it sees, in one row."""
    window = config.sliding_window if layer.sliding else math.inf
    if not shape.encodes or config.block:  # of a whole block all see one another
        return shape.width * (min(shape.prefix, window - 1) + shape.width)
    # Token i sees min(prefix + i + 1, window) keys.
    first, last = shape.prefix + 1, shape.prefix + shape.width
    below = max(0, min(last, window) - first + 1)
    full = shape.width - below
    return below * (2 * first + below - 1) / 2 + (full * window if full else 0)


def _dense(
    config: ModelConfig, tokens: int, own: Mapping[str, int], part: Part, prefix: str = "mlp."
) -> list[KernelCost]:
    hidden, inner = config.hidden_size, config.intermediate_size
    name = "dense MLP" if part == "layers" else "self-conditioning"
    weights = sum(own[f"{prefix}{leaf}_proj.weight"] for leaf in ("gate", "up", "down"))
    # Gate and up with the activation of both, and down.
    passed = 2 * tokens * (hidden + inner) * _ACTIVATION
    flop = 6.0 * tokens * hidden * inner
    beside = part == "layers" and config.num_experts > 0 and tokens <= BESIDE
    return [KernelCost(name, part, weights, passed, flop, 2, beside=beside)]


def _experts(
    config: ModelConfig, tokens: int, own: Mapping[str, int], touched: float
) -> list[KernelCost]:
    hidden, size, count = config.hidden_size, config.expert_size, config.num_experts
    chosen = tokens * config.experts_per_token
    share = touched / count
    names = "experts.gate_up_proj", "experts.down_proj"
    into, out = (own[name] * share for name in names)
    return [
        KernelCost(
            "router", "layers", own["router.proj.weight"],
            tokens * (hidden * _ACTIVATION + 2 * count * _EXACT), 2.0 * tokens * hidden * count,
            launches=2, products="float32",
        ),
        # Counts, offsets and places of the chosen experts: int32.
        KernelCost("sorting by expert", "layers", 0.0, 4.0 * chosen * _EXACT, 0.0),
        KernelCost(
            "experts, gate and up", "layers", into, chosen * (hidden + size) * _ACTIVATION,
            4.0 * chosen * hidden * size,
        ),
        # The parts of a token are written, then read and summed.
        KernelCost(
            "experts, down and sum", "layers", out,
            (chosen * (size + 2 * hidden) + tokens * hidden) * _ACTIVATION,
            2.0 * chosen * size * hidden, 2,
        ),
    ]  # fmt: skip


def _outside(
    config: ModelConfig, shape: StepShape, stored: Mapping[str, int], formats: Mapping[str, str]
) -> list[KernelCost]:
    tokens, hidden, vocab = shape.tokens, config.hidden_size, config.vocab_size
    embedding, output = stored["embed_tokens.weight"], stored[output_name(stored)]
    rows = tokens * embedding / vocab
    groups, chunks = math.ceil(tokens / GROUP), math.ceil(vocab / head_chunk(vocab))
    kinds = len({rotary_key(layer) for layer in config.layers})
    reads = config.design.self_conditioning
    conditioning = _dense(config, tokens, stored, "outside", "self_conditioning.") if reads else ()
    dense = [name for name in stored if name.startswith("self_conditioning.")]
    given = config, shape, stored, formats
    return [
        # Rows and their scale, the final norm, a copy of flags, and one of the ids of several rows.
        KernelCost(
            "embedding", "outside", rows, tokens * hidden * _ACTIVATION, 0.0,
            4 + (1 if shape.rows > 1 else 0),
        ),
        # Three more behind questions: their lengths are added, and rows without a question are
        # found.
        KernelCost(
            "positions and rotary tables", "outside", 0.0, 0.0, 0.0, 2 + 3 * shape.reads + 6 * kinds
        ),
        # Beside the products: a norm before them, the sum, and a norm.
        *(
            replace(cost, launches=cost.launches + 3, unpacked=_unpacked(*given, dense))
            for cost in conditioning
        ),
        # A product for the scores, then one for the soft embedding of the same chunk, and its best
        # scores.
        KernelCost(
            "vocabulary head", "outside", output,
            tokens * hidden * (_ACTIVATION + _EXACT), 4.0 * tokens * vocab * hidden,
            groups * (3 * chunks + 1), again=(2 * groups - 1) * output,
            unpacked=2 * _unpacked(*given, [output_name(stored)]),
        ),
        # Entropies, draws, words of noise, flags and tokens, each 8 bytes at most.
        KernelCost("sampler", "outside", 0.0, 10.0 * tokens * 8, 0.0, 3),
    ]  # fmt: skip


COPY_SHARE, PRODUCT_SHARE = 0.90, 0.80
"""Shares of the published rates that a large copy (4.3 of 4.8 TB/s) and a large bfloat16 product of
random numbers (788 of 990 TFLOP/s) reached on an H200 with torch 2.11."""
CODES_SHARE = 0.71
"""Share of the published rates of products of codes: 1,400 of 1,979 TFLOP/s on an H200. Assumed,
for no device has been measured."""


@dataclass(frozen=True)
class DeviceLimits:
    """The highest rates of a device, as large copies and products reach them."""

    name: str
    bytes_per_s: float  # a copy in the device's memory, bytes read and bytes written counted
    bf16_flops: float  # a dense bfloat16 product that adds in float32
    fp8_flops: float  # of e4m3 codes; that of bfloat16 where kernels widen them for want of units
    int8_flops: float
    float32_flops: float  # outside of the units for products of bfloat16 and of tf32
    cache: float  # bytes of the last cache before the device's memory
    memory: float  # bytes
    measured: bool  # on such a device; False: from published rates
    source: str
    target: str = ""  # the architecture whose tiles serve; "": unpacking is not counted
    issued: float = 0.0  # instructions of threads in a second

    @classmethod
    def published(
        cls,
        name: str,
        terabytes: float,
        bf16: float,
        codes: tuple[float, float],
        float32: float,
        cache_mb: float,
        gigabytes: float,
        target: str,
        source: str,
    ) -> DeviceLimits:
        """From a data sheet: TB/s, TFLOP/s without sparsity, MB of cache, GB of memory. codes:
        TFLOP/s of FP8, sums in float32, and of INT8; 0 where these are no faster. A lane that adds
        products in float32 issues an instruction for two FLOP; sm_80 has as many lanes for integers
        beside, and gfx942 does two such sums in one."""
        products = bf16 * 1e12 * PRODUCT_SHARE
        fp8, int8 = (max(products, rate * 1e12 * CODES_SHARE) for rate in codes)
        return cls(
            name,
            terabytes * 1e12 * COPY_SHARE,
            products,
            fp8,
            int8,
            float32 * 1e12 * PRODUCT_SHARE,
            cache_mb * 1e6,
            gigabytes * 1e9,
            False,
            source,
            target,
            float32 * 1e12 / 2 * {"sm_80": 2.0, "gfx942": 0.5}.get(target, 1.0),
        )


_published = DeviceLimits.published
_SHEET = "data sheet"
_LIMITS = (
    DeviceLimits(
        "h200", 4.3e12, 790e12, 1400e12, 1400e12, 0.8 * 67e12, 60e6, 150.7e9, True,
        "copy of 8.6 GB and a product of side 8192 of random numbers, torch 2.11, driver 580; "
        "float32 from the data sheet, FP8 and INT8 assumed",
        "sm_90", 132 * 128 * 1.755e9,
    ),
    _published("h100", 3.35, 990, (1979, 1979), 67, 50, 85.9, "sm_90", f"{_SHEET}, SXM"),
    _published("b200", 8.0, 2250, (4500, 4500), 75, 126, 192, "sm_100", f"{_SHEET}, SXM"),
    _published("a100", 2.04, 312, (0, 624), 19.5, 40, 85.9, "sm_80", f"{_SHEET}, SXM 80 GB"),
    _published("l4", 0.30, 121, (242, 242), 30.3, 48, 24, "sm_89", _SHEET),
    _published(
        "rtx-pro-6000", 1.79, 503.8, (1007.6, 1007.6), 126, 128, 103,
        "sm_120", f"{_SHEET}, Blackwell, workstation",
    ),
    _published("rtx-5090", 1.79, 209.5, (419, 838), 104.8, 96, 34.2, "sm_120", _SHEET),
    _published("rtx-4090", 1.01, 165.2, (330.3, 660.6), 82.6, 72, 25.8, "sm_89", _SHEET),
    _published("rtx-3090", 0.936, 71, (0, 284), 35.6, 6, 25.8, "sm_86", _SHEET),
    _published("rtx-3060", 0.36, 25.5, (0, 102), 12.7, 3, 12.9, "sm_86", f"{_SHEET}, 12 GB"),
    _published("arc-b70", 0.608, 183.5, (0, 367), 22.9, 32, 34.4, "", f"{_SHEET}; half of int8"),
    _published(
        "strix-halo", 0.256, 59.4, (0, 0), 14.8, 32, 103, "gfx1151",
        f"{_SHEET}, 96 GB for the GPU",
    ),
    _published("mi300x", 5.3, 1307, (0, 2615), 163.4, 256, 206, "gfx942", _SHEET),
)  # fmt: skip
LIMITS = {limits.name: limits for limits in _LIMITS}
"""The devices that are known by name."""


def limits_named(name: str) -> DeviceLimits:
    """Raises ValueError, naming the known ones, for another name."""
    if name not in LIMITS:
        raise Refused("predict", f"{name!r} is none of {', '.join(LIMITS)}")
    return LIMITS[name]


def limits_of_product(product: str) -> DeviceLimits | None:
    """The limits of a device by the name that its driver gives ("NVIDIA H200"); None: unknown.

    A product whose name says more than the table's does (as "H100 PCIe") is another one.
    """
    plain = {"nvidia", "amd", "geforce", "instinct", "hbm3", "sxm", "80gb", "sxm4", "blackwell"}
    plain |= {"workstation", "edition", "oam"}
    words = [word for word in product.lower().replace("-", " ").split() if word not in plain]
    return LIMITS.get("-".join(words))


REACHED = 0.85
"""Share of both rates that a kernel reaches whose tiles fit its matrices. Assumed."""
LAUNCH_S = 1.5e-6
"""Seconds between two kernels of a graph: the end of one and the start of the next. Assumed."""
CACHE_SPEED = 2.5
"""How much faster than its memory a device's last cache is. Assumed."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel on a device."""

    cost: KernelCost
    floor_s: float
    predicted_s: float
    bound: str  # "memory", "arithmetic", "unpacking" or "launch": most of the prediction

    def as_dict(self) -> dict[str, Any]:
        """Plain values, times in ms."""
        cost = self.cost
        return {
            "kernel": cost.name,
            "part": cost.part,
            "products": cost.products,
            "launches": cost.launches,
            "gigabytes": cost.stored / 1e9,
            "gigaflop": cost.flop / 1e9,
            "floor_ms": self.floor_s * 1e3,
            "predicted_ms": self.predicted_s * 1e3,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class StepTime:
    """A step on a device."""

    device: DeviceLimits
    kernels: tuple[KernelTime, ...]

    @property
    def floor_ms(self) -> float:
        return 1e3 * sum(kernel.floor_s for kernel in self.kernels)

    @property
    def predicted_ms(self) -> float:
        return 1e3 * sum(kernel.predicted_s for kernel in self.kernels)

    @property
    def outside_ms(self) -> float:
        """Predicted, of everything outside the layers."""
        outside = (k.predicted_s for k in self.kernels if k.cost.part == "outside")
        return 1e3 * sum(outside)


def step_time(costs: Sequence[KernelCost], device: DeviceLimits) -> StepTime:
    """The floor and the prediction of each kernel: of what runs beside the experts, how much longer
    both take than they alone. A fork and a join are taken for as long as its launches."""
    kernels = [_kernel_time(cost, device) for cost in costs]
    experts = [cost for cost in costs if cost.name.startswith("experts")]
    for at, cost in enumerate(costs if experts else ()):
        if cost.beside:
            joined = reduce(add, experts)
            alone, both = _kernel_time(joined, device), _kernel_time(joined + cost, device)
            added = both.predicted_s - alone.predicted_s
            kernels[at] = replace(kernels[at], predicted_s=added, bound=both.bound)
    return StepTime(device, tuple(kernels))


def _kernel_time(cost: KernelCost, device: DeviceLimits) -> KernelTime:
    coded = {"FP8": device.fp8_flops, "INT8": device.int8_flops}
    fastest = coded.get(cost.products, device.bf16_flops)
    floor = max(cost.stored / device.bytes_per_s, cost.flop / fastest)
    rate = device.float32_flops if cost.products == "float32" else fastest
    each = cost.passed / max(1, cost.launches)  # by one launch
    speed = device.bytes_per_s * (CACHE_SPEED if each <= device.cache else 1.0)
    read = (cost.stored + cost.again) / device.bytes_per_s
    moving = (read + cost.passed / speed) / REACHED
    computing = cost.flop / rate / REACHED
    launching = cost.launches * LAUNCH_S
    parts = {"memory": moving, "arithmetic": computing, "unpacking": 0.0}
    if device.target:
        instructions = sum(each.instructions(device.target) for each in cost.unpacked)
        parts["unpacking"] = instructions / device.issued
    predicted = max(parts.values()) + launching
    parts["launch"] = launching
    return KernelTime(cost, floor, predicted, max(parts, key=parts.__getitem__))


_COLUMNS = ("kernel", "launches", "GB", "TFLOP", "floor, ms", "predicted, ms", "bound by")
_FEW_COLUMNS = ("kernel", "floor, ms", "predicted, ms")


def network_bytes(network: Network) -> dict[str, int]:
    """Bytes of each loaded tensor, by canonical name."""
    return {name: tensor.nbytes for name, tensor in _tensors(network).items()}


def _tensors(network: Network) -> dict[str, Any]:
    tensors = {}
    for name in expected_shapes(network.config):
        path, _, leaf = name.rpartition(".")
        tensors[name] = getattr(network.transformer.get_submodule(path), leaf)
    return tensors


def network_costs(network: Network, shape: StepShape) -> list[KernelCost]:
    """See `step_costs`: of a loaded network, as its tensors are held."""
    formats = {
        name: tensor.format.name if isinstance(tensor, PlaneTensor) else getattr(tensor, "kind", "")
        for name, tensor in _tensors(network).items()
    }
    return step_costs(network.config, shape, network_bytes(network), formats=formats)


def beside_measured(network: Network, shape: StepShape) -> Values:
    """The floor and the predicted time of a step, by metric; nothing where the device's limits are
    not known."""
    product = gpu.product(network.device)
    limits = None if product is None else limits_of_product(product)
    if limits is None:
        return {}
    time = step_time(network_costs(network, shape), limits)
    return {"step_floor_ms": [time.floor_ms], "step_predicted_ms": [time.predicted_ms]}


def to_document(steps: Sequence[tuple[StepShape, StepTime]], nbytes: int) -> dict[str, Any]:
    """Plain values, of a device's steps. nbytes: of all weights."""
    device = steps[0][1].device
    return {
        "benchmark": "sfumato bench --predict",
        "device": device.name,
        "measured_limits": device.measured,
        "limits": device.source,
        "weights_bytes": nbytes,
        "fits": nbytes < device.memory,
        "steps": [
            {
                "rows": shape.rows,
                "width": shape.width,
                "prefix": shape.prefix,
                "floor_ms": time.floor_ms,
                "predicted_ms": time.predicted_ms,
                "kernels": [kernel.as_dict() for kernel in time.kernels],
            }
            for shape, time in steps
        ],
    }


def to_tables(steps: Sequence[tuple[StepShape, StepTime]], width: int) -> Iterator[Table]:
    """A table of kernels for each step; width: of the terminal, in which a narrow one has the times
    alone."""
    names = _COLUMNS if width >= 96 else _FEW_COLUMNS
    for shape, time in steps:
        title = f"{time.device.name}: {shape.rows} x {shape.width} positions, prefix "
        table = Table(title=f"{title}{shape.prefix:,}; nothing was run", title_justify="left")
        for name in names:
            side: Literal["left", "right"] = "left" if name in ("kernel", "bound by") else "right"
            table.add_column(name, justify=side, overflow="fold")

        def add_row(*cells: str, table: Table = table) -> None:
            table.add_row(*(cells[_COLUMNS.index(name)] for name in names))

        for kernel in time.kernels:
            cost = kernel.cost
            add_row(
                *(cost.name, number(cost.launches), number(cost.stored / 1e9)),
                *(number(cost.flop / 1e12), number(1e3 * kernel.floor_s)),
                *(number(1e3 * kernel.predicted_s), kernel.bound),
            )
        table.add_section()
        launches = sum(kernel.cost.launches for kernel in time.kernels)
        stored = sum(kernel.cost.stored for kernel in time.kernels)
        flop = sum(kernel.cost.flop for kernel in time.kernels)
        add_row(
            *("a step", number(launches), number(stored / 1e9), number(flop / 1e12)),
            *(number(time.floor_ms), number(time.predicted_ms), ""),
        )
        yield table
