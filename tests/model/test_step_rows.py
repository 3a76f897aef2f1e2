"""A forward in which some rows denoise and others commit gives what each gives by itself."""

from __future__ import annotations

import pytest
import torch
from tests.support.oracle import network_of, random_oracle, tiny_config

from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart

CAPACITY = 40


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(random_oracle(tiny_config(), 3))


@pytest.mark.parametrize("held", [(0, 1, 9), (20, 3, 32)])
def test_rows_of_both_phases_are_those_apart(network: Network, held: tuple[int, ...]) -> None:
    """With prefixes within and beyond a ring; the middle row denoises, and the last one commits
    fewer tokens than the width."""
    width, counts = 8, (8, 0, 5)
    slots, others = network.new_slots(4, CAPACITY)[1:], network.new_slots(3, CAPACITY)
    torch.manual_seed(5)
    for group in (slots, others):
        network.encode([torch.arange(n) * 7 % 97 for n in held], group)
    tokens = torch.randint(97, (3, width))
    soft = torch.randn(3, width, network.config.hidden_size)
    denoised = network.denoise([tokens[1]], [others[1]], [soft[1]])
    network.encode([tokens[0], tokens[2, :5]], [others[0], others[2]])
    part = RowPart(
        slots[0].pool,
        torch.tensor([slot.index for slot in slots]),
        width,
        torch.tensor([8, 8, 5]),
        commits=torch.tensor(counts),
    )
    hidden = network.denoise_batch(tokens.flatten(), soft.flatten(0, 1), PaddedRows([part]))
    assert [slot.length for slot in slots] == [*held]
    for slot, count in zip(slots, counts, strict=True):
        slot.advance(count)
    torch.testing.assert_close(hidden[width : 2 * width], denoised)
    for slot, other in zip(slots, others, strict=True):
        assert slot.length == other.length
        for layer in range(len(network.config.layers)):
            for one, alone in zip(slot.read(layer), other.read(layer), strict=True):
                assert one.dtype == alone.dtype
                torch.testing.assert_close(one, alone)
