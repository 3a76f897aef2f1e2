"""Compiled attention over keys and values of a narrow cache: the bits that it has over the same,
widened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.cpu.forced import forced, normal, runs
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry
from sfumato.ops.attention_reference import Causal, Own, Rows
from sfumato.ops.cpu import attention, library
from sfumato.ops.narrow_cache import FP8, Q8_0, stored_as, stored_width, widened

NARROW = pytest.mark.parametrize("stored", [FP8, Q8_0], ids=["fp8", "q8_0"])


@pytest.fixture(params=("avx512", "avx512_vnni", "avx2", "neon"))
def numbers(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Every level that attends, and what it multiplies."""
    if not runs(request.param):
        pytest.skip(f"{request.param} does not run here")
    with forced(request.param):
        dtype = library.loaded().attention
        if dtype is None:
            pytest.skip(f"{request.param} does not attend here")
        yield dtype


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def activations(request: pytest.FixtureRequest, numbers: torch.dtype) -> torch.dtype:
    """Those whose keys the level takes."""
    dtype: torch.dtype = request.param
    if attention.packs(FP8, dtype) is None:
        pytest.skip("torch attends to these")
    return dtype


def wide(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The parts as torch widens them."""
    return [part.to(dtype) if part.dtype == dtype else widened([part], dtype)[0] for part in parts]


def every_byte(stored: torch.dtype, d: int) -> Tensor:
    """One head's rows in which every byte stands that is a number; scales of q8_0 are of all sizes,
    the smallest ones below what float16 has in full."""
    codes = torch.arange(256, dtype=torch.uint8)
    if stored == FP8:
        codes[codes & 0x7F == 0x7F] = 0
        return codes.repeat(d // 32).view(1, 8, d).view(FP8)
    scales = torch.tensor([0.0, 6e-8, 3e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1]).half()
    scales = scales.view(8, 1).repeat(1, d // 32).view(torch.uint8)
    return torch.cat((codes.repeat(d // 32).view(8, d), scales), dim=1)[None]


@NARROW
@pytest.mark.parametrize("d", [32, 96])
def test_every_byte_is_the_number_that_torch_makes_of_it(
    stored: torch.dtype, d: int, activations: torch.dtype
) -> None:
    """Each value by itself: queries see one key each."""
    values = every_byte(stored, d)
    keys = stored_as(normal(0, 1, 8, d), stored)
    see_one = Causal.of(torch.arange(8), torch.arange(8), 1)
    q = normal(1, 8, 1, d).to(activations) * 0.1
    got = attention.attend(q, [keys], [values], see_one)
    assert torch.equal(got[:, 0], wide([values], activations)[0][0].to(activations))


@NARROW
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("d", "held"), [(32, 7), (96, 300), (64, 1100)])
def test_attend_has_the_bits_of_widened_keys(
    stored: torch.dtype, d: int, held: int, window: int | None, activations: torch.dtype
) -> None:
    """A turned ring in two parts behind zeros that a ring has overwritten, and tokens as they will
    be stored; rows far apart, as those of a slot with room are."""
    tokens, heads, kv_heads = 33, 6, 2
    q = normal(0, tokens, heads, d).to(activations) * 0.2
    slots = [stored_as(normal(seed, kv_heads, held + 20, d), stored) for seed in (1, 2)]
    new = [stored_as(normal(seed, tokens, kv_heads, d).transpose(0, 1), stored) for seed in (3, 4)]
    keys, values = (
        [
            slot.new_zeros(kv_heads, 1, slot.shape[2]).expand(-1, 5, -1),
            slot[:, 3:held],
            slot[:, :3],
            own,
        ]
        for slot, own in zip(slots, new, strict=True)
    )
    positions = torch.cat((torch.full((5,), 2**31 - 1), torch.arange(held + tokens)))
    causal = Causal.of(positions[-tokens:], positions, window)
    for who in (causal, None):
        got = attention.attend(q, keys, values, who)
        expected = attention.attend(q, wide(keys, activations), wide(values, activations), who)
        assert torch.equal(got, expected)
        assert torch.equal(got, ops.attend(q, keys, values, who))


@NARROW
def test_attend_padded_has_the_bits_of_a_widened_cache(
    stored: torch.dtype, activations: torch.dtype
) -> None:
    """Slots of different lengths, one of them empty and one row without a canvas."""
    shapes = ((0, 4), (1, 2), (2, 2))
    q, k, v = (normal(seed, 4, 48, heads, 64).to(activations) for seed, heads in shapes)
    keys, values = (stored_as(normal(seed, 5, 2, 300, 64), stored) for seed in (3, 4))
    places = [torch.tensor(x) for x in ([4, 0, 2, 2], [300, 0, 17, 9], [48, 7, 0, 33])]
    arguments = q * 0.1, k, v
    slots, held, width = places
    rows = Rows(keys, values, slots, held, None, width)
    serves = registry.choose("attend_padded", q.device, registry.ANY, *arguments, rows)
    assert serves is attention.attend_padded
    got = serves(*arguments, rows)
    plain = [wide([each], activations)[0] for each in (keys, values)]
    widened_rows = replace(rows, keys=plain[0], values=plain[1])
    assert torch.equal(got, ops.attend_padded(*arguments, widened_rows))
    for wrong in ((keys[..., :-1], values[..., :-1]), (keys, values[:, :1])):
        with pytest.raises(AssertionError):
            attention.attend_padded(*arguments, replace(rows, keys=wrong[0], values=wrong[1]))


@NARROW
@pytest.mark.parametrize("window", [None, 40])
def test_rows_after_one_prefix_have_the_bits_of_widened_keys(
    stored: torch.dtype, window: int | None, activations: torch.dtype
) -> None:
    counts, held, kept = (30, 7, 16), 263, 5
    q, k, v = (
        normal(seed, sum(counts), heads, 32).to(activations)
        for seed, heads in ((0, 6), (1, 2), (2, 2))
    )
    parts = [stored_as(normal(seed, 2, held, 32), stored) for seed in (3, 4)]
    keys, values = ([x[:, :3], x[:, 3:]] for x in parts)

    def parts_of(row: int, new: Tensor, seed: int) -> list[Tensor]:
        return [stored_as(normal(9 + row + seed, 2, kept, 32), stored), new.transpose(0, 1)]

    new = zip(k.split(counts), v.split(counts), strict=True)
    own = [Own(parts_of(row, rk, 0), parts_of(row, rv, 50)) for row, (rk, rv) in enumerate(new)]
    places = [torch.arange(held, held + kept + n) for n in counts]
    queries = torch.cat([each[-n:] for each, n in zip(places, counts, strict=True)])
    sizes = [(n, kept + n) for n in counts]
    causal = Causal.of(queries, torch.cat((torch.arange(held), *places)), window, sizes)
    plain = [Own(wide(row.keys, activations), wide(row.values, activations)) for row in own]
    got = attention.attend(q, keys, values, causal, own)
    both = wide(keys, activations), wide(values, activations)
    assert torch.equal(got, attention.attend(q, *both, causal, plain))
    with registry.reference_only():
        torchs = ops.attend(q, keys, values, causal, own)
    assert (got - torchs).norm() <= 2e-2 * torchs.norm()


def test_who_attends_to_a_narrow_cache(numbers: torch.dtype) -> None:
    """As to one in the dtype of activations: products of bfloat16 would round float32."""
    for stored in (FP8, Q8_0):
        assert attention.packs(stored, torch.bfloat16) == numbers
        in_float32 = attention.packs(stored, torch.float32)
        assert in_float32 == attention.packs(torch.float32, torch.float32)
        assert attention.packs(stored, torch.float16) is None
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            part = stored_as(normal(0, 2, 4, 32), stored)
            q: Any = normal(1, 3, 4, 32).to(dtype)
            serves = registry.choose("attend", q.device, registry.ANY, q, [part], [part], None, ())
            taken = attention.packs(stored, dtype) is not None
            assert (serves is attention.attend) == taken
            assert serves(q, [part], [part], None, ()).dtype == dtype


@NARROW
@pytest.mark.parametrize("row", ["key", "value"])
def test_what_is_no_number_stays_so(
    stored: torch.dtype, row: str, activations: torch.dtype
) -> None:
    q = normal(0, 3, 2, 32).to(activations)
    parts = {name: normal(seed, 1, 40, 32) for seed, name in enumerate(("key", "value"))}
    parts[row][0, 35, 7] = torch.nan
    keys, values = (stored_as(parts[name], stored) for name in ("key", "value"))
    who = Causal.of(torch.tensor([34, 35, 36]), torch.arange(40))
    got = attention.attend(q, [keys], [values], who).isnan().any(1)
    expected = attention.attend(q, wide([keys], activations), wide([values], activations), who)
    assert torch.equal(got, expected.isnan().any(1)) and got[1:].any(1).all()


@pytest.mark.usefixtures("numbers")
def test_attend_asks_for_the_width_of_a_row() -> None:
    q = normal(0, 3, 2, 32).bfloat16()
    part = stored_as(normal(1, 1, 4, 32), Q8_0)
    assert part.shape[2] == stored_width(32, Q8_0) == 34
    for keys, values in ((part[..., :32], part[..., :32]), (part, part[..., :32].view(FP8))):
        with pytest.raises(AssertionError):
            attention.attend(q, [keys], [values])
