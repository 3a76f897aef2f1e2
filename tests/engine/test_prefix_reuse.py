"""Prefix reuse on a network: only new tokens are encoded, and the reply is the same.

A random quantized checkpoint with a window of 1,024: a prefix of 1,300 tokens goes round its
rings. The compiled operations sum in an order that depends on positions alone, so that what is
reused equals a cold run bit for bit; torch's own products round by the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.scripted_model import END_IDS, PIECES, TEMPLATE, tokenizer
from torch import Tensor

from sfumato import ops
from sfumato.api import Model, TextSide
from sfumato.bench.subject import random_checkpoint
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.engine import Draft, Engine, EngineConfig, Finished, Handle, Request
from sfumato.model.cache import Slot
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.text.template import ChatTemplate

SHARED, OWN, CONTEXT, LENGTH = 1300, 60, 1500, 32
CPU = torch.device("cpu")
# The model knows 512 tokens, and the tests' tokenizer fewer.
SPELLABLE = LogitBias(dict.fromkeys(range(len(PIECES), 512), float("-inf")))
BITWISE = ops.multiplies_bf16(CPU)  # else attention is torch's


@pytest.fixture(scope="module", params=["q4_k_m", "q8_0", "bf16"])
def network(request: pytest.FixtureRequest) -> Network:
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    return load_network(random_checkpoint("tiny", request.param, layers=3), CPU, dtype)


def tokens(seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    values: list[int] = torch.randint(0, 512, (count,), generator=random).tolist()
    return values


def logits(network: Network, slot: Slot) -> Tensor:
    canvas = torch.tensor(tokens(99, 32))
    return network.head.logits(network.denoise([canvas], [slot]))


def cold(network: Network, ids: Sequence[int]) -> Tensor:
    slot = network.new_slot(CONTEXT)
    network.encode([torch.tensor(ids)], [slot])
    return logits(network, slot)


def assert_same(network: Network, warm: Tensor, expected: Tensor) -> None:
    if BITWISE:
        assert torch.equal(warm, expected)
    else:
        difference = (warm - expected).norm() / expected.norm()
        # A rounding may choose another expert; bfloat16 activations round three digits off.
        assert difference < (0.2 if network.dtype == torch.bfloat16 else 0.02)


@dataclass(frozen=True)
class Visible:
    """What a client sees of a request, down to the last bit."""

    ids: list[int]
    entropy: Tensor  # float32 [steps of all canvases, length]
    cached: int


def serving(network: Network) -> Engine:
    text = TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=DIFFUSION_GEMMA.markers))
    model = Model(network, text, REFERENCE, END_IDS, Path("random"), DIFFUSION_GEMMA)
    return Engine(model, EngineConfig(slots=2, context=CONTEXT, strict=True, prefill_chunk=500))


def submitted(engine: Engine, ids: Sequence[int]) -> Handle:
    sampler = SamplerConfig(
        max_steps=3, canvas_length=LENGTH, ignore_eos=True, processors=(SPELLABLE,)
    )
    return engine.submit(
        Request(ids=ids, max_tokens=2 * LENGTH, seed=7, sampler=sampler, drafts=True)
    )


def results(engine: Engine, *handles: Handle) -> list[Visible]:
    while engine.step():
        pass
    values = []
    for handle in handles:
        drafts = [event.entropy for event in handle.events() if isinstance(event, Draft)]
        assert isinstance(handle.terminal, Finished)
        reply, account = handle.terminal.reply, handle.terminal.account
        values.append(Visible(reply.token_ids, torch.stack(drafts), account.cached_tokens))
    return values


def assert_like_cold(network: Network, ids: Sequence[int], warm: Visible) -> None:
    """As an engine that has served no request yet has it."""
    fresh = serving(network)
    (cold,) = results(fresh, submitted(fresh, ids))
    assert cold.cached == 0
    if BITWISE:
        assert warm.ids == cold.ids and torch.equal(warm.entropy, cold.entropy)
    else:  # later steps build on drawn tokens, which a rounding may change
        assert_same(network, warm.entropy[0], cold.entropy[0])


@pytest.mark.parametrize(
    ("network", "busy"),
    [("q4_k_m", False), ("q4_k_m", True), ("q8_0", False), ("bf16", True)],
    indirect=["network"],
)
def test_a_shared_prefix_is_paid_for_once(network: Network, busy: bool) -> None:
    """Two find out that they share it, the third has it: from a slot at rest or one at work."""
    engine, shared = serving(network), tokens(0, SHARED)
    prompts = [[*shared, *tokens(seed, OWN)] for seed in (1, 2, 3)]
    for prompt in prompts[:2]:
        results(engine, submitted(engine, prompt))
    before = engine.state().totals.encoded_tokens
    handles = [submitted(engine, prompts[2])]
    if busy:
        engine.step()
        handles.append(submitted(engine, [*shared, *tokens(4, OWN)]))
    values = results(engine, *handles)
    assert [one.cached for one in values] == [SHARED] * len(values)
    assert engine.state().totals.encoded_tokens - before == len(values) * (OWN + LENGTH)
    assert_like_cold(network, prompts[2], values[0])
    if busy:
        assert_like_cold(network, [*shared, *tokens(4, OWN)], values[1])


def test_the_next_turn_begins_where_the_prompt_ended(network: Network) -> None:
    """After the reply's canvases, thoughts and all, have gone over the rings."""
    engine, prompt = serving(network), tokens(0, SHARED)
    (first,) = results(engine, submitted(engine, prompt))
    turn = [*prompt, *first.ids[20:], *tokens(4, OWN)]
    before = engine.state().totals.encoded_tokens
    (second,) = results(engine, submitted(engine, turn))
    assert second.cached == SHARED
    assert engine.state().totals.encoded_tokens - before == len(turn) - SHARED + LENGTH
    assert_like_cold(network, turn, second)


def test_company_and_chunks_change_nothing(network: Network) -> None:
    """Pieces of any length, encoded beside another row."""
    ids, others = tokens(5, SHARED), tokens(6, SHARED)
    slot, other = network.new_slot(CONTEXT), network.new_slot(CONTEXT)
    cuts = [0, 1, 4, 260, 1030, 1033, 1299, SHARED]
    for start, stop in itertools.pairwise(cuts):
        pieces = [torch.tensor(row[start:stop]) for row in (others, ids)]
        network.encode(pieces, [other, slot], chunk=300)
    assert_same(network, logits(network, slot), cold(network, ids))
