"""Kernels over a narrow cache, interpreted: what they write is what the reference stores, and what
they read gives the bits that the kernels over floats give of the widened cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.kernels import close, interpreted
from torch import Tensor

from sfumato import ops
from sfumato.ops import attention_reference, registry
from sfumato.ops.attention_reference import Prefixes, Questions
from sfumato.ops.narrow_cache import (
    CACHED,
    FORMATS,
    FP8,
    Q8_0,
    as_bytes,
    stored_as,
    stored_width,
    widened,
)
from sfumato.ops.triton import self_test, tiles, twins
from sfumato.ops.triton.kernel import counted_launches

pytestmark = interpreted
NARROW = pytest.mark.parametrize("stored", [FP8, Q8_0])
ATTENTION = sorted(CACHED - {"write_cache"})
CPU = torch.device("cpu")


def hard_numbers(count: int) -> Tensor:
    """Numbers around all that e4m3 holds and halfway between them, and what it cannot hold."""
    exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact = exact[exact.isfinite()].sort().values
    halves = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((exact, halves, halves.nextafter(exact[1:]), halves.nextafter(exact[:-1])))
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9, 464.0, 1e-30, 2.0**-10, -0.0])
    numbers = torch.cat((near, odd))
    return numbers.repeat(-(-count // len(numbers)))[:count]


@NARROW
@pytest.mark.parametrize("d", [16, 64])
def test_what_is_written_is_what_the_reference_stores(stored: torch.dtype, d: int) -> None:
    """To the bit, in rows that write nothing, a part, and more than a ring holds."""
    from sfumato.ops.triton.cache_write import write_cache

    new = hard_numbers(3 * 12 * 3 * d).view(3, 12, 3, d)
    new = torch.cat((new[:, ::2], torch.randn(3, 6, 3, d)), dim=1)
    held = torch.randint(256, (4, 3, 11, stored_width(d, stored)), dtype=torch.uint8)
    held, expected = held.view(stored), held.clone().view(stored)
    numbers = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 9, 12]])
    attention_reference.write_cache.reference(expected, new, *numbers)
    write_cache(held, new, *numbers)
    if stored == Q8_0:
        expected_nan, is_nan = (widened([x], torch.float32)[0].isnan() for x in (expected, held))
        assert torch.equal(is_nan, expected_nan), "the bits of a NaN are not the same everywhere"
        codes = (x[..., :d].masked_fill(is_nan, 0) for x in (held, expected))
        assert torch.equal(*codes)
        scales = [x[..., d:].contiguous().view(torch.float16).nan_to_num(7.0) for x in
                  (held, expected)]  # fmt: skip
        assert torch.equal(*scales)
    else:
        assert torch.equal(as_bytes(held), as_bytes(expected))


def call(name: str, d: int, held: list[Tensor]) -> tuple[Any, ...]:
    """Rows with and without a prefix, of a part and of a full ring, which ends the pool's memory;
    held: keys and values of 4 slots and of questions."""
    torch.manual_seed(2)
    q = torch.randn(3, 9, 4, d) * d**-0.5
    k, v = torch.randn(3, 9, 2, d), torch.randn(3, 9, 2, d)
    slots, first, width, commits = torch.tensor([[2, 0, 3], [70, 0, 200], [9, 2, 7], [0, 1, 1]])
    starts, counts = torch.tensor([[3, 0, 21], [17, 0, 16]])
    keys, values, own_keys, own_values = held
    if name == "canvas_attention":
        return q, k, v, keys, values, slots, first.clamp(max=75), width
    if name == "phase_attention":
        return q, k, v, keys, values, slots, first, width, commits, 30
    prefixes = Prefixes(keys, values, slots, first, 90)
    return q, k, v, prefixes, Questions(own_keys, own_values, starts, counts, 20)


def pools(d: int, stored: torch.dtype) -> list[Tensor]:
    """What an earlier request left is NaN."""
    torch.manual_seed(1)
    slots, beside = torch.randn(2, 4, 2, 75, d), torch.randn(2, 2, 37, d)
    slots[:, 2, :, 70:] = slots[:, 0] = slots[:, 1] = beside[:, :, :3] = float("nan")
    return [stored_as(x, stored) for x in (*slots, *beside)]


@NARROW
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("d", [16, 64])
def test_what_is_read_is_the_widened_cache(name: str, d: int, stored: torch.dtype) -> None:
    held = pools(d, stored)
    twin, narrow = twins()[name], twins(FORMATS.values())[f"{name} {FORMATS[stored]}"]
    with counted_launches() as launches:
        out = narrow.function(*call(name, d, held))
    assert [kernel.endswith("_narrow") for kernel in launches] == [True]
    floats = widened(held, torch.float32)
    given = call(name, d, floats)
    inside = torch.ones(3, 9, dtype=torch.bool)
    if name != "read_attention":
        inside = torch.arange(9) < torch.tensor([9, 2, 7])[:, None]
    assert torch.equal(out[inside], twin.function(*given)[inside])
    close(out[inside], registry.operations()[name].reference(*given)[inside])


def test_a_narrow_kind_serves_once_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, and floats as before; what kernels do not read, torch does."""
    passed = {"canvas_attention fp8 cache", "canvas_attention"}
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(passed)})
    given = {kind: call("canvas_attention", 16, pools(16, kind)) for kind in (FP8, Q8_0)}
    given[torch.float32] = call("canvas_attention", 16, pools(16, torch.float32))
    with registry.seen_as("cpu", "cuda"), counted_launches() as launches:
        outs = {kind: ops.canvas_attention(*each) for kind, each in given.items()}
    assert launches == {"attention_256_narrow": 1, "attention_256": 1}
    for kind, out in outs.items():
        close(out[0], ops.canvas_attention.reference(*given[kind])[0])
    serves, (q, k, v, keys, *rest) = twins()["canvas_attention"].serves, given[FP8]
    assert serves(q, k, v, keys, *rest)
    assert not serves(q, k, v, keys[..., :8].contiguous(), *rest), "of another head's size"
    assert not serves(q, k, v, keys, rest[0].view(torch.uint8), *rest[1:]), "of two kinds"


def test_only_the_kind_that_a_model_has_is_tested_and_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sfumato.ops.triton import fill_cache

    plain, narrow = set(twins()), set(twins(("q8_0 cache", "Q8_0")))
    assert {name for name in narrow - plain if name.split()[0] in CACHED} == {
        f"{name} q8_0 cache" for name in CACHED
    }
    monkeypatch.setattr(fill_cache, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(fill_cache, "own_architecture", lambda device: 90)
    monkeypatch.setattr(fill_cache, "_serves", lambda job, device: job.candidate == 0)

    def compiled(*formats: str) -> set[tuple[str, str]]:
        jobs = [job for job, _ in fill_cache.serving(CPU, formats)]
        return {(job.kernel, job.variant) for job in jobs if job.kernel.endswith("_narrow")}

    assert not compiled() and not compiled("Q8_0")
    fp8, q8_0 = compiled("fp8 cache"), compiled("q8_0 cache")
    assert len(fp8) == len(q8_0) == 8 and not fp8 & q8_0
    assert all(variant.startswith("fp8") for _, variant in fp8)


def test_pieces_are_as_long_as_those_over_floats() -> None:
    """By which the memory of a step is predicted."""
    for name in ("attention_256", "attention_512", "read_256", "read_512"):
        for target, uses in tiles.table()["kernels"][f"{name}_narrow"].items():
            wide = tiles.candidates(name, target)["any"][0]["SPLIT"]
            assert [tile["SPLIT"] for tile in uses["any"]] == [wide] * len(uses["any"])
