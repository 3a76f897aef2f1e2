from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sfumato.cli import doctor
from sfumato.model import placement
from sfumato.model.placement import missing_code, pick_device, serves, shares_host_memory

GPU = torch.device("cuda", 0)
ADA = ["sm_50", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_90", (12, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_120", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_120", (12, 1), True),
        ("sm_100f", (10, 3), True),
        ("gfx942", (9, 4), False),
    ],
)
def test_which_code_runs_on_which_device(
    built: str, capability: tuple[int, int], runs: bool
) -> None:
    assert serves(built, *capability) is runs


def give(
    monkeypatch: pytest.MonkeyPatch, built: list[str], hip: str | None = None, **properties: object
) -> None:
    """Makes torch believe in one device."""
    given = SimpleNamespace(name="NVIDIA GeForce RTX 5090", major=12, minor=0, **properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)


def test_a_wheel_without_code_for_the_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ADA)
    problem = missing_code(GPU) or ""
    assert problem.startswith(f"torch {torch.__version__} has no code for NVIDIA GeForce RTX 5090")
    assert "(sm_120), only for sm_50, sm_80, sm_86, sm_90; install" in problem
    give(monkeypatch, [*ADA, "sm_120"])
    assert missing_code(GPU) is None
    give(monkeypatch, [])
    assert missing_code(GPU) is None


@pytest.mark.parametrize(
    ("capability", "build", "dtype"),
    [
        ((6, 1), "install torch 2.14 or earlier for CUDA 12.6, the last that has it", "float32"),
        ((7, 5), "install a build of torch that has it", "float32"),
        ((8, 6), "install a build of torch that has it", "bfloat16"),
    ],
)
def test_old_cards(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], build: str, dtype: str
) -> None:
    """What to install for them, and that they compute in float32 where no option says."""
    give(monkeypatch, ["sm_100"])
    given = SimpleNamespace(name="Tesla P40", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    assert f"{build}, see https" in (missing_code(GPU) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert doctor.quantized_dtype("cuda:0") is getattr(torch, dtype)
    for format in ("Q4_K", "BF16", "F16"):
        info = SimpleNamespace(format=format, nbytes=1 << 40, shape=(97, 64))
        checkpoint = SimpleNamespace(tensors={"embed_tokens.weight": info})
        assert placement.pick_dtype("auto", checkpoint, GPU) is getattr(torch, dtype)
    assert ("no units for bfloat16" in doctor._dtypes("cuda:0")) is (dtype == "float32")


def test_rocm_names_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    name = {"gcnArchName": "gfx1151:xnack-"}
    give(monkeypatch, ["gfx90a", "gfx942"], "6.4", **name)
    assert "(gfx1151), only for gfx90a, gfx942" in (missing_code(GPU) or "")
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert missing_code(GPU) is None
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION")
    give(monkeypatch, ["gfx1151"], "6.4", **name)
    assert missing_code(GPU) is None


def test_auto_leaves_such_a_device_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: GPU)
    monkeypatch.setattr(placement, "missing_code", lambda device: "torch is too old")
    with caplog.at_level(logging.WARNING):
        assert pick_device() == torch.device("cpu")
    assert "cuda:0 is left out: torch is too old" in caplog.text
    with pytest.raises(ValueError, match=r"'cpu' cannot be used here \(torch is too old\)"):
        pick_device("cpu")
    monkeypatch.setattr(placement, "missing_code", lambda device: None)
    assert pick_device() == GPU


def test_an_integrated_gpu_shares_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shares_host_memory(GPU)  # of a machine that has none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for integrated in (0, 1):
        give(monkeypatch, ADA, is_integrated=integrated)
        assert shares_host_memory(GPU) is bool(integrated)
    assert shares_host_memory(torch.device("cpu")) and shares_host_memory(torch.device("mps"))
    assert not shares_host_memory(torch.device("xpu"))
