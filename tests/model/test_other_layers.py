"""The choice between the CPU and streaming, by stubbed times and by a trial of a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf

from sfumato.model import loading
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import ROUNDS, LayerTimes, config_of, faster_other_layers, load_network
from sfumato.options.table import OTHER_LAYERS
from sfumato.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_state(gguf_config()), gguf_config())
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        (LayerTimes(cpu_s=3.0, card_s=0.5, copy_s=2.0), "stream"),
        (LayerTimes(cpu_s=3.0, card_s=1.0, copy_s=2.0), "cpu"),
        (LayerTimes(cpu_s=3.0, card_s=0.1, copy_s=4.0), "cpu"),
    ],
)
def test_the_faster_one(times: LayerTimes, choice: str) -> None:
    assert times.faster == choice and choice in OTHER_LAYERS


def clock(*seconds: float) -> Callable[[], float]:
    """Time goes on by these seconds in the work of each kind, but for one round that is slow."""

    def times() -> Iterator[float]:
        now = 0.0
        for each in seconds:
            for number in range(ROUNDS + 1):
                yield now
                now += each * (100 if number == 2 else 1)
                yield now

    return times().__next__


@pytest.mark.parametrize(("copied", "choice"), [(1.0, "stream"), (3.0, "cpu")])
def test_a_layer_is_timed_on_both_and_the_choice_logged(
    checkpoint: Checkpoint,
    copied: float,
    choice: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, loading.__name__)
    given = checkpoint, config_of(checkpoint), CPU, torch.float32
    ours = clock(4.0, 2.0, copied)
    assert faster_other_layers(*given, clock=ours) == choice
    (record,) = caplog.records
    assert record.getMessage() == (
        f"other layers: {choice}: a layer takes 4000.00 ms on the CPU, and 2000.00 ms on cpu after "
        f"{copied * 1e3:.2f} ms of copying"
    )
    # A part is copied where a layer is large, and its time counts for the others too.
    network = load_network(checkpoint, CPU, torch.float32)
    layer = network.transformer.layers[0]
    nbytes = loading._nbytes(layer)  # type: ignore[arg-type]
    assert nbytes >= sum(p.nbytes for p in layer.parameters())
    monkeypatch.setattr(loading, "COPIED", nbytes // 2)
    assert loading._copy_seconds(nbytes, CPU, clock(1.0)) == pytest.approx(2.0, rel=0.01)


def test_without_memory_for_the_trial_the_cpu_runs_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> Callable[..., NoReturn]:
        def load(*_: object) -> NoReturn:
            raise error

        return load

    given = checkpoint, config_of(checkpoint), CPU, torch.float32
    monkeypatch.setattr(loading, "load_layer", fail(MemoryError()))
    assert faster_other_layers(*given) == "cpu"
    assert "no memory for a trial" in caplog.text
    monkeypatch.setattr(loading, "load_layer", fail(RuntimeError("a kernel is wrong")))
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        faster_other_layers(*given)
