"""Writes checkpoints: a GGUF file, or a folder with JSON files and safetensors.

`save_gguf` and `save_folder`, which training has too, write what has its name only when it is
complete. Knows the names of a checkpoint's files, so that no other folder is ever replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.diffusion.checkpoint_defaults import defaults_to_hf
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import FAMILIES, Family
from sfumato.model.model_config import ModelConfig
from sfumato.model.vision.config import VisionConfig, vision_to_hf
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.atomic_write import atomic_path
from sfumato.weights.files.gguf import layout, write_gguf
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.safetensors import write_safetensors
from sfumato.weights.files.tensorfile import TensorStream

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Names of a folder's formats in config.json."""
Progress = Callable[[int, int], None]
"""(bytes written so far, bytes in all)"""

_FILES = re.compile(  # the files of a folder that a conversion or a training wrote
    r"(generation_|tokenizer_)?config\.json|tokenizer\.json|chat_template\.jinja"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


def config_files(
    family: Family,
    config: ModelConfig,
    sampler: SamplerConfig,
    end_ids: Sequence[int],
    format: str = "BF16",
    tower: VisionConfig | None = None,
) -> dict[str, dict[str, Any]]:
    """The JSON files that describe a network, its sampler and its tower, by name. format: of all
    tensors. Raises ConfigError for what they cannot say."""
    generation = {
        **defaults_to_hf(sampler, family.sampler),
        "bos_token_id": config.bos_id,
        "eos_token_id": list(end_ids) or None,
        "pad_token_id": config.pad_id,
    }
    described = family.config.to_hf(config, DTYPES[format])
    if tower is not None:
        described["vision_config"] = vision_to_hf(tower)
    return {"config.json": described, "generation_config.json": generation}


def save_folder(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    tensors: Sequence[TensorStream],
    write_others: Callable[[Path], None] = lambda folder: None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a folder of safetensors that has its name only when it is complete.

    write_others: writes more files into the folder that it is given. Raises as `save_gguf`.
    """
    size = sum(tensor.nbytes for tensor in tensors)
    with atomic_path(path, size, force, check_checkpoint_folder) as part:
        part.mkdir()
        write_others(part)
        for name, content in files.items():
            (part / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_safetensors(part, tensors, _counted(tensors, progress))


def save_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorStream],
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file that has its name only when it is complete.

    Raises ValueError, naming the path or the tensor, and OSError.
    """
    size = len(layout(metadata, ())[0]) + sum(tensor.nbytes for tensor in tensors)
    with (
        atomic_path(path, size, force, check_checkpoint_folder) as part,
        part.open("xb") as stream,
    ):
        write_gguf(stream, metadata, tensors, _counted(tensors, progress))


def check_checkpoint_folder(path: Path) -> None:
    """Raises ValueError for a folder that is more or other than a checkpoint of a known family."""
    for item in path.iterdir():
        if item.is_symlink() or not item.is_file() or not _FILES.fullmatch(item.name):
            raise ValueError(
                f"{path}: holds {quoted(item.name)}, which is no part of a checkpoint and would be "
                "lost; name another folder"
            )
    try:
        kind = read_object(path / "config.json").get("model_type")
    except CheckpointError:
        kind = None
    if not any(kind == family.model_type for family in FAMILIES):
        raise ValueError(f"{path}: is a folder, and no checkpoint that could be replaced")


def _counted(tensors: Sequence[TensorStream], progress: Progress | None) -> Callable[[int], None]:
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return wrote
