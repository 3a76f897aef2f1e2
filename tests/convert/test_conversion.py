from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.gguf_files import gguf_config, random_state, write_gguf

import sfumato.convert as convert_module
import sfumato.weights.files.gguf as write_gguf_module
from sfumato.catalog import EMBEDDED
from sfumato.convert import convert
from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma import TENSOR_NAMES
from sfumato.model.families.diffusion_gemma.config import hf_config
from sfumato.model.loading import config_of
from sfumato.weights.errors import CheckpointError

CONFIG = gguf_config(hidden_size=256, intermediate_size=288, expert_size=96, vocab_size=110)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 checkpoint as from the hub, with the embedded model's text side."""
    return _hf_folder(tmp_path_factory.mktemp("hf"), torch.bfloat16)


def _hf_folder(path: Path, dtype: torch.dtype) -> Path:
    state = random_state(CONFIG)
    named = {TENSOR_NAMES.transformers_name(name): value.to(dtype) for name, value in state.items()}
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((EMBEDDED / name).read_bytes())
    return path


def _equal(first: Path, second: Path) -> None:
    ours, theirs = load_file(first), load_file(second)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("dtype", "to"), [(torch.bfloat16, None), (torch.float32, "f32"), (torch.float16, "f16")]
)
def test_safetensors_to_gguf_and_back_is_bitwise_the_same(
    tmp_path: Path, dtype: torch.dtype, to: str | None
) -> None:
    (tmp_path / "hf").mkdir()
    source = _hf_folder(tmp_path / "hf", dtype)
    convert(source, tmp_path / "x.gguf", "f32")
    done = convert(tmp_path / "x.gguf", tmp_path / "back", to)
    assert done.notes == ()
    _equal(tmp_path / "back" / "model.safetensors", source / "model.safetensors")
    assert config_of(open_checkpoint(tmp_path / "back")) == config_of(open_checkpoint(source))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["dtype"] == str(dtype).removeprefix("torch.")


def test_the_mix(folder: Path, tmp_path: Path) -> None:
    done = convert(folder, tmp_path / "x.gguf")
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert done.target == "q4_k_m"
    assert done.nbytes == sum(i.nbytes for i in checkpoint.tensors.values()) + 4 * 16
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    assert formats["embed_tokens.weight"] == "Q6_K"
    assert formats["layers.0.self_attn.q_proj.weight"] == "Q4_K"
    # Of three layers the mix favours the last; of two V projections the second.
    assert [formats[f"layers.{i}.experts.down_proj"] for i in range(3)] == ["Q5_0", "Q5_0", "Q8_0"]
    values = [formats[f"layers.{i}.self_attn.v_proj.weight"] for i in range(2)]
    assert values == ["Q4_K", "Q6_K"]
    once = replace(config_of(checkpoint), rms_norm_eps=1e-6)  # it has been a float32
    assert replace(once, eos_ids=(1, 6)) == config_of(open_checkpoint(folder))


@pytest.mark.parametrize("to", ["q8_0", "q6_k", "q5_k_m", "q5_k", "q4_k", "q5_0", "bf16", "f16"])
def test_every_target_is_near_the_source(folder: Path, tmp_path: Path, to: str) -> None:
    convert(folder, tmp_path / "x.gguf", to)
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "x.gguf")
    worst = {"q8": 0.01, "q6": 0.04, "q5": 0.06, "q4": 0.11, "bf": 1e-9, "f1": 1e-3}[to[:2]]
    for name in before.tensors:
        plain, coded = before.read(name), after.read(name)
        assert isinstance(plain, torch.Tensor)
        back = coded.float() if isinstance(coded, torch.Tensor) else coded.dequantize()
        assert (back - plain.float()).norm() <= worst * plain.float().norm(), name


def test_the_gguf_package_reads_every_tensor(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    assert kinds["F32"] == sum(i.format == "F32" for i in checkpoint.tensors.values()) + 1
    by_name = {info.name: name for name, info in checkpoint.tensors.items()}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        ours = checkpoint.read(by_name[tensor.name])
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        expected = ours.dequantize() if not isinstance(ours, torch.Tensor) else ours
        assert np.array_equal(values.reshape(expected.shape), expected.numpy())
    get = reader.get_field
    assert get("general.file_type").contents() == 15
    assert get("diffusion-gemma.attention.sliding_window_pattern").contents() == [1, 1, 0]
    assert get("diffusion.canvas_length").types[0].name == "UINT32"
    assert get("diffusion-gemma.attention.layer_norm_rms_epsilon").types[0].name == "FLOAT32"


def test_requantizing_keeps_what_is_in_the_format_already(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "mix.gguf")
    done = convert(tmp_path / "mix.gguf", tmp_path / "six.gguf", "q6_k")
    assert done.notes == (
        "the source is quantized already (Q4_K, Q5_0): its errors add to the new ones",
    )
    assert convert(tmp_path / "mix.gguf", tmp_path / "same.gguf").notes == ()
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "mix.gguf").read_bytes()
    before, after = open_checkpoint(tmp_path / "mix.gguf"), open_checkpoint(tmp_path / "six.gguf")
    name = "embed_tokens.weight"
    assert torch.equal(before.read(name).data, after.read(name).data)
    assert after.tensors["layers.0.self_attn.q_proj.weight"].format == "Q6_K"
    same = {**before.metadata, "general.file_type": 18}
    assert after.metadata.keys() == same.keys()
    for key, value in same.items():
        assert np.array_equal(after.metadata[key], value), key


