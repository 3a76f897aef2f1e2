from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import random_checkpoint as script

from sfumato.cli import main
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of, expected_shapes, load_network
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.formats import QuantizedTensor

VOCABULARY = Path(__file__).resolve().parents[1].parent / "shared/fixtures/ggml-vocab-gemma-4.gguf"


def _write(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", *argv])
    script.main()


def test_a_sparse_file_of_full_size_opens_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    note: Callable[[str], None],
) -> None:
    path = tmp_path / "full.gguf"
    real = ("--tokenizer", str(VOCABULARY)) if VOCABULARY.is_file() else ()
    _write(monkeypatch, str(path), "--sparse", *real)
    assert "692 tensors, 16.791 GB" in capsys.readouterr().out
    assert path.stat().st_size > 16_791_000_000
    if os.name == "posix":
        assert path.stat().st_blocks * 512 < 100_000_000
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    opened = time.perf_counter() - start
    assert main(["inspect", str(path), "--json"]) == 0
    inspected = time.perf_counter() - start - opened
    note(f"full-size file: opened in {opened:.2f} s, inspected in {inspected:.2f} s")
    assert opened < 5 and inspected < 20
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert facts["runs"]
    assert len(facts["config"]["layers"]) == 30
    counts = {"Q4_K": 194, "Q6_K": 14, "Q8_0": 28, "Q5_0": 33, "F32": 422}
    assert Counter(info.format for info in checkpoint.tensors.values()) == counts
    checkpoint.check_tensors(expected_shapes(config_of(checkpoint)))


def test_a_tiny_one_runs_and_stays_tame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    _write(monkeypatch, str(path), "--preset", "tiny", "--layers", "3", "--seed", "1")
    checkpoint = open_checkpoint(path)
    assert len(config_of(checkpoint).layers) == 3
    for name in checkpoint.tensors:
        value = checkpoint.read(name)
        if isinstance(value, QuantizedTensor):
            values = value.dequantize()
            scale = 3 if name == "embed_tokens.weight" else 1
            assert float(values.std()) == pytest.approx(scale * value.shape[-1] ** -0.5, rel=0.25)
            assert abs(float(values.mean())) < float(values.std()) / 2
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    text = "<|turn>user\nCalm: 1 + 1 = é<turn|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    network = load_network(checkpoint, torch.device("cpu"), torch.float32)
    cache = network.new_cache(1, 64)
    network.encode([torch.arange(20)], cache)
    hidden = network.denoise([torch.arange(32)], cache)
    logits = network.head.logits(hidden)
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 10


def test_it_is_the_same_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        _write(monkeypatch, str(tmp_path / name), "--preset", "tiny", "--seed", seed)
    first, second, third = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == second != third
