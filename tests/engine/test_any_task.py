"""A kind of request that the engine has never seen: the better of two replies.

Nothing but the generator below knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.scripted_engine import run
from tests.support.shallow_model import shallow_checkpoint

import sfumato
from sfumato import Draft, Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.diffusion.canvas import Canvas, CanvasPlan
from sfumato.diffusion.limits import Limits, plan_reply
from sfumato.diffusion.noise import Noise
from sfumato.engine import Completed, Failed, Handle
from sfumato.tasks.alone import alone
from sfumato.tasks.wants import LastState
from sfumato.tasks.works import (
    Claim,
    Denoise,
    Draw,
    Encode,
    Figures,
    Likelihood,
    Prompt,
    Score,
    Unfinished,
)

BOTH = (SamplerConfig(mode="causal", temperature=0), SamplerConfig(max_steps=4))


class BetterOfTwo:
    """Draws one token, denoises two replies behind it, and keeps the more likely one."""

    stats = None

    def __init__(self, model: Model, text: str, seed: int) -> None:
        ids = model.prompt_ids(text)
        plan = partial(plan_reply, model.network, len(ids), limits=Limits(32, ()), seed=seed)
        self.drawn, self.denoised = (plan(c.over(model.sampler_defaults)).config for c in BOTH)
        self.make, self.seed = partial(Canvas.of, network=model.network), seed
        prompt = Prompt(ids, (len(ids),))
        self.claim = Claim(prompt, len(ids) + 1, model.family.name, fresh=1)
        self.figures = Figures(seed)

    def run(self) -> Any:
        state = yield Encode(self.claim.prompt.ids, LastState())
        draft = yield Draw(state, self.make(CanvasPlan(self.drawn, Noise(self.seed, 0))))
        first = draft.token_ids.tolist()
        yield Encode(first)
        noises = (Noise(self.seed, 1), Noise(self.seed + 1, 1))
        canvases = [self.make(CanvasPlan(self.denoised, noise)) for noise in noises]
        replies: dict[Canvas, list[int]] = {}
        while going := tuple(canvas for canvas in canvases if not canvas.done):
            for canvas, draft in zip(going, (yield Denoise(going)), strict=True):
                replies[canvas] = draft.token_ids.tolist()
                yield draft
        lines = tuple(Likelihood(replies[canvas], 1) for canvas in canvases)
        scores = yield Score(lines)
        best = max(range(2), key=scores.__getitem__)
        return first + replies[canvases[best]], scores

    def stopped(self) -> Any:
        raise Unfinished("neither reply was better yet")


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(shallow_checkpoint(), device="cpu", dtype="float32")


def by_itself(model: Model, text: str, seed: int) -> tuple[list[Draft], Any]:
    events, drafts = alone(model.network, BetterOfTwo(model, text, seed)), []
    while True:
        try:
            drafts.append(next(events))
        except StopIteration as end:
            return drafts, end.value


def beside_others(model: Model, serving: Engine) -> tuple[list[Handle], Handle]:
    handles = [serving.run(BetterOfTwo(model, f"name color {n}", n)) for n in range(3)]
    chat = Request("Who are you?", max_tokens=40, seed=1, sampler=SamplerConfig(max_steps=3))
    return handles, serving.submit(chat)


def engine(model: Model, **config: Any) -> Engine:
    return Engine(
        model, EngineConfig(**({"slots": 3, "context": 256, "prefill_chunk": 24} | config))
    )


def test_it_is_the_same_alone_and_beside_others(model: Model) -> None:
    chat = model.generate("Who are you?", max_tokens=40, seed=1, sampler=SamplerConfig(max_steps=3))
    serving = engine(model)
    handles, beside = beside_others(model, serving)
    run(serving)
    for seed, handle in enumerate(handles):
        drafts, outcome = by_itself(model, f"name color {seed}", seed)
        *received, end = handle.events()
        assert handle.result() == outcome and isinstance(end, Completed)
        assert all(isinstance(each, Draft) for each in received)
        for one, other in zip(received, drafts, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
        assert end.account.seed == seed and end.account.total_s > 0
    assert beside.result().token_ids == chat.token_ids
    assert serving.state().totals.requests["completed"] == 3 and no_slot_is_leaked(serving)


def test_it_is_the_same_under_recorded_graphs(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RepeatedCalls()
    monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: backend)
    serving = engine(model)
    for _ in range(2):  # so that steps have been captured
        handles, _ = beside_others(model, serving)
        run(serving)
    assert backend.replays and no_slot_is_leaked(serving)
    for seed, handle in enumerate(handles):
        (ids, scores), outcome = handle.result(), by_itself(model, f"name color {seed}", seed)[1]
        assert ids == outcome[0] and scores == pytest.approx(outcome[1], abs=1e-3)


WORKS = {
    "encode": ("sfumato.model.network.Network", "encode_hidden"),
    "draw": ("sfumato.engine.runner", "draw_next"),
    "denoise": ("sfumato.diffusion.step.Denoiser", "forward"),
    "score": ("sfumato.tasks.score_progress", "row_log_likelihoods"),
}


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("work", WORKS)
def test_a_fault_ends_it_in_words_or_costs_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, work: str, always: bool
) -> None:
    outcome = by_itself(model, "name color 0", 0)[1]
    serving = engine(model)
    failing(monkeypatch, *WORKS[work], times=1000 if always else 1)
    handle = serving.run(BetterOfTwo(model, "name color 0", 0))
    run(serving)
    end = handle.terminal
    if isinstance(end, Failed):
        assert end.kind == "internal" and end.account is not None
    else:
        assert handle.result() == outcome and not always
    monkeypatch.undo()
    handle = serving.run(BetterOfTwo(model, "name color 0", 0))
    run(serving)
    assert handle.result() == outcome and no_slot_is_leaked(serving)


def failing(patch: pytest.MonkeyPatch, owner: str, name: str, times: int) -> None:
    """Lets a function fail so many times."""
    from pkgutil import resolve_name

    place = resolve_name(owner)
    works, left = getattr(place, name), [times]

    def fails(*given: Any, **how: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a fault")
        return works(*given, **how)

    patch.setattr(place, name, fails)


def test_an_emptied_slot_costs_it_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row's fault in a shared encode: what it has appended is encoded again."""
    outcome = by_itself(model, "name color 0", 0)[1]
    serving = engine(model, prefill_chunk=512)
    real, failed = type(model.network).encode, []

    def encode(network: Any, rows: Any, slots: Any, *more: Any, **how: Any) -> Any:
        if len(rows) > 1 and not failed:
            failed.append(1)
            for slot in slots:
                slot.reset()
            raise RuntimeError("once")
        return real(network, rows, slots, *more, **how)

    monkeypatch.setattr(type(model.network), "encode", encode)
    handle = serving.run(BetterOfTwo(model, "name color 0", 0))
    serving.step()
    twin = serving.run(BetterOfTwo(model, "name color 0", 0))
    run(serving)
    assert handle.result() == twin.result() == outcome


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_it_is_cancelled_in_the_queue_and_in_the_middle(model: Model, steps: int) -> None:
    serving = engine(model, slots=1)
    running = serving.run(BetterOfTwo(model, "name color 0", 0))
    waiting = serving.run(BetterOfTwo(model, "name color 1", 1))
    for _ in range(steps):
        serving.step()
    running.cancel(), waiting.cancel()
    run(serving)
    for handle in (waiting, running):
        end = handle.terminal
        assert isinstance(end, Failed) and end.kind == "cancelled"
        assert end.message == "neither reply was better yet"
    assert no_slot_is_leaked(serving)


def test_a_task_that_raises_ends_alone(model: Model) -> None:
    class Broken(BetterOfTwo):
        def run(self) -> Any:
            yield Encode(self.claim.prompt.ids)
            raise RuntimeError("a fault of its own")

    serving = engine(model)
    broken = serving.run(Broken(model, "name color 0", 0))
    handles, _ = beside_others(model, serving)
    run(serving)
    assert isinstance(broken.terminal, Failed) and broken.terminal.kind == "internal"
    assert handles[0].result() == by_itself(model, "name color 0", 0)[1]


def test_its_length(model: Model) -> None:
    """The proof is that such a kind is short."""
    import inspect

    count: Callable[[Any], int] = lambda one: len(inspect.getsource(one).splitlines())  # noqa: E731
    assert count(BetterOfTwo) <= 60
