"""bfloat16 and float16: no further from exact than the reference is in the same dtype.

Exact is the reference in float32 with the same, already rounded, weights. In half precision the
reference's own soft embedding loses some per cent, so a step's is injected on all sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.oracle import (
    encode_logits,
    network_of,
    oracle_encode_logits,
    oracle_logits,
    random_oracle,
    tiny_config,
)
from torch import Tensor

SEEDS = range(3)


def error(got: Tensor, exact: Tensor) -> float:
    """Relative, in the mean square: one unlucky number says little about a dtype."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def logits_of_all(sizes: dict[str, Any], seed: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """(exact, the reference in `dtype`, ours in `dtype`) of each phase."""
    rough = random_oracle(tiny_config(**sizes), seed, dtype)
    exact = random_oracle(tiny_config(**sizes), seed, dtype).float()
    network = network_of(rough)
    random = torch.Generator().manual_seed(seed)
    prompt, canvas = torch.randint(0, 97, (27,), generator=random), torch.arange(8) * 9
    soft = torch.randn(8, 64, generator=random).to(dtype)
    results: list[list[Tensor]] = [[], [], []]
    for oracle in (exact, rough):
        logits, cache = oracle_encode_logits(oracle, prompt)
        results[0].append(logits)
        results[1].append(oracle_logits(oracle, canvas, cache))
        results[2].append(oracle_logits(oracle, canvas, cache, soft=soft))
    slot = network.new_slot(40)
    results[0] += encode_logits(network, [prompt], [slot])
    results[1].append(network.head.logits(network.denoise([canvas], [slot])))
    results[2].append(network.head.logits(network.denoise([canvas], [slot], [soft])))
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "active"), [(2, 2), (8, 2)], ids=["every expert", "some experts"]
)
def test_as_exact_as_the_reference(
    dtype: torch.dtype, experts: int, active: int, note: Callable[[str], None]
) -> None:
    sizes = {"num_experts": experts, "top_k_experts": active}
    runs = [logits_of_all(sizes, seed, dtype) for seed in SEEDS]
    for phase, name in enumerate(("encode", "first step", "soft injected")):
        errors = []
        for exact, theirs, ours in (run[phase] for run in runs):
            assert ours.dtype == torch.float32 and not torch.equal(exact, theirs)
            errors.append((error(ours, exact), error(theirs, exact)))
        # The median: where rounding decides between two experts either may be far off.
        ours, reference = (statistics.median(column) for column in zip(*errors, strict=True))
        note(f"{dtype}, {active} of {experts}, {name}: ours {ours:.1e}, reference {reference:.1e}")
        assert ours <= 1.5 * reference + torch.finfo(dtype).eps / 4
