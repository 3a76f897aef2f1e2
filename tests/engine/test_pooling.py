"""Vectors of prompts: the hidden states of `transformers`, pooled, in any chunks and company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.oracle import F, S, network_of, oracle_hidden, random_oracle, tiny_config
from tests.support.scripted_engine import run
from torch import Tensor
from torch.nn.functional import normalize

import sfumato
from sfumato import Engine, EngineConfig, Model, Request
from sfumato.engine import Finished, Pooling, PromptScoring
from sfumato.tasks.wants import PooledState

HEAD: Any = None  # which a pooler does not use


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu", dtype="float32")


def serving(model: Model, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**({"slots": 4, "context": 256} | config)))


def own_vector(model: Model, ids: list[int], kind: str) -> Tensor:
    """Encoded by itself, in one piece."""
    (hidden,) = model.network.encode_hidden([torch.tensor(ids)], [model.network.new_slot(256)])
    return normalize(hidden[-1] if kind == "last" else hidden.mean(dim=0), dim=0)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_parity_with_transformers(kind: str) -> None:
    """Hidden states of the encode phase after the final norm, over several windows and pieces."""
    oracle = random_oracle(tiny_config(layer_types=[S, S, F, S, F], vocab_size=101), seed=3)
    network = network_of(oracle)
    ids = torch.randint(0, 101, (53,), generator=torch.Generator().manual_seed(1))
    hidden = oracle_hidden(oracle, ids)
    expected = normalize(hidden[-1] if kind == "last" else hidden.mean(dim=0), dim=0)
    slot, pooler = network.new_slot(64), PooledState(Pooling(kind), len(ids))
    pooler.begin(len(ids))
    for start in range(0, len(ids), 20):
        (part,) = network.encode_hidden([ids[start : start + 20]], [slot])
        pooler.add(HEAD, start, part, 8)
    vector = pooler.result()
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(vector.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("chunk", [512, 7])
def test_vectors_beside_other_rows(model: Model, chunk: int) -> None:
    """The same in any chunks, beside a reply; a slot that holds the prompt changes nothing."""
    ids = model.prompt_ids("What is the capital of France?")
    engine = serving(model, prefill_chunk=chunk)
    engine.submit(Request("Who are you?", max_tokens=8))
    for _ in range(2):
        handles = [
            engine.submit(Request(ids=own, pooling=Pooling(kind), max_tokens=0))
            for own in (ids, ids[:9])
            for kind in ("mean", "last")
        ]
        run(engine)
        ends = [handle.terminal for handle in handles]
        for end, own, kind in zip(ends, (ids, ids, ids[:9], ids[:9]), ("mean", "last") * 2,
                                  strict=True):  # fmt: skip
            assert isinstance(end, Finished) and end.vector is not None
            torch.testing.assert_close(end.vector, own_vector(model, own, kind))
            assert (end.reply.token_ids, end.account.output_tokens) == ([], 0)
            assert end.account.cached_tokens in ((0,) if kind == "mean" else (0, len(own) - 1))


def test_what_does_not_go_with_a_vector(model: Model) -> None:
    engine, some = serving(model), Pooling()
    with pytest.raises(ValueError, match="set max_tokens to 0"):
        engine.submit(Request("a", pooling=some))
    with pytest.raises(ValueError, match="pooling, scoring: give at most one"):
        engine.submit(Request("a", pooling=some, scoring=PromptScoring(), max_tokens=0))
    with pytest.raises(ValueError, match="pooling: must be 'mean' or 'last', got 'max'"):
        Pooling("max")
    pooler = PooledState(Pooling("last"), 1)
    pooler.begin(1)
    pooler.add(HEAD, 0, torch.full((1, 4), torch.nan), 8)
    with pytest.raises(FloatingPointError, match="no finite numbers"):
        pooler.result()
    wrong: Any = SimpleNamespace(kind="mean")
    with pytest.raises(ValueError, match="must be a Pooling"):
        engine.submit(Request("a", pooling=wrong, max_tokens=0))
