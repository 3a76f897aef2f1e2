"""Whole texts of an engine with layers on several devices, for which names of the CPU stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from tests.support.late_copies import LateCopies
from torch import Tensor

import sfumato
from sfumato import api
from sfumato.engine import Draft, Engine, EngineConfig, Finished, Request, runner
from sfumato.model import loading
from sfumato.model.layer_devices import Placement

CPU, FIRST, SECOND = (torch.device("cpu", *index) for index in ((), (0,), (1,)))
TEXTS = ["What is the capital of France?", "Write a haiku.", "What is the capital of Peru?"]


def results(model: sfumato.Model) -> list[tuple[list[int], Tensor]]:
    """Tokens of each reply, and the entropies of each of its steps, down to the last bit."""
    config = EngineConfig(slots=2, context=192, strict=True, prefill_chunk=16)
    engine = Engine(model, config)  # three requests in two slots: one begins from a snapshot
    handles = [engine.submit(Request(text, max_tokens=40, seed=7, drafts=True)) for text in TEXTS]
    while engine.step():
        pass
    replies = []
    for handle in handles:
        drafts = [event.entropy for event in handle.events() if isinstance(event, Draft)]
        assert isinstance(handle.terminal, Finished)
        replies.append((handle.terminal.reply.token_ids, torch.cat(drafts)))
    return replies


def cycled(device: torch.device, layers: int, *_: object) -> Placement:
    own = tuple((CPU, FIRST, SECOND)[index % 3] for index in range(layers))
    return Placement(device, own, own[1:] + own[:1])


def in_two(device: torch.device, layers: int, *_: object) -> Placement:
    own = (CPU,) * (layers // 2) + (SECOND,) * (layers - layers // 2)
    return Placement(device, own, own)


def streamed(device: torch.device, layers: int, *_: object) -> Placement:
    """All layers but the last, on two devices, the experts of the first elsewhere."""
    own = (CPU,) * (layers - 2) + (SECOND,) * 2
    return Placement(device, own, (FIRST, *own[1:]), tuple(range(layers - 1)))


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], Tensor]]:
    return results(sfumato.load(device="cpu"))


def never(device: torch.device) -> NoReturn:
    raise AssertionError("a graph holds the work of one device")


@pytest.mark.parametrize("make", [cycled, in_two, streamed])
def test_texts_are_those_of_one_device(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[list[int], Tensor]],
    make: Callable[..., Placement],
) -> None:
    monkeypatch.setattr(api, "make_placement", make)
    monkeypatch.setattr(loading, "side_copies", lambda _: LateCopies())
    monkeypatch.setattr(runner, "graph_backend", never)
    model = sfumato.load(device="cpu")
    assert model.network.is_mixed and "layers on cpu:1" in model.identity.dtype
    for (ids, entropies), (other, others) in zip(results(model), expected, strict=True):
        assert ids == other and ids
        assert torch.equal(entropies, others)


@pytest.mark.parametrize(("given", "streams"), [("auto", True), ("stream", True), ("cpu", False)])
def test_what_becomes_of_the_other_layers(
    monkeypatch: pytest.MonkeyPatch, given: str, streams: bool
) -> None:
    placements: list[Placement] = []

    def load_network(*arguments: object) -> NoReturn:
        placements.extend(each for each in arguments if isinstance(each, Placement))
        raise ValueError("that is all")

    monkeypatch.setattr(api, "pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(api, "try_device", lambda *_: None)
    monkeypatch.setattr(api, "faster_other_layers", lambda *_: "stream")
    monkeypatch.setattr(api, "load_network", load_network)
    with pytest.raises(ValueError, match="that is all"):
        sfumato.load(gpu_layers=3, other_layers=given)
    assert [placement.streamed for placement in placements] == [(0, 1) if streams else ()]
    with pytest.raises(ValueError, match="'disk' is none of auto, cpu, stream"):
        sfumato.load(other_layers="disk")
