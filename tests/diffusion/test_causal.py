"""The causal mode against `transformers`: its encoder forward and the tied head."""

from __future__ import annotations

import pytest
import torch
from tests.support.oracle import network_of, oracle_encode_logits, random_oracle, tiny_config
from torch import Tensor

from sfumato.diffusion import causal
from sfumato.diffusion.causal import log_likelihoods, next_scores, row_log_likelihoods

TOLERANCE = 1e-4  # in nats, of float32


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def oracle():
    return random_oracle(tiny_config(), seed=3)


@pytest.fixture(scope="module")
def network(oracle):
    return network_of(oracle)


def expected(oracle, ids: Tensor, after: int) -> Tensor:
    """Of ids[after + 1:], from the reference."""
    logs = oracle_encode_logits(oracle, ids)[0].log_softmax(dim=-1)
    return logs[after:-1].gather(1, ids[after + 1 :, None])[:, 0]


@pytest.mark.parametrize("prefix", [0, 5, 21])
def test_token_log_probabilities_are_those_of_the_reference(
    oracle, network, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a prefix, within the window of 8 and past it, in pieces."""
    monkeypatch.setattr(causal, "PIECE", 7)
    ids = tokens(34)
    slot = network.new_slot(40)
    network.encode([ids[:prefix]], [slot])
    ours = log_likelihoods(network, slot, ids[prefix:])
    torch.testing.assert_close(ours, expected(oracle, ids, prefix), rtol=0, atol=TOLERANCE)
    assert slot.length == prefix, "the slot stays as it is"
    assert ours.equal(log_likelihoods(network, slot, ids[prefix:]))


def test_rows_that_share_a_slot_do_not_change_each_other(network) -> None:
    """Short and long ones, in one batch and in forwards of a few tokens."""
    prefix = tokens(11)
    slot, other = network.new_slots(2, 40)
    network.encode([prefix, prefix[:4]], [slot, other])
    rows = [tokens(count, seed=count) for count in (1, 9, 2, 20)]
    slots = [slot, slot, other, slot]
    alone = [log_likelihoods(network, *row) for row in zip(slots, rows, strict=True)]
    assert [len(logs) for logs in alone] == [0, 8, 1, 19]
    for together in (512, 10):
        batch = row_log_likelihoods(network, slots, rows, together)
        assert all(a.equal(b) for a, b in zip(alone, batch, strict=True)), together


def test_next_scores_are_those_of_the_reference(oracle, network) -> None:
    ids = tokens(23)
    slot = network.new_slot(40)
    for start, stop in ((0, 9), (9, 10), (10, 23)):
        scores = next_scores(network, slot, ids[start:stop])
        reference = oracle_encode_logits(oracle, ids[:stop])[0][-1]
        torch.testing.assert_close(scores, reference, rtol=0, atol=TOLERANCE)
        assert slot.length == stop
    allowed = torch.zeros(90, dtype=torch.bool)
    allowed[[3, 70]] = True
    masked = next_scores(network, slot, ids[:1], allowed)
    assert masked.isfinite().nonzero()[:, 0].tolist() == [3, 70], (
        "nor what the mask has no entry of"
    )


def test_what_cannot_be_scored_is_refused(network) -> None:
    slot = network.new_slot(4)
    with pytest.raises(ValueError, match="row 0: must hold one token at least"):
        log_likelihoods(network, slot, tokens(0))
    with pytest.raises(ValueError, match="token ids must lie in"):
        next_scores(network, slot, torch.tensor([97]))
    with pytest.raises(ValueError, match="exceed the context of 4096"):
        log_likelihoods(network, slot, torch.zeros(4097, dtype=torch.int64))
    with pytest.raises(ValueError, match="room for 4"):
        next_scores(network, slot, tokens(5))
    with pytest.raises(ValueError, match="allow one of them"):
        next_scores(network, slot, tokens(1), torch.zeros(97, dtype=torch.bool))
    assert slot.length == 0
