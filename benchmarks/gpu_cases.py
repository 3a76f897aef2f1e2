"""One call of each operation at the sizes of a real step, for `gpu_kernel.py`.

A case holds the arguments of the operation's reference, how one row's arguments are cut out, and
what the call must move and compute.  An operation without a case here has its self-test alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks import gpu_plane_cases, gpu_prefill_cases, gpu_read_cases
from torch import Tensor

from sfumato.bench.step_cost import KernelCost, StepShape, step_costs, stored_bytes
from sfumato.model.cache import slot_sizes
from sfumato.model.head import CHUNK
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.ops.attention_reference import Rows
from sfumato.ops.triton.planes import twin_name

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A call. Rows are its canvases: all tokens of one stand together."""

    operation: str
    arguments: Arguments
    cost: KernelCost
    alone: Callable[[int], Arguments]  # the call of one row
    part: Callable[[Any, int], Any]  # of a result, what belongs to one row
    twin: str = ""  # under which kernels serve it, where that is not the operation's name


@dataclass(frozen=True)
class Sizes:
    """What cases are made of."""

    config: ModelConfig
    shape: StepShape
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, deviation: float = 1.0, seed: int = 0) -> Tensor:
        """Normal numbers, made on the device."""
        random = torch.Generator(self.device).manual_seed(seed + sum(shape))
        values = torch.randn(*shape, generator=random, device=self.device, dtype=torch.float32)
        return values.mul_(deviation).to(self.dtype)

    def weights(self, count: int, rows: int, columns: int, seed: int) -> Tensor:
        """A stack of random matrices, one after another: float32 of all at once would be twice as
        large."""
        stack = torch.empty(count, rows, columns, dtype=self.dtype, device=self.device)
        for index, matrix in enumerate(stack):
            matrix.copy_(self.random(rows, columns, deviation=columns**-0.5, seed=seed + index))
        return stack

    def cost(self, layer: LayerConfig, *names: str) -> KernelCost:
        """The kernels of these names in one layer, as one."""
        config = replace(self.config, layers=(layer,))
        nbytes = stored_bytes(config, "bf16" if self.dtype == torch.bfloat16 else "f32")
        costs = [c for c in step_costs(config, self.shape, nbytes) if c.name in names]
        total = costs[0]
        for cost in costs[1:]:
            total = total + cost
        return total

    def layer(self, sliding: bool) -> LayerConfig:
        """A sliding or a full layer; any where the network has none such."""
        layers = self.config.layers
        return next((layer for layer in layers if layer.sliding is sliding), layers[0])

    def of_row(self, row: int) -> slice:
        return slice(row * self.shape.width, (row + 1) * self.shape.width)


