"""Which modules may name torch's backend for GPUs, and what is known where there is none."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfumato
from sfumato.ops import gpu

SRC = Path(sfumato.__file__).parent
ALLOWED = {
    "diffusion/step/graphs.py": "the graph runner",
    "engine/memory/device_memory.py": "the memory of every backend, each in a branch of its own",
    "engine/late_steps.py": "events of the device's clock",
    "model/placement.py": "for which cards this build of torch has code",
    "model/loading.py": "streams and events of copies",
    "ops/gpu.py": "answers the others",
    "ops/torch_device.py": "a probe of what makes the host wait, and its twin",
    "options/table.py": "the names that --device takes",
}
"""Files that name it beside those of ops/triton, and why."""


def names_it(source: str) -> bool:
    """Whether code, not a docstring or a comment, uses torch.cuda or compares with "cuda"."""
    tree = ast.parse(source)
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            return True
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", "") or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            if any("cuda" in name.split(".") for name in names):
                return True
        if isinstance(node, ast.Constant) and id(node) not in docs and _says(node.value):
            return True
    return False


def _says(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return any(word.split(":")[0] == "cuda" for word in value.replace(",", " ").split())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('if device.type == "cuda": pass', True),
        ('pick(torch.device("cuda:0"))', True),
        ("torch.cuda.synchronize()", True),
        ("from torch import cuda", True),
        ("import torch.cuda", True),
        ("from torch.cuda import Stream", True),
        ('"""For cuda."""\nx = 1  # cuda', False),
        ("from sfumato.diffusion.step.graphs import graph_backend", False),
    ],
)
def test_what_counts_as_naming_it(source: str, names: bool) -> None:
    assert names_it(source) == names


def test_no_other_code_assumes_cuda() -> None:
    files = (path.relative_to(SRC) for path in SRC.rglob("*.py"))
    names = {each.as_posix() for each in files if not each.is_relative_to("ops/triton")}
    naming = {name for name in names if names_it((SRC / name).read_text(encoding="utf-8"))}
    assert naming == ALLOWED.keys(), "ask ops/gpu.py instead"


@pytest.mark.parametrize("name", ["cpu", "mps", "xpu", "meta"])
def test_other_devices_are_no_such_gpus(name: str) -> None:
    device = torch.device(name)
    assert not gpu.is_gpu(device) and not gpu.is_present(device) and gpu.product(device) is None


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = torch.device("cuda", 0)
    assert gpu.is_gpu(device) and not gpu.is_present(device)
    assert gpu.peak_bytes() is gpu.used_bytes() is None


def test_the_memory_of_a_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5)
    assert (gpu.used_bytes(), gpu.peak_bytes()) == (7, 5)


def test_a_side_stream_is_of_one_stream_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", lambda device: object())
    gpu._side_stream.cache_clear()
    mains: list[Any] = [
        SimpleNamespace(device=torch.device("cuda", 0), stream_id=n) for n in (0, 7)
    ]
    own = [gpu.side_stream(mains[n]) for n in (0, 1, 0)]
    assert own[0] is own[2] is not own[1]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gpu.side_stream, mains[0]).result() not in own
    gpu._side_stream.cache_clear()
