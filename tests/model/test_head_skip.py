"""What the soft embedding may leave out: the bound, what is skipped, and what stays exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.model.heads import CAP, ban, random_head
from tests.support.gguf_files import encode
from torch import Tensor

from sfumato import ops
from sfumato.model.head import AS_ROUNDED, HeadStats, Skip, VocabularyHead
from sfumato.ops.online_softmax import Bans, SoftmaxState
from sfumato.weights.formats import FORMATS, QuantizedTensor, Weight

EXACT = ("argmax", "drawn", "entropy", "top_ids", "top_probs")


@dataclass(frozen=True)
class Recording(VocabularyHead):
    """Remembers which chunks were read, one entry for each time."""

    read: list[int] = field(default_factory=list)

    def columns(self, start: int, *args: Any, **kwargs: Any) -> Weight:
        self.read.append(start)
        return super().columns(start, *args, **kwargs)


def inputs(positions: int, width: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(positions, width, generator=random),
        torch.rand(positions, generator=random) + 0.4,
        torch.rand(positions, generator=random, dtype=torch.float64),
    )


def assert_exact(stats: HeadStats, exact: HeadStats) -> None:
    for name in EXACT:
        assert torch.equal(getattr(stats, name), getattr(exact, name)), name


@settings(max_examples=20)
@example(vocab=300, chunk=7, spread=30.0, share=0.5, seed=0, tried=True, banned=True)
@given(
    vocab=st.integers(2, 400),
    chunk=st.sampled_from((1, 7, 64, 8192)),
    spread=st.sampled_from((0.0, 0.3, 3.0, 30.0, 1000.0)),
    share=st.sampled_from((1e-6, 1e-3, 0.1, 0.5, 0.999)),
    seed=st.integers(0, 2**31),
    tried=st.booleans(),
    banned=st.booleans(),
)
def test_no_more_is_left_out_than_allowed(
    vocab: int, chunk: int, spread: float, share: float, seed: int, tried: bool, banned: bool
) -> None:
    """Wherever it is tried. One-hot rows are appended to the embedding's, so that the soft
    embedding tells each token's own weight; they see a hidden state of zeros."""
    head, random = random_head(vocab, 8, chunk, spread, seed)
    embedding = torch.cat((head.embedding, torch.eye(vocab)), dim=1)
    hidden, temperature, uniform = inputs(6, 8, random)
    hidden = torch.cat((hidden, torch.zeros(6, vocab)), dim=1)
    head = VocabularyHead(embedding, CAP, chunk)
    adjust = ban(0, *range(chunk, min(vocab, 2 * chunk))) if banned and vocab > 1 else None
    exact = head(hidden, temperature, uniform, adjust)
    expected = torch.rand(6, generator=random) < (1.0 if tried else 0.5)
    skip = Skip(torch.full((6,), share), expected)
    stats = head(hidden, temperature, uniform, adjust, skip=skip)
    assert_exact(stats, exact)
    lost = (exact.soft - stats.soft)[:, 8:] / embedding.shape[1] ** 0.5
    assert (lost > -1e-5).all()
    assert lost.sum(dim=1).max() <= share + 1e-5
    difference = (exact.soft - stats.soft).norm(dim=1)
    longest = embedding.norm(dim=1).max() * embedding.shape[1] ** 0.5
    assert (difference <= (share + 1e-5) * longest).all()


def test_shares_are_each_positions_own() -> None:
    head, random = random_head(400, 8, 20, spread=6.0, seed=1)
    hidden, temperature, uniform = inputs(8, 8, random)
    exact = head(hidden, temperature, uniform)
    share = torch.tensor([0.0, 0.9] * 4)
    stats = head(hidden, temperature, uniform, skip=Skip(share, torch.ones(8, dtype=torch.bool)))
    error = (stats.soft - exact.soft).norm(dim=1) / exact.soft.norm(dim=1)
    assert (error[0::2] < 1e-6).all() and (error[1::2] > 1e-5).all()


def test_by_default_all_is_summed() -> None:
    """Bit for bit what two products a chunk give."""
    head, random = random_head(300, 8, 64, spread=30.0, seed=3)
    hidden, temperature, uniform = inputs(6, 8, random)
    state, soft = SoftmaxState.empty(6, torch.device("cpu")), torch.zeros(6, 8)
    for start, stop in head.chunks():
        rows = head.embedding[start:stop]
        raw = head.raw(hidden, start)
        mass, _, fade = ops.update_softmax(state, raw, start, temperature, CAP, torch.float32)
        soft = soft * fade[:, None] + mass @ rows
    expected = soft / state.sum_exp[:, None] * 8**0.5
    assert torch.equal(head(hidden, temperature, uniform).soft, expected)


@pytest.mark.parametrize("rounding", [2.0**-8, 2.0**-10])
def test_by_rounding_no_more_is_left_out_than_it_hides(rounding: float) -> None:
    """Of positions from flat to sharp: where the top tokens suffice, the vector is off by less than
    half of the rounding; elsewhere a second sweep gives all of it. Alone each has the same bits."""
    head, random = random_head(400, 32, 50, spread=1.0, seed=5)
    head = replace(head, rounding=rounding)
    count = 60
    winners = torch.randint(400, (count,), generator=random)
    hidden = head.embedding[winners] * torch.linspace(1, 24, count)[:, None]
    _, temperature, uniform = inputs(count, 32, random)
    yes, share = torch.ones(count, dtype=torch.bool), torch.full((count,), AS_ROUNDED)
    exact = head(hidden, temperature, uniform)
    stats = head(hidden, temperature, uniform, skip=Skip(share, yes))
    suffices = stats.top_suffices
    assert suffices is not None and 10 < int(suffices.sum()) < count - 10
    assert_exact(stats, exact)
    off = (stats.soft - exact.soft).norm(dim=1) / exact.soft.norm(dim=1)
    assert 1e-5 < off[suffices].max() <= rounding / 2 * 1.01 and off[~suffices].max() < 1e-5
    for at in (slice(i, i + 1) for i in range(0, count, 7)):
        own = head(hidden[at], temperature[at], uniform[at], skip=Skip(share[at], yes[at]))
        assert torch.equal(own.soft, stats.soft[at]) and own.top_suffices is not None
        assert torch.equal(own.top_suffices, suffices[at])


