"""The decision of a step, interpreted, against `diffusion.step`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.kernels import interpreted
from torch import Tensor

from sfumato.diffusion.canvas import RowStart
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.step.batch import StepBatch
from sfumato.diffusion.step.layout import Part
from sfumato.diffusion.step.packed import FROZEN, NOT_FINITE, pack, unpack
from sfumato.diffusion.step.rules import RowRules, RuleGroup
from sfumato.diffusion.step.update import apply_update, compute_update
from sfumato.diffusion.stopping import Never, StableAndConfident
from sfumato.model.head import HeadStats

pytestmark = interpreted
CPU = torch.device("cpu")
RULES = [
    RowRules(EntropyBound(0.6), StableAndConfident(1, 0.5), 3),
    RowRules(EntropyBound(0.0), StableAndConfident(0, 0.01), 3),
    RowRules(EntropyBound(1e6), Never(), 2),
    RowRules(EntropyBound(2.5), StableAndConfident(2, 9.0), 9),
]


def _batch(width: int, history: int) -> StepBatch:
    """Four rows: with pinned positions, a cold one, and one that is done after two steps."""
    batch = StepBatch.allocate(4, width, history, 2, torch.float32, CPU)
    starts = []
    for row, rules in enumerate(RULES):
        pinned = torch.full((width,), -1)
        pinned[: 2 * row] = torch.arange(2 * row)
        temperatures = [0.7] * rules.max_steps
        starts.append(RowStart(pinned, row, 0, 0, temperatures, row == 1, True))
    batch.begin(range(4), starts, list(torch.randint(50, (4, width))))
    return batch


def _stats(positions: int, entropy: Tensor) -> HeadStats:
    # Few different ids, so that an argmax canvas sometimes stays.
    ids = torch.randint(0, 2, (2, positions))
    top_ids, top_probs = torch.randint(50, (positions, 8)), torch.rand(positions, 8)
    return HeadStats(ids[0], ids[1], entropy, top_ids, top_probs, torch.zeros(positions, 2))


def _moved(batch: StepBatch, stats: HeadStats, fresh: Tensor) -> Tensor:
    from sfumato.ops.triton.sampler import Settings, move_rows

    stopping = [rules.stopping for rules in RULES]
    sure = [s if isinstance(s, StableAndConfident) else None for s in stopping]
    settings = Settings(
        torch.tensor([rules.sampler.bound for rules in RULES]),  # type: ignore[attr-defined]
        torch.tensor([0 if s is None else s.stability for s in sure]),
        torch.tensor([float("-inf") if s is None else s.confidence for s in sure]),
    )
    named = stats.argmax, stats.drawn, stats.entropy, stats.top_ids, stats.top_probs
    return move_rows(batch, settings, *named, fresh)


def _expected(batch: StepBatch, stats: HeadStats, fresh: Tensor) -> Tensor:
    width = batch.width
    groups = [
        RuleGroup((i,), torch.tensor([i]), (rules,), ([], []), width, False)
        for i, rules in enumerate(RULES)
    ]
    part = Part(batch, (width,) * 4, None, tuple(groups))
    update = compute_update(part, stats, fresh, {})
    words = pack(update)
    apply_update(batch, update)
    return words


def _same(one: Tensor, other: Tensor, width: int) -> None:
    """Frozen rows have nothing to say."""
    for row in range(4):
        flags = int(other[row, 1])
        assert (int(one[row, 1]) & FROZEN) == flags & FROZEN
        if not flags & FROZEN:
            assert torch.equal(one[row], other[row])
    assert unpack(one.flatten(), 4, width).argmax.shape == (4, width)


@pytest.mark.parametrize(("width", "history"), [(16, 1), (20, 3)])
def test_rows_move_as_those_of_the_reference(width: int, history: int) -> None:
    torch.manual_seed(1)
    ours = _batch(width, history)
    theirs = StepBatch.allocate(4, width, history, 2, torch.float32, CPU)
    theirs.take_over(ours)
    frozen: Sequence[bool] = []
    for step in range(4):
        entropy = torch.rand(4 * width).mul(4).round() / 8  # with ties
        stats, fresh = _stats(4 * width, entropy), torch.randint(50, (4, width))
        before = ours.record.clone()
        _same(_moved(ours, stats, fresh), _expected(theirs, stats, fresh), width)
        assert torch.equal(ours.record, theirs.record)
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
        theirs.take_over(ours)
        entropy = torch.rand(4 * width)
        entropy[3] = value
        stats, fresh = _stats(4 * width, entropy), torch.randint(50, (4, width))
        words, expected = _moved(ours, stats, fresh), _expected(theirs, stats, fresh)
        assert torch.equal(words[:, 1], expected[:, 1])
        assert [bool(flags & NOT_FINITE) for flags in words[:, 1].tolist()] == [True] + 3 * [False]
        assert torch.equal(ours.record, theirs.record)
