from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from sfumato.weights.checkpoint import Checkpoint, fingerprint
from sfumato.weights.files.safetensors import read_safetensors


def of(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, path)
    return fingerprint(Checkpoint(path, "safetensors", {}, {}, {}, {path: read_safetensors(path)}))


def test_it_names_weights_and_not_files(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(40, 30), "b": torch.zeros(3)}
    first = of(tmp_path / "x.safetensors", tensors)
    assert len(first) == 16 and first == of(tmp_path / "y.safetensors", tensors)
    retrained = {**tensors, "a": tensors["a"] + 1e-3}  # names, shapes and sizes are the same
    others = [retrained, {**tensors, "b": torch.ones(3)}, {"a": tensors["a"], "c": tensors["b"]}]
    fingerprints = {of(tmp_path / "x.safetensors", other) for other in others}
    assert len(fingerprints) == 3 and first not in fingerprints
