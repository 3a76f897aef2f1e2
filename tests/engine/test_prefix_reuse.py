"""Prefix reuse on a network: only new tokens are encoded, and nobody can tell from the logits.

A random quantized checkpoint with a window of 1,024: a prefix of 2,000 tokens goes round its
rings. The compiled operations sum in an order that depends on positions alone, so that what is
reused equals a cold run bit for bit; torch's own products round by the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sfumato import ops
from sfumato.bench.random_weights import random_checkpoint
from sfumato.engine.slots import Lease, SlotPool
from sfumato.model.cache import Slot
from sfumato.model.loading import load_network
from sfumato.model.network import Network

SHARED, OWN, CONTEXT = 2000, 60, 2200
CPU = torch.device("cpu")
BITWISE = ops.multiplies_bf16(CPU)  # else attention is torch's


@pytest.fixture(scope="module", params=["q4_k_m", "q8_0", "bf16"])
def network(request: pytest.FixtureRequest) -> Network:
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    return load_network(random_checkpoint("tiny", request.param, layers=3), CPU, dtype)


def tokens(seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 512, (count,), generator=random).tolist()
    return found


def logits(network: Network, slot: Slot) -> Tensor:
    canvas = torch.tensor(tokens(99, 32))
    return network.head.logits(network.denoise([canvas], [slot]))


def cold(network: Network, ids: Sequence[int]) -> Tensor:
    slot = network.new_slot(CONTEXT)
    network.encode([torch.tensor(ids)], [slot])
    return logits(network, slot)


def serve(pool: SlotPool, network: Network, ids: Sequence[int], marks: Sequence[int]) -> Lease:
    lease = pool.lease(ids, CONTEXT, marks)
    assert lease
    encode(pool, network, lease, ids)
    return lease


def encode(pool: SlotPool, network: Network, lease: Lease, ids: Sequence[int]) -> None:
    at = lease.cached
    for stop in (*lease.marks, len(ids)):
        network.encode([torch.tensor(ids[at:stop], dtype=torch.int64)], [lease.slot])
        lease.extend(ids[at:stop])
        if stop in lease.marks:
            pool.mark(lease)
        at = stop


def assert_same(network: Network, warm: Tensor, expected: Tensor) -> None:
    if BITWISE:
        assert torch.equal(warm, expected)
    else:
        difference = (warm - expected).norm() / expected.norm()
        # A rounding may choose another expert; bfloat16 activations round three digits off.
        assert difference < (0.2 if network.dtype == torch.bfloat16 else 0.02)


def pool_of(network: Network, slots: int = 2) -> SlotPool:
    return SlotPool(network, slots, CONTEXT, True, 1 << 30, lambda nbytes: False)


@pytest.mark.parametrize("busy", [False, True])
def test_a_shared_prefix_is_paid_for_once(network: Network, busy: bool) -> None:
    pool, shared = pool_of(network), tokens(0, SHARED)
    one, two = ([*shared, *tokens(seed, OWN)] for seed in (1, 2))
    first = serve(pool, network, one, marks=(SHARED, len(one)))
    if not busy:
        pool.release(first, keep=True)
    assert (pool.encoded_tokens, pool.cached_tokens) == (SHARED + OWN, 0)
    second = serve(pool, network, two, marks=(SHARED, len(two)))
    assert (pool.encoded_tokens, pool.cached_tokens) == (SHARED + 2 * OWN, SHARED)
    assert second.slot is not first.slot
    assert_same(network, logits(network, second.slot), cold(network, two))
    assert_same(network, logits(network, first.slot), cold(network, one))


def test_the_next_turn_begins_where_the_prompt_ended(network: Network) -> None:
    """After the reply's canvases, thoughts and all, have gone over the rings."""
    pool, prompt = pool_of(network), tokens(0, SHARED)
    first = serve(pool, network, prompt, marks=(SHARED,))
    reply = tokens(3, 64)
    network.encode([torch.tensor(reply)], [first.slot])
    first.extend(reply)
    pool.release(first, keep=True)
    turn = [*prompt, *reply[20:], *tokens(4, OWN)]
    before = pool.encoded_tokens
    second = serve(pool, network, turn, marks=(len(turn),))
    assert second.slot is first.slot and second.cached == SHARED
    assert pool.encoded_tokens - before == len(turn) - SHARED
    assert_same(network, logits(network, second.slot), cold(network, turn))


def test_company_and_chunks_change_nothing(network: Network) -> None:
    """Pieces of any length, encoded beside another row."""
    ids, others = tokens(5, SHARED), tokens(6, SHARED)
    slot, other = network.new_slot(CONTEXT), network.new_slot(CONTEXT)
    cuts = [0, 1, 4, 260, 1030, 1033, 1999, SHARED]
    for start, stop in itertools.pairwise(cuts):
        pieces = [torch.tensor(row[start:stop]) for row in (others, ids)]
        network.encode(pieces, [other, slot], chunk=300)
    assert_same(network, logits(network, slot), cold(network, ids))
