"""Top-k and top-p cutoffs against plain ones on all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.model.heads import CAP, ban, largest_tensor, random_head
from torch import Tensor

from sfumato.model import truncate
from sfumato.model.head import VocabularyHead


def survivors(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, float]:
    """Which of the logits [vocab] survive, by the book: top-k first, then the shortest head of
    the renormalised probs whose mass reaches top_p; and how near that mass came to top_p."""
    ranked, order = logits.double().sort(descending=True, stable=True)
    kept = torch.ones(len(logits), dtype=torch.bool)
    if top_k > 0:
        kept = ranked >= ranked[min(top_k, len(ranked)) - 1]
    margin = 1.0
    if top_p < 1:
        probs = ranked.masked_fill(~kept, -torch.inf).softmax(dim=0)
        before = probs.cumsum(dim=0) - probs
        kept &= before < top_p
        kept[0] = True
        margin = float((before[1:] - top_p).abs().min())  # the first survives whatever top_p
    alive = torch.zeros(len(logits), dtype=torch.bool)
    alive[order] = kept
    return alive, margin


@settings(max_examples=30)
@given(
    vocab=st.integers(2, 300),
    chunk=st.sampled_from((1, 7, 64, 8192)),
    spread=st.sampled_from((0.01, 0.5, 3.0)),
    candidates=st.sampled_from((2, 16, 256)),
    ks=st.lists(st.sampled_from((0, 1, 2, 5, 40, 300, 1000)), min_size=1, max_size=6),
    ps=st.lists(st.sampled_from((1.0, 0.0, 0.1, 0.5, 0.9, 0.999)), min_size=6, max_size=6),
    banned=st.sampled_from(((), (0, 1), tuple(range(1, 40)))),
    seed=st.integers(0, 2**31),
)
def test_cutoffs_keep_what_the_book_keeps(
    vocab: int,
    chunk: int,
    spread: float,
    candidates: int,
    ks: list[int],
    ps: list[float],
    banned: tuple[int, ...],
    seed: int,
) -> None:
    head, random = random_head(vocab, 8, chunk, spread, seed)
    hidden = torch.randn(len(ks), 8, generator=random)
    banned = tuple(token for token in banned if token < vocab - 1)
    adjust = ban(*banned) if banned else None
    ps = ps[: len(ks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncate, "CANDIDATES", candidates)
        cutoffs = truncate.cutoffs(head, hidden, torch.tensor(ks), torch.tensor(ps), adjust)
    assert cutoffs.dtype == torch.float32
    logits = head.logits(hidden)
    if adjust is not None:
        logits = adjust(logits, 0)
    for row, (k, p) in enumerate(zip(ks, ps, strict=True)):
        expected, margin = survivors(logits[row], k, p)
        assume(margin > 1e-5)
        alive = logits[row] >= cutoffs[row]
        if k > 0 or p < 1:
            # A cutoff may also keep banned tokens of mass 0; they are banned all the same.
            possible = logits[row] > -torch.inf
            assert torch.equal(alive & possible, expected & possible), (row, k, p)
            assert alive[logits[row].argmax()]
        else:
            assert (alive | (logits[row] == -torch.inf)).all()


@pytest.mark.parametrize("positions", [truncate.GROUP, 90])
@pytest.mark.parametrize("top_p", [0.5, 0.97])
def test_a_flat_distribution_is_wider_than_the_candidates(top_p: float, positions: int) -> None:
    """Its nucleus takes no sort and a few passes, however many positions have one, and each
    position has its own cutoff."""
    vocab, chunk = 2000, 256
    head, random = random_head(vocab, 8, chunk, spread=0.3, seed=1)
    hidden = torch.randn(positions, 8, generator=random)
    top_k = torch.zeros(positions, dtype=torch.int64)
    top_ps = torch.full((positions,), top_p)
    starts: list[int] = []

    def counted(scores: Tensor, start: int) -> Tensor:
        starts.append(start)
        return scores

    with largest_tensor() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "sort", None)
        cutoffs = truncate.cutoffs(head, hidden, top_k, top_ps, counted)
    passes = 2 if positions <= truncate.GROUP else 1 + len(truncate.DIGITS)
    assert len(starts) == passes * len(head.chunks())
    logits = head.logits(hidden)
    kept = (logits >= cutoffs[:, None]).sum(dim=1)
    assert (kept > truncate.CANDIDATES).all()
    mass = logits.double().softmax(dim=1).masked_fill(logits < cutoffs[:, None], 0).sum(dim=1)
    assert (mass >= top_p - 1e-6).all() and (mass < top_p + 2 / vocab).all()
    assert (logits == cutoffs[:, None]).any(dim=1).all()
    assert seen.numel <= max(truncate.GROUP * vocab, positions * truncate.BINS)
    unchanged = torch.arange(positions) % 3 > 0
    top_ps[~unchanged] = 1.0
    assert torch.equal(truncate.cutoffs(head, hidden, top_k, top_ps)[unchanged], cutoffs[unchanged])


def test_a_nucleus_of_nearly_everything_is_found_at_a_real_vocabulary() -> None:
    """Positive, negative and equal scores, zero among them, against a sort in float64."""
    scores = torch.randn(3, 262144, generator=torch.Generator().manual_seed(5))
    scores[1] = (scores[1] * 4).round() / 4  # many ties, of 0 and -0 as well
    scores[2] -= 9
    for top_p in (0.3, 0.9, 0.99999):
        least = truncate.least_scores(
            lambda: scores.split(4096, dim=1), scores.logsumexp(dim=1), torch.full((3,), top_p)
        )
        for row, cutoff in zip(scores, least, strict=True):
            probs = row.double().softmax(dim=0)
            assert probs[row > cutoff].sum() < top_p + 1e-6
            assert probs[row >= cutoff].sum() > top_p - 1e-6
            assert (row == cutoff).any()


def test_rows_choose_for_themselves() -> None:
    head, random = random_head(500, 8, 64, spread=0.5, seed=2)
    hidden = torch.randn(1, 8, generator=random).expand(4, -1)
    top_k, top_p = torch.tensor([0, 3, 0, 10]), torch.tensor([1.0, 1.0, 0.9, 0.5])
    cutoffs = truncate.cutoffs(head, hidden, top_k, top_p)
    logits = head.logits(hidden)
    kept = (logits >= cutoffs[:, None]).sum(dim=1).tolist()
    assert kept[0] == 500 and kept[1] == 3
    assert 256 < kept[2] < 500 and 3 <= kept[3] < 10


def test_a_wide_top_k_is_one_positions_cost() -> None:
    """Others keep their numbers, to the last bit, and what is held does not grow with them."""
    vocab, positions = 3000, 70
    head, random = random_head(vocab, 8, 500, spread=2.0, seed=3)
    hidden = torch.randn(positions, 8, generator=random)
    top_k = torch.full((positions,), 5)
    top_p = torch.rand(positions, generator=random) * 0.5 + 0.4
    usual = truncate.cutoffs(head, hidden, top_k, top_p)
    wide = top_k.clone()
    wide[7] = 1000
    with largest_tensor() as seen:
        ours = truncate.cutoffs(head, hidden, wide, top_p)
    unchanged = torch.arange(positions) != 7
    assert torch.equal(ours[unchanged], usual[unchanged]) and ours[7] <= usual[7]
    assert seen.numel <= positions * 500  # the scores of a chunk, and no table of all candidates


def test_ties_with_the_cutoff_survive() -> None:
    embedding = torch.tensor([[3.0], [2.0], [2.0], [2.0], [1.0]])
    head = VocabularyHead(embedding, CAP, 2)
    cutoffs = truncate.cutoffs(head, torch.ones(1, 1), torch.tensor([2]), torch.ones(1))
    assert (head.logits(torch.ones(1, 1)) >= cutoffs[:, None]).tolist() == [[True] * 4 + [False]]


def test_a_nucleus_of_nearly_everything_leaves_top_k_in_force() -> None:
    """In float32 the survivors' probabilities may never add up to a top-p next to 1."""
    head, random = random_head(600, 8, 256, spread=1.0, seed=4)
    hidden = torch.randn(64, 8, generator=random)
    top_k = torch.full((64,), 40)
    logits = head.logits(hidden)
    for top_p in (0.9999999, 1 - 2**-24):
        cutoffs = truncate.cutoffs(head, hidden, top_k, torch.full((64,), top_p))
        assert ((logits >= cutoffs[:, None]).sum(dim=1) <= 40).all()
