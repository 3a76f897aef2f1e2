"""Opens and loads vision towers: from a checkpoint's own tensors, or from an mmproj GGUF file.

A tensor's canonical name is the module's in `tower.py`, which is `transformers`' without where in
its own tree the tower is.  Every tensor is used, or the load fails and names it.  Quantized
matrices stay quantized; those that are looked up or stored in another order become floats.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.loading import holds_float16, place
from sfumato.model.model_config import ConfigError
from sfumato.model.vision.config import VisionConfig, vision_from_gguf, vision_from_hf
from sfumato.model.vision.tower import Encoding, VisionTower
from sfumato.ops import gpu
from sfumato.ops.cpu.library import watch
from sfumato.ops.triton.self_test import Sizes
from sfumato.weights.checkpoint import Checkpoint, mmproj_beside
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.gguf import read_gguf
from sfumato.weights.files.tensorfile import TensorInfo, require_readable
from sfumato.weights.formats import Stored, Weight

Tower = tuple[VisionConfig, Checkpoint]
"""A vision tower that is not loaded yet: its shape, and its tensors by canonical name."""
NO_TOWER = "none"
"""The word for an mmproj file where a model is to be loaded without its tower."""

_TRIAL = 8  # soft tokens across and down of a trial's picture
_log = logging.getLogger(__name__)

PATCHES, _POSITIONS = "patch_embedding.weight", "position_embedding"
_TOWER, _PROJECTOR = "model.encoder.vision_tower.", "model.encoder.embed_vision."
_HF = {
    f"{_TOWER}patch_embedder.input_proj.weight": "patch_embedding.weight",
    f"{_TOWER}patch_embedder.position_embedding_table": "position_embedding",
    f"{_TOWER}std_bias": "std_bias",
    f"{_TOWER}std_scale": "std_scale",
    f"{_PROJECTOR}embedding_projection.weight": "projection.weight",
}
_GGUF = {
    "v.patch_embd.weight": "patch_embedding.weight",
    "v.position_embd.weight": "position_embedding",
    "v.std_bias": "std_bias",
    "v.std_scale": "std_scale",
    "mm.input_projection.weight": "projection.weight",
}
_GGUF_LAYER = {
    "ln1": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_out": "self_attn.o_proj",
    "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_LEAF = r"(weight|input_min|input_max|output_min|output_max)"
_LAYER_OF_HF = re.compile(
    rf"{re.escape(_TOWER)}encoder\.(layers\.\d+\.[a-z_.]+?)(\.linear)?\.{_LEAF}"
)
_LAYER_OF_GGUF = re.compile(rf"v\.blk\.(\d+)\.(\w+)\.{_LEAF}")


def open_tower(checkpoint: Checkpoint, text_size: int) -> tuple[VisionConfig, Checkpoint] | None:
    """The tower of a safetensors checkpoint: its config, and its tensors by canonical name. None
    where the model has none, or was saved without it. Raises ConfigError and CheckpointError."""
    try:
        config = vision_from_hf(checkpoint.metadata["config"], text_size)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    if config is None or not checkpoint.vision:  # config.json has a tower's shape in any case
        return None
    tensors = _canonical(checkpoint.vision, of_transformers)
    own = replace(checkpoint, tensors=tensors, vision={})
    return config, _checked(own, config)


def open_mmproj(path: str | Path, text_size: int | None) -> tuple[VisionConfig, Checkpoint]:
    """The tower of an mmproj file. text_size: what the text network's hidden size is; None: any.
    Raises ConfigError and CheckpointError, naming the file and what is wrong with it."""
    file = read_gguf(path)
    watch(file.mapping, file.address, len(file.mapping), file.path)
    tensors = _canonical(file.tensors, of_gguf)
    try:
        shapes = {name: info.shape for name, info in tensors.items()}
        config = vision_from_gguf(file.metadata, shapes)
        if text_size not in (None, config.text_size):
            raise ConfigError(
                f"its soft tokens are {config.text_size} wide and the model is {text_size} wide; "
                "use the mmproj file of this model"
            )
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from error
    files = {file.path: file}
    opened = Checkpoint(file.path, "gguf", tensors, {}, file.metadata, files)
    return config, _checked(opened, config)


def load_tower(
    config: VisionConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    activations: str | None = None,
) -> VisionTower:
    """The tower, with float matrices as `dtype`. activations: to what products with quantized
    weights round their inputs where a CPU's kernels serve ("int8", "bf16"; None: not at all)."""
    if gpu.is_gpu(device):  # the file may have formats that the model has not
        formats = frozenset(info.format for info in checkpoint.tensors.values())
        inner = config.num_heads * config.head_dim
        pairs = (inner, config.hidden_size), (config.hidden_size, config.intermediate_size)
        ops.prepare(device, Sizes(products=(*pairs, *(pair[::-1] for pair in pairs))), formats)
    tower = skeleton(config)
    tower.opened = config, checkpoint
    for name in shapes_of(config):
        path, _, leaf = name.rpartition(".")
        value = read_weight(config, checkpoint, name, device, dtype)
        if activations and leaf == "weight" and len(value.shape) == 2:
            value = ops.pack(value, activations)
        place(tower.get_submodule(path), leaf, value)
    return tower


def holds_tower(path: str | Path) -> bool:
    """Whether a GGUF file holds a vision tower alone, and no model. Raises CheckpointError for a
    file that cannot be read."""
    if Path(path).suffix.lower() != ".gguf" or not Path(path).is_file():
        return False
    return bool(read_gguf(path).metadata.get("general.architecture") == "clip")


