"""The families of models that can be run, and which of them a checkpoint is of.

A family is a folder beside this file that makes one `Family` value; to add one, list it in
`FAMILIES`. Nothing outside of its folder may know what is one family's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.model.families.diffusion_gemma import DIFFUSION_GEMMA
from sfumato.model.families.family import (
    CanvasProcess,
    ConfigFormat,
    Family,
    ReadFormat,
    SamplerKeys,
)
from sfumato.model.families.qwen3_blocks import BD3LM, SDAR, SDAR_MOE
from sfumato.ops.cpu.library import watch
from sfumato.weights.checkpoint import Checkpoint, Kind, open_with
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.names import TensorNames

__all__ = [
    "BD3LM",
    "DIFFUSION_GEMMA",
    "FAMILIES",
    "SDAR",
    "SDAR_MOE",
    "CanvasProcess",
    "ConfigFormat",
    "Family",
    "ReadFormat",
    "SamplerKeys",
    "family_of",
    "find_family",
    "open_checkpoint",
]

FAMILIES: tuple[Family, ...] = (DIFFUSION_GEMMA, SDAR, SDAR_MOE, BD3LM)


def open_checkpoint(path: str | Path, families: Sequence[Family] = FAMILIES) -> Checkpoint:
    """Opens the checkpoint at `path`: a .gguf or .safetensors file, an index, or a folder. Where
    a file is truncated while it is in use, the process ends with its name (`ops.cpu.library`).

    Raises CheckpointError, naming file and field, if anything in it cannot be used.
    """

    def names(kind: Kind, metadata: Mapping[str, Any]) -> TensorNames:
        return find_family(kind, metadata, families).tensor_names

    checkpoint = open_with(path, names)
    for file in checkpoint.files.values():
        watch(file.mapping, file.address, len(file.mapping), file.path)
    return checkpoint


def family_of(checkpoint: Checkpoint, families: Sequence[Family] = FAMILIES) -> Family:
    """The family of a checkpoint. Raises CheckpointError where it is of none."""
    try:
        return find_family(checkpoint.kind, checkpoint.metadata, families)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def find_family(kind: Kind, metadata: Mapping[str, Any], families: Sequence[Family]) -> Family:
    """The family that the metadata of a checkpoint name. Raises CheckpointError, naming the field
    and the known families, where they name none of these."""
    if kind == "gguf":
        where, name = "general.architecture", metadata.get("general.architecture")
        known = [(family.architecture, family) for family in families]
    else:
        where, name = "config.json: model_type", metadata["config"].get("model_type")
        known = [(family.model_type, family) for family in families]
    alike = [family for own, family in known if isinstance(name, str) and own == name]
    for family in alike:
        keys = family.gguf_keys.items() if kind == "gguf" else ()
        if all(metadata.get(key) == value for key, value in keys):
            return family
    if isinstance(name, str) and alike:
        raise CheckpointError(_of_no_diffusion(name, metadata, alike))
    if name == "clip":
        raise CheckpointError(
            f"{where}: is 'clip': the file holds a vision tower and no model; give the model's "
            "file, and this one as mmproj (--mmproj)"
        )
    listed = ", ".join(map(repr, dict.fromkeys(own for own, _ in known)))
    raise CheckpointError(
        f"{where}: is {quoted(name)}; give a checkpoint of an architecture that Sfumato runs:"
        f" {listed}"
    )


def _of_no_diffusion(name: str, metadata: Mapping[str, Any], alike: Sequence[Family]) -> str:
    """Why a GGUF file of a known architecture is of none of the families that have it."""
    wanted = [
        f"{key} = {value!r} ({family.title})"
        for family in alike
        for key, value in family.gguf_keys.items()
    ]
    key = next(iter(alike[0].gguf_keys))
    return (
        f"{key}: is {quoted(metadata.get(key))}, and files of {name!r} that denoise blocks have "
        f"{' or '.join(wanted)}; a model that writes token by token cannot be run here"
    )
