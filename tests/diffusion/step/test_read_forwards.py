"""Forwards of reads as graphs: they give what they give operation by operation, and never wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.fake_device import DEVICE, Trace, fake_device, fake_network
from tests.support.oracle import network_of, tiny_config
from tests.support.recorded_graphs import RecordedGraphs
from torch import Tensor

from sfumato.diffusion.step.graphs import StepGraphs
from sfumato.diffusion.step.read_forward import ReadForward, ReadKind, ReadRoom
from sfumato.diffusion.step.read_forwards import ReadForwards
from sfumato.model.cache import Slot
from sfumato.model.families.diffusion_gemma.config_json import config_from_hf
from sfumato.model.network import Network
from sfumato.model.question_pool import QuestionPool
from sfumato.model.read_rows import Scratch
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

    def opened(self, slots: list[Slot], placed: bool = True) -> list[Scratch]:
        scratches = [Scratch(slot) for slot in slots]
        questions = [torch.arange(5 + 7 * i) % 97 for i in range(len(slots))]
        for scratch, question in zip(scratches, questions, strict=True):
            if placed:
                self.forwards.place(scratch, len(question))
        self.network.encode_beside(questions, scratches)
        return scratches

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
    """Of other slots, lengths, questions and positions; rows may share a slot."""
    reads = Reads(network)
    for members in ([0, 1], [2, 2], [3, 0], [1, 3]):
        reads.same(members, 8, [[members[0]], [5]])
    assert reads.replays == (1, 3)
    reads.same([0, 1], 8, [[0], [1]], soft=True)
    reads.same([3, 1], 8, [[4], [1]], soft=True)
    assert reads.replays == (2, 4)
    reads.same([0, 1, 2], 8, [[0, 1], [2], [7]])
    reads.same([2], 7, [[0, 1]])
    reads.same([0, 1], 8, [[2], [1]])
    assert reads.replays == (4, 5), "each shape has its own, and the first one is still there"


def test_other_reads_go_through_the_network_alone(network: Network) -> None:
    reads = Reads(network)
    other = network.new_slots(1, 64)
    canvases = [torch.arange(8), torch.arange(8)]

    def served(scratches: list[Scratch], canvases: list[Tensor] = canvases) -> bool:
        before = len(reads.graphs._records)
        reads.forwards.denoise_beside(canvases, scratches, [[0]] * len(scratches))
        return len(reads.graphs._records) > before

    assert not served(reads.opened(reads.slots[:2], placed=False)), "no places"
    assert not served(reads.opened([reads.slots[0], *other])), "several pools"
    assert not served(reads.opened(reads.slots[:2]), [torch.arange(8), torch.arange(7)])
    assert not served(reads.opened(reads.slots + reads.slots[:1]), [torch.arange(8)] * 5)
    assert served(reads.opened(reads.slots[:2]))


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
        room = ReadRoom(network, 256)
        for rows in (1, 8):
            kind = ReadKind(rows, 16, 2 * rows, conditioned=True)
            forward = ReadForward(network, slots[0].pool, pool, kind, room)
            with Trace() as trace:
                forward.run()
            counts.append(trace.count)
    assert counts[0] >= counts[1] > 0
