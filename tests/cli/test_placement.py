"""What `run` and `chat` hand to load(): precision of activations, and threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.guard import check_placed
from sfumato.model import placement
from sfumato.ops import ACTIVATIONS as OURS
from sfumato.options.table import ACTIVATIONS, CACHE_TYPES


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every load(), which then gives up."""
    seen: list[dict[str, Any]] = []

    def load(_: object, **given: Any) -> SimpleNamespace:
        seen.append(given | {"threads": torch.get_num_threads()})
        raise ValueError("that is all")

    monkeypatch.setattr("sfumato.load", load, raising=False)
    return seen


def test_the_names_written_out_are_all() -> None:
    assert ACTIVATIONS == OURS
    assert tuple(placement.CACHE_TYPES) == CACHE_TYPES


def test_the_kind_of_cache_is_handed_on(cli: Any, loads: list[dict[str, Any]]) -> None:
    cli("run", "Hi")
    cli("run", "Hi", "--cache-type", "fp8")
    cli("bench", "--cache-type", "fp8")
    assert [each["cache_type"] for each in loads] == [None, "fp8", "fp8"]


@pytest.mark.parametrize(("option", "default"), [("experts-on-cpu", 0), ("gpu-layers", None)])
def test_the_layers_of_the_cpu(
    cli: Any, loads: list[dict[str, Any]], option: str, default: int | None
) -> None:
    cli("run", "Hi")
    cli("run", "Hi", f"--{option}", "2")
    assert [each[option.replace("-", "_")] for each in loads] == [default, 2]
    assert f"--{option}: must be" in cli("run", "Hi", f"--{option}", "12").err
    assert f"--{option}" in cli("run", "Hi", f"--{option}", "-1").err


@pytest.mark.parametrize(
    ("given", "activations", "threads"),
    [
        ((), "int8", 3),
        (("--activations", "bf16"), "bf16", 3),
        (("--activations", "int8", "--threads", "2"), "int8", 2),
    ],
)
def test_what_is_handed_on(
    cli: Any, loads: list[dict[str, Any]], given: tuple[str, ...], activations: str, threads: int
) -> None:
    done = cli("run", "Hi", *given)
    assert done.err == "sfumato: error: that is all\n"
    (handed,) = loads
    assert (handed["activations"], handed["threads"]) == (activations, threads)


def test_other_activations_are_refused(cli: Any) -> None:
    done = cli("run", "Hi", "--activations", "int4")
    assert done.code == 2 and "invalid choice: 'int4'" in done.err


def test_auto_is_the_number_of_layers_that_fit(
    monkeypatch: pytest.MonkeyPatch, cli: Any, loads: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.most_gpu_layers", lambda *_: 1)
    done = cli("run", "Hi", "--device", "cpu", "--gpu-layers", "auto")
    assert [each["gpu_layers"] for each in loads] == [1]
    assert "sfumato: gpu-layers: 1 of " in done.err and "on the CPU: as many as fit" in done.err
    assert "--split" in cli("run", "Hi", "--gpu-layers", "auto", "--split", "1,1").err


def test_the_layers_of_each_card(cli: Any, loads: list[dict[str, Any]]) -> None:
    cli("run", "Hi")
    cli("run", "Hi", "--split", "2,3")
    assert [each["split"] for each in loads] == [None, [2, 3]]
    assert "split: must be" in cli("run", "Hi", "--split", "20,10").err


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has every command take a card for its device; the trials of a layer on it, each of which
    finds streaming faster."""
    trials: list[str] = []

    def try_layer(*given: object) -> str:
        trials.append(str(given[2]))
        return "stream"

    monkeypatch.setattr("sfumato.cli.generation.pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr("sfumato.cli.generation.faster_other_layers", try_layer)
    return trials


@pytest.mark.parametrize(
    ("given", "handed", "tried"),
    [
        (("--gpu-layers", "1"), "stream", 1),
        (("--gpu-layers", "1", "--other-layers", "cpu"), "cpu", 0),
        (("--gpu-layers", "1", "--other-layers", "stream"), "stream", 0),
        ((), "auto", 0),
    ],
)
def test_the_other_layers_are_tried_where_there_are_some(
    cli: Any,
    loads: list[dict[str, Any]],
    card: list[str],
    given: tuple[str, ...],
    handed: str,
    tried: int,
) -> None:
    cli("run", "Hi", *given)
    assert [each["other_layers"] for each in loads] == [handed]
    assert card == ["meta"] * tried
    assert "invalid choice: 'disk'" in cli("run", "Hi", "--other-layers", "disk").err


@pytest.mark.parametrize("fitting", [{"cpu": 1, "stream": 0}, {"cpu": 5, "stream": 5}])
def test_auto_counts_beside_what_streaming_takes(
    monkeypatch: pytest.MonkeyPatch,
    cli: Any,
    loads: list[dict[str, Any]],
    card: list[str],
    fitting: dict[str, int],
) -> None:
    def most(*_: object, other_layers: str = "cpu") -> int:
        return fitting[other_layers]

    monkeypatch.setattr("sfumato.cli.generation.most_gpu_layers", most)
    err = cli("run", "Hi", "--gpu-layers", "auto").err
    assert [each["gpu_layers"] for each in loads] == [fitting["stream"]]
    is_streamed = fitting["cpu"] < 5
    assert ("stream from the host's memory" in err) == is_streamed and len(card) == is_streamed


def test_a_part_that_does_not_fit_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, cli: Any, loads: list[dict[str, Any]], card: list[str]
) -> None:
    def ask(device: torch.device) -> Budget | None:
        return Budget(1000, "a test") if device.type == "cpu" else None

    monkeypatch.setattr(
        "sfumato.cli.generation.check_placed", lambda *given: check_placed(*given, ask)
    )
    for given in (("--experts-on-cpu", "2"), ("--gpu-layers", "1")):
        done = cli("run", "Hi", *given)
        assert done.code == 2 and "or leave more to the card" in done.err and not loads
