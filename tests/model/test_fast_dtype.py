"""The dtype that a probe chooses where a device has no units for bfloat16, with a clock of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfumato
from sfumato.catalog import EMBEDDED
from sfumato.model import loading, placement
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import fits_float16, load_network
from sfumato.model.placement import faster_dtype, pick_dtype

CPU = torch.device("cpu")


def clock(wide_s: float, narrow_s: float) -> Callable[[], float]:
    """Time goes on by these seconds in each product, in turn; one round is ten times slower."""

    def times() -> Iterator[float]:
        now = 0.0
        for count, taken in enumerate(cycle((wide_s, narrow_s))):
            yield now
            now += taken * (10 if count in (2, 3) else 1)
            yield now

    return times().__next__


@pytest.mark.parametrize(
    ("narrow_s", "dtype"),
    [(0.2, torch.float16), (0.89, torch.float16), (0.95, torch.float32), (64.0, torch.float32)],
)
def test_the_faster_one_is_taken_by_its_median(
    narrow_s: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, placement.__name__)
    ours = clock(1.0, narrow_s)
    for _ in range(2):
        assert faster_dtype(CPU, 64, torch.float16, ours) is dtype
    (record,) = caplog.records
    assert f"takes 1000.00 ms in float32 and {narrow_s * 1e3:.2f} ms" in record.getMessage()


def test_float32_where_a_device_refuses_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", refuses)
    assert faster_dtype(CPU, 64, torch.float16, clock(1.0, 0.1)) is torch.float32


def test_who_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old cards for every checkpoint, and Apple's for quantized ones; no other device."""
    probed: list[tuple[str, int, torch.dtype]] = []

    def probe(device: torch.device, width: int, narrow: torch.dtype) -> torch.dtype:
        probed.append((device.type, width, narrow))
        return torch.float32

    monkeypatch.setattr(placement, "faster_dtype", probe)
    monkeypatch.setattr(placement, "multiplies_bfloat16", lambda device: device.type == "mps")

    def checkpoint(format: str) -> Any:
        info = SimpleNamespace(format=format, nbytes=1 << 30, shape=(97, 2816))
        return SimpleNamespace(tensors={"embed_tokens.weight": info})

    gpu, mps = torch.device("cuda", 0), torch.device("mps")
    for format in ("Q6_K", "BF16"):
        assert pick_dtype("auto", checkpoint(format), gpu) is torch.float32
        pick_dtype("auto", checkpoint(format), mps)
        pick_dtype("auto", checkpoint(format), CPU)
    old = ("cuda", 2816, torch.float16)
    assert probed == [old, ("mps", 2816, torch.bfloat16), old]


def test_float16_is_kept_only_where_it_holds_the_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = load_network(open_checkpoint(EMBEDDED), CPU, torch.float16)
    monkeypatch.setattr(loading, "FLOAT16_HEADROOM", 1)
    assert fits_float16(network) and not caplog.records
    network.transformer.layers[0].layer_scalar.data.fill_(6e4)
    assert not fits_float16(network)
    assert "float32 in place of float16" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("fits", "dtype"), [(True, torch.float16), (False, torch.float32)])
def test_a_model_that_float16_does_not_hold_is_loaded_in_float32(
    monkeypatch: pytest.MonkeyPatch, fits: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("sfumato.api.pick_dtype", lambda *_: torch.float16)
    monkeypatch.setattr("sfumato.api.fits_float16", lambda network: fits)
    assert sfumato.load(device="cpu").network.dtype is dtype
    assert sfumato.load(device="cpu", dtype="float16").network.dtype is torch.float16
