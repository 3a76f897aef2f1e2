"""Processors, and parts of third parties, in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.diffusion.head_only import (
    CPU,
    LENGTH,
    TEMPERATURE,
    VOCABULARY,
    canvas,
    check,
    distribution,
    score,
)
from tests.support import one_row
from torch import Tensor

from sfumato.diffusion import scoring
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import CanvasView, LogitBias, MinTokens, StepView
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.head import VocabularyHead


def test_processors_act_on_all_that_is_found() -> None:
    network, logits = distribution(sharpness=1.0)
    biased = logits.clone()
    favourite = int(logits[0].argmax())
    biased[:, favourite] = -1e30
    biased[:, 11] += 2.5
    biased[:5, [3, 30]] = -1e30
    row = canvas(processors=(LogitBias({favourite: float("-inf"), 11: 2.5}), MinTokens(5, (3, 30))))
    stats = check(network, row, biased / TEMPERATURE)
    assert stats.argmax[0] != favourite
    assert one_row.advance(row, stats).token_ids[0] != favourite


def test_processors_change_when_a_canvas_stops() -> None:
    """A token that all positions are sure of, banned: neither stable nor sure any more."""
    head = VocabularyHead(torch.eye(VOCABULARY), 30.0)
    network: Any = SimpleNamespace(head=head)
    hidden = torch.zeros(LENGTH, VOCABULARY)
    hidden[:, 6] = 1e3
    for processors, steps in (((), 2), ((LogitBias({6: float("-inf")}),), 5)):
        row = canvas(processors=processors, max_steps=5)
        while not row.done:
            one_row.advance(row, score(network, hidden, [row]))
        assert row.step == steps


def test_min_tokens_counts_from_the_start_of_the_reply() -> None:
    network, logits = distribution(sharpness=1.0)
    banned = logits.clone()
    banned[:3, 5] = -1e30
    check(network, canvas(reply=[1] * 20, processors=(MinTokens(23, (5,)),)), banned / TEMPERATURE)
    check(network, canvas(reply=[1] * 23, processors=(MinTokens(23, (5,)),)), logits / TEMPERATURE)


def test_processors_see_the_canvas() -> None:
    seen: list[CanvasView] = []

    class Spy:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            seen.append(view)
            return scores

    network, _ = distribution()
    row = canvas(reply=[4, 8], processors=(Spy(),))
    went_in = row.tokens
    draft = one_row.advance(row, score(network, network.hidden, [row]))
    score(network, network.hidden, [row])
    first, second = seen[0], seen[-1]
    assert torch.equal(torch.stack((first.step, second.step)), torch.tensor([1, 2]))
    assert torch.equal(first.tokens, went_in) and torch.equal(second.tokens, row.tokens)
    assert first.history.tolist() == [[-1] * LENGTH]
    assert torch.equal(second.history[-1], draft.token_ids)
    assert first.reply.tolist() == second.reply.tolist() == [4, 8]


def test_third_party_parts() -> None:
    """Nothing but the methods counts: no base class, no registration."""

    class OnlyEven:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            odd = (torch.arange(scores.shape[-1]) + first_id) % 2 == 1
            return scores.masked_fill(odd, float("-inf"))

    class Constant:
        def temperature(self, step: int, max_steps: int) -> float:
            return 0.5

    class ByLogits:
        needs_logits: ClassVar[bool] = True

        def accept(self, view: StepView) -> Tensor:
            assert view.stats.logits is not None
            assert view.stats.logits.shape == (LENGTH, VOCABULARY)
            best = view.stats.logits.topk(2).values
            return best[:, 0] - best[:, 1] > 1.0

    class AtOnce:
        def done(self, view: StepView) -> Tensor:
            return view.step == 2

    network, logits = distribution(sharpness=1.0)
    processed = logits / 0.5
    processed[:, 1::2] = -1e30
    row = canvas(
        processors=(OnlyEven(),), schedule=Constant(), sampler=ByLogits(), stopping=AtOnce()
    )
    stats = check(network, row, processed)
    assert stats.logits is not None
    torch.testing.assert_close(stats.logits[:, ::2], processed[:, ::2])
    best = processed.topk(2).values
    draft = one_row.advance(row, stats)
    assert torch.equal(draft.accepted, best[:, 0] - best[:, 1] > 1.0)
    assert 0 < int(draft.accepted.sum()) < LENGTH
    one_row.advance(row, score(network, network.hidden, [row]))
    assert (row.convergence, row.step) == ("converged", 2)


class Returns:
    """A processor that gives back something else than it got."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Any:
        return self.change(scores)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda scores: None, "None, which is no tensor"),
        (lambda scores: scores.double(), r"float64 \[12, 9\]"),
        (lambda scores: scores[:-1], r"float32 \[11, 9\]"),
        (lambda scores: scores[0], r"float32 \[9\]"),
    ],
)
def test_a_processor_must_return_scores(change: Callable[[Tensor], Any], got: str) -> None:
    network, _ = distribution()
    row = canvas(processors=(LogitBias({3: 1.0}), Returns(change)))
    expected = rf"^processor Returns: process must return float32 \[12, 9\], got {got}$"
    with pytest.raises(ValueError, match=expected):
        score(network, network.hidden, [row])


