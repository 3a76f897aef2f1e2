"""Attention of canvases and of both phases, interpreted, against the references."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import Rows

pytestmark = interpreted

SLOTS = 4  # of a pool


@dataclass(frozen=True)
class Case:
    """Numbers of a call; `first` counts positions beyond the size of a ring."""

    n: int = 24
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    size: int = 29
    slots: tuple[int, ...] = (2, 0, 3)
    first: tuple[int, ...] = (20, 0, 200)
    width: tuple[int, ...] = (24, 7, 20)
    commits: tuple[int, ...] = (0, 1, 1)
    window: int | None = 30

    def floats(self) -> list[Tensor]:
        torch.manual_seed(1)
        rows, new = len(self.slots), (self.n, self.kv_heads, self.d)
        q = torch.randn(rows, self.n, self.heads, self.d) * self.d**-0.5
        stored = (SLOTS, self.kv_heads, self.size, self.d)
        return [q, torch.randn(rows, *new), torch.randn(rows, *new),
                torch.randn(stored), torch.randn(stored)]  # fmt: skip

    def rows(self, keys: Tensor, values: Tensor) -> Rows:
        numbers = [torch.tensor(x) for x in (self.slots, self.first, self.width, self.commits)]
        return Rows(keys, values, *numbers[:2], self.window, *numbers[2:])

    def one(self, row: int, **changed: Any) -> Case:
        """One row of the call, alone."""
        names = ("slots", "first", "width", "commits")
        return replace(self, **{n: getattr(self, n)[row : row + 1] for n in names}, **changed)

    def seen(self, out: Tensor) -> Tensor:
        """The results at positions inside of their rows' widths."""
        return out[torch.arange(self.n) < torch.tensor(self.width)[:, None]]


def phases(case: Case, floats: list[Tensor]) -> Tensor:
    from sfumato.ops.triton.attention import attend_padded

    return attend_padded(*floats[:3], case.rows(*floats[3:]))


def expected(case: Case, floats: list[Tensor], **changed: Any) -> Tensor:
    """The results of the reference in float64."""
    *new, keys, values = (x.double() for x in floats)
    rows = replace(case.rows(keys, values), **changed)
    return attention_reference.attend_padded.reference(*new, rows)


CASES = [
    Case(),
    Case(window=None, size=80, first=(70, 0, 80)),
    Case(n=70, heads=2, size=300, width=(70, 65, 1), first=(300, 301, 150), window=301),
    Case(heads=6, d=32, commits=(1, 1, 0), size=6, window=7),
    Case(commits=(1, 1, 1), size=80, first=(70, 0, 200)),
]


@pytest.mark.parametrize("case", CASES)
def test_both_phases_are_those_of_the_reference(case: Case) -> None:
    floats = case.floats()
    close(case.seen(phases(case, floats)), case.seen(expected(case, floats)))


def test_canvases_are_those_of_the_reference() -> None:
    from sfumato.ops.triton.attention import attend_padded

    case = Case(width=(24, 7, 0), first=(20, 0, 0))
    floats = case.floats()
    rows = replace(case.rows(*floats[3:]), commits=None)
    out = attend_padded(*floats[:3], rows)
    close(case.seen(out), case.seen(expected(case, floats, commits=None)))
    assert not out[2].any(), "what sees no key is zero"
    none = replace(rows, slots=rows.slots[:0], first=rows.first[:0], width=None)
    assert not attend_padded(*(x[:0] for x in floats[:3]), none).numel()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_no_position_sees_may_hold_anything(value: float) -> None:
    case = Case(window=None, size=80, first=(70, 0, 80))
    floats = case.floats()
    clean = case.seen(phases(case, floats))
    for stored in floats[3:]:
        stored[2, :, 70:] = stored[0] = stored[1] = value
    for new in floats[:3]:
        for row, width in enumerate(case.width):
            new[row, width:] = value
    assert torch.equal(case.seen(phases(case, floats)), clean)


def test_pieces_of_a_long_prefix_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a piece follows from a row's prefix: each row has the bits that it has alone,
    in a pool that is no longer than its prefix."""
    from sfumato.ops.triton import attention
    from sfumato.ops.triton.tiles import tile_for

    def short(name: str, device: torch.device) -> object:
        tile = tile_for(name, device)
        if name == "attention_merge":
            return tile
        return replace(tile, constants={**tile.constants, "PIECES": 3, "SHORTEST": 64})

    # One piece, two of 64, and three of 128 of which the last has one position.
    case = Case(n=6, width=(6, 5, 6), size=300, first=(64, 128, 257), window=None)
    floats = case.floats()
    monkeypatch.setattr(attention, "tile_for", short)
    with counted_launches() as launches:
        out = phases(case, floats)
    assert launches["attention_merge"] == 1
    close(case.seen(out), case.seen(expected(case, floats)))
    for row, size in enumerate(case.first):
        one = case.one(row, size=size)
        cut = [x[:, :, :size].contiguous() for x in floats[3:]]
        alone = phases(one, [*(x[row : row + 1] for x in floats[:3]), *cut])
        assert torch.equal(one.seen(alone), out[row : row + 1, : case.width[row]].flatten(0, 1))


def test_a_row_has_the_same_result_beside_others() -> None:
    case = Case()
    floats = case.floats()
    many = phases(case, floats)
    for row in range(3):
        alone = phases(case.one(row), [*(x[row : row + 1] for x in floats[:3]), *floats[3:]])
        assert torch.equal(alone[0], many[row])


def test_what_it_does_not_take_is_left_to_torch() -> None:
    from sfumato.ops.triton.attention import TWINS

    case = Case()
    q, k, v, keys, values = case.floats()
    serves, rows = TWINS["attend_padded"].serves, case.rows(keys, values)
    assert serves(q, k, v, rows) and serves(q, k, v, replace(rows, commits=None))
    assert not serves(q, k, v, case.rows(keys.bfloat16(), values.bfloat16()))
    q, k, v, keys, values = (x[..., :12].contiguous() for x in (q, k, v, keys, values))
    assert not serves(q, k, v, case.rows(keys, values))
    assert not serves(*case.floats()[:3], replace(rows, first=rows.first.int()))
