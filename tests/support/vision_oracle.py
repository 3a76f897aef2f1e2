"""`transformers`' vision tower as the oracle: random tiny ones, and files of their weights.

mmproj files are written with the `gguf` package and its own table of names, after llama.cpp's
converter: patches with colours outermost, numbers without an axis as vectors of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tests.support.oracle import tiny_config
from torch import Tensor
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaMultimodalEmbedder,
)
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

from sfumato.media.patches import Patches

TOWER, PROJECTOR = "model.encoder.vision_tower.", "model.encoder.embed_vision."


@dataclass(frozen=True)
class VisionOracle:
    """A tower of `transformers` with the projector of DiffusionGemma."""

    tower: Gemma4VisionModel
    projector: DiffusionGemmaMultimodalEmbedder

    @property
    def config(self) -> Gemma4VisionConfig:
        return self.tower.config

    @torch.no_grad()
    def soft_tokens(self, patches: Patches, padding: int = 0) -> Tensor:
        """Those of a picture, with so many soft tokens of padding."""
        count, more = len(patches.levels), padding * patches.cut.pool**2
        pixels = np.pad(patches.values(), ((0, more), (0, 0)))
        places = np.array([(i % patches.columns, i // patches.columns) for i in range(count)])
        places = np.pad(places, ((0, more), (0, 0)), constant_values=-1)
        out = self.tower(torch.from_numpy(pixels)[None], torch.from_numpy(places)[None])
        return self.projector(out.last_hidden_state)

    def state(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint."""
        tower = {TOWER + name: t for name, t in self.tower.state_dict().items()}
        return tower | {PROJECTOR + name: t for name, t in self.projector.state_dict().items()}

    def save(self, folder: Path) -> Path:
        """A safetensors checkpoint of the tower alone."""
        folder.mkdir(exist_ok=True)
        values = tiny_config().to_dict() | {"vision_config": self.config.to_dict()}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        state = {name: tensor.contiguous() for name, tensor in self.state().items()}
        save_file(state, folder / "model.safetensors")
        return folder

    def write_mmproj(
        self,
        path: Path,
        kinds: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        left_out: str = "",
        added: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """An mmproj file. kinds: format of the tensors whose names end so (else F32). Returns the
        weights as the file holds them, by the names of a checkpoint."""
        config, held = self.config, {}
        writer = gguf.GGUFWriter(path, "clip")
        values = {
            "clip.projector_type": "gemma4v",
            "clip.has_vision_encoder": True,
            "clip.vision.projection_dim": self.projector.embedding_projection.weight.shape[0],
            "clip.vision.image_size": 224,
            "clip.vision.patch_size": config.patch_size,
            "clip.vision.embedding_length": config.hidden_size,
            "clip.vision.feed_forward_length": config.intermediate_size,
            "clip.vision.block_count": config.num_hidden_layers,
            "clip.vision.attention.head_count": config.num_attention_heads,
            "clip.vision.attention.layer_norm_epsilon": config.rms_norm_eps,
            "clip.vision.projector.scale_factor": config.pooling_kernel_size,
        } | dict(metadata or {})
        for key, value in values.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string,
                   list: writer.add_array}  # fmt: skip
            add.get(type(value), writer.add_float32)(key, value)
        for name, tensor in self.state().items():
            theirs, data = mmproj_name(name, config.num_hidden_layers), mmproj_layout(name, tensor)
            if left_out and left_out in theirs:
                continue
            chosen = next((k for end, k in (kinds or {}).items() if theirs.endswith(end)), "F32")
            kind = gguf.GGMLQuantizationType[chosen]
            array = gguf.quantize(data.numpy(), kind)
            raw = kind if chosen != "F32" else None
            writer.add_tensor(theirs, array, raw_dtype=raw)
            back = torch.from_numpy(np.array(gguf.dequantize(array, kind))).view(data.shape)
            held[name] = (back.permute(0, 2, 3, 1) if back.ndim == 4 else back).reshape(
                tensor.shape
            )
        for name, tensor in (added or {}).items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return held


def mmproj_name(name: str, layers: int) -> str:
    """The name in an mmproj file, by llama.cpp's converter and the `gguf` package's table."""
    name = name.replace(TOWER, "model.vision_tower.").replace(PROJECTOR, "model.embed_vision.")
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    leaves = ".weight", ".input_max", ".input_min", ".output_max", ".output_min"
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers).get_name(name, leaves)
    assert theirs is not None, name
    return theirs


def mmproj_layout(name: str, tensor: Tensor) -> Tensor:
    """The tensor as an mmproj file holds it."""
    if name.endswith("patch_embedder.input_proj.weight"):
        side = int((tensor.shape[1] // 3) ** 0.5)
        tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2)
    return (tensor if tensor.ndim else tensor[None]).float().contiguous()


def random_vision(text_size: int = 32, seed: int = 0, **changes: Any) -> VisionOracle:
    """Random weights in every tensor; q_norm is small, for attention has scale 1."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
        "standardize": True,
    }
    config = Gemma4VisionConfig(**(values | changes))
    config._attn_implementation = "eager"
    text = tiny_config(hidden_size=text_size).text_config
    torch.manual_seed(seed)
    oracle = VisionOracle(
        Gemma4VisionModel(config).eval(), DiffusionGemmaMultimodalEmbedder(config, text).eval()
    )
    for name, tensor in oracle.state().items():
        tensor.requires_grad_(False)
        if name.endswith(("_min", "_max")):
            tensor.uniform_(0.3, 2.0).mul_(-1 if name.endswith("_min") else 1)
        elif "q_norm" in name or "std_scale" in name:
            tensor.uniform_(0.1, 0.5)
        elif "std_bias" in name or "position_embedding" in name:
            tensor.normal_(0, 0.5)
        elif tensor.ndim == 1:
            tensor.uniform_(0.7, 1.3)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    return oracle
