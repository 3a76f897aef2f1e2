"""Tokens beside a slot have the hidden states that encode and denoise give them in it."""

from __future__ import annotations

import pytest
import torch
from tests.support.oracle import F, S, network_of, random_oracle, tiny_config

from sfumato.model.network import Network
from sfumato.model.read_rows import Scratch


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(random_oracle(tiny_config(layer_types=[S, F, S]), 0))


@pytest.mark.parametrize(("prefix", "question", "chunk"), [(20, 9, 9), (3, 30, 7), (0, 4, 4)])
def test_a_canvas_beside_a_slot_is_a_canvas_in_it(
    network: Network, prefix: int, question: int, chunk: int
) -> None:
    """With windows of 8; and the slot stays as it was."""
    random = torch.Generator().manual_seed(prefix)
    ids = torch.randint(0, 97, (prefix + question,), generator=random)
    canvas = torch.randint(0, 97, (8,), generator=random)
    together, shared = network.new_slots(2, 64)
    network.encode([ids], [together])
    expected = network.denoise([canvas], [together])
    network.encode([ids[:prefix]], [shared])
    before = [tensor.clone() for tensor in (*shared.pool.keys, *shared.pool.values)]
    scratch, other = Scratch(shared), Scratch(shared)
    for part in ids[prefix:].split(chunk):
        network.encode_beside([part], [scratch])
    network.encode_beside([ids[:5]], [other])
    wanted = [1, 6]
    hidden = network.denoise_beside([canvas, canvas], [scratch, other], [wanted, [0]])
    torch.testing.assert_close(hidden[:2], expected[wanted], atol=1e-5, rtol=1e-4)
    alone = network.denoise_beside([canvas], [scratch], [wanted])
    assert torch.equal(hidden[:2], alone), "the other row changes no bit"
    assert scratch.end == prefix + question and shared.length == prefix
    after = (*shared.pool.keys, *shared.pool.values)
    assert all(map(torch.equal, before, after))
    kept = sum(part.shape[1] for part in scratch.keys[0])
    assert kept == question if question < 7 + chunk else kept < 7 + chunk


def test_a_forward_that_fails_leaves_the_scratch(network: Network) -> None:
    slot = network.new_slot(8)
    scratch = Scratch(slot)
    with pytest.raises(IndexError):
        network.encode_beside([torch.tensor([5, 10**6])], [scratch])
    assert scratch.length == 0 and not scratch.keys[0]
