"""The network's calls: refusals that name the row, packing of rows, and what stays unwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.counted_calls import counted_calls
from tests.support.oracle import network_of, random_oracle, relative, tiny_config
from torch import Tensor

from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(random_oracle(tiny_config(), 11))


def content(slot: Slot) -> list[Tensor]:
    return [tensor.clone() for layer in range(3) for tensor in slot.read(layer)]


def test_too_long_a_row_is_named_and_nothing_is_written(network: Network) -> None:
    slots = network.new_cache(2, capacity=12)
    network.encode([torch.arange(5), torch.arange(9)], slots)
    before = [content(slot) for slot in slots]
    with pytest.raises(ValueError, match=r"row 1: 4 tokens do not fit a cache slot of 12 with 9"):
        network.encode([torch.arange(3), torch.arange(4)], slots)
    assert slots.lengths == [5, 9]
    for slot, kept in zip(slots, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(content(slot), kept, strict=True))
    network.encode([torch.arange(7), torch.arange(3)], slots)  # exactly full
    assert [slot.room() for slot in slots] == [0, 0]


@pytest.mark.parametrize(("ids", "range_"), [([3, 97], r"3\.\.97"), ([5, -1], r"-1\.\.5")])
def test_ids_out_of_range_are_refused(network: Network, ids: list[int], range_: str) -> None:
    slots = network.new_cache(2, capacity=12)
    with pytest.raises(ValueError, match=rf"row 1: token ids must lie in 0\.\.96, got {range_}"):
        network.encode([torch.arange(3), torch.tensor(ids)], slots)
    assert slots.lengths == [0, 0]


@pytest.mark.parametrize("length", [0, 9, 300])
def test_canvas_lengths_beyond_the_checkpoints_are_refused(network: Network, length: int) -> None:
    slots = network.new_cache(2, capacity=12)
    canvases = [torch.zeros(8, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)]
    with pytest.raises(ValueError, match=f"canvas 1: must hold 1 to 8 tokens.* got {length}$"):
        network.denoise(canvases, slots)


def test_as_many_rows_as_slots(network: Network) -> None:
    with pytest.raises(ValueError):
        network.encode([torch.arange(3)], network.new_cache(2, capacity=12))


def test_a_cache_as_large_as_the_memory_and_no_larger(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 3 * network.new_slot(20).nbytes()
    monkeypatch.setattr("sfumato.model.network.device_memory", lambda device: needed)
    assert len(network.new_cache(3, 20)) == 3
    message = rf"rows, capacity: .* 3 x 21 .* needs .* bytes, and cpu has {needed:,}; lower"
    with pytest.raises(ValueError, match=message):
        network.new_cache(3, 21)
    monkeypatch.setattr("sfumato.model.network.device_memory", lambda device: None)
    assert len(network.new_cache(3, 21)) == 3


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_a_cache_is_of_whole_numbers(network: Network, value: Any) -> None:
    for name in ("rows", "capacity"):
        with pytest.raises(
            ValueError, match=f"^{name}: must be a whole number from 1, got {value!r}"
        ):
            network.new_cache(**{"rows": 1, "capacity": 8} | {name: value})


def test_an_empty_row_adds_nothing(network: Network) -> None:
    slots = network.new_cache(2, capacity=12)
    network.encode([torch.arange(0), torch.arange(4)], slots)
    assert slots.lengths == [0, 4]
    network.encode([], [])


def test_a_canvas_without_a_prefix(network: Network) -> None:
    """Packed beside a row that has one; canvases of other lengths than the checkpoint's too."""
    slots = network.new_cache(2, capacity=30)
    network.encode([torch.arange(0), torch.arange(20)], slots)
    canvases = [torch.arange(3), torch.arange(8)]
    both = network.denoise(canvases, slots)
    assert both.shape == (11, 64) and both.isfinite().all()
    alone = [network.denoise([c], [s]) for c, s in zip(canvases, slots, strict=True)]
    assert relative(both, torch.cat(alone)) <= 1e-5