def test_older_names_and_unknown_keys_pass(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "old.gguf",
        random_state(CONFIG),
        CONFIG,
        extra={"other.key": "kept", "diffusion.eb_max_steps": 7},
        older_names=True,
    )
    done = convert(tmp_path / "old.gguf", tmp_path / "new.gguf", "q8_0")
    assert done.notes == (
        f"{tmp_path / 'old.gguf'} has no tokenizer, so the new checkpoint has none",
    )
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    assert reader.get_field("other.key").contents() == "kept"
    assert "self_cond_pre_norm.weight" in {tensor.name for tensor in reader.tensors}
    convert(tmp_path / "old.gguf", tmp_path / "hf")
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["max_denoising_steps"] == 7
    assert generation["t_min"] == 0.4


def test_another_alignment_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a matter of the file and not of the model; ours align to 32 bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(write_gguf_module, "ALIGNMENT", 1024)
        made = convert_module._gguf_metadata
        patch.setattr(
            convert_module, "_gguf_metadata", lambda *a: made(*a) | {"general.alignment": 1024}
        )
        convert(folder, tmp_path / "wide.gguf")
    convert(tmp_path / "wide.gguf", tmp_path / "usual.gguf")
    assert "general.alignment" not in open_checkpoint(tmp_path / "usual.gguf").metadata
    convert(folder, tmp_path / "direct.gguf")
    first, second = (open_checkpoint(tmp_path / f"{n}.gguf") for n in ("usual", "direct"))
    for name, info in first.tensors.items():
        assert info.offset == second.tensors[name].offset


def test_transformers_loads_what_was_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert(folder, tmp_path / "x.gguf", "f32")
    convert(tmp_path / "x.gguf", tmp_path / "back")
    load = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained
    model, info = load(tmp_path / "back", dtype=torch.float32, output_loading_info=True)
    # The placeholder of a vision tower is not in the file, and nothing else is missing.
    assert {
        key for key in info["missing_keys"] if ".vision" not in key and "_vision" not in key
    } == set()
    assert not info["unexpected_keys"]
    weight = model.model.decoder.layers[0].self_attn.q_proj.weight
    expected = load_file(folder / "model.safetensors")
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weight, expected[name].float())


def test_progress_ends_at_the_total(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    done = convert(folder, tmp_path / "x.gguf", progress=lambda *at: calls.append(at))
    counts = [count for count, _ in calls]
    assert counts == sorted(counts)
    assert {total for _, total in calls} == {done.nbytes}
    assert counts[-1] == done.nbytes


@contextmanager
def _no_file_larger_than(size: int) -> Iterator[None]:
    """As on a disk that is full there: writing past it is an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("out", ["x.gguf", "model"])
def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, out: str) -> None:
    convert(folder, tmp_path / "source.gguf", "f32")
    with _no_file_larger_than(100_000), pytest.raises(OSError, match=out):
        convert(tmp_path / "source.gguf", tmp_path / out)
    assert {item.name for item in tmp_path.iterdir()} == {"source.gguf"}


def test_what_exists_is_kept_unless_forced(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="exists already"):
        convert(folder, path)
    assert path.read_bytes() == b"old"
    convert(folder, path, force=True)
    assert open_checkpoint(path).tensors
    # A file may even be replaced by itself in another format.
    convert(path, path, "q8_0", force=True)
    assert open_checkpoint(path).tensors["layers.0.mlp.up_proj.weight"].format == "Q8_0"


def test_a_folder_that_holds_the_source_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "config.json").write_text(json.dumps(hf_config(CONFIG)))
    convert(folder, inside / "x.gguf")
    for source in (inside / "x.gguf", inside):
        with pytest.raises(ValueError, match=r"model: holds 'x\.gguf', .* would be lost"):
            convert(source, inside, force=True)
    assert (inside / "x.gguf").is_file()


def test_its_own_folder_is_replaced(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "x.gguf", "f32")
    for _ in range(2):
        convert(tmp_path / "x.gguf", tmp_path / "back", force=True)
    assert open_checkpoint(tmp_path / "back").tensors
    assert {item.name for item in tmp_path.iterdir()} == {"x.gguf", "back"}


@pytest.mark.parametrize(
    ("out", "to", "message"),
    [
        ("x.gguf", "q4", "'q4' is none of q4_k_m"),
        ("x.gguf", "iq3_s", "'iq3_s' is none of q4_k_m, .*: blocks of IQ3_S are read and run, and"),
        ("model", "q8_0", "'q8_0' is none of bf16, f16, f32"),
        ("x.safetensors", None, "name a folder for safetensors"),
        ("model", None, "both are safetensors"),
        ("nowhere/x.gguf", None, "the folder .*nowhere does not exist"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, tmp_path: Path, out: str, to: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / out, to)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    bad = _hf_folder(tmp_path / "bad", torch.bfloat16)
    tensors = load_file(bad / "model.safetensors")
    del tensors["model.decoder.norm.weight"]
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: norm\.weight"):
        convert(bad, tmp_path / "x.gguf")
    (bad / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="gpt2"):
        convert(bad, tmp_path / "x.gguf")


def test_a_weight_that_is_no_number_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    bad = _hf_folder(tmp_path / "bad", torch.bfloat16)
    tensors = load_file(bad / "model.safetensors")
    name = "model.decoder.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name}: as Q4_K: .*not finite"):
        convert(bad, tmp_path / "x.gguf")
    assert {item.name for item in tmp_path.iterdir()} == {"bad"}
