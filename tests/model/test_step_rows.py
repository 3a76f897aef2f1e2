"""A forward in which some rows denoise and others commit gives what each gives by itself."""

from __future__ import annotations

import pytest
import torch
from tests.support.fake_device import DEVICE, Trace, fake_device, fake_network
from tests.support.oracle import network_of, random_oracle, tiny_config

from sfumato.model.cache import KVPool
from sfumato.model.families.diffusion_gemma.config_json import config_from_hf
from sfumato.model.network import Network
from sfumato.model.step_rows import StepPart, StepRows

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
    part = StepPart(
        slots[0].pool,
        torch.tensor([slot.index for slot in slots]),
        width,
        torch.tensor([8, 8, 5]),
        torch.tensor(counts),
    )
    hidden = network.step_batch(tokens.flatten(), soft.flatten(0, 1), StepRows(part))
    assert [slot.length for slot in slots] == [*held]
    for slot, count in zip(slots, counts, strict=True):
        slot.advance(count)
    torch.testing.assert_close(hidden[width : 2 * width], denoised)
    for slot, other in zip(slots, others, strict=True):
        assert slot.length == other.length
        for layer in range(len(network.config.layers)):
            for stored, alone in zip(slot.read(layer), other.read(layer), strict=True):
                torch.testing.assert_close(stored, alone)


def test_it_stays_on_the_device_whatever_the_rows() -> None:
    config = config_from_hf(tiny_config(canvas_length=32).to_dict())
    counts = []
    for rows in (1, 8):
        with fake_device():
            network = fake_network(config)
            pool = KVPool(config, rows, 700, torch.bfloat16, DEVICE)
            numbers = [torch.zeros(rows, dtype=torch.int64) for _ in range(3)]
            part = StepPart(pool, numbers[0], 32, numbers[1], numbers[2])
            tokens = torch.zeros(rows * 32, dtype=torch.int64)
            soft = torch.zeros(rows * 32, config.hidden_size, dtype=torch.bfloat16)
            with Trace() as trace:
                network.step_batch(tokens, soft, StepRows(part))
        counts.append(trace.count)
    assert abs(counts[0] - counts[1]) <= 2  # one row's tensors are views where several are copies