def test_rows_of_several_widths_and_pools_are_one_forward(network: Network) -> None:
    """Bit for bit what each row is alone, and one call of every operation but attention's."""
    slots = [*network.new_slots(4, 40), network.new_slot(25), network.new_slot(60)]
    prefixes = (30, 7, 0, 12, 25, 50)
    network.encode([torch.arange(n) for n in prefixes], slots)
    canvases = [torch.arange(n) + n for n in (8, 8, 5, 3, 3, 8)]
    softs = [torch.randn(len(canvas), 64) for canvas in canvases]
    with counted_calls() as counts:
        both = network.denoise(canvases, slots, softs)
    alone = []
    for row in zip(canvases, slots, softs, strict=True):
        with counted_calls() as one:
            alone.append(network.denoise(*([part] for part in row)))
    assert torch.equal(both, torch.cat(alone))
    attention = counts.pop("attend_padded")
    assert attention == 5 * one.pop("attend_padded") and counts == one


def test_a_canvas_in_a_wider_row_is_what_it_is_alone(network: Network) -> None:
    """Positions beyond it are left out of the packed tokens."""
    slots = network.new_slots(3, 40)
    network.encode([torch.arange(n) for n in (30, 7, 12)], slots)
    rows, lengths = torch.tensor([2, 0]), torch.tensor([5, 7])
    index = torch.tensor([*range(5), *range(16, 16 + 7)])
    part = RowPart(slots[0].pool, rows, 16, lengths, index)
    canvases = [torch.arange(5), torch.arange(7) + 9]
    attend = PaddedRows([part])
    assert attend.positions().tolist() == [*range(12, 17), *range(30, 37)]
    hidden = network.denoise_batch(torch.cat(canvases), None, attend)
    assert torch.equal(hidden, network.denoise(canvases, [slots[2], slots[0]]))


def test_no_soft_embedding_is_one_of_zeros(network: Network) -> None:
    slots = network.new_cache(2, capacity=30)
    canvases = [torch.arange(8), torch.arange(8) + 20]
    zeros = torch.zeros(8, 64)
    plain = network.denoise(canvases, slots)
    for softs in ([None, None], [zeros, None], [zeros, zeros]):
        assert torch.equal(network.denoise(canvases, slots, softs), plain)
    assert relative(network.denoise(canvases, slots, [zeros + 1, None])[:8], plain[:8]) > 1e-3


def test_chunks_bound_the_work_of_a_forward(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of one forward, over all rows, and every token once."""
    sizes, encode = [], network.transformer.encode

    def spy(ids: Tensor, *rest: object) -> Tensor:
        sizes.append(len(ids))
        return encode(ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(network.transformer, "encode", spy)
    slots = network.new_cache(3, capacity=60)
    network.encode([torch.arange(n) for n in (50, 20, 1)], slots, chunk=12)
    assert slots.lengths == [50, 20, 1]
    assert sum(sizes) == 71 and max(sizes) <= 12


def test_a_failure_while_encoding_empties_the_slot_that_it_spoilt(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rings were overwritten, the length was not moved: the old prefix is lost."""
    (slot,) = slots = network.new_cache(1, capacity=40)
    network.encode([torch.arange(20)], slots)
    last = network.transformer.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            network.encode([torch.arange(9)], slots)
    assert slot.length == 0
    network.encode([torch.arange(20)], slots)
    fresh = network.new_cache(1, capacity=40)
    network.encode([torch.arange(20)], fresh)
    assert all(torch.equal(a, b) for a, b in zip(content(slot), content(fresh[0]), strict=True))


def test_encoding_can_be_cancelled_between_chunks(network: Network) -> None:
    answers = iter([False, False, True])
    (slot,) = slots = network.new_cache(1, capacity=40)
    done = network.encode([torch.arange(20)], slots, chunk=6, cancelled=lambda: next(answers))
    assert not done and slot.length == 12
    assert network.encode([torch.arange(8)], slots)
    fresh = network.new_cache(1, capacity=40)
    network.encode([torch.cat((torch.arange(12), torch.arange(8)))], fresh)
    for mine, other in zip(content(slot), content(fresh[0]), strict=True):
        assert mine.dtype == torch.int64 or relative(mine, other) < 1e-5
