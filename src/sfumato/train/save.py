"""Saves a trained network as a Hugging Face checkpoint that `transformers` loads too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sfumato.convert.files import config_files, save_folder
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.model_config import ModelConfig
from sfumato.model.transformer import Transformer
from sfumato.train.vocabulary import write_text_side
from sfumato.weights.files.tensor_stream import TensorStream


def save_checkpoint(network: Transformer, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors (bfloat16) and the text side, in place
    of an earlier checkpoint: whole, or not at all. Raises ValueError for a folder that is more than
    a checkpoint, and OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    name_of = DIFFUSION_GEMMA.tensor_names.transformers_name
    tensors = {name_of(name): value for name, value in network.state_dict().items()}
    tensors |= DIFFUSION_GEMMA.config.hf_placeholders(network.config)
    streams = [TensorStream.of(name, value, "BF16") for name, value in tensors.items()]
    save_folder(folder, _files(network.config), streams, write_text_side, force=True)


def _files(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """The reference's sampler is written out."""
    return config_files(DIFFUSION_GEMMA, config, REFERENCE, config.eos_ids)
