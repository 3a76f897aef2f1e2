"""Forwards of reads as graphs: they give what they give operation by operation, and never wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.fake_device import DEVICE, Trace, fake_device, fake_network
from tests.support.oracle import network_of, tiny_config
from tests.support.recorded_graphs import RecordedGraphs
from torch import Tensor

from sfumato import ops
from sfumato.diffusion.step.batch import WIDTHS
from sfumato.diffusion.step.captured import (
    ReadForward,
    ReadForwards,
    ReadGroup,
    most_rows,
    read_group,
    read_rows,
)
from sfumato.diffusion.step.graphs import READS, StepGraphs
from sfumato.model.cache import QuestionPool, Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.network import Network
from sfumato.model.segments import Suffix
from sfumato.ops import registry


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


@pytest.fixture(autouse=True)
def pure_tensor_operations() -> Iterator[None]:
    """On a CPU the twins read numbers on the host."""
    with registry.reference_only():
        yield


@pytest.fixture(autouse=True)
def captured_after_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 1)


class Reads:
    """A network's forwards, with places for 160 tokens of questions."""

    def __init__(self, network: Network, slots: int = 4) -> None:
        self.network, self.backend = network, RecordedGraphs()
        self.graphs = StepGraphs(self.backend, 4)
        pool = QuestionPool(network.config, 160, 64, network.cache_dtype, network.device)
        self.forwards = ReadForwards(network, self.graphs, pool)
        self.slots = network.new_slots(slots, 64)
        texts = [torch.arange(3 + 9 * i) % 97 for i in range(slots)]
        network.encode(texts, self.slots)

    def opened(self, slots: list[Slot], placed: bool = True) -> list[Suffix]:
        suffixes = [Suffix(slot) for slot in slots]
        questions = [torch.arange(5 + 7 * i) % 97 for i in range(len(slots))]
        for suffix, question in zip(suffixes, questions, strict=True):
            if placed:
                self.forwards.place(suffix, len(question))
        self.network.encode_beside(questions, suffixes)
        return suffixes

    def same(
        self, members: list[int], width: int, wanted: list[list[int]], soft: bool = False
    ) -> None:
        """Whether a forward of rows in these slots is the network's own."""
        slots = [self.slots[i] for i in members]
        canvases = [(torch.arange(width) + i) % 97 for i in range(len(slots))]
        size = width * len(slots), self.network.config.hidden_size
        given = torch.randn(size) if soft else None
        plain = self.opened(slots, placed=False)
        expected = self.network.denoise_beside(canvases, plain, wanted, given)
        out = self.forwards.denoise_beside(canvases, self.opened(slots), wanted, given)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        self.graphs.capture_next()

    @property
    def replays(self) -> tuple[int, int]:
        return self.backend.captures, self.backend.replays


def test_one_graph_serves_reads_of_a_shape(network: Network) -> None:
    """Of other slots, lengths, questions and positions, with soft embeddings and without; rows may
    share a slot, and fewer rows than a power of two are read among others that are not."""
    reads = Reads(network)
    for members in ([0, 1], [2, 2], [3, 0], [1, 3]):
        reads.same(members, 8, [[members[0]], [5]])
    assert reads.replays == (1, 3)
    reads.same([0, 1], 8, [[0], [1]], soft=True)
    reads.same([3, 1], 8, [[4, 7], [1, 0, 2]])
    assert reads.replays == (1, 5)
    reads.same([2], 7, [[0, 1]])
    reads.same([0, 1, 2, 3], 8, [[0, 1], [2], [7], [3]], soft=True)
    reads.same([0, 1, 2], 8, [[0, 1], [2], [7]])
    reads.same([3, 1, 0], 8, [[0, 1], [2], [7]], soft=True)
    reads.same([0, 1], 8, [[2], [1]])
    assert reads.replays == (3, 8), "each shape has its own, and the first one is still there"


def test_kinds_are_few() -> None:
    """Of 32 × 5 numbers of rows and widths."""
    kinds = {
        (read_rows(rows, most), width)
        for width in WIDTHS
        for most in [most_rows(512, width, 64, frozenset())]
        for rows in range(1, most + 1)
    }
    assert len(kinds) == READS and max(rows * width for rows, width in kinds) == 512


