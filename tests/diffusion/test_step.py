"""Scores of a row in a step: temperature, cutoffs and draws, whatever else is in the batch."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.diffusion.head_only import (
    LENGTH,
    TEMPERATURE,
    VOCABULARY,
    canvas,
    check,
    distribution,
    score,
)
from tests.diffusion.tiny import inverse_cdf
from tests.support import one_row
from tests.support.soft_of import soft_of
from torch.distributions import Categorical

from sfumato.diffusion.sampler import EntropyBound, LinearTemperature, LogitBias, Never, SoftTopK
from sfumato.model.head import HeadStats, VocabularyHead


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_scales_the_schedule(temperature: float) -> None:
    network, logits = distribution()
    check(network, canvas(temperature=temperature), logits / (TEMPERATURE * temperature))


def test_the_schedule_goes_down_step_by_step() -> None:
    network, logits = distribution()
    row = canvas(stopping=Never(), max_steps=4, schedule=LinearTemperature(0.2, 1.0))
    for temperature in (1.0, 0.8, 0.6, 0.4):
        one_row.advance(row, check(network, row, logits / temperature))
    assert row.convergence == "step_cap"


def test_at_temperature_0_the_draw_is_the_argmax_and_the_distribution_is_kept() -> None:
    network, logits = distribution(sharpness=1.0)
    row = canvas(temperature=0.0, sampler=EntropyBound(1e6))
    stats = check(
        network, row, logits / TEMPERATURE
    )  # entropy and soft embedding keep the schedule
    assert not torch.equal(stats.drawn, stats.argmax)
    draft = one_row.advance(row, stats)
    assert draft.accepted.all()
    assert torch.equal(row.tokens, stats.argmax)
    torch.testing.assert_close(soft_of(row), stats.soft)


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(1)
    head = VocabularyHead(torch.randn(VOCABULARY, 16), 30.0, chunk=9)
    count = 4000
    hidden = (torch.randn(1, 16) / 3).expand(count, -1).contiguous()
    network: Any = SimpleNamespace(head=head)
    drawn = score(network, hidden, [canvas(count)]).drawn
    expected = (head.logits(hidden[:1])[0] / TEMPERATURE).softmax(-1) * count
    chi2 = ((drawn.bincount(minlength=VOCABULARY) - expected) ** 2 / expected).sum()
    assert chi2 < 62  # 39 degrees of freedom, 1 %


@pytest.mark.parametrize("k", [1, 3, VOCABULARY, 1000])
def test_top_k(k: int) -> None:
    network, logits = distribution(sharpness=1.0)
    kept = logits.topk(min(k, VOCABULARY))[0][:, -1:]
    stats = check(
        network, canvas(top_k=k), (logits / TEMPERATURE).masked_fill(logits < kept, -1e30)
    )
    if k == 1:
        assert stats.entropy.max() == 0 and torch.equal(stats.drawn, stats.argmax)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 1.0])
def test_top_p(p: float) -> None:
    network, logits = distribution(sharpness=1.0)
    ranked = logits.softmax(-1).sort(descending=True)  # before temperature
    before = ranked.values.cumsum(-1) - ranked.values
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ranked.indices, before >= p)
    stats = check(network, canvas(top_p=p), (logits / TEMPERATURE).masked_fill(outside, -1e30))
    assert (stats.entropy.max() == 0) == (p == 1e-6)


def test_what_a_row_skips_is_its_own_choice() -> None:
    """Tried once a step has shown that it may suffice."""
    network, _ = distribution(sharpness=3.0)
    both = SimpleNamespace(head=network.head, hidden=network.hidden.repeat(2, 1))
    rows, plain = [canvas(), canvas(soft_skip=0.5)], [canvas(), canvas()]
    for step in range(2):
        stats = score(both, both.hidden, rows)
        exact = score(both, both.hidden, plain)
        for name in ("argmax", "drawn", "entropy", "top_probs"):
            assert torch.equal(getattr(stats, name), getattr(exact, name))
        torch.testing.assert_close(stats.soft[:LENGTH], exact.soft[:LENGTH])
        change = (stats.soft[LENGTH:] - exact.soft[LENGTH:]).norm(dim=1)
        longest = network.head.embedding.norm(dim=1).max() * 4
        assert (change.max() > 1e-4) == (step > 0) and change.max() <= 0.5 * longest
        for row, at in ((rows[0], slice(LENGTH)), (rows[1], slice(LENGTH, None))):
            one_row.advance(row, stats[at])
        for row, at in ((plain[0], slice(LENGTH)), (plain[1], slice(LENGTH, None))):
            one_row.advance(row, exact[at])


def test_how_many_tokens_count_is_a_rows_own_choice() -> None:
    """And that of its step; the entropy stays that of all of them."""
    network, logits = distribution(sharpness=1.0)
    both = SimpleNamespace(head=network.head, hidden=network.hidden.repeat(2, 1))
    rows = [canvas(), canvas(soft_top_k=SoftTopK(9, 1), max_steps=3, stopping=Never())]
    for temperature, count in ((TEMPERATURE, 9), (0.4 + 0.4 * 2 / 3, 3), (0.4 + 0.4 / 3, 1)):
        assert rows[1].soft_top_k() == count
        stats = score(both, both.hidden, rows)
        exact = score(both, both.hidden, [rows[0], rows[0]])
        for name in ("argmax", "drawn", "entropy", "top_probs"):
            assert torch.equal(getattr(stats[:LENGTH], name), getattr(exact[:LENGTH], name))
        torch.testing.assert_close(stats.soft[:LENGTH], exact.soft[:LENGTH])
        scaled = logits / temperature
        cut = scaled.masked_fill(scaled < scaled.topk(count)[0][:, -1:], -torch.inf)
        probs = cut.softmax(-1)
        own = stats[LENGTH:]
        assert torch.equal(own.drawn, inverse_cdf(probs, rows[1].uniforms()))
        torch.testing.assert_close(own.soft, probs @ network.head.embedding * 4.0)
        torch.testing.assert_close(own.entropy, Categorical(logits=scaled).entropy())
        one_row.advance(rows[1], own)


def test_top_p_and_processors_act_before_the_few_are_chosen() -> None:
    network, logits = distribution(sharpness=1.0)
    favourite = int(logits[0].argmax())
    biased = logits.index_fill(1, torch.tensor([favourite]), -torch.inf)
    row = canvas(soft_top_k=3, top_k=20, processors=(LogitBias({favourite: float("-inf")}),))
    stats = score(network, network.hidden, [row])
    cut = biased.masked_fill(biased < biased.topk(3)[0][:, -1:], -torch.inf)
    probs = (cut / TEMPERATURE).softmax(-1)
    torch.testing.assert_close(stats.soft, probs @ network.head.embedding * 4.0)
    assert torch.equal(stats.drawn, inverse_cdf(probs, row.uniforms()))
    kept = biased.masked_fill(biased < biased.topk(20)[0][:, -1:], -torch.inf)
    entropy = Categorical(logits=kept / TEMPERATURE).entropy()
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [0, 2049, 2.5, None])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    class Odd:
        def k(self, step: int, max_steps: int) -> Any:
            return count

    network, _ = distribution()
    message = r"soft_top_k Odd: k must return a whole number from 1 to 2048, got .* at step 1"
    with pytest.raises(ValueError, match=message):
        score(network, network.hidden, [canvas(soft_top_k=Odd())])


def test_entropy_is_in_nats() -> None:
    network, logits = distribution()
    stats = score(network, network.hidden, [canvas()])
    torch.testing.assert_close(
        stats.entropy, Categorical(logits=logits / TEMPERATURE).entropy(), atol=1e-4, rtol=1e-4
    )


def test_what_a_row_asks_for_changes_no_bit_of_another() -> None:
    """Bans, cutoffs, kept logits, more named tokens, skips and few tokens, in one batch."""

    class KeepsLogits(EntropyBound):
        needs_logits: ClassVar[bool] = True

    torch.manual_seed(1)
    asks: list[dict[str, Any]] = [
        {},
        {"processors": (LogitBias({4: -math.inf}),)},
        {"processors": (LogitBias({4: 2.0}),)},
        {"top_k": 3},
        {"top_p": 0.5, "length": 5},
        {"top_k": 30, "top_p": 0.8},
        {"soft_top_k": 4},
        {"soft_top_k": 9, "min_tokens": 3},
        {"soft_skip": 0.3, "length": 7},
        {"sampler": KeepsLogits(), "top_tokens": 20},
        {"top_tokens": 12},
    ]
    network, _ = distribution(sharpness=1.0)
    rows = [canvas(**ask) for ask in asks]
    hidden = [torch.randn(row.length, 16) for row in rows]
    alone = [
        one_row.score(network.head, own, [row])[0] for own, row in zip(hidden, rows, strict=True)
    ]
    for order in ([*range(11)], [10, 9, 0, 3], [8, 6, 7, 1], [5, 4, 2, 9]):
        packed = torch.cat([hidden[i] for i in order])
        together = one_row.score(network.head, packed, [rows[i] for i in order])
        for i, stats in zip(order, together, strict=True):
            for part in fields(HeadStats):
                one, other = getattr(stats, part.name), getattr(alone[i], part.name)
                if part.name == "top_suffices":  # of a group without a skip it is not known
                    one, other = (
                        torch.zeros_like(stats.argmax).bool() if each is None else each
                        for each in (one, other)
                    )
                assert (one is None and other is None) or torch.equal(one, other), (asks[i], part)
    assert [stats.top_ids.shape[1] for stats in alone] == [8] * 9 + [20, 12]
    assert [stats.logits is not None for stats in alone] == [False] * 9 + [True, False]
