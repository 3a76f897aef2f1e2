"""Adapters in the weights of their base, in every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.narrow_files import LAYOUTS, narrow_tensors, write_narrow
from tests.support.random_adapter import added, random_adapter, tensor_name
from tests.support.tiny_checkpoint import save_tiny_checkpoint
from torch import Tensor

import sfumato
from sfumato.catalog import EMBEDDED
from sfumato.convert import convert
from sfumato.convert.merge import OWN, merge
from sfumato.model.adapter_files import AdapterFile, write_gguf_adapter, write_peft
from sfumato.model.families import FAMILIES, Family, family_of, open_checkpoint
from sfumato.model.loading import config_of
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize


def floats(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.read(name)
    return value.float() if isinstance(value, Tensor) else value.dequantize()


def adapter_of(base: Path, folder: Path, spread: float = 0.1) -> AdapterFile:
    """A random adapter, written into a folder."""
    checkpoint = open_checkpoint(base)
    adapter = random_adapter(config_of(checkpoint), spread=spread)
    write_peft(folder, adapter, family_of(checkpoint), config_of(checkpoint))
    return adapter


def check_sums(base: Path, merged: Path, adapter: AdapterFile) -> None:
    """Whether the merged weights are those of the base and what the adapter adds."""
    before, after = open_checkpoint(base), open_checkpoint(merged)
    changes = {tensor_name(path, change): change for path, change in adapter.changes.items()}
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        wanted = floats(before, name)
        if change := changes.get(name):
            wanted = wanted + added(change)
        torch.testing.assert_close(floats(after, name), wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_matrix_gets_its_change(family: Family, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = save_tiny_checkpoint(tmp_path / "base", family)
    adapter = adapter_of(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "folder", "f32")
    check_sums(base, tmp_path / "folder", adapter)
    merge(base, tmp_path / "adapter", tmp_path / "x.gguf", "f32")
    check_sums(base, tmp_path / "x.gguf", adapter)
    write_gguf_adapter(tmp_path / "adapter.gguf", adapter, family, config_of(open_checkpoint(base)))
    convert(base, tmp_path / "base.gguf", "f32")
    merge(tmp_path / "base.gguf", tmp_path / "adapter.gguf", tmp_path / "y")
    check_sums(base, tmp_path / "y", adapter)


def test_a_merged_model_writes_what_the_adapter_beside_its_base_does(tmp_path: Path) -> None:
    model = sfumato.load(dtype="float32")
    adapter = adapter_of(EMBEDDED, tmp_path / "adapter")
    assert merge(EMBEDDED, tmp_path / "adapter", tmp_path / "merged", "f32").notes == ()
    model.adapters.attach("tuned", adapter.changes)
    merged = sfumato.load(tmp_path / "merged", dtype="float32")
    request = {"prompt": "Tell me about zebras and seas", "seed": 3, "max_tokens": 32}
    request |= {"sampler": sfumato.SamplerConfig(max_steps=3)}
    tuned = model.generate(**request, adapter="tuned").text
    assert merged.generate(**request).text == tuned != model.generate(**request).text
    ids, logits = torch.arange(5, 30), []
    for network, number in ((model.network, 1), (merged.network, 0)):
        slots = network.new_cache(1, capacity=64)
        slots[0].adapter = number
        network.encode([ids], slots)
        logits.append(network.head.logits(network.denoise([ids], slots)))
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()


def test_a_quantized_base_keeps_its_formats_and_says_what_rounding_costs(tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    convert(EMBEDDED, base, "q4_k_m")
    adapter = adapter_of(base, tmp_path / "adapter", spread=0.02)
    del adapter.changes["layers.0.self_attn.q_proj"]  # type: ignore[attr-defined]
    given = family_of(open_checkpoint(base)), config_of(open_checkpoint(base))
    write_peft(tmp_path / "adapter", adapter, *given, force=True)
    done = merge(base, tmp_path / "adapter", tmp_path / "merged.gguf")
    assert done.target == OWN
    (note,) = done.notes
    assert "rounds the changed weights by" in note and "Q4_K" in note
    before, after = open_checkpoint(base), open_checkpoint(tmp_path / "merged.gguf")
    assert before.metadata["general.file_type"] == after.metadata["general.file_type"]
    changes = {tensor_name(path, change): change for path, change in adapter.changes.items()}
    for name, info in before.tensors.items():
        assert after.tensors[name].format == info.format
        ours, theirs = after.read(name), before.read(name)
        if not isinstance(ours, QuantizedTensor):
            continue
        if change := changes.get(name):
            theirs = quantize(floats(before, name) + added(change), FORMATS[info.format])
        assert torch.equal(ours.data, theirs.data), name


def test_narrow_matrices_become_floats_and_keep_their_values(tmp_path: Path) -> None:
    source = open_checkpoint(EMBEDDED)
    state = {name: source.read(name).float() for name in source.tensors}
    config = json.loads((EMBEDDED / "config.json").read_text())
    base = tmp_path / "narrow"
    base.mkdir()
    layout = LAYOUTS["fp8"]
    write_narrow(base, narrow_tensors(state, layout), layout, config)
    adapter = adapter_of(base, tmp_path / "adapter")
    done = merge(base, tmp_path / "adapter", tmp_path / "merged", "f32")
    convert(base, tmp_path / "plain.gguf", "f32")
    check_sums(tmp_path / "plain.gguf", tmp_path / "merged", adapter)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert done.notes == (f"{base} has no tokenizer, so the new checkpoint has none",)


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    config, base = gguf_config(hidden_size=256), tmp_path / "base.gguf"
    name = "layers.0.self_attn.q_proj.weight"
    write_gguf(base, random_state(config), config, formats={name: "Q2_K"})
    adapter_of(base, tmp_path / "adapter")
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"attn_q.weight: blocks of Q2_K are read and not made"):
        merge(base, tmp_path / "adapter", tmp_path / "merged.gguf")
    with pytest.raises(ValueError, match=r"exists already; name another, or replace it with"):
        merge(base, tmp_path / "adapter", base)
    with pytest.raises(ValueError, match=r"\[3, 128\] fits the model"):
        merge(EMBEDDED, tmp_path / "adapter", tmp_path / "merged")
    assert set(tmp_path.iterdir()) == before
