"""The state of rows: its addresses, who sits where, and that a row that is done stays as it is."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.oracle import network_of

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser, denoise_step
from sfumato.diffusion.step.batch import StepBatch, width_for
from sfumato.diffusion.stopping import Never
from sfumato.model.cache import Slot
from sfumato.model.network import Network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


def begin(network: Network, seed: int, **choices: Any) -> tuple[Canvas, Slot]:
    config = SamplerConfig(**({"max_steps": 12, "canvas_length": 8} | choices)).over(REFERENCE)
    slot = network.new_slot(64)
    network.encode([torch.arange(3 + seed) % 97], [slot])
    return Canvas(config, Noise(seed, seed), 97, CPU), slot


def steps(network: Network, canvas: Canvas, slot: Slot) -> list[Draft]:
    drafts = []
    while not canvas.done:
        drafts += denoise_step(network, [canvas], [slot])
    return drafts


@pytest.mark.parametrize(
    ("length", "longest", "width"),
    [
        *((1, 256, 16), (16, 256, 16), (17, 256, 32), (100, 256, 128), (256, 256, 256)),
        *((100, 100, 100), (33, 48, 48), (300, 512, 512), (8, 8, 8)),
    ],
)
def test_a_canvas_runs_in_the_next_width(length: int, longest: int, width: int) -> None:
    assert width_for(length, longest) == width


def test_the_state_keeps_its_place(network: Network) -> None:
    """From step to step, and while others join, leave and change places."""
    rows = [begin(network, seed, stopping=Never()) for seed in range(4)]
    denoiser = Denoiser(network, 4)
    places = []
    for members in ([0, 1, 2], [2, 1, 0], [0], [3, 0, 1, 2], [1, 3]):
        chosen = [rows[i] for i in members]
        findings = denoiser.forward([c for c, _ in chosen], [s for _, s in chosen])
        denoiser.advance(findings)
        (seats,) = denoiser._seats.values()
        places.append([tensor.data_ptr() for tensor in seats.batch.tensors()])
        assert [c.place for c, _ in chosen] == [(seats.batch, row) for row in range(len(chosen))]
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize("choices", [{"max_steps": 2}, {}], ids=["step cap", "converged"])
def test_a_row_that_is_done_is_frozen(network: Network, choices: dict[str, Any]) -> None:
    """However late the host learns of it, and beside a row that goes on."""
    canvas, slot = begin(network, 1, **choices)
    other, other_slot = begin(network, 2, stopping=Never())
    expected = steps(network, *begin(network, 2, stopping=Never()))
    denoiser = Denoiser(network, 2)
    drafts: list[Any] = []
    while not canvas.done:
        findings = denoiser.forward([canvas, other], [slot, other_slot])
        drafts.append(denoiser.advance(findings)[1])
    batch, row = canvas.place or (None, 0)
    assert batch is not None
    before = [tensor[row].clone() for tensor in batch.tensors()]
    state = (canvas.step, canvas.convergence)
    pending = []
    for _ in range(3):
        findings = denoiser.forward([canvas, other], [slot, other_slot])
        pending.append(denoiser.write(findings))
    for late in pending:
        done, running = late.results()
        drafts.append(running)
        assert isinstance(done, Draft) and torch.equal(done.token_ids, canvas.argmax)
    for tensor, kept in zip(batch.tensors(), before, strict=True):
        assert torch.equal(tensor[row], kept)
    assert (canvas.step, canvas.convergence) == state
    for draft, alone in zip(drafts, expected, strict=False):
        assert draft.step == alone.step and torch.equal(draft.token_ids, alone.token_ids)


KINDS: list[dict[str, Any]] = [
    {},
    {"canvas_length": 5},
    {"temperature": 0.0, "canvas_length": 1},
    {"max_steps": 3, "stopping": Never()},
    {"top_k": 4, "canvas_length": 5},
    {"soft_top_k": 3},
    {"self_conditioning": False},
]


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go_in_any_order(network: Network, seed: int) -> None:
    """More of them than there is room for at first, some left out of a step, some dropped."""
    chosen = random.Random(seed)
    kinds = [chosen.choice(KINDS) for _ in range(9)]
    expected = [steps(network, *begin(network, i, **kind)) for i, kind in enumerate(kinds)]
    denoiser = Denoiser(network, 2)
    waiting, live = list(range(9)), {}  # type: tuple[list[int], dict[int, tuple[Canvas, Slot]]]
    seen: dict[int, list[Any]] = {i: [] for i in waiting}
    while waiting or live:
        for _ in range(chosen.choice((0, 1, 3))):
            if waiting:
                i = waiting.pop(0)
                live[i] = begin(network, i, **kinds[i])
        members = [i for i in live if chosen.random() < 0.8]
        chosen.shuffle(members)
        if not members:
            continue
        findings = denoiser.forward([live[i][0] for i in members], [live[i][1] for i in members])
        if chosen.random() < 0.2:  # it changes nothing
            findings = denoiser.forward(
                [live[i][0] for i in members], [live[i][1] for i in members]
            )
        for i, draft in zip(members, denoiser.advance(findings), strict=True):
            seen[i].append(draft)
            if live[i][0].done:
                del live[i]
    for i, drafts in seen.items():
        assert [draft.step for draft in drafts] == [draft.step for draft in expected[i]]
        for draft, alone in zip(drafts, expected[i], strict=True):
            for name in ("token_ids", "entropy", "accepted", "top_ids", "top_probs"):
                assert torch.equal(getattr(draft, name), getattr(alone, name)), (i, name)


def test_a_canvas_takes_its_state_along() -> None:
    """Where others need its row, and back again."""
    rows = StepBatch.allocate(3, 4, 1, 2, torch.float32, CPU)
    for field in fields(rows):
        tensor = getattr(rows, field.name)
        tensor.copy_(torch.arange(3).view(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor))
    rows.swap(0, 2)
    rows.copy_row(1, rows, 0)
    assert all(
        t.flatten(1).float().mean(1)[:2].unique().numel() == 1 for t in rows.tensors() if t.ndim > 1
    )
    assert rows.step.tolist() == [2, 2, 0]
