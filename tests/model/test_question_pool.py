"""Places for questions: who has which, and that reads behind them are reads behind suffixes."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.support.oracle import F, S, network_of, random_oracle, tiny_config

from sfumato.model.cache import MOST, QuestionPool
from sfumato.model.network import Network
from sfumato.model.segments import Beside, PaddedRows, RowPart, Suffix


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(random_oracle(tiny_config(layer_types=[S, F, S]), 0))


def pool_of(network: Network, places: int, longest: int = 40) -> QuestionPool:
    return QuestionPool(network.config, places, longest, network.cache_dtype, network.device)


def test_places_are_leased_until_the_question_is_gone(network: Network) -> None:
    pool = pool_of(network, 64)
    first, second, third = (pool.lease(tokens) for tokens in (17, 16, 1))
    assert first and second and third
    assert [span.start for span in (first, second, third)] == [0, 32, 48]
    assert pool.lease(1) is None
    del second
    gc.collect()
    assert pool.lease(17) is None, "no gap is as large"
    again = pool.lease(9)
    assert again and again.start == 32
    assert pool_of(network, 64).lease(41) is None, "questions of several pieces get no places"
    assert pool_of(network, 8).lease(3) is None and pool_of(network, 64).lease(0) is None
    own = pool.for_one(33)
    assert own.places == 48 and own.longest == pool.longest and own.lease(33)
    with pytest.raises(AssertionError):
        pool_of(network, MOST + 1)


def test_reads_behind_places_are_those_behind_scratches(network: Network) -> None:
    """With windows of 8: prefixes and questions longer and shorter than these, a question in two
    parts, and one without tokens."""
    random = torch.Generator().manual_seed(3)
    slots, pool = network.new_slots(3, 64), pool_of(network, 96)
    for stored in (*pool.keys, *pool.values):
        stored.fill_(float("nan"))
    texts = [torch.randint(0, 97, (n,), generator=random) for n in (30, 3)]
    network.encode(texts, [slots[2], slots[0]])
    members = slots[2], slots[0], slots[2], slots[2], slots[1]
    questions = [torch.randint(0, 97, (n,), generator=random) for n in (9, 4, 0, 20, 5)]
    plain, placed = ([Suffix(slot) for slot in members] for _ in range(2))
    for suffix, question in zip(placed, questions, strict=True):
        suffix.place(pool, len(question))
    placed[4].lease = None  # a question that found no place
    for part in (slice(0, 6), slice(6, None)):
        for suffixes in (plain, placed):
            network.encode_beside([question[part] for question in questions], suffixes)
    placed[0].own()  # which keeps places as they are
    canvases = [torch.randint(0, 97, (8,), generator=random) for _ in range(4)]
    wanted = [list(range(8))] * 4
    expected = network.denoise_beside(canvases, plain[:4], wanted)
    beside = network.denoise_beside(canvases, placed[:4], wanted)
    torch.testing.assert_close(beside, expected, atol=1e-5, rtol=1e-4)
    leases = [suffix.lease for suffix in placed[:4]]
    starts = torch.tensor([lease.start if lease else 0 for lease in leases])
    counts = torch.tensor([suffix.length for suffix in placed[:4]])
    own = Beside(pool, starts, counts, torch.tensor([4]))
    part_of = RowPart(slots[0].pool, torch.tensor([2, 0, 2, 2]), 8, beside=own)
    hidden = network.denoise_batch(torch.cat(canvases), None, PaddedRows([part_of]))
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-4)
