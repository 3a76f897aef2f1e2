from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfumato import ops
from sfumato.cli.checkpoint import memory
from sfumato.model.cache import slot_bytes
from sfumato.model.families import open_checkpoint
from sfumato.model.head import head_bytes
from sfumato.model.loading import load_network
from sfumato.train.recipe import EMBEDDED, initialised, save_checkpoint


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.cli.checkpoint.pick_device", lambda: torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(initialised(EMBEDDED, torch.Generator()), folder)
    return folder


def test_json(cli: Any, checkpoint: Path) -> None:
    done = cli("inspect", str(checkpoint), "--json")
    facts = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert (facts["kind"], facts["architecture"]) == ("safetensors", "diffusion_gemma")
    assert facts["formats"] == {"BF16": {"tensors": facts["tensors"], "bytes": facts["bytes"]}}
    assert facts["vision"]["tensors"] > 0
    assert facts["runs"]
    assert facts["config"]["vocab_size"] == EMBEDDED.vocab_size
    memory = facts["memory"]
    assert memory["dtype"] == "float32"
    assert facts["bytes"] < memory["weights"] <= 2 * facts["bytes"]
    assert memory["kv_cache"] == {
        str(context): slot_bytes(EMBEDDED, context, torch.float32) for context in (4096, 16384)
    }
    assert "list" not in facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_predicted_is_what_loading_takes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Routers, norms and scales included, which are kept apart from the others' dtype."""
    monkeypatch.setattr("sfumato.cli.checkpoint.pick_dtype", lambda *_: dtype)
    cpu, opened = torch.device("cpu"), open_checkpoint(checkpoint)
    network = load_network(opened, cpu, dtype)
    needs = memory(opened, network.config, cpu)
    held = [vars(module) | module._parameters for module in network.transformer.modules()]
    weights = [value for values in held for value in values.values() if hasattr(value, "nbytes")]
    assert needs["weights"] == sum(weight.nbytes for weight in weights)
    compiled = ops.multiplies_bf16(cpu)
    assert needs["head_buffer"] == head_bytes(network.config, dtype, compiled=compiled)


def test_the_memory_of_a_checkpoint_quantized_at_load(cli: Any, checkpoint: Path) -> None:
    plain, quantized = (
        json.loads(cli("inspect", str(checkpoint), "--json", *more).out)
        for more in ((), ("--quantize", "q8_0"))
    )
    assert (plain["memory"]["quantize"], quantized["memory"]["quantize"]) == (None, "q8_0")
    assert quantized["memory"]["weights"] < plain["memory"]["weights"]
    assert quantized["formats"] == plain["formats"]  # the file is what it is
    printed = cli("inspect", str(checkpoint), "--quantize", "q8_0").out
    assert "memory predicted on cpu, in float32, --quantize q8_0:" in printed


def test_the_memory_with_a_narrow_cache(cli: Any, checkpoint: Path) -> None:
    plain, narrow = (
        json.loads(cli("inspect", str(checkpoint), "--json", *more).out)["memory"]
        for more in ((), ("--cache-type", "fp8"))
    )
    assert plain["kv_cache"] == {at: 4 * size for at, size in narrow["kv_cache"].items()}
    assert (plain["cache_type"], narrow["cache_type"]) == (None, "fp8")
    printed = cli("inspect", str(checkpoint), "--cache-type", "fp8").out
    assert "memory predicted on cpu, in float32, --cache-type fp8:" in printed


def test_report(cli: Any, checkpoint: Path) -> None:
    done = cli("inspect", str(checkpoint))
    assert done.code == 0
    assert f"vision tower of {checkpoint}: 16 tensors, " in done.out
    assert "memory predicted on cpu, in float32:" in done.out
    assert "cache for 4096 tokens" in done.out
    assert "embed_tokens.weight" not in done.out


def test_tensors(cli: Any, checkpoint: Path) -> None:
    done = cli("inspect", str(checkpoint), "--tensors")
    (line,) = (line for line in done.out.splitlines() if "embed_tokens.weight" in line)
    shape = f"{EMBEDDED.vocab_size}×{EMBEDDED.hidden_size}"
    assert line.split()[:3] == ["embed_tokens.weight", "BF16", shape]
    facts = json.loads(cli("inspect", str(checkpoint), "--tensors", "--json").out)
    assert len(facts["list"]) == facts["tensors"]


def test_a_checkpoint_that_cannot_run_is_told_with_the_reason(
    cli: Any, checkpoint: Path, tmp_path: Path
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.decoder.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    done = cli("inspect", str(tmp_path))
    assert done.code == 0
    assert "cannot run: " in done.out
    assert "norm.weight" in done.out


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"\x08\0\0\0\0\0\0\0not json"])
def test_what_is_no_checkpoint_is_one_line(cli: Any, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    done = cli("inspect", str(path))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("sfumato: error: ")
    assert str(path) in done.err
    assert len(done.err.split("\n\n")[0].splitlines()) == 1  # what follows is advice
