"""Soft embedding and draw of the most probable tokens alone, and which results stay exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.heads import CAP, ban, largest_tensor, random_head
from tests.support.gguf_files import encode
from torch import Tensor

from sfumato.model.head import HeadStats, Skip, VocabularyHead
from sfumato.model.most_probable import MostProbable
from sfumato.weights.formats import FORMATS, QuantizedTensor, Weight

EXACT = ("argmax", "entropy", "top_ids", "top_probs")


def inputs(positions: int, width: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(positions, width, generator=random),
        torch.rand(positions, generator=random) + 0.4,
        torch.rand(positions, generator=random, dtype=torch.float64),
    )


def assert_exact(stats: HeadStats, exact: HeadStats, at: Any = slice(None)) -> None:
    for name in EXACT:
        assert torch.equal(getattr(stats, name)[at], getattr(exact, name)[at]), name


def kept(logits: Tensor, count: Tensor) -> Tensor:
    """Bool like logits [positions, vocab]: the most probable, of equal ones those of lowest ids."""
    order = logits.sort(dim=1, descending=True, stable=True)[1]
    rank = order.argsort(dim=1)
    return (rank < count[:, None]) | (count == 0)[:, None]


def check(stats: HeadStats, count: Tensor, uniform: Tensor, embedding: Tensor, atol: float) -> None:
    """Against a softmax of all logits, of which only the most probable are kept."""
    assert stats.logits is not None
    logits = stats.logits.double()
    probs = logits.softmax(dim=1) * kept(stats.logits, count)
    probs /= probs.sum(dim=1, keepdim=True)
    soft = probs @ embedding.double() * embedding.shape[1] ** 0.5
    torch.testing.assert_close(stats.soft.double(), soft, rtol=0, atol=atol)
    after = probs.cumsum(dim=1)
    before = after - probs
    drawn = stats.drawn[:, None]
    assert (probs.gather(1, drawn) > 0).all()
    assert (before.gather(1, drawn)[:, 0] <= uniform + 1e-6).all()
    assert (after.gather(1, drawn)[:, 0] >= uniform - 1e-6).all()


@settings(max_examples=15)
@given(
    vocab=st.integers(2, 400),
    chunk=st.sampled_from((1, 7, 64, 100, 8192)),
    spread=st.sampled_from((0.0, 0.3, 3.0, 30.0)),
    most=st.sampled_from((1, 2, 8, 64, 399)),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    banned=st.booleans(),
)
def test_a_dense_computation_finds_the_same(
    vocab: int, chunk: int, spread: float, most: int, seed: int, ties: bool, banned: bool
) -> None:
    head, random = random_head(vocab, 8, chunk, spread, seed)
    hidden, temperature, uniform = inputs(9, 8, random)
    if ties:  # few values each, so that the scores are exact, and mostly equal
        hidden = hidden.round()
        head = replace(head, embedding=head.embedding.round())
    adjust = ban(0, *range(chunk, min(vocab, 2 * chunk))) if banned else None
    count = torch.randint(0, most + 1, (9,), generator=random)
    arguments = (hidden, temperature, uniform, adjust)
    exact = head(*arguments)
    stats = head(*arguments, keep_logits=True, soft_top_k=count)
    size = max(1.0, float(head.embedding.abs().max()))
    check(stats, count, uniform, head.embedding, atol=2e-5 * size)
    plain = head(*arguments, soft_top_k=count)  # ranked before the softcap, here as there
    assert_exact(plain, exact)
    assert torch.equal(plain.drawn, stats.drawn)
    torch.testing.assert_close(plain.soft, stats.soft, rtol=0, atol=2e-5 * size)
    all_of_it = (count == 0) | (count >= vocab)
    assert torch.equal(plain.drawn[all_of_it], exact.drawn[all_of_it])
    torch.testing.assert_close(plain.soft[all_of_it], exact.soft[all_of_it])


@settings(max_examples=12)
@given(
    vocab=st.integers(1, 300),
    chunks=st.tuples(st.integers(1, 40), st.integers(1, 400)),
    values=st.sampled_from((1, 3, 1000)),
    rising=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_most_probable_depend_on_neither_chunks_nor_positions(
    vocab: int, chunks: tuple[int, int], values: int, rising: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (5, vocab), generator=random).float()
    scores = scores.sort(dim=1)[0] if rising else scores
    count = torch.randint(1, vocab + 1, (5,), generator=random)
    wanted = [row.nonzero()[:, 0].tolist() for row in kept(scores, count)]

    def gathered_ids(which: slice, chunk: int) -> list[list[int]]:
        best = MostProbable(count[which], chunk)
        for start in range(0, vocab, chunk):
            best.offer(scores[which, start : start + chunk], start)
        values, ids = best.gathered()
        assert torch.equal(
            values.isfinite().sum(dim=1), count[which]
        )  # and what is there comes first
        return [row[:n].tolist() for row, n in zip(ids, count[which].tolist(), strict=True)]

    for chunk in chunks:
        assert gathered_ids(slice(None), chunk) == wanted
        assert [gathered_ids(slice(i, i + 1), chunk)[0] for i in range(5)] == wanted


@dataclass(frozen=True)
class Recording(VocabularyHead):
    """Remembers which chunks were read, one entry for each time."""

    read: list[int] = field(default_factory=list)

    def columns(self, start: int, *args: Any, **kwargs: Any) -> Weight:
        self.read.append(start)
        return super().columns(start, *args, **kwargs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_quantized_embeddings(name: str, packed: bool) -> None:
    """Where scores come from packed chunks, the most probable tokens need no dequantized chunk."""
    random = torch.Generator().manual_seed(4)
    values = torch.randn(1000, 256, generator=random) / 4
    data = torch.from_numpy(encode(values, name, seed=1))
    stored = QuantizedTensor(data, FORMATS[name], (1000, 256))
    chunks = [stored[start : start + 50] for start in range(0, 1000, 50)] if packed else None
    head = Recording(stored, CAP, 50, chunks)
    hidden, temperature, uniform = inputs(6, 256, random)
    count = torch.tensor([1, 2, 8, 64, 400, 999])
    stats = head(hidden, temperature, uniform, keep_logits=True, soft_top_k=count)
    check(stats, count, uniform, stored.dequantize(), atol=0.05 if packed else 1e-4)
    head.read.clear()
    head(hidden, temperature, uniform, soft_top_k=count)
    assert head.read == ([] if packed else list(range(0, 1000, 50)))
    head.read.clear()
    head(hidden, temperature, uniform, soft_top_k=count.index_fill(0, torch.tensor([3]), 0))
    assert head.read == list(range(0, 1000, 50))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Whose scores are often equal: the lowest ids are kept."""
    head, random = random_head(600, 32, 64, spread=3.0)
    head = VocabularyHead(head.embedding.to(dtype), CAP, 64)
    hidden, temperature, uniform = inputs(6, 32, random)
    count = torch.tensor([1, 3, 16, 64, 300, 0])
    arguments = (hidden.to(dtype), temperature, uniform)
    stats = head(*arguments, keep_logits=True, soft_top_k=count)
    assert stats.soft.dtype == dtype
    largest = float(stats.soft.abs().max())
    check(stats, count, uniform, head.embedding, atol=2 * torch.finfo(dtype).eps * largest)
    assert torch.equal(head(*arguments, soft_top_k=count).drawn, stats.drawn)


