"""The mixture of experts, interpreted, against its reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.kernels import close, in_turn, interpreted, poisoned
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.reference import Gating

pytestmark = interpreted

COUNT, HIDDEN, INNER = 5, 40, 24


def weights() -> tuple[Tensor, Tensor]:
    return (
        torch.randn(COUNT, 2 * INNER, HIDDEN) * HIDDEN**-0.5,
        torch.randn(COUNT, HIDDEN, INNER) * INNER**-0.5,
    )


def choice(tokens: int, k: int, favourite: float = 0.0) -> tuple[Tensor, Tensor]:
    scores = torch.randn(tokens, COUNT)
    scores[:, 2] += favourite
    shares, chosen = scores.softmax(-1).topk(k)
    return chosen, shares


@pytest.mark.parametrize(
    ("tokens", "k", "favourite", "gating"),
    [(1, 1, 0.0, "silu"), (5, 2, 0.0, "gelu"), (70, 1, 1e3, "silu")],
)
def test_mixtures_are_those_of_the_reference(
    tokens: int, k: int, favourite: float, gating: Gating
) -> None:
    from sfumato.ops.triton.experts import experts

    x, (gate_up, down), (chosen, shares) = (
        torch.randn(tokens, HIDDEN),
        weights(),
        choice(tokens, k, favourite),
    )
    wide = (each.double() for each in (gate_up, down))
    expected = reference.experts.reference(x.double(), chosen, shares, *wide, gating)
    close(experts(x, chosen, shares, gate_up, down, gating), expected)


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where most programs leave early: one expert has all tokens."""
    from sfumato.ops.triton import experts as module

    x, (gate_up, down), (chosen, shares) = torch.randn(70, HIDDEN), weights(), choice(70, 1, 1e3)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(*x.shape))
    assert module.experts(x, chosen, shares, gate_up, down).isfinite().all()
    monkeypatch.undo()
    assert not module.experts(x[:0], chosen[:0], shares[:0], gate_up, down).numel()


def test_a_token_has_the_same_mixture_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others make the tile that for many tokens."""
    from sfumato.ops.triton import tiles
    from sfumato.ops.triton.experts import experts

    monkeypatch.setattr(tiles, "FEW", 4)
    x, (gate_up, down), (chosen, shares) = torch.randn(9, HIDDEN), weights(), choice(9, 2)
    many = experts(x, chosen, shares, gate_up, down)
    some = slice(3, 6)
    assert torch.equal(experts(x[some], chosen[some], shares[some], gate_up, down), many[some])


@pytest.mark.parametrize("tokens", [1, 1500])
def test_the_order_is_that_of_a_stable_sort(tokens: int) -> None:
    from sfumato.ops.triton.experts import sort

    chosen = torch.randint(0, 6, (tokens, 2))
    chosen[chosen == 4] = 3  # an expert without tokens
    order, starts = sort(chosen, 7)
    expected = chosen.flatten().argsort(stable=True)
    assert torch.equal(order.long(), expected)
    counts = torch.bincount(chosen.flatten(), minlength=7)
    assert torch.equal(starts.long(), torch.cat((torch.zeros(1).long(), counts.cumsum(0))))


def test_no_choice_has_more_tiles_than_programs() -> None:
    from sfumato.ops.triton.tiles import most_tiles

    assert most_tiles(2048, 128, 64) == 158
    for count, experts, tile in ((9, 3, 4), (2, 5, 4), (16, 3, 8), (1, 1, 64)):
        sizes = itertools.product(range(count + 1), repeat=experts)
        worst = max(sum(-(-n // tile) for n in each) for each in sizes if sum(each) == count)
        assert worst == most_tiles(count, experts, tile)


@pytest.mark.parametrize("format", ["", "Q8_0"])
def test_programs_that_take_tiles_in_turn_give_the_same_bits(format: str) -> None:
    """Three programs for some forty tiles, of which each has several."""
    from sfumato.ops.triton.experts import experts
    from sfumato.ops.triton.self_test import Trial

    trial, (chosen, shares) = Trial(torch.device("cpu")), choice(300, 2, 2.0)
    gate_up, down = trial.weight(format, COUNT, 256, 64), trial.weight(format, COUNT, 64, 128)
    given = torch.randn(300, 64), chosen, shares, gate_up, down
    with in_turn(3) as grids:
        got = experts(*given)
    assert grids == [(3,), (3,)]
    assert torch.equal(got, experts(*given))


def test_what_it_does_not_take_is_left_to_torch() -> None:
    from sfumato.ops.triton.experts import TWINS

    x, (gate_up, down), (chosen, shares) = torch.randn(4, HIDDEN), weights(), choice(4, 1)
    serves = TWINS["experts"].serves
    assert serves(x, chosen, shares, gate_up, down, "gelu")
    assert serves(x, chosen, shares, gate_up, down, "silu")
    assert not serves(x, chosen.int(), shares, gate_up, down, "gelu")
    assert not serves(x.bfloat16(), chosen, shares, gate_up.bfloat16(), down.bfloat16(), "gelu")
    assert not serves(x, chosen, shares, gate_up.transpose(1, 2), down, "gelu")
