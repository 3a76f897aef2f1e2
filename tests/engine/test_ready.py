"""What of a row's prefix can be encoded next, beside pictures, which no piece divides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.engine.events import Handle
from sfumato.engine.request import AnyRequest
from sfumato.engine.row import Row
from sfumato.tasks.works import Claim, PlacedPicture, Prompt


def row_with(spans: list[tuple[int, int]], rest: int) -> Row:
    """spans: of each picture the ids in front of it, and its soft tokens."""
    placed, at = list[PlacedPicture](), 0
    for gap, soft in spans:
        patches: Any = SimpleNamespace(soft_tokens=soft, key=str(at))
        placed.append(PlacedPicture(at + gap, patches))
        at += gap + soft
    ids = list(range(at + rest))
    task = SimpleNamespace(claim=Claim(Prompt(ids, (), tuple(placed)), len(ids)), stats=None)
    job: Any = SimpleNamespace(task=task)
    return Row(AnyRequest(), job, Handle("a", None, lambda: None), 0.0, None)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=4),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.booleans()), max_size=40),
)
def test_a_piece_divides_no_picture_and_reaches_into_none_that_is_not_there(
    spans: list[tuple[int, int]], rest: int, pieces: list[tuple[int, bool, bool]]
) -> None:
    """pieces: tokens at most, whether a picture may have more, whether one comes before."""
    row = row_with(spans, rest)
    pictures = row.claim.prompt.pictures
    for most, oversized, comes in pieces + [(1, True, True)] * 99:
        if comes and (lacking := row.lacking) is not None:
            row.see(torch.empty(lacking.patches.soft_tokens, 1))
        start, seen_at = row.encoded, None if row.soft is None else row.soft.start
        end = start + row.ready(most, oversized)
        assert start <= end <= len(row.prefix)
        assert not any(each.start < end < each.end for each in pictures)
        within = [each.start for each in pictures if start <= each.start < end]
        assert within in ([], [seen_at])
        if end > start + most:
            assert oversized and within == [start]
        if end == start < len(row.prefix):  # it waits for a picture, or for a larger piece
            (following,) = (each for each in pictures if each.start == start)
            assert seen_at != start or (not oversized and following.patches.soft_tokens > most)
        row.advance(end - start)
    assert row.encoded == len(row.prefix)
