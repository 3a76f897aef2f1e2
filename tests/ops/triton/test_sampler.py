"""The decision of a step, interpreted, against `diffusion.step`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.kernels import interpreted
from tests.support.row_start import row_start
from torch import Tensor

from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import EntropyBound, FixedCount, Never, StableAndConfident
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.captured import move_rows
from sfumato.diffusion.step.rules import RowRules, StaticRules
from sfumato.diffusion.step.step import FROZEN, NOT_FINITE, row_words, unpack
from sfumato.model.head import HeadStats

pytestmark = interpreted
CPU, HIDDEN = torch.device("cpu"), 5
RULES = [
    RowRules(EntropyBound(0.6), StableAndConfident(1, 0.5), 3),
    RowRules(EntropyBound(0.0), StableAndConfident(0, 0.01), 3),
    RowRules(EntropyBound(1e6), Never(), 2),
    RowRules(EntropyBound(2.5), StableAndConfident(2, 9.0), 9),
]


def _batch(width: int, history: int) -> StepBatch:
    """Four rows: with pinned positions, a cold one, one that is done after two steps, and one
    without self-conditioning."""
    batch = StepBatch.allocate(4, width, history, HIDDEN, torch.float32, CPU)
    starts, begun = [], torch.randint(50, (4, width))
    for row, rules in enumerate(RULES):
        pinned = torch.full((width,), -1)
        pinned[: 2 * row] = torch.arange(2 * row)
        temperatures = [0.7] * rules.max_steps
        flags = row == 1, row != 3
        own = row_start(pinned, Noise(row, 0), temperatures, *flags, begun[row], row == 2)
        starts.append(own)
    batch.begin(range(4), starts)
    return batch


def _stats(positions: int, entropy: Tensor) -> HeadStats:
    # Few different ids, so that an argmax canvas sometimes stays.
    ids = torch.randint(0, 2, (2, positions))
    top_ids, top_probs = torch.randint(50, (positions, 8)), torch.rand(positions, 8)
    soft = torch.randn(positions, HIDDEN)
    return HeadStats(ids[0], ids[1], entropy, top_ids, top_probs, soft, top_probs[:, 0])


def _rules(rules: Sequence[RowRules]) -> StaticRules:
    static = StaticRules(StaticRules.kinds_of(rules), len(rules), CPU)
    static.write(rules)
    return static


def _moved(batch: StepBatch, stats: HeadStats, fresh: Tensor) -> Tensor:
    from sfumato.ops.triton.step import TWINS

    rules, words = _rules(RULES), torch.zeros(4, row_words(batch.width, 8), dtype=torch.int32)
    twin = TWINS["move_rows"]
    assert twin.serves(batch, rules, stats, fresh, words)
    twin.function(batch, rules, stats, fresh, words)
    return words


def _expected(batch: StepBatch, stats: HeadStats, fresh: Tensor) -> Tensor:
    words = torch.zeros(4, row_words(batch.width, 8), dtype=torch.int32)
    move_rows(batch, _rules(RULES), stats, fresh, words)
    return words


def _same(one: Tensor, other: Tensor, width: int) -> None:
    """Frozen rows have nothing to say."""
    for row in range(4):
        flags = int(other[row, 1])
        assert (int(one[row, 1]) & FROZEN) == flags & FROZEN
        if not flags & FROZEN:
            assert torch.equal(one[row], other[row])
    assert [len(row[2]) for row in unpack(one.flatten(), 4, width)] == [width] * 4


@pytest.mark.parametrize(("width", "history"), [(8, 1), (20, 3)])
def test_rows_move_as_those_of_the_reference(width: int, history: int) -> None:
    torch.manual_seed(1)
    ours = _batch(width, history)
    theirs = StepBatch.allocate(4, width, history, HIDDEN, torch.float32, CPU)
    theirs.copy(slice(None), ours, slice(None))
    frozen: Sequence[bool] = []
    for step in range(4):
        entropy = torch.rand(4 * width).mul(4).round() / 8  # with ties
        stats, fresh = _stats(4 * width, entropy), torch.randint(50, (4, width))
        before = ours.record.clone()
        _same(_moved(ours, stats, fresh), _expected(theirs, stats, fresh), width)
        assert torch.equal(ours.record, theirs.record) and torch.equal(ours.soft, theirs.soft)
        for row, done in enumerate(frozen):
            assert not done or torch.equal(ours.tokens[row], theirs.tokens[row])
            assert not done or torch.equal(ours.record[row], before[row])
        frozen = ours.done.tolist()
        assert step < 2 or frozen[2]
    assert not all(frozen)


def test_entropies_that_are_no_numbers_are_flagged() -> None:
    width = 16
    for value in (float("nan"), float("inf")):
        ours, theirs = _batch(width, 1), _batch(width, 1)
        theirs.copy(slice(None), ours, slice(None))
        entropy = torch.rand(4 * width)
        entropy[3] = value
        stats, fresh = _stats(4 * width, entropy), torch.randint(50, (4, width))
        words, expected = _moved(ours, stats, fresh), _expected(theirs, stats, fresh)
        assert torch.equal(words[:, 1], expected[:, 1])
        assert [bool(flags & NOT_FINITE) for flags in words[:, 1].tolist()] == [True] + 3 * [False]
        assert torch.equal(ours.record, theirs.record)


def test_rules_of_other_kinds_are_left_to_torch() -> None:
    from sfumato.ops.triton.step import TWINS

    batch, stats = _batch(16, 1), _stats(64, torch.rand(64))
    other = _rules([*RULES[:3], RowRules(FixedCount(2), Never(), 3)])
    fresh, words = batch.tokens.clone(), torch.zeros(4, row_words(16, 8), dtype=torch.int32)
    assert not TWINS["move_rows"].serves(batch, other, stats, fresh, words)
