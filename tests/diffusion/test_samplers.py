"""Acceptance and stopping rules on findings made up by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sfumato.diffusion.sampler import (
    SAMPLERS,
    EachSettled,
    EntropyBound,
    EvenPace,
    FixedCount,
    LinearPace,
    LowConfidence,
    Never,
    Pace,
    Sequential,
    SettledToEnd,
    StableAndConfident,
    StepView,
    Threshold,
    counts_of,
)
from sfumato.refused import Refused


def view(
    step: int = 1,
    history: list[list[int]] | None = None,
    pinned: list[bool] | None = None,
    least: int = 0,
    **stats: Any,
) -> StepView:
    values = {name: torch.as_tensor(value) for name, value in stats.items()}
    length = len(next(iter(values.values())))
    # The five newest, as a canvas keeps them: -1 where there were not so many.
    past = torch.tensor([*[[-1] * length] * 5, *(history or [])][-5:])
    tokens = torch.zeros(length, dtype=torch.int64)
    head_stats: Any = SimpleNamespace(**values)
    unchanged = torch.tensor(0)
    if "argmax" in values:  # as a canvas counts it
        unchanged = (past == values["argmax"]).all(dim=1).flip(0).long().cumprod(0).sum()
    free = torch.tensor(pinned or [False] * length)
    pace = torch.tensor(least)
    return StepView(torch.tensor(step), 10, tokens, head_stats, past, free, unchanged, pace)


def accepted(mask: Tensor) -> list[int]:
    assert mask.dtype == torch.bool
    return mask.nonzero()[:, 0].tolist()


def test_entropy_bound_by_hand() -> None:
    entropy = [0.5, 0.01, 0.2, 0.02, 0.06]
    # In ascending order 0.01, 0.02, 0.06, 0.2, 0.5; before each 0, 0.01, 0.03, 0.09, 0.29.
    assert accepted(EntropyBound(0.1).accept(view(entropy=entropy))) == [1, 2, 3, 4]
    assert accepted(EntropyBound(0.05).accept(view(entropy=entropy))) == [1, 3, 4]
    assert accepted(EntropyBound(0.0).accept(view(entropy=entropy))) == [1]
    assert accepted(EntropyBound(9.0).accept(view(entropy=entropy))) == [0, 1, 2, 3, 4]


def test_entropy_bound_takes_the_surest_at_least() -> None:
    assert len(accepted(EntropyBound(0.1).accept(view(entropy=[3.0, 3.0, 3.0])))) == 1
    assert accepted(EntropyBound(0.0).accept(view(entropy=[0.0, 0.0, 3.0]))) == [0, 1, 2]


def test_fixed_count_takes_more_at_every_step() -> None:
    top = [[0.5, 0.3], [0.9, 0.1], [0.4, 0.3], [0.7, 0.2], [0.6, 0.2]]
    for step, expected in ((1, [1, 3]), (2, [0, 1, 3, 4]), (3, [0, 1, 2, 3, 4])):
        assert accepted(FixedCount(2).accept(view(step, top_probs=top))) == expected


def test_fixed_count_takes_no_more_than_there_are() -> None:
    assert accepted(FixedCount(2**24).accept(view(3, top_probs=[[0.5, 0.5]] * 4))) == [0, 1, 2, 3]


def test_fixed_count_breaks_ties_by_position() -> None:
    assert accepted(FixedCount(2).accept(view(top_probs=[[0.5, 0.5]] * 4))) == [0, 1]


def test_threshold() -> None:
    top = [[0.95, 0.01], [0.6, 0.05], [0.6, 0.35], [0.9, 0.1]]
    assert accepted(Threshold(0.9).accept(view(top_probs=top))) == [0, 3]
    assert accepted(Threshold(0.9, margin=0.5).accept(view(top_probs=top))) == [0, 1, 3]
    assert accepted(Threshold(0.99).accept(view(top_probs=top))) == [0]  # so that steps progress


def test_threshold_progresses_beside_pinned_positions() -> None:
    """The model may be surest of a position that is none of its business."""
    top = [[0.99, 0.01], [0.3, 0.2], [0.4, 0.3]]
    seen = view(top_probs=top, pinned=[True, False, False])
    assert accepted(Threshold(0.995).accept(seen)) == [0, 2]
    assert accepted(Threshold().accept(view(top_probs=top, pinned=[True] * 3))) == [0, 1, 2]


def test_low_confidence() -> None:
    probs = [0.8, 0.95, 0.7, 0.92, 0.1]
    for threshold, least, revealed in (
        (0.9, 1, [1, 3]),
        (0.9, 3, [0, 1, 3]),
        (0.92, 1, [1]),  # strictly over
        (1.0, 2, [1, 3]),
        (0.0, 1, [0, 1, 2, 3, 4]),
    ):
        rule = LowConfidence(threshold)
        assert accepted(rule.accept(view(least=least, drawn_probs=probs))) == revealed
    pinned = [False, True, False, False, False]  # whose probability is 1
    seen = view(least=1, pinned=pinned, drawn_probs=[0.8, 1.0, 0.7, 0.6, 0.1])
    assert accepted(LowConfidence().accept(seen)) == [0, 1]
    assert accepted(LowConfidence().accept(view(least=9, drawn_probs=[0.5] * 3))) == [0, 1, 2]
    assert accepted(LowConfidence(1.0).accept(view(least=1, drawn_probs=[0.5] * 3))) == [0]


def test_sequential() -> None:
    pinned = [True, False, True, False, False]
    assert accepted(Sequential().accept(view(least=2, pinned=pinned, entropy=[0.0] * 5))) == [
        0,
        1,
        2,
        3,
    ]


def test_fixed_count_counts_no_mask_twice() -> None:
    top = [[0.5, 0.3], [0.9, 0.1], [0.4, 0.3], [0.7, 0.2]]
    seen = view(2, pinned=[False, True, False, False], least=1, top_probs=top)
    assert accepted(FixedCount(1).accept(seen)) == [3]


@pytest.mark.parametrize(
    ("pace", "length", "steps", "expected"),
    [
        (EvenPace(), 10, 4, [3, 3, 2, 2]),
        (EvenPace(), 4, 9, [1, 1, 1, 1]),
        (LinearPace(), 10, 4, [2, 3, 2, 3]),
        (LinearPace(), 3, 9, [1, 1, 1]),
        (EvenPace(), 5, 1, [5]),
    ],
)
def test_paces(pace: Pace, length: int, steps: int, expected: list[int]) -> None:
    assert counts_of(pace, steps, length) == expected


@pytest.mark.parametrize("count", [-1, 1.5, True, None, ZeroDivisionError()])
def test_a_pace_that_gives_no_count(count: Any) -> None:
    class Wrong:
        def count(self, step: int, max_steps: int, length: int) -> Any:
            if isinstance(count, Exception):
                raise count
            return count

    with pytest.raises(Refused, match=r"pace Wrong.* at step 1"):
        counts_of(Wrong(), 4, 4)


def test_samplers_have_names() -> None:
    assert {name: kind() for name, kind in SAMPLERS.items()} == {
        "entropy-bound": EntropyBound(0.1),
        "fixed-count": FixedCount(8),
        "threshold": Threshold(0.9, 1.0),
        "low-confidence": LowConfidence(0.9),
        "sequential": Sequential(),
    }


@pytest.mark.parametrize(
    ("stability", "history", "expected"),
    [
        (0, [], True),
        (1, [], False),
        (1, [[1, 2]], True),
        (1, [[1, 3]], False),
        (1, [[1, 2], [1, 3]], False),
        (1, [[1, 3], [1, 2]], True),
        (2, [[1, 2]], False),
        (2, [[1, 2], [1, 2]], True),
        (2, [[1, 3], [1, 2]], False),
        (3, [[9, 9], [1, 2], [1, 2], [1, 2]], True),
    ],
)
def test_stability(stability: int, history: list[list[int]], expected: bool) -> None:
    seen = view(history=history, argmax=[1, 2], entropy=[0.0, 0.004])
    done = StableAndConfident(stability, 0.005).done(seen)
    assert done.dtype == torch.bool and done.shape == ()
    assert bool(done) is expected


def test_confidence_is_of_the_mean() -> None:
    rule = StableAndConfident(stability=0, confidence=0.005)
    assert bool(rule.done(view(argmax=[1, 2], entropy=[0.0, 0.0099])))
    assert not bool(rule.done(view(argmax=[1, 2], entropy=[0.0, 0.0101])))


def test_confidence_is_of_the_free_positions() -> None:
    rule = StableAndConfident(stability=0, confidence=0.005)
    pinned = [True, True, True, False]
    for entropy, done in ((0.0049, True), (0.0051, False)):
        seen = view(argmax=[1] * 4, entropy=[0.0, 0.0, 0.0, entropy], pinned=pinned)
        assert bool(rule.done(seen)) is done
    assert bool(rule.done(view(argmax=[1], entropy=[0.0], pinned=[True])))


END = 9
SURE = [0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("argmax", "before", "entropy", "stability", "expected"),
    [
        ([1, 2, END, 4], [1, 2, END, 5], SURE, 1, True),  # what stands behind may change
        ([1, 2, 3, 4], [1, 2, 3, 4], SURE, 1, False),  # no end: all are tested
        ([1, 2, 3, 4], [1, 2, 3, 4], [0.0] * 4, 1, True),
        ([1, 2, END, 4], [1, 3, END, 4], SURE, 1, False),  # what stands before may not change
        ([1, 2, END, 4], [1, 2, 3, 4], SURE, 1, False),  # an end token that is new
        ([1, 2, END, 4], [1, 2, 3, 4], SURE, 0, True),
        ([1, 2, END, 4], [1, 2, END, 4], [0.0, 0.0, 1.0, 2.0], 1, False),  # one that is not sure
        ([1, END, END, 4], [1, END, END, 4], [0.0, 0.05, 0.0, 2.0], 1, True),
        ([1, END, END, 4], [1, 2, END, 4], [0.0, 0.05, 0.0, 2.0], 1, False),
        ([1, 2, END, 4], [1, 2, END, 4], SURE, 2, False),  # not so often yet
        ([1, 2, END, 4], [1, 2, END, 4], SURE, 6, False),  # more than a canvas keeps
    ],
)
def test_settled_to_the_end(
    argmax: list[int], before: list[int], entropy: list[float], stability: int, expected: bool
) -> None:
    rule = SettledToEnd(stability, 0.04, (8, END))
    check_rule(rule, view(2, [before], argmax=argmax, entropy=entropy), expected)


@pytest.mark.parametrize(
    ("before", "entropy", "patience", "expected"),
    [
        ([[1, 2, 3]], [0.0, 0.009, 0.0], 1, True),  # all are sure, whatever stood there before
        ([[5, 6, 7]], [0.0, 0.009, 0.0], 1, True),
        ([[1, 2, 5]], [0.0, 0.4, 0.0], 1, True),  # the one that is not has stayed the same
        ([[1, 5, 3]], [0.0, 0.4, 0.0], 1, False),
        ([[1, 2, 3]], [0.0, 0.6, 0.0], 1, False),  # it is not calm
        ([[1, 5, 3], [1, 2, 3]], [0.0, 0.4, 0.0], 2, False),  # not for so long
        ([[1, 2, 3], [1, 2, 3]], [0.0, 0.4, 0.0], 2, True),
        ([[1, 2, 3]], [0.0, 0.4, 0.0], 2, False),  # more than a canvas keeps
    ],
)
def test_each_position_settles_by_itself(
    before: list[list[int]], entropy: list[float], patience: int, expected: bool
) -> None:
    rule = EachSettled(patience)
    check_rule(rule, view(3, before, argmax=[1, 2, 3], entropy=entropy), expected)
    pinned = view(3, before, [False, True, False], argmax=[1, 2, 3], entropy=entropy)
    check_rule(rule, pinned, True)


def check_rule(rule: SettledToEnd | EachSettled, seen: StepView, expected: bool) -> None:
    """Lifted too, as the rows of a batch are."""
    assert bool(rule.done(seen)) is expected

    def lifted(history: Tensor, argmax: Tensor, entropy: Tensor, pinned: Tensor) -> Tensor:
        stats: Any = SimpleNamespace(argmax=argmax, entropy=entropy)
        rest = history, pinned, seen.step, seen.least
        return rule.done(StepView(seen.step, 10, seen.tokens, stats, *rest))

    parts = seen.history, seen.stats.argmax, seen.stats.entropy, seen.pinned
    both = torch.vmap(lifted)(*(torch.stack((part, part)) for part in parts))
    assert both.tolist() == [expected] * 2


def test_a_pinned_end_token_ends_nothing() -> None:
    pinned = [False, False, True, False]
    seen = view(2, [[1, 2, END, 4]], pinned, argmax=[1, 2, END, 4], entropy=[0.0, 0.0, 0.0, 2.0])
    assert not SettledToEnd(1, 0.04, (END,)).done(seen)


def test_never() -> None:
    done = Never().done(view(history=[[1, 2]], argmax=[1, 2], entropy=[0.0, 0.0]))
    assert done.dtype == torch.bool and not bool(done)
