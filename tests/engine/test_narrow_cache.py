"""A narrow cache in the engine: what is reused gives the bits that a cold run gives.

The embedded model has a window of 128, which the prompts and replies here go round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.support.scripted_engine import run
from tests.support.shallow_model import shallow_checkpoint
from torch import Tensor

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.engine import Draft, Finished
from sfumato.model.placement import CACHE_TYPES

CONTEXT, SHARED = 400, 180


@dataclass(frozen=True)
class Visible:
    """What a client sees of a request, down to the last bit, and the tokens that were reused."""

    text: str
    ids: list[int]
    entropy: Tensor  # float32 [steps of all canvases, length]
    cached: int


@pytest.fixture(scope="module", params=["fp8", "q8_0"])
def model(request: pytest.FixtureRequest) -> Model:
    loaded = sfumato.load(shallow_checkpoint(), device="cpu", cache_type=request.param)
    assert loaded.network.cache_dtype == CACHE_TYPES[request.param]
    return loaded


def engine(model: Model, snapshots: int = 2**30) -> Engine:
    config = EngineConfig(2, CONTEXT, prefill_chunk=48, snapshot_bytes=snapshots, strict=True)
    return Engine(model, config)


def ids(model: Model, seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (count,), generator=random)
    return model.tokenizer.encode("".join(map(chr, letters.tolist())))


def replies(serving: Engine, *prompts: Sequence[int]) -> list[Visible]:
    """Of prompts that come at once."""
    sampler = SamplerConfig(max_steps=4, ignore_eos=True)
    handles = [
        serving.submit(Request(ids=ids, max_tokens=64, seed=7, sampler=sampler, drafts=True))
        for ids in prompts
    ]
    run(serving)
    values = []
    for handle in handles:
        drafts = [event.entropy for event in handle.events() if isinstance(event, Draft)]
        assert isinstance(handle.terminal, Finished)
        reply, account = handle.terminal.reply, handle.terminal.account
        entropy = torch.stack(drafts)
        values.append(Visible(reply.text, reply.token_ids, entropy, account.cached_tokens))
    return values


def assert_as_cold(model: Model, prompt: Sequence[int], warm: Visible) -> None:
    """An engine that has served no request and keeps nothing gives the same."""
    (cold,) = replies(engine(model, snapshots=0), prompt)
    assert cold.cached == 0 and cold.text
    assert (warm.text, warm.ids) == (cold.text, cold.ids)
    assert torch.equal(warm.entropy, cold.entropy)


def test_a_shared_prefix_in_two_slots(model: Model) -> None:
    """Two prompts find out that they share it, and the next two, which run together, have it."""
    serving, shared = engine(model), ids(model, 0, SHARED)
    prompts = [[*shared, *ids(model, seed, 30)] for seed in (1, 2, 3, 4)]
    for prompt in prompts[:2]:
        replies(serving, prompt)
    together = replies(serving, *prompts[2:])
    assert [warm.cached for warm in together] == [SHARED, SHARED]
    for prompt, warm in zip(prompts[2:], together, strict=True):
        assert_as_cold(model, prompt, warm)


def test_the_next_turn_needs_what_rings_have_overwritten(model: Model) -> None:
    serving, prompt = engine(model), ids(model, 5, SHARED)
    (first,) = replies(serving, prompt)
    assert serving.state().snapshot_bytes > 0
    turn = [*prompt, *first.ids[:20], *ids(model, 6, 30)]
    (warm,) = replies(serving, turn)
    assert warm.cached == SHARED
    assert_as_cold(model, turn, warm)
