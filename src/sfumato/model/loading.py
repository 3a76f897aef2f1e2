"""A checkpoint's tensors into a network, one at a time, quantized ones as they are.

Every tensor of the checkpoint is used or the load fails naming it; a float tensor that already
has the wanted dtype and device is taken as the memory map's own view, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sfumato.model.config import ConfigError, ModelConfig
from sfumato.model.network import Network
from sfumato.model.transformer import Transformer
from sfumato.weights.blocks import QuantizedTensor
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.tensorfile import FLOAT_FORMATS

Progress = Callable[[int, int], None]
"""(bytes loaded so far, bytes in all)"""


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration that a checkpoint's metadata describe. Raises ConfigError, naming the
    checkpoint and the field."""
    metadata = checkpoint.metadata
    try:
        if checkpoint.kind == "safetensors":
            return ModelConfig.from_hf(metadata["config"], metadata.get("generation_config"))
        embedding = checkpoint.tensors.get("embed_tokens.weight")
        if embedding is None:
            raise ConfigError("token_embd.weight is missing; the checkpoint is incomplete")
        return ModelConfig.from_gguf(metadata, embedding.shape[0], _turning_pairs(checkpoint))
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error


def _turning_pairs(checkpoint: Checkpoint) -> int | None:
    """How many rotary pairs of full layers turn, by the divisors of their frequencies in
    `rope_freqs.weight`: 1 turns, 1e30 stills. None where the file has no such tensor."""
    (file,) = checkpoint.files.values()
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = file.read("rope_freqs.weight")
    if isinstance(divisors, Tensor) and divisors.ndim == 1:
        turning = int((divisors == 1).sum())
        if turning and (divisors[:turning] == 1).all() and (divisors[turning:] > 1e9).all():
            return turning
    raise ConfigError(
        "rope_freqs.weight does not turn the first pairs and still the "
        "others, which is all that DiffusionGemma's full layers know"
    )


def skeleton(config: ModelConfig) -> Transformer:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config).requires_grad_(False)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor that a checkpoint of this config holds."""
    return {name: tuple(p.shape) for name, p in skeleton(config).named_parameters()}


def load_network(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Network:
    """Loads every tensor to `device`; float matrices become `dtype`, quantized ones stay.

    Raises ConfigError or CheckpointError, naming the field or the tensors, before any is read.
    """
    config = config_of(checkpoint)
    transformer = skeleton(config)
    expected = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
    checkpoint.account(expected)
    total = sum(checkpoint.tensors[name].nbytes for name in expected)
    done = 0
    for name in expected:
        path, _, leaf = name.rpartition(".")
        module = transformer.get_submodule(path)
        place(module, leaf, _converted(checkpoint.read(name), name, device, dtype))
        done += checkpoint.tensors[name].nbytes
        if progress is not None:
            progress(done, total)
    return Network(transformer, device, dtype)


def place(module: nn.Module, leaf: str, value: Tensor | QuantizedTensor) -> None:
    """Puts a weight where `module.leaf` was."""
    if isinstance(value, QuantizedTensor):
        delattr(module, leaf)
        setattr(module, leaf, value)
    else:
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))


def _converted(
    value: Tensor | QuantizedTensor, name: str, device: torch.device, dtype: torch.dtype
) -> Tensor | QuantizedTensor:
    if isinstance(value, QuantizedTensor):
        return value.to(device)
    return value.to(device, _kept_dtype(name, value.ndim, value.dtype, dtype))


def _kept_dtype(name: str, ndim: int, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    # Routers compute in float32, and vectors (norms, scales) are cheap to keep as exact as stored.
    exact = ".router." in name or (ndim == 1 and stored == torch.float32)
    return torch.float32 if exact else dtype


def loaded_bytes(name: str, info: TensorInfo, dtype: torch.dtype) -> int:
    """What the tensor of this canonical name will take in memory, loaded for `dtype`."""
    stored = FLOAT_FORMATS.get(info.format)
    if stored is None:
        return info.nbytes
    return math.prod(info.shape) * _kept_dtype(name, len(info.shape), stored, dtype).itemsize