def test_rows_with_and_without_do_not_know_of_one_another() -> None:
    head, random = random_head(500, 16, 64, spread=3.0, seed=1)
    hidden, temperature, uniform = inputs(8, 16, random)
    count = torch.tensor([0, 4, 0, 40] * 2)
    exact = head(hidden, temperature, uniform)
    share = torch.tensor([0.0, 0.0, 0.5, 0.0] * 2)
    for skip in (None, Skip(share, torch.ones(8, dtype=torch.bool))):
        stats = head(hidden, temperature, uniform, skip=skip, soft_top_k=count)
        assert_exact(stats, exact)
        alone = [
            head(
                *(x[i : i + 1] for x in (hidden, temperature, uniform)),
                skip=skip and Skip(skip.share[i : i + 1], skip.expected[i : i + 1]),
                soft_top_k=count[i : i + 1],
            )
            for i in range(8)
        ]
        assert stats.drawn.tolist() == [int(one.drawn) for one in alone]
        torch.testing.assert_close(stats.soft, torch.cat([one.soft for one in alone]))
    assert torch.equal(stats.drawn[count == 0], exact.drawn[count == 0])
    changed = (stats.soft - exact.soft).norm(dim=1) > 1e-4
    assert changed[count > 0].all() and not changed[(count == 0) & (share == 0)].any()


def test_no_position_that_asks_is_the_exact_pass() -> None:
    head, random = random_head(100, 8, 32)
    arguments = inputs(4, 8, random)
    for count in (0, 100, 2000):
        stats = head(*arguments, soft_top_k=torch.full((4,), count))
        exact = head(*arguments)
        assert_exact(stats, exact)
        assert torch.equal(stats.soft, exact.soft) and torch.equal(stats.drawn, exact.drawn)


def test_one_token_is_the_argmax() -> None:
    head, random = random_head(300, 8, 32, spread=2.0)
    stats = head(*inputs(40, 8, random), soft_top_k=torch.ones(40, dtype=torch.int64))
    assert torch.equal(stats.drawn, stats.argmax)
    torch.testing.assert_close(stats.soft, head.embedding[stats.argmax] * 8**0.5)
    assert stats.entropy.min() > 0


def test_draws_are_in_the_order_of_ids() -> None:
    """Three tokens have 1/2, 1/3 and 1/6 of their mass, in another order than that of their ids."""
    embedding = torch.full((90, 1), -4.0)
    embedding[[7, 50, 80], 0] = torch.tensor([1.0, 3.0, 2.0]).log()
    head = VocabularyHead(embedding, 1e4, 20)
    uniform = torch.tensor([0, 0.16, 0.17, 0.66, 0.67, 1 - 2**-53], dtype=torch.float64)
    stats = head(torch.ones(6, 1), torch.ones(6), uniform, soft_top_k=torch.full((6,), 3))
    assert stats.drawn.tolist() == [7, 7, 50, 50, 80, 80]


def test_a_distribution_of_nothing_does_not_crash() -> None:
    """All banned, or no numbers: the canvas refuses these, by their entropy."""
    head, random = random_head(60, 8, 16)
    hidden, temperature, uniform = inputs(3, 8, random)
    count = torch.full((3,), 4)
    stats = head(hidden, temperature, uniform, ban(*range(60)), soft_top_k=count)
    assert stats.soft.isfinite().all()
    hidden[1] = torch.nan
    stats = head(hidden, temperature, uniform, soft_top_k=count)
    assert stats.entropy.isnan().tolist() == [False, True, False]
    assert (stats.drawn < 60).all()


def test_whole_logits_never_exist() -> None:
    vocab, chunk, positions, width = 5000, 512, 64, 8  # as many rows as a product has
    head, random = random_head(vocab, width, chunk)
    arguments = inputs(positions, width, random)
    for count in (1, 50, 600):
        with largest_tensor() as seen:
            head(*arguments, soft_top_k=torch.full((positions,), count))
        assert seen.numel <= max(2 * positions * (count + chunk), count * width)
