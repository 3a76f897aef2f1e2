"""What a denoising step of DiffusionGemma 26B-A4B would take, from the speeds of its operations.

Knows no machine: the speeds are `probes.py`'s, and what a step computes is the step model's
(`bench/step_model`). So many positions reach nearly every expert, so that a step reads all weights
once. Compiled operations multiply the blocks; only the soft embedding dequantizes, and multiplies
floats. Without them all that a step reaches is dequantized: the layers once, the embedding up to
three times: for the cutoffs of top-k and top-p, the statistics, the draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from sfumato.bench.random_weights import random_checkpoint
from sfumato.bench.step_cost import MATRICES, StepShape, step_costs, stored_bytes
from sfumato.cli.probes import CANVAS, Speed, dtype_name, quantized_dtype
from sfumato.model.loading import config_of, expected_shapes

LAYER_EXTRA = 1.5
"""What else a layer does (attention, norms, rounding activations), over its products alone, as
`bench --where` finds for layers of the real size; between 1.4 and 1.7 on two machines."""

_BASE = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "safetensors": "BF16"}


@dataclass(frozen=True)
class Work:
    """What a step computes, in floating-point operations, and the weights that it dequantizes."""

    dense: float  # of the layers, without their experts
    experts: float
    head: float  # the tied embedding once; it is also the soft embedding
    embedding: float  # weights
    weights: float  # all of them, the embedding three times

    @property
    def flop(self) -> float:
        return self.dense + self.experts + 2 * self.head


@cache
def work() -> Work:
    """The work of a step of one canvas."""
    config = config_of(random_checkpoint("26b-a4b"))
    costs = step_costs(config, StepShape(width=CANVAS), stored_bytes(config))
    flop = {cost.name: cost.flop for cost in costs}
    experts = sum(flop[name] for name in MATRICES if name.startswith("experts"))
    embedding = config.vocab_size * config.hidden_size
    weights = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return Work(
        dense=sum(flop[name] for name in MATRICES) - experts,
        experts=experts,
        head=flop["vocabulary head"] / 2,
        embedding=embedding,
        weights=weights + 2 * embedding,
    )


def step_seconds(speed: Speed, device: str, format: str, nbytes: float) -> float:
    """One step of the model in that format, whose weights take so many bytes."""
    base, step = _BASE.get(format, format), work()
    reading = nbytes / speed["read_bytes"]
    if f"{base}_flops" not in speed:
        return _dense(speed, device, base, reading)
    ratio = speed["expert_flops"] / speed["Q4_K_flops"]
    layers = (step.dense + step.experts / ratio) / speed[f"{base}_flops"]
    if base == "BF16":
        head = step.head / speed["BF16_flops"] + step.head / speed["bfloat16_flops"]
    else:
        output = base if base == "Q8_0" else "Q6_K"  # the embedding, in every K mix
        head = step.head / speed[f"{output}_flops"] + step.head / speed["float32_flops"]
        head += step.embedding / speed["dequantized_weights"]
    return LAYER_EXTRA * layers + head + reading


def _dense(speed: Speed, device: str, base: str, reading: float) -> float:
    """With torch's products alone."""
    if base == "BF16":
        return max(work().flop / speed["bfloat16_flops"], reading)
    floats = speed[f"{dtype_name(quantized_dtype(device))}_flops"]
    return work().weights / speed["dequantized_weights"] + work().flop / floats


def least_seconds(speed: Speed, nbytes: float) -> float:
    """What any program would need: the greater of the arithmetic at the best speed, and reading
    the weights once."""
    flops = max(rate for name, rate in speed.items() if name.endswith("_flops"))
    return max(work().flop / flops, nbytes / speed["read_bytes"])
