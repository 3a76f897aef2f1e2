from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sfumato.model.placement import SMALL, pick_device, pick_dtype
from sfumato.ops.gpu import device_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def checkpoint(format: str, nbytes: int = SMALL):
    return SimpleNamespace(
        tensors={"embed_tokens.weight": SimpleNamespace(format=format, nbytes=nbytes)}
    )


@pytest.mark.parametrize(
    ("format", "nbytes", "device", "dtype"),
    [
        ("BF16", SMALL, CPU, torch.bfloat16),
        ("BF16", SMALL - 1, CPU, torch.float32),
        ("BF16", SMALL - 1, GPU, torch.bfloat16),
        ("F16", SMALL, GPU, torch.bfloat16),
        ("Q6_K", SMALL, CPU, torch.float32),
        ("Q6_K", 1, GPU, torch.bfloat16),
    ],
)
def test_auto_dtype(format, nbytes, device, dtype):
    assert pick_dtype("auto", checkpoint(format, nbytes), device) is dtype


def test_a_named_dtype_is_taken_and_an_unknown_one_refused_with_the_list():
    assert pick_dtype("float16", checkpoint("BF16"), CPU) is torch.float16
    with pytest.raises(ValueError, match=r"dtype: 'int8' .*bfloat16"):
        pick_dtype("int8", checkpoint("BF16"), CPU)


def test_a_dtype_may_be_torchs_own():
    assert pick_dtype(torch.bfloat16, checkpoint("Q6_K"), CPU) is torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype: 'int8' .*bfloat16"):
        pick_dtype(torch.int8, checkpoint("BF16"), CPU)


def test_a_checkpoint_without_embedding_is_left_for_the_loader_to_refuse():
    assert pick_dtype("auto", SimpleNamespace(tensors={}), CPU) is torch.float32


@pytest.mark.parametrize("name", ["toaster", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"device: '{name}'"):
        pick_device(name)


def test_gpu_is_the_accelerator_there_is(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    with pytest.raises(ValueError, match=r"device: 'gpu': torch .* sees none.*name cpu, or see"):
        pick_device("gpu")
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: CPU)
    assert pick_device("gpu") == CPU


def test_a_device_may_be_torchs_own_and_nothing_else():
    assert pick_device(CPU) == CPU
    with pytest.raises(ValueError, match="device: 'None' cannot be used"):
        pick_device(None)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="this system does not tell")
def test_a_machine_has_memory(monkeypatch):
    assert device_memory(CPU) > 1 << 28
    monkeypatch.delattr("os.sysconf")
    assert device_memory(CPU) is None


def test_the_cpu_is_always_there():
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda", "mps", "xpu")
