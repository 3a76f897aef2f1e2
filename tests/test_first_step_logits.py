from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import first_step_logits as script
from torch import Tensor

from sfumato.model.families import open_checkpoint


def _run(monkeypatch: pytest.MonkeyPatch, noise: float, *formats: str) -> None:
    """With a peer that is exact but for noise of this share of the logits' length."""

    def peers(program: Path, model: Path, prompt: Tensor, canvas: Tensor) -> Tensor:
        exact = script.dequantized(open_checkpoint(model))
        logits = script.logits(exact, prompt, canvas, torch.float32, "int8")
        return logits + noise * logits.std() * torch.randn(logits.shape)

    monkeypatch.setattr(script, "peers", peers)
    argv = ["first_step_logits", "--eval", __file__, "--seeds", "1", "--formats", *formats]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()


def test_quantized_files_are_near_the_exact_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, 0, "f32", "q4_k")
    distances = json.loads(capsys.readouterr().out.splitlines()[-1])["distances"]
    assert distances["f32"]["float32"]["exact"]["l2_median"] == 0
    for way in ("int8", "bf16"):
        assert distances["q4_k"][way]["llama.cpp"]["cosine_worst"] > 0.999
        assert 1 > distances["q4_k"][way]["exact"]["cosine_worst"] > 0.999


@pytest.mark.parametrize(("format", "noise"), [("q8_0", 0.07), ("f32", 0.003)])
def test_what_is_off_is_said(monkeypatch: pytest.MonkeyPatch, format: str, noise: float) -> None:
    with pytest.raises(SystemExit, match=f"{format}.* llama.cpp of "):
        _run(monkeypatch, noise, format)
