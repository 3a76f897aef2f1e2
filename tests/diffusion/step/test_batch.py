"""The state of rows: its addresses, who sits where, and that a row that is done stays as it is."""

from __future__ import annotations

import gc
import importlib
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import calm_oracle
from tests.support.denoise import denoise_step
from tests.support.fake_device import Trace
from tests.support.oracle import network_of
from tests.support.row_start import row_start
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import LogitBias, Never, SoftTopK, StepView
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import StepBatch, width_for
from sfumato.engine.recovery import BatchRecovery
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
        forwarded = denoiser.forward([c for c, _ in chosen], [s for _, s in chosen])
        denoiser.advance(forwarded)
        (batch_rows,) = denoiser._batch_rows.values()
        places.append([tensor.data_ptr() for tensor in batch_rows.batch.tensors()])
        # Each slot is a pool by itself here, and pools stand in the order of the call.
        assert [c.place for c, _ in chosen] == [
            (batch_rows.batch, row) for row in range(len(chosen))
        ]
    assert all(place == places[0] for place in places)


def in_one_pool(network: Network, count: int) -> tuple[list[Canvas], list[Slot]]:
    canvases, slots = [], network.new_slots(count, 64)
    for seed, slot in enumerate(slots):
        canvas, _ = begin(network, seed, stopping=Never())
        canvases.append(canvas)
        network.encode([torch.arange(3 + seed) % 97], [slot])
    return canvases, slots


def test_a_row_keeps_its_place_until_a_hole_is_filled(network: Network) -> None:
    """Whatever the order of the call, and whichever row joins."""
    canvases, slots = in_one_pool(network, 5)
    denoiser = Denoiser(network, 4)

    def rows_of(*members: int) -> list[int]:
        denoiser.step([canvases[i] for i in members], [slots[i] for i in members])
        return [place[1] for i in members if (place := canvases[i].place)]

    assert rows_of(0, 1, 2, 3) == [0, 1, 2, 3]
    assert rows_of(3, 1, 0, 2) == [3, 1, 0, 2]
    assert rows_of(0, 2, 3) == [0, 2, 1]  # 3 into the hole, and 1 waits in the last row
    assert rows_of(3, 0, 1, 2) == [1, 0, 3, 2]
    del canvases[1], slots[1]
    assert rows_of(0, 1, 2) == [0, 2, 1]
    assert rows_of(0, 3, 1, 2) == [0, 3, 2, 1]


def test_rows_come_and_go_by_few_operations(network: Network, note: Callable[[str], None]) -> None:
    """As many for three rows as for one, but for bookkeeping. Most of those of rows that join draw
    what their canvases begin as."""

    def cost(leave: int, join: int) -> int:
        canvases, slots = in_one_pool(network, 8 + join)
        denoiser = Denoiser(network, 8)
        denoiser.step(canvases[:8], slots[:8])
        del canvases[:leave]
        with Trace() as trace:
            denoiser._lay_out(canvases, slots[leave:])
        return trace.count

    assert cost(leave=0, join=0) == 0
    leaves, joins = cost(leave=1, join=0), cost(leave=1, join=1)
    note(
        f"tensor operations where one of 8 rows leaves: {leaves}; another takes its place: {joins}"
    )
    assert leaves <= 40 and joins <= 200
    assert cost(leave=3, join=0) <= leaves and cost(leave=3, join=3) <= joins + 30


@pytest.mark.parametrize("choices", [{"max_steps": 2}, {}], ids=["step cap", "converged"])
def test_a_row_that_is_done_is_frozen(network: Network, choices: dict[str, Any]) -> None:
    """However late the host learns of it, and beside a row that goes on."""
    canvas, slot = begin(network, 1, **choices)
    other, other_slot = begin(network, 2, stopping=Never())
    expected = steps(network, *begin(network, 2, stopping=Never()))
    denoiser = Denoiser(network, 2)
    drafts: list[Any] = []
    while not canvas.done:
        forwarded = denoiser.forward([canvas, other], [slot, other_slot])
        drafts.append(denoiser.advance(forwarded)[1])
    batch, row = canvas.place or (None, 0)
    assert batch is not None
    before = [tensor[row].clone() for tensor in batch.tensors()]
    state = (canvas.step, canvas.convergence)
    pending = []
    for _ in range(3):
        forwarded = denoiser.forward([canvas, other], [slot, other_slot])
        pending.append(denoiser.apply(forwarded))
    for late in pending:
        done, running = late.results()
        drafts.append(running)
        assert done is None
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
    {"soft_skip": 0.5},
]


