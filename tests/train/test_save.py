from __future__ import annotations

import json

import pytest
import torch

from sfumato.model.families import open_checkpoint
from sfumato.model.network import Network
from sfumato.train.recipe import EMBEDDED, initialised, save_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random network, rounded to what is stored, and the folder it was saved in."""
    folder = tmp_path_factory.mktemp("saved")
    network = initialised(EMBEDDED, torch.Generator().manual_seed(1)).requires_grad_(False)
    for name, parameter in network.named_parameters():
        if name.endswith("layer_scalar"):
            parameter.uniform_(0.5, 1.5)
        parameter.copy_(parameter.to(torch.bfloat16))
    save_checkpoint(network, folder)
    return network, folder


def test_transformers_loads_every_weight_and_computes_the_same_logits(saved):
    network, folder = saved
    oracle, info = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids, canvas = torch.randint(0, 100, (1, 19)), torch.randint(0, 100, (1, 32))
    with torch.no_grad():
        expected = oracle(input_ids=ids, decoder_input_ids=canvas, past_key_values=None).logits
    runtime = Network(network, torch.device("cpu"), torch.float32)
    slot = runtime.new_slot(32)
    runtime.encode([ids[0]], [slot])
    ours = runtime.head.logits(runtime.denoise([canvas[0]], [slot]))
    assert (ours - expected[0]).abs().max() <= 1e-4 * expected.abs().max()


def test_sfumato_opens_what_it_saved_with_the_vision_tower_aside(saved):
    network, folder = saved
    checkpoint = open_checkpoint(folder)
    checkpoint.check_tensors({name: tuple(p.shape) for name, p in network.named_parameters()})
    assert checkpoint.vision
    for name, parameter in network.named_parameters():
        assert torch.equal(checkpoint.read(name).float(), parameter)


def test_the_generation_config_is_valid_for_transformers(saved):
    _, folder = saved
    loaded = transformers.models.diffusion_gemma.generation_diffusion_gemma
    config = loaded.DiffusionGemmaGenerationConfig.from_pretrained(folder)
    assert config.max_denoising_steps == 48 and config.sampler_config.entropy_bound == 0.1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 6]


def test_a_checkpoint_is_replaced_whole_or_not_at_all(saved, tmp_path, monkeypatch):
    network, _ = saved
    save_checkpoint(network, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= before.keys()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sfumato.convert.files.write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(network, tmp_path / "out")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
