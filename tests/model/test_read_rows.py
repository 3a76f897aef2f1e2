"""Tokens beside a slot have the hidden states that encode and denoise give them in it."""

from __future__ import annotations

import pytest
import torch
from tests.support.oracle import F, S, network_of, random_oracle, tiny_config

from sfumato.model.network import Network
from sfumato.model.segments import Suffix


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
    suffix, other = Suffix(shared), Suffix(shared)
    for part in ids[prefix:].split(chunk):
        network.encode_beside([part], [suffix])
    network.encode_beside([ids[:5]], [other])
    wanted = [1, 6]
    hidden = network.denoise_beside([canvas, canvas], [suffix, other], [wanted, [0]])
    torch.testing.assert_close(hidden[:2], expected[wanted], atol=1e-5, rtol=1e-4)
    alone = network.denoise_beside([canvas], [suffix], [wanted])
    assert torch.equal(hidden[:2], alone), "the other row changes no bit"
    assert suffix.end == prefix + question and shared.length == prefix
    after = (*shared.pool.keys, *shared.pool.values)
    assert all(map(torch.equal, before, after))
    kept = sum(part.shape[1] for part in suffix.keys[0])
    assert kept == question if question < 7 + chunk else kept < 7 + chunk


@pytest.mark.parametrize("cache", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_several_slots_are_as_each_alone(cache: torch.dtype | None) -> None:
    """To the bit, whatever order and slots; some layers want one place of some canvases."""
    model = network_of(random_oracle(tiny_config(layer_types=[S, F, S]), 0))
    model = Network(model.transformer, model.device, model.dtype, cache)
    random = torch.Generator().manual_seed(1)
    first, second = model.new_slots(2, 64)
    model.encode([torch.randint(0, 97, (n,), generator=random) for n in (21, 5)], [first, second])
    questions = [torch.randint(0, 97, (n,), generator=random) for n in (9, 4, 7, 2)]
    slots, wanted = (first, second, first, first), ([1, 6], [0], [2], [0, 1, 2])

    def read(rows: list[int]) -> list[torch.Tensor]:
        suffixes = [Suffix(slots[row]) for row in rows]
        model.encode_beside([questions[row] for row in rows], suffixes)
        wanted_places = [wanted[row] for row in rows]
        hidden = model.denoise_beside(
            [torch.arange(8) + row for row in rows], suffixes, wanted_places
        )
        return list(hidden.split([len(each) for each in wanted_places]))

    alone = [read([row])[0] for row in range(4)]
    for rows in ([0, 1, 2, 3], [3, 2, 0], [1, 0]):
        for row, hidden in zip(rows, read(rows), strict=True):
            assert torch.equal(hidden, alone[row])


def test_what_is_kept_is_no_part_of_a_batch(network: Network) -> None:
    slot = network.new_slot(8)
    suffixes = [Suffix(slot), Suffix(slot)]
    network.encode_beside([torch.tensor([5, 6]), torch.tensor([7] * 40)], suffixes)
    before = [part.clone() for parts in suffixes[0].keys for part in parts]
    suffixes[0].own()
    parts = [part for parts in suffixes[0].keys for part in parts]
    assert all(map(torch.equal, parts, before))
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    kept = [part.data_ptr() for part in parts]
    suffixes[0].own()
    assert [part.data_ptr() for parts in suffixes[0].keys for part in parts] == kept


def test_a_forward_that_fails_leaves_the_scratch(network: Network) -> None:
    slot = network.new_slot(8)
    suffix = Suffix(slot)
    with pytest.raises(IndexError):
        network.encode_beside([torch.tensor([5, 10**6])], [suffix])
    assert suffix.length == 0 and not suffix.keys[0]
