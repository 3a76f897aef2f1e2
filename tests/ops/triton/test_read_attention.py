"""Attention of reads, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import Questions, Rows
from sfumato.ops.device_check import mapped

pytestmark = interpreted

Call = tuple[Tensor, Tensor, Tensor, Rows]
SLOTS, FIRST = (2, 0, 3, 2), (70, 0, 200, 70)
STARTS, COUNTS = (3, 40, 0, 24), (17, 70, 0, 5)


def call(size: int = 80, window: int | None = 30, n: int = 24, heads: int = 4) -> Call:
    """Of four rows, two of them in one slot, beside unwritten places that hold NaN."""
    torch.manual_seed(1)
    kv_heads, d = 2, 16
    q = torch.randn(4, n, heads, d) * d**-0.5
    k, v = (torch.randn(4, n, kv_heads, d) for _ in range(2))
    stored, beside = torch.randn(2, 4, kv_heads, size, d), torch.randn(2, kv_heads, 120, d)
    stored[:, 2, :, 70:] = stored[:, 0] = stored[:, 1] = float("nan")
    beside[:, :, :3] = beside[:, :, 20:24] = beside[:, :, 29:40] = float("nan")
    beside[:, :, 110:] = float("nan")
    slots, first, starts, counts = (torch.tensor(x) for x in (SLOTS, FIRST, STARTS, COUNTS))
    questions = Questions(beside[0], beside[1], starts, counts, 70)
    return q, k, v, Rows(stored[0], stored[1], slots, first, window, questions=questions)


def expected(given: Call) -> Tensor:
    """The result of the reference in float64."""
    wide = mapped(given, lambda x: x.double() if x.is_floating_point() else x)
    return attention_reference.attend_padded.reference(*wide)


@pytest.mark.parametrize(("window", "n", "heads"), [(30, 24, 4), (None, 7, 2), (7, 70, 6)])
def test_reads_are_those_of_the_reference(window: int | None, n: int, heads: int) -> None:
    from sfumato.ops.triton.attention import attend_padded

    given = call(window=window, n=n, heads=heads)
    close(attend_padded(*given), expected(given))


def test_pieces_of_a_long_prefix_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.ops.triton import attention
    from sfumato.ops.triton.tiles import tile_for

    def short(name: str, device: torch.device) -> object:
        tile = tile_for(name, device)
        pieces = {"PIECES": 3, "SHORTEST": 64} if "_256" in name else {}
        return replace(tile, constants={**tile.constants, **pieces})

    monkeypatch.setattr(attention, "tile_for", short)
    given = call(size=200, window=None, n=6)
    with counted_launches() as launches:
        out = attention.attend_padded(*given)
    assert launches == {"read_256": 1, "attention_merge": 1}
    close(out, expected(given))


def test_a_row_has_the_same_result_beside_others_and_wherever_its_question_stands() -> None:
    from sfumato.ops.triton.attention import attend_padded

    q, k, v, rows = call()
    many, questions = attend_padded(q, k, v, rows), rows.questions
    assert questions is not None
    keys, values = (torch.full((2, 90, 16), float("nan")) for _ in range(2))
    for row, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        one = slice(row, row + 1)
        for moved, own in ((keys, questions.keys), (values, questions.values)):
            moved[:, 9 : 9 + count] = own[:, start : start + count]
        moved_questions = Questions(keys, values, torch.tensor([9]), questions.counts[one], 70)
        alone = replace(
            rows, slots=rows.slots[one], first=rows.first[one], questions=moved_questions
        )
        assert torch.equal(attend_padded(q[one], k[one], v[one], alone)[0], many[row])


def test_what_it_does_not_take_is_left_to_torch() -> None:
    from sfumato.ops.triton.attention import TWINS

    q, k, v, rows = call()
    serves, questions = TWINS["attend_padded"].serves, rows.questions
    assert serves(q, k, v, rows) and questions is not None
    short = replace(questions, starts=questions.starts.int())
    assert not serves(q, k, v, replace(rows, questions=short))
    assert not serves(q, k, v, replace(rows, keys=rows.keys.bfloat16()))
    for name in ("width", "commits"):
        assert not serves(q, k, v, replace(rows, **{name: torch.ones_like(rows.slots)}))
