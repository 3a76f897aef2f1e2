"""Perplexity: windows that score each token of a text once, with the text before it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.oracle import network_of, oracle_encode_logits, random_oracle, tiny_config

from sfumato.diffusion.causal import Perplexity, perplexity, windows


@given(count=st.integers(1, 60), room=st.integers(2, 20), stride=st.integers(1, 19))
def test_each_token_is_scored_once(count: int, room: int, stride: int) -> None:
    stride = min(stride, room - 1)
    scored: list[int] = []
    for window in windows(count, room, stride, first=1):
        assert 0 <= window.start < window.scored and window.stop - window.start <= room
        scored += range(window.scored, window.stop)
    assert scored == list(range(1, count))


@pytest.mark.parametrize("begin", [None, 2])
def test_figures_are_those_of_the_reference(begin: int | None) -> None:
    oracle = random_oracle(tiny_config(), seed=3)
    network = network_of(oracle)
    ids = torch.randint(97, (23,), generator=torch.Generator().manual_seed(4)).tolist()
    opening = [] if begin is None else [begin]
    expected = 0.0
    for window in windows(23, 12 - len(opening), 5, 1 - len(opening)):
        tokens = torch.tensor([*opening, *ids[window.start : window.stop]])
        logs = oracle_encode_logits(oracle, tokens)[0].log_softmax(dim=-1)
        own = logs[:-1].gather(1, tokens[1:, None])[:, 0]
        expected += float(own[-(window.stop - window.scored) :].sum())
    shown: list[tuple[int, int]] = []
    figures = perplexity(network, ids, begin, 12, 5, lambda *done: shown.append(done))
    assert figures.log_likelihood == pytest.approx(expected, abs=1e-3)
    assert figures.tokens == 22 + len(opening) == shown[-1][0] == shown[-1][1]
    one_window = perplexity(network, ids, begin, 4096, 1)
    logs = oracle_encode_logits(oracle, torch.tensor([*opening, *ids]))[0].log_softmax(dim=-1)
    following = torch.tensor([*opening, *ids])[1:, None]
    assert one_window.log_likelihood == pytest.approx(
        float(logs[:-1].gather(1, following).sum()), abs=1e-3
    )
    for wrong in ({"context": 1}, {"stride": 12}, {"ids": ids[: 1 - len(opening)]}):
        given_fields = {"ids": ids, "begin": begin, "context": 12, "stride": 5} | wrong
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("ids", "text")):
            perplexity(network, **given_fields)


def test_derived_figures() -> None:
    figures = Perplexity(tokens=4, log_likelihood=-4 * math.log(8))
    assert figures.perplexity == pytest.approx(8)
    assert figures.bits_per(6) == pytest.approx(2)
    assert Perplexity(1, -1e9).perplexity == math.inf