def test_what_is_not_late_is_summed_within_the_pass() -> None:
    """To the bit as without a skip, whatever is presumed; whether the top tokens would have
    sufficed is found for the next step."""
    head, random = random_head(300, 32, 50, spread=8.0, seed=6)
    head = replace(head, rounding=2.0**-8)
    arguments = inputs(20, 32, random)
    yes, share = torch.ones(20, dtype=torch.bool), torch.full((20,), AS_ROUNDED)
    exact = head(*arguments)
    stats = head(*arguments, skip=Skip(share, yes, ~yes))
    assert torch.equal(stats.soft, exact.soft) and exact.top_suffices is None
    assert stats.top_suffices is not None and stats.top_suffices.any()
    late = head(*arguments, skip=Skip(share, ~yes, yes))
    assert torch.equal(late.top_suffices, stats.top_suffices)
    torch.testing.assert_close(late.soft, exact.soft)


def test_no_row_is_read_for_the_second_product_unless_the_skip_fails() -> None:
    """Where scores come from packed chunks, none is even dequantized."""
    random = torch.Generator().manual_seed(4)
    values = torch.randn(1000, 256, generator=random) / 16
    data = torch.from_numpy(encode(values, "Q8_0", seed=1))
    stored = QuantizedTensor(data, FORMATS["Q8_0"], (1000, 256))
    chunks = [stored[start : start + 50] for start in range(0, 1000, 50)]
    head = Recording(stored, CAP, 50, chunks)
    winners = torch.tensor([3, 49, 960])
    hidden = stored.dequantize()[winners] * 25
    ones, uniform = torch.ones(3), torch.rand(3, generator=random).double()
    yes = torch.ones(3, dtype=torch.bool)
    # A share of 0 leaves nothing out; a pass without shares is an operation, of another object.
    exact = head(hidden, ones, uniform, skip=Skip(torch.zeros(3), yes))
    assert torch.equal(exact.argmax, winners) and exact.top_probs[:, 0].min() > 0.99
    assert head.read == list(range(0, 1000, 50))
    head.read.clear()
    skip = Skip(torch.full((3,), 1e-2), yes)
    stats = head(hidden, ones, uniform, skip=skip)
    assert head.read == []
    assert_exact(stats, exact)
    torch.testing.assert_close(stats.soft, exact.soft, rtol=0, atol=0.02)
    hidden[1] = 0  # of a flat distribution: a second sweep, for that position alone
    exact = head(hidden, ones, uniform, skip=Skip(torch.zeros(3), yes))
    head.read.clear()
    failed = head(hidden, ones, uniform, skip=skip)
    assert head.read == list(range(0, 1000, 50))
    assert_exact(failed, exact)
    torch.testing.assert_close(failed.soft[1], exact.soft[1])
    assert torch.equal(failed.soft[::2], stats.soft[::2])


@pytest.mark.parametrize("temperature", [1.0, 1e-6])
def test_a_score_far_above_the_first(temperature: float) -> None:
    """Also where a whole chunk is banned, before there is any peak."""
    embedding = torch.full((100, 1), -1.0)
    embedding[70] = 1.0
    head = VocabularyHead(embedding, CAP, 10)
    arguments = (torch.full((2, 1), 100.0), torch.full((2,), temperature), torch.rand(2).double())
    skip = Skip(torch.tensor([0.0, 0.5]), torch.tensor([True, True]))
    bans = Bans.of([dict.fromkeys(range(10), 2)], [2], torch.device("cpu"))
    for how in ({}, {"adjust": ban(*range(10))}, {"bans": bans}):
        stats = head(*arguments, skip=skip, **how)
        torch.testing.assert_close(stats.soft, torch.ones(2, 1))


def test_bans_hold_in_the_second_sweep() -> None:
    head, random = random_head(60, 8, 10, spread=0.1, seed=2)
    arguments = inputs(5, 8, random)
    bans = Bans.of([{7: 5, 30: 2}], [5], torch.device("cpu"))
    skip = Skip(torch.full((5,), 1e-3), torch.ones(5, dtype=torch.bool))
    stats, exact = head(*arguments, bans=bans, skip=skip), head(*arguments, bans=bans)
    assert_exact(stats, exact)
    torch.testing.assert_close(stats.soft, exact.soft)


def test_without_soft_embeddings_all_else_is_the_same() -> None:
    head, random = random_head(60, 8, 10, spread=3.0, seed=2)
    arguments = inputs(5, 8, random)
    skip = Skip(torch.full((5,), 0.5), torch.ones(5, dtype=torch.bool))
    for how in ({}, {"skip": skip}):
        exact = head(*arguments, **how)
        stats = head(*arguments, embeds=False, **how)
        assert_exact(stats, exact)
        assert not stats.soft.any()
        some = torch.tensor([True, False, False, True, True])
        stats = head(*arguments, embeds=some, **how)
        assert_exact(stats, exact)
        assert torch.equal(stats.soft[some], exact.soft[some]) and not stats.soft[~some].any()