def experts(sizes: Sizes, seed: int) -> Case:
    """Uneven on purpose: some experts are chosen far more often than others."""
    config, tokens = sizes.config, sizes.shape.tokens
    hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts
    x = sizes.random(tokens, hidden, seed=seed)
    liked = sizes.random(count, seed=seed + 1).float()
    scores = sizes.random(tokens, count, seed=seed + 2).float() + liked
    shares, chosen = scores.softmax(-1).topk(config.experts_per_token, dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    weights = (
        sizes.weights(count, 2 * inner, hidden, seed + 3),
        sizes.weights(count, hidden, inner, seed + 4),
    )

    def alone(row: int) -> Arguments:
        at = sizes.of_row(row)
        return x[at], chosen[at], shares[at], *weights

    names = "sorting by expert", "experts, gate and up", "experts, down and sum"
    touched = chosen.unique().numel() / count
    cost = sizes.cost(config.layers[0], *names)
    cost = replace(cost, stored=touched * sum(weight.nbytes for weight in weights))
    arguments = (x, chosen, shares, *weights)
    return Case("experts", arguments, cost, alone, lambda out, row: out[sizes.of_row(row)])


def linear(sizes: Sizes, seed: int) -> Case:
    """The query projection of a sliding layer."""
    outputs = sizes.config.num_heads * sizes.layer(True).head_dim
    return _product(sizes, seed, outputs, sizes.config.hidden_size)


def output(sizes: Sizes, seed: int, sliding: bool) -> Case:
    """The product behind attention."""
    inputs = sizes.config.num_heads * sizes.layer(sliding).head_dim
    return _product(sizes, seed, sizes.config.hidden_size, inputs)


def down(sizes: Sizes, seed: int) -> Case:
    """The end of the dense part of a layer."""
    config = sizes.config
    return _product(sizes, seed, config.hidden_size, config.intermediate_size)


def _product(sizes: Sizes, seed: int, outputs: int, inputs: int) -> Case:
    tokens = sizes.shape.tokens
    x = sizes.random(tokens, inputs, seed=seed)
    (weight,) = sizes.weights(1, outputs, inputs, seed + 1)
    cost = KernelCost(
        "linear", "layers", weight.nbytes, tokens * (inputs + outputs) * x.itemsize,
        2.0 * tokens * inputs * outputs,
    )  # fmt: skip
    return Case(
        *("linear", (x, weight, None), cost),
        lambda row: (x[sizes.of_row(row)], weight, None),
        lambda out, row: out[sizes.of_row(row)],
    )


def each(sizes: Sizes, seed: int) -> Case:
    """Queries, keys and values of a sliding layer."""
    config, layer = sizes.config, sizes.layer(True)
    x = sizes.random(sizes.shape.tokens, config.hidden_size, seed=seed)
    heads = config.num_heads, layer.kv_heads, layer.kv_heads
    weights = [
        sizes.weights(1, count * layer.head_dim, config.hidden_size, seed + at)[0]
        for at, count in enumerate(heads, 1)
    ]
    return Case(
        *("linear_each", (x, *weights), sizes.cost(layer, "q, k, v projections")),
        lambda row: (x[sizes.of_row(row)], *weights),
        lambda out, row: tuple(product[sizes.of_row(row)] for product in out),
    )


def gated(sizes: Sizes, seed: int) -> Case:
    """Gate and up of the dense part of a layer, with the activation of both."""
    config, tokens = sizes.config, sizes.shape.tokens
    hidden, inner = config.hidden_size, config.intermediate_size
    x = sizes.random(tokens, hidden, seed=seed)
    gate, up = sizes.weights(2, inner, hidden, seed + 1)
    cost = KernelCost(
        "gate and up", "layers", 2.0 * gate.nbytes, tokens * (hidden + inner) * x.itemsize,
        4.0 * tokens * hidden * inner,
    )  # fmt: skip
    return Case(
        *("linear_gated", (x, gate, up, "gelu"), cost),
        lambda row: (x[sizes.of_row(row)], gate, up, "gelu"),
        lambda out, row: out[sizes.of_row(row)],
    )


def vocabulary_pass(sizes: Sizes, seed: int) -> Case:
    """The head: scores of deviation 3, a distribution that is neither flat nor certain."""
    config, tokens = sizes.config, sizes.shape.tokens
    hidden = sizes.random(tokens, config.hidden_size, seed=seed)
    (weight,) = sizes.weights(1, config.vocab_size, config.hidden_size, seed + 1)
    weight.mul_(3)
    temperature = 0.4 + 0.4 * torch.linspace(0, 1, tokens, device=sizes.device)
    random = torch.Generator(sizes.device).manual_seed(seed)
    uniform = torch.rand(tokens, generator=random, device=sizes.device, dtype=torch.float64)
    others = config.logit_softcap, None, CHUNK, None

    def alone(row: int) -> Arguments:
        at = sizes.of_row(row)
        return hidden[at], weight, temperature[at], uniform[at], *others

    return Case(
        "vocabulary_pass",
        (hidden, weight, temperature, uniform, *others),
        sizes.cost(config.layers[0], "vocabulary head"),
        alone,
        lambda out, row: tuple(each[sizes.of_row(row)] for each in out),
    )


def route(sizes: Sizes, seed: int) -> Case:
    config, tokens = sizes.config, sizes.shape.tokens
    hidden, count = config.hidden_size, config.num_experts
    x = sizes.random(tokens, hidden, seed=seed)
    weight, scale, per_expert = (
        sizes.random(*shape, deviation=deviation, seed=seed + 1).float() + shift
        for shape, deviation, shift in (
            ((count, hidden), hidden**-0.5, 0.0),
            ((hidden,), 3.0, hidden**0.5),
            ((count,), 0.1, 1.0),
        )
    )
    others = weight, scale, per_expert, config.experts_per_token, config.rms_norm_eps
    return Case(
        *("route", (x, *others), sizes.cost(config.layers[0], "router")),
        lambda row: (x[sizes.of_row(row)], *others),
        lambda out, row: tuple(each[sizes.of_row(row)] for each in out),
    )


def commits(sizes: Sizes, seed: int, sliding: bool) -> Case:
    """As `canvases`; every second row commits."""
    return canvases(sizes, seed, sliding, commit=True)


def canvases(sizes: Sizes, seed: int, sliding: bool, commit: bool = False) -> Case:
    """Rows whose slots stand in another order, and hold prefixes of different lengths."""
    layer, (rows, width) = sizes.layer(sliding), (sizes.shape.rows, sizes.shape.width)
    d, heads = layer.head_dim, sizes.config.num_heads
    config = replace(sizes.config, layers=(layer,))
    (size,) = slot_sizes(config, sizes.shape.prefix + 64)
    # Scale 1: larger queries would see one key each.
    q = sizes.random(rows, width, heads, d, deviation=d**-0.5, seed=seed)
    k, v = (sizes.random(rows, width, layer.kv_heads, d, seed=seed + n) for n in (1, 2))
    stored = [sizes.random(rows + 1, layer.kv_heads, size, d, seed=seed + n) for n in (3, 4)]
    slots = torch.arange(rows, 0, -1, device=sizes.device)
    held = (sizes.shape.prefix - 3 * torch.arange(rows, device=sizes.device)).clamp(0, size)
    widths = torch.full_like(slots, width)
    counts = widths * (torch.arange(rows, device=sizes.device) % 2)
    window = config.sliding_window if layer.sliding else None

    def call(at: slice) -> Arguments:
        numbers = slots[at], held[at], window, widths[at], counts[at] if commit else None
        return q[at], k[at], v[at], Rows(*stored, *numbers)

    return Case(
        *("attend_padded", call(slice(None)), sizes.cost(layer, "attention")),
        lambda row: call(slice(row, row + 1)),
        lambda out, row: out[row : row + 1],
    )


def attend(sizes: Sizes, seed: int, sliding: bool) -> Case:
    """A chunk of a prompt with as many tokens as a step has; see `gpu_prefill_cases`."""
    arguments, alone = gpu_prefill_cases.attend(sizes, seed, sliding)
    shape = StepShape(1, sizes.shape.tokens, sizes.shape.prefix, encodes=True)
    cost = replace(sizes, shape=shape).cost(sizes.layer(sliding), "attention")
    return Case("attend", arguments, cost, alone, lambda out, row: out[sizes.of_row(row)])


def reads(sizes: Sizes, seed: int, sliding: bool) -> Case:
    """Canvases behind questions; see `gpu_read_cases`. The questions' keys are not in the cost."""
    arguments, alone = gpu_read_cases.reads(sizes, seed, sliding)
    cost = sizes.cost(sizes.layer(sliding), "attention")
    return Case("attend_padded", arguments, cost, alone, lambda out, row: out[row : row + 1])


def rms_norm(sizes: Sizes, seed: int) -> Case:
    x = sizes.random(sizes.shape.tokens, sizes.config.hidden_size, seed=seed)
    weight = sizes.random(sizes.config.hidden_size, seed=seed + 1)
    eps = sizes.config.rms_norm_eps
    cost = KernelCost("norm", "layers", 0.0, 2.0 * x.nbytes, 0.0)
    return Case(
        *("rms_norm", (x, weight, eps), cost),
        lambda row: (x[sizes.of_row(row)], weight, eps),
        lambda out, row: out[sizes.of_row(row)],
    )


def of_planes(sizes: Sizes, seed: int, case: Case, format: str) -> Case:
    """A case with its weights in planes of a format."""
    call = case.operation, format, case.arguments, case.cost
    arguments, cost = gpu_plane_cases.in_planes(sizes, *call)
    changed = {id(old): new for old, new in zip(case.arguments, arguments, strict=True)}

    def alone(row: int) -> Arguments:
        return tuple(changed.get(id(each), each) for each in case.alone(row))

    twin = twin_name(case.operation, format)
    return replace(case, arguments=arguments, cost=cost, alone=alone, twin=twin)


_CASES: dict[str, tuple[str, Callable[[Sizes, int], Case]]] = {
    "experts": ("experts", experts),
    "head": ("vocabulary_pass", vocabulary_pass),
    "linear": ("linear", linear),
    "output, sliding": ("linear", lambda s, seed: output(s, seed, True)),
    "output, full": ("linear", lambda s, seed: output(s, seed, False)),
    "down": ("linear", down),
    "each": ("linear_each", each),
    "gated": ("linear_gated", gated),
    "attention, sliding": ("attend_padded", lambda s, seed: canvases(s, seed, True)),
    "attention, full": ("attend_padded", lambda s, seed: canvases(s, seed, False)),
    "commit, sliding": ("attend_padded", lambda s, seed: commits(s, seed, True)),
    "commit, full": ("attend_padded", lambda s, seed: commits(s, seed, False)),
    "prefill, sliding": ("attend", lambda s, seed: attend(s, seed, True)),
    "prefill, full": ("attend", lambda s, seed: attend(s, seed, False)),
    "read, sliding": ("attend_padded", lambda s, seed: reads(s, seed, True)),
    "read, full": ("attend_padded", lambda s, seed: reads(s, seed, False)),
    "router": ("route", route),
    "rms_norm": ("rms_norm", rms_norm),
}
_MAKERS = {"experts": experts, "linear": linear, "vocabulary_pass": vocabulary_pass}
_PLANES: dict[str, tuple[str, Callable[[Sizes, int], Case]]] = {
    name: (
        twin_name(operation, format),
        lambda s, seed, make=_MAKERS[operation], format=format: of_planes(  # type: ignore[misc]
            s, seed, make(s, seed), format
        ),
    )
    for name, (operation, format) in gpu_plane_cases.NAMES.items()
}
OPERATIONS = {name: operation for name, (operation, _) in (_CASES | _PLANES).items()}
"""The operation of each case, or the twin of its format, the most valuable first."""
CASES = {name: make for name, (_, make) in (_CASES | _PLANES).items()}
"""What makes a case of some sizes and a seed, by its name."""
