"""What one kernel of a step must move and compute. Knows no network and no device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Part = Literal["layers", "outside"]
"""Within the layers of the network, or outside: self-conditioning, head, sampler."""
Products = Literal["bf16", "float32", "FP8", "INT8"]


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
    """What the matrix units multiply: FP8 and INT8 where weights are 8-bit codes."""
    again: float = 0.0
    """Bytes of `stored` that are read once more: of the prediction, not of the floor."""

    def times(self, count: int) -> KernelCost:
        """The same kernel in so many layers."""
        return replace(
            self,
            stored=self.stored * count,
            passed=self.passed * count,
            flop=self.flop * count,
            launches=self.launches * count,
            again=self.again * count,
        )

    def __add__(self, other: KernelCost) -> KernelCost:
        """Both, under the name of the first."""
        return replace(
            self,
            stored=self.stored + other.stored,
            passed=self.passed + other.passed,
            flop=self.flop + other.flop,
            launches=self.launches + other.launches,
            again=self.again + other.again,
        )


def merged(costs: list[KernelCost]) -> list[KernelCost]:
    """One entry for each name and kind of products, in the order in which they first come."""
    joined: dict[tuple[str, Products], KernelCost] = {}
    for cost in costs:
        key = cost.name, cost.products
        joined[key] = joined[key] + cost if key in joined else cost
    return list(joined.values())