def find_tower(
    checkpoint: Checkpoint, text_size: int, mmproj: str | PathLike[str] | None = None
) -> Tower | None:
    """The tower with which a model reads pictures: that of an mmproj file; of None the checkpoint's
    own, or, of a GGUF file, the first one beside it that fits (see `mmproj_beside`); of NO_TOWER
    none. Raises ConfigError and CheckpointError for a file that is given, or for an own tower."""
    if mmproj == NO_TOWER:
        return None
    if mmproj is not None:
        return open_mmproj(Path(mmproj), text_size)
    if checkpoint.kind == "safetensors":
        return open_tower(checkpoint, text_size)
    faults = list[Exception]()
    for path in mmproj_beside(checkpoint):
        try:
            opened = open_mmproj(path, text_size)
        except (ValueError, OSError) as error:  # that of another model must not stop this one
            faults.append(error)
        else:
            _log.info("%s: pictures are read with %s", checkpoint.path, path.name)
            return opened
    if faults:
        _log.warning("no pictures are read: %s", faults[0])
    return None


def fits_float16(tower: VisionTower) -> bool:
    """Whether a tower in float16 holds the numbers of a picture, as `holds_float16` says."""
    config, device = tower.config, tower.position_embedding.device
    side = config.pool * max(1, min(_TRIAL, config.positions // config.pool))
    noise = torch.rand(side**2, 3 * config.patch**2, generator=torch.Generator().manual_seed(0))
    encoding = partial(Encoding, tower, noise.to(device), side)
    return holds_float16(lambda: encoding().advance(), "the vision tower's numbers")


def _canonical(
    infos: Mapping[str, TensorInfo], name_of: Callable[[str], str | None]
) -> dict[str, TensorInfo]:
    """Tensors by canonical name; those that have none by another one that is none either."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        other = tensors.setdefault(name_of(name) or f"unknown {name}", info)
        if other is not info:
            raise CheckpointError(
                f"{info.file}: tensor {quoted(name)} holds the same as {quoted(other.name)}; "
                "remove one of them"
            )
    return tensors


def skeleton(config: VisionConfig) -> VisionTower:
    """A tower without weights, on torch's device "meta"."""
    with torch.device("meta"):
        return VisionTower(config).requires_grad_(False)


def shapes_of(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor of a tower."""
    return {name: tuple(p.shape) for name, p in skeleton(config).named_parameters()}


def _checked(checkpoint: Checkpoint, config: VisionConfig) -> Checkpoint:
    """The checkpoint, whose tensors are those of the config, or CheckpointError."""
    if len(checkpoint.tensors) < config.num_layers:  # before a skeleton of so many is made
        raise CheckpointError(
            f"{checkpoint.path}: {len(checkpoint.tensors)} tensors of a vision tower of "
            f"{config.num_layers} layers; the file is incomplete"
        )
    expected = shapes_of(config)
    if checkpoint.kind == "gguf":  # which knows no numbers without an axis
        expected = {name: shape or (1,) for name, shape in expected.items()}
        expected[PATCHES] = (config.hidden_size, 3, config.patch, config.patch)
    checkpoint.check_tensors(expected)
    for info in checkpoint.tensors.values():
        require_readable(info)
    return checkpoint


def read_weight(
    config: VisionConfig,
    checkpoint: Checkpoint,
    name: str,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Weight:
    """A weight as the tower has it; device: None for the host."""
    value, device = checkpoint.read(name), device or torch.device("cpu")
    if isinstance(value, Stored) and name not in (PATCHES, _POSITIONS):
        return value.to(device)
    if name == PATCHES and len(value.shape) == 4:  # colours outermost
        value = value.to(dtype).permute(0, 2, 3, 1).reshape(config.hidden_size, -1)
    floats = value.to(dtype) if len(value.shape) > 1 else value
    assert isinstance(floats, Tensor)
    if name.endswith(("_min", "_max")):
        floats = floats.reshape(())
    return floats.to(device)


def of_transformers(name: str) -> str | None:
    """The canonical name of a tensor of a safetensors file; None for one that is not known."""
    if (layer := _LAYER_OF_HF.fullmatch(name)) is not None:
        return f"{layer[1]}.{layer[3]}"
    return _HF.get(name)


def to_transformers(name: str) -> str:
    """The name in a safetensors file of the tensor of this canonical name."""
    theirs = next((hf for hf, own in _HF.items() if own == name), None)
    if theirs is not None:
        return theirs
    module, _, leaf = name.rpartition(".")
    linear = ".linear" if module.endswith("_proj") and leaf == "weight" else ""
    return f"{_TOWER}encoder.{module}{linear}.{leaf}"


def to_gguf(name: str) -> str:
    """The name in an mmproj file of the tensor of this canonical name."""
    theirs = next((gguf for gguf, own in _GGUF.items() if own == name), None)
    if theirs is not None:
        return theirs
    _, number, rest = name.split(".", 2)
    module, _, leaf = rest.rpartition(".")
    written = next(gguf for gguf, own in _GGUF_LAYER.items() if own == module)
    return f"v.blk.{number}.{written}.{leaf}"


def of_gguf(name: str) -> str | None:
    """The canonical name of a tensor of an mmproj file; None for one that is not known."""
    if (layer := _LAYER_OF_GGUF.fullmatch(name)) is not None:
        known = _GGUF_LAYER.get(layer[2])
        return known and f"layers.{layer[1]}.{known}.{layer[3]}"
    return _GGUF.get(name)
