"""A vision tower as an mmproj GGUF file, or as tensors of a safetensors folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.vision.config import VisionConfig, vision_to_gguf
from sfumato.model.vision.loading import (
    PATCHES,
    holds_tower,
    open_mmproj,
    open_tower,
    read_weight,
    shapes_of,
    to_gguf,
    to_transformers,
)
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.tensorfile import TensorStream, recoded
from sfumato.weights.formats import FORMATS, Weight

MMPROJ_TARGETS = {"bf16": 32, "f16": 1, "f32": 0, "q8_0": 7}
"""The formats of mmproj files, and GGUF's `general.file_type` of each."""

Layout = Callable[[str, Weight], Weight]


def open_source(source: str | Path) -> tuple[VisionConfig, Checkpoint]:
    """The tower of an mmproj file, or of a safetensors checkpoint. Raises ValueError, naming the
    source, where there is none."""
    if holds_tower(source):
        return open_mmproj(source, None)
    checkpoint = open_checkpoint(source)
    size = config_of(checkpoint).hidden_size
    opened = open_tower(checkpoint, size) if checkpoint.kind == "safetensors" else None
    if opened is None:
        raise CheckpointError(
            f"{checkpoint.path}: has no vision tower; give an mmproj file, or safetensors with one"
        )
    return opened


def mmproj_metadata(config: VisionConfig, source: Checkpoint, to: str) -> Mapping[str, Any]:
    """The keys of an mmproj file."""
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": source.folder.resolve().name,
        "general.file_type": MMPROJ_TARGETS[to],
        "general.quantization_version": 2,
        **vision_to_gguf(config),
    }


def mmproj_tensors(config: VisionConfig, tower: Checkpoint, to: str) -> list[TensorStream]:
    """The tensors of an mmproj file. Matrices of products have the target's format, or F16 where
    their rows do not divide into its blocks; all others are F32, as llama.cpp wants them."""
    format = to.upper()

    def chosen(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) != 2 or name == PATCHES:
            return "F32"
        return format if FORMATS[format].divides(shape[1]) else "F16"

    def laid_out(name: str, value: Weight) -> Weight:
        """Patches have colours outermost, and a number is a vector of one."""
        if not isinstance(value, Tensor):
            return value
        if name == PATCHES:
            return value.view(-1, config.patch, config.patch, 3).permute(0, 3, 1, 2)
        return value if value.ndim else value[None]

    return [
        _stream(config, tower, name, shape, to_gguf(name), chosen(name, shape), laid_out)
        for name, shape in shapes_of(config).items()
    ]


def hf_tower_tensors(config: VisionConfig, tower: Checkpoint, format: str) -> list[TensorStream]:
    """The tensors of a safetensors folder, all in one format."""
    return [
        _stream(config, tower, name, shape, to_transformers(name), format, lambda _, value: value)
        for name, shape in shapes_of(config).items()
    ]


def _stream(
    config: VisionConfig,
    tower: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    file_name: str,
    format: str,
    laid_out: Layout,
) -> TensorStream:
    empty = torch.empty(shape, device="meta")

    def chunks() -> Iterator[Tensor]:
        yield from recoded(laid_out(name, read_weight(config, tower, name)), format)

    return TensorStream(file_name, tuple(laid_out(name, empty).shape), format, chunks)