LATE: list[dict[str, Any]] = [
    {"soft_top_k": SoftTopK(9, 1)},
    {"processors": (LogitBias({3: 1.0}),)},
    {"top_k": 4},
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
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
        forwarded = denoiser.forward([live[i][0] for i in members], [live[i][1] for i in members])
        if chosen.random() < 0.2:  # it changes nothing
            forwarded = denoiser.forward(
                [live[i][0] for i in members], [live[i][1] for i in members]
            )
        for i, draft in zip(members, denoiser.advance(forwarded), strict=True):
            seen[i].append(draft)
            if live[i][0].done:
                del live[i]
    for i, drafts in seen.items():
        assert [draft.step for draft in drafts] == [draft.step for draft in expected[i]]
        assert all(same(one, alone) for one, alone in zip(drafts, expected[i], strict=True)), i


def same(one: Draft, other: Draft) -> bool:
    names = ("token_ids", "entropy", "accepted", "top_ids", "top_probs")
    return one.step == other.step and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


@pytest.mark.parametrize("kind", [{}, {"soft_skip": 0.5}, *LATE])
def test_the_host_may_learn_of_steps_late(network: Network, kind: dict[str, Any]) -> None:
    """Three steps before the host learns of any; rows that read the host's state make it learn."""
    choices = kind | {"stopping": Never(), "max_steps": 6}
    expected = [steps(network, *begin(network, seed, **choices)) for seed in range(2)]
    rows = [begin(network, seed, **choices) for seed in range(2)]
    canvases, slots = [c for c, _ in rows], [s for _, s in rows]
    denoiser = Denoiser(network, 2)
    pending = [denoiser.apply(denoiser.forward(canvases, slots)) for _ in range(3)]
    assert canvases[0].step == (2 if kind in LATE else 0)
    for number, late in enumerate(pending):
        for row, draft in enumerate(late.results()):
            assert isinstance(draft, Draft) and same(draft, expected[row][number])
    assert not denoiser._outstanding
    for number in range(3, 6):
        for row, result in enumerate(denoiser.advance(denoiser.forward(canvases, slots))):
            assert isinstance(result, Draft) and same(result, expected[row][number])
            assert torch.equal(canvases[row].history[-1], result.token_ids)


def test_a_late_result_of_a_row_that_is_done_is_none(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of its numbers and its rules in the meantime."""

    class Fails:
        def done(self, view: StepView) -> Tensor:
            if int(view.step) > 2:
                raise RuntimeError("the third step")
            return view.step == 9

    canvas, slot = begin(network, 1, max_steps=2, stopping=Fails())
    denoiser = Denoiser(network, 1)
    pending = [denoiser.apply(denoiser.forward([canvas], [slot])) for _ in range(2)]
    serve = network.denoise_batch
    monkeypatch.setattr(network, "denoise_batch", lambda *inputs: serve(*inputs) * math.nan)
    pending.append(denoiser.apply(denoiser.forward([canvas], [slot])))
    (first,), (second,), (third,) = (late.results() for late in pending)
    assert isinstance(first, Draft) and isinstance(second, Draft) and third is None
    assert (canvas.step, canvas.convergence) == (2, "step_cap")


def test_results_of_rows_that_have_changed_are_refused(network: Network) -> None:
    (a, a_slot), (b, b_slot) = begin(network, 1), begin(network, 2)
    denoiser = Denoiser(network, 1)
    stale = denoiser.forward([a], [a_slot])
    current = denoiser.forward([b], [b_slot])
    with pytest.raises(ValueError, match="given away or moved on"):
        denoiser.advance(stale)
    assert denoiser.advance(current)[0].step == 1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="given away or moved on"):
        denoiser.advance(current)
    assert (a.step, b.step) == (0, 1)


@pytest.mark.parametrize("place", ["step.pack", "denoiser.to_host"])
def test_a_step_that_is_tried_again_is_one_step(
    network: Network, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that ends after the forward ends before anything is written."""
    expected = steps(network, *begin(network, 1))
    canvas, slot = begin(network, 1)
    denoiser = Denoiser(network, 1)
    recovery = BatchRecovery(
        lambda rows: denoiser.advance(denoiser.forward(rows, [slot])),
        lambda error: None,
        lambda canvas: canvas,
    )
    module, name = place.split(".")
    module = importlib.import_module(f"sfumato.diffusion.step.{module}")
    serve, failures = getattr(module, name), [torch.OutOfMemoryError("once")]

    def failing(*inputs: Any) -> Any:
        if failures:
            raise failures.pop()
        return serve(*inputs)

    monkeypatch.setattr(module, name, failing)
    drafts = []
    while not canvas.done:
        drafts += [draft for _, draft in recovery.run([canvas])]
    assert not failures and len(drafts) == len(expected)
    assert all(same(draft, one) for draft, one in zip(drafts, expected, strict=True))


@pytest.mark.parametrize("place", ["step.apply_update", "denoiser.unpack"])
def test_what_fails_after_the_writing_began_is_each_rows_error(
    network: Network, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [begin(network, seed) for seed in range(2)]
    denoiser, error = Denoiser(network, 2), torch.OutOfMemoryError("late")

    def failing(*inputs: Any) -> Any:
        raise error

    forwarded = denoiser.forward([c for c, _ in rows], [s for _, s in rows])
    monkeypatch.setattr(f"sfumato.diffusion.step.{place}", failing)
    assert denoiser.advance(forwarded) == [error, error]


def test_what_waits_for_the_host_holds_nothing_of_the_device(network: Network) -> None:
    """But the packed words: no soft embedding, scores or state."""
    canvas, slot = begin(network, 1, top_tokens=20)
    denoiser = Denoiser(network, 1)
    forwarded = denoiser.forward([canvas], [slot])
    dropped = [weakref.ref(forwarded), weakref.ref(forwarded.evaluated[0].soft)]
    pending = denoiser.apply(forwarded)
    del forwarded
    gc.collect()
    assert not any(one() for one in dropped)
    (draft,) = pending.results()
    assert isinstance(draft, Draft) and draft.top_ids.shape == (8, 20)


def numbered(rows: int, first: int) -> StepBatch:
    """A batch whose rows hold nothing but their numbers, first..."""
    batch = StepBatch.allocate(rows, 4, 1, 2, torch.float32, CPU)
    for tensor in (batch.record, batch.soft):
        tensor.copy_(
            torch.arange(rows).view(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor) + first
        )
    return batch


def test_a_canvas_takes_its_state_along() -> None:
    """All of it, where others need its row."""
    batch, other = numbered(4, 1), numbered(2, 11)
    batch.move([0, 1, 3], [1, 0, 2])
    batch.copy(3, other, 1)
    for tensor in (batch.record, batch.soft):
        assert [row.unique().tolist() for row in tensor] == [[2], [1], [4], [12]]
    larger = numbered(5, 21)
    larger.copy(slice(other.rows), other, slice(None))
    assert larger.soft[:, 0, 0].tolist() == [11, 12, 23, 24, 25]


def test_a_row_that_begins_is_as_a_new_one() -> None:
    """Whatever stood there, and whatever begins beside it."""
    batch = numbered(3, 250)
    begun = torch.tensor([8, 9]), torch.tensor([1, 4, 2, 5])
    pinned = torch.tensor([-1, 9]), torch.tensor([-1, 4, -1, 5])
    one, other = Noise(2**40 + 7, 1, 2), Noise(3, 4, 5)
    starts = [
        row_start(pinned[0], one, [0.5, 0.25, 2.0], True, False, begun[0]),
        row_start(pinned[1], other, [0.75], False, True, begun[1]),
    ]
    batch.begin([2, 0], starts)
    two = batch.first(1), StepBatch(*(tensor[2:] for tensor in batch.tensors()))
    assert [b.tokens.tolist() for b in two] == [[[1, 4, 2, 5]], [[8, 9, 0, 0]]]
    assert [b.pinned.tolist() for b in two] == [[[-1, 4, -1, 5]], [[-1, 9, 0, 0]]]
    assert [b.seeds.tolist() for b in two] == [[[3, 0]], [[7, 256]]]
    assert [b.temperatures[0, :3].tolist()[: int(b.max_steps)] for b in two] == [
        [0.75],
        [0.5, 0.25, 2.0],
    ]
    numbers = [(b.canvas, b.attempt, b.max_steps, b.step, b.unchanged) for b in two]
    assert [[int(n) for n in row] for row in numbers] == [[4, 5, 1, 0, 0], [1, 2, 3, 0, 0]]
    flags = [(b.cold, b.self_conditioning, b.converged, b.done) for b in two]
    assert [[bool(f) for f in row] for row in flags] == [
        [False, True, *[False] * 2],
        [True, *[False] * 3],
    ]
    assert all((b.history == -1).all() and not b.soft.any() for b in two)
    assert batch.record[1].unique().tolist() == [251]