def test_a_read_chooses_its_path_by_itself(network: Network) -> None:
    """What a read gives has the same bits alone and beside a long question, one that found no place
    in the pool, one of another pool, and one of another width."""
    reads = Reads(network)
    (other,) = network.new_slots(1, 64)
    network.encode([torch.arange(20)], [other])
    full = network.new_slots(1, 64)[0]
    full_pool = [Suffix(full) for _ in range(10)]

    def suffix(slot: Slot, tokens: int, placed: bool = True) -> Suffix:
        new = Suffix(slot)
        if placed:
            reads.forwards.place(new, tokens)
        network.encode_beside([torch.arange(tokens) % 97], [new])
        return new

    def read(*rows: tuple[Suffix, int]) -> tuple[Tensor, ...]:
        canvases = [torch.arange(width) for _, width in rows]
        wanted = [[0, width - 1] for _, width in rows]
        given = [suffix for suffix, _ in rows]
        return reads.forwards.denoise_beside(canvases, given, wanted).split(2)

    placed, long = suffix(reads.slots[0], 20), suffix(reads.slots[1], 70)
    empty, elsewhere = Suffix(reads.slots[2]), suffix(other, 9)
    for lease in full_pool:  # what is left of the pool
        lease.place(reads.forwards._questions, 16)
    late = suffix(reads.slots[3], 30)
    assert placed.lease and late.lease and placed.lease.pool is not late.lease.pool
    assert long.lease is None and empty.lease is None
    rows = [(long, 8), (placed, 8), (elsewhere, 8), (late, 8), (empty, 8), (placed, 7)]
    together = read(*rows)
    for row, result in zip(rows, together, strict=True):
        plain = Suffix(row[0].slot)
        count = row[0].length
        if count:
            network.encode_beside([torch.arange(count) % 97], [plain])
        wanted = [[0, row[1] - 1]]
        expected = network.denoise_beside([torch.arange(row[1])], [plain], wanted)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
    for row, result in zip(rows[::2], together[::2], strict=True):
        assert torch.equal(read(row)[0], result), "alone"
    kinds = {kind_of_path(reads, suffix) for suffix in (placed, empty, late)}
    assert kinds == {"denoise_batch"} and kind_of_path(reads, long) == "denoise_beside"


def kind_of_path(reads: Reads, suffix: Suffix) -> str:
    """Which of the network's functions reads it."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("denoise_batch", "denoise_beside"):
            function = getattr(Network, name)

            def noted(*given: Any, name: str = name, function: Any = function) -> Any:
                called.append(name)
                return function(*given)

            patch.setattr(Network, name, noted)
        reads.graphs.release()
        reads.forwards.denoise_beside([torch.arange(8)], [suffix], [[0]])
    (only,) = called
    return only


def test_torch_gathers_no_more_slots_than_a_step_does(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pool of four slots, whatever kernels serve where the cache is not of bfloat16."""
    sizes: list[int] = []
    run = ReadForward.run

    def noted(forward: ReadForward) -> None:
        sizes.append(forward.rows)
        run(forward)

    monkeypatch.setattr(ReadForward, "run", noted)
    monkeypatch.setattr(ops, "kernels_on", lambda device: frozenset(["attend_padded"]))
    reads = Reads(network)
    reads.same([0, 1, 2, 3, 0], 8, [[1]] * 5)
    assert sizes[:2] == [4, 1]
    network.dtype = network.cache_dtype = torch.bfloat16
    try:
        assert reads.forwards._most_rows(group_of(reads)) == 64
        network.cache_dtype = torch.float32
        assert reads.forwards._most_rows(group_of(reads)) == 4
    finally:
        network.dtype = network.cache_dtype = torch.float32


def group_of(reads: Reads) -> ReadGroup:
    group = read_group(Suffix(reads.slots[0]), 8, reads.forwards._questions)
    assert group is not None
    return group


def test_a_replay_that_fails_is_the_last_of_its_graph(network: Network) -> None:
    reads = Reads(network)
    reads.same([0, 1], 8, [[0], [5]])
    reads.backend.replay_error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        reads.same([0, 1], 8, [[0], [5]])
    reads.same([0, 1], 8, [[0], [5]])
    assert reads.replays == (1, 0)


def test_a_forward_never_waits_for_the_device() -> None:
    """And has no more operations for many rows than for one."""
    counts = []
    with fake_device():
        network = fake_network(config_from_hf(tiny_config(canvas_length=32).to_dict()))
        slots = network.new_slots(8, 64)
        pool = QuestionPool(network.config, 64, 64, torch.bfloat16, DEVICE)
        shape = 256, network.config.hidden_size
        shared = tuple(torch.zeros(shape, dtype=network.dtype, device=DEVICE) for _ in range(2))
        for rows in (1, 8):
            forward = ReadForward(network, slots[0].pool, pool, rows, 16, frozenset(), shared)
            with Trace() as trace:
                forward.run()
            counts.append(trace.count)
    assert counts[0] >= counts[1] > 0