@pytest.mark.parametrize("choices", [{}, {"top_k": 3}, {"temperature": 1e-6}])
def test_to_ban_every_token_is_refused(choices: dict[str, Any]) -> None:
    """Everywhere or at some positions; one token left at each is enough."""
    network, _ = distribution()

    class Some:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            return scores.index_fill(0, torch.tensor([3, 6]), -math.inf)

    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    for processor, name, position in ((every, "LogitBias", 0), (Some(), "Some", 3)):
        row = canvas(processors=(processor,), **choices)
        message = rf"the logit processors \({name}\) ban every token of position {position}; leave"
        with pytest.raises(ValueError, match=rf"^canvas 0, step 1: {message}"):
            one_row.advance(row, score(network, network.hidden, [row]))
    all_but_one = LogitBias(dict.fromkeys(range(1, VOCABULARY), -math.inf))
    row = canvas(processors=(all_but_one,), **choices)
    assert (
        one_row.advance(row, score(network, network.hidden, [row])).token_ids.tolist()
        == [0] * LENGTH
    )


def test_a_banned_position_may_be_pinned() -> None:
    network, _ = distribution()
    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    config = SamplerConfig(canvas_length=LENGTH, processors=(every,)).over(REFERENCE)
    pinned = dict.fromkeys(range(LENGTH), 7)
    row = Canvas(config, Noise(7, 0), VOCABULARY, CPU, pinned=pinned)
    assert (
        one_row.advance(row, score(network, network.hidden, [row])).token_ids.tolist()
        == [7] * LENGTH
    )


def test_one_rows_ban_is_no_other_rows_business() -> None:
    network, _ = distribution()
    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    rows = [canvas(), canvas(processors=(every,)), canvas(processors=(LogitBias({3: 1.0}),))]
    stats = score(network, network.hidden.repeat(3, 1), rows)
    entropy = stats.entropy.view(3, LENGTH)
    assert entropy[1].isinf().all() and entropy[[0, 2]].isfinite().all()


@pytest.mark.parametrize("changed", [False, True])
def test_bans_are_minus_infinity_at_those_ids(changed: bool) -> None:
    """Whether they are counted with plain rows or, beside a bias, with changed ones."""
    network, logits = distribution(sharpness=1.0)
    banned, end = (3, 17, 39, VOCABULARY + 5), 5
    processors = (LogitBias(dict.fromkeys(banned, -math.inf)), MinTokens(9, (end, 3)))
    bias = (LogitBias({1: 0.5}),) if changed else ()
    row = canvas(reply=[8, 8], processors=(*processors, *bias))
    expected = logits.clone()
    expected[:, 1] += 0.5 * changed
    expected[:, list(banned[:3])] = -1e30
    expected[:7, end] = -1e30  # nine tokens less the two that there are
    check(network, row, expected / TEMPERATURE)
    assert (scoring._bans(row) is None) == changed
