"""`convert()`: a checkpoint of one kind becomes one of the other, or one of another format.

Brings together what each room can say of itself: the network's metadata, its sampler's, its text
side's, and its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.convert.tensors import Progress, gguf_tensors, hf_tensors, save_gguf, save_hf
from sfumato.diffusion import export as sampler_export
from sfumato.diffusion.config import defaults_from_gguf, defaults_from_hf
from sfumato.model.config import ModelConfig
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.families.diffusion_gemma.gguf_keys import ARCHITECTURE
from sfumato.model.families.diffusion_gemma.write_config import (
    gguf_config,
    hf_config,
    rotary_divisors,
)
from sfumato.model.loading import config_of, expected_shapes
from sfumato.text import export as text_export
from sfumato.weights.atomic_write import Outgoing, check_free
from sfumato.weights.blocks import BLOCK_FORMATS
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.quant_recipes import TARGETS, Target, formats

HF_TARGETS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
DEFAULTS = {"gguf": "q4_k_m", "safetensors": "bf16"}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Converted:
    """What was written. `notes` tell people what the new checkpoint lacks."""

    path: Path
    target: str
    tensors: tuple[Outgoing, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def convert(
    source: str | Path,
    out: str | Path,
    to: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Converts the checkpoint `source` to a GGUF file (`out` ends in .gguf) or an HF folder.

    to: a name in `TARGETS`; for a folder "bf16", "f16" or "f32". None: "q4_k_m" and "bf16".
    force: replaces what is there. Raises CheckpointError, ConfigError, ValueError or OSError,
    naming what cannot be used or written; `out` is then as it was.
    """
    out = Path(out)
    kind = "gguf" if out.suffix.lower() == ".gguf" else "safetensors"
    to, target = _target(out, kind, to)
    check_free(out, force)
    checkpoint = open_checkpoint(source)
    if kind == checkpoint.kind == "safetensors":
        raise ValueError(f"{out}: both are safetensors; give a name that ends in .gguf")
    config = config_of(checkpoint)
    shapes = expected_shapes(config)
    checkpoint.check_tensors(shapes)
    notes = _notes(checkpoint, shapes, target)
    if kind == "gguf":
        tensors = gguf_tensors(checkpoint, shapes, target, rotary_divisors(config))
        metadata = _gguf_metadata(checkpoint, config, target)
        save_gguf(out, metadata, tensors, force, progress)
    else:
        metadata = checkpoint.metadata
        tensors = hf_tensors(checkpoint, shapes, target.base)
        files = _hf_files(checkpoint, config, HF_TARGETS[to])

        def write_others(folder: Path) -> None:
            for name, content in files.items():
                text = json.dumps(content, indent=2) + "\n"
                (folder / name).write_text(text, encoding="utf-8")
            text_export.to_files(metadata, folder)

        save_hf(out, write_others, tensors, force, progress)
    if "tokenizer.ggml.tokens" not in metadata:
        notes.append(f"{checkpoint.path} has no tokenizer, so the new checkpoint has none")
    return Converted(out, to, tuple(tensors), tuple(notes))


def _target(out: Path, kind: str, to: str | None) -> tuple[str, Target]:
    """The target of this name, if files of the kind can be of it."""
    if out.suffix.lower() == ".safetensors":
        raise ValueError(f"{out}: name a folder for safetensors, or a file that ends in .gguf")
    known = TARGETS if kind == "gguf" else HF_TARGETS
    name = to or DEFAULTS[kind]
    if name not in known:
        where = "a GGUF file" if kind == "gguf" else "a folder of safetensors"
        raise ValueError(f"--to: {name!r} is none of {', '.join(known)}, which {where} can be")
    return name, TARGETS[name]


def _notes(checkpoint: Checkpoint, shapes: Shapes, target: Target) -> list[str]:
    notes = []
    if checkpoint.vision:
        notes.append(f"the {len(checkpoint.vision)} tensors of the vision tower are left out")
    now = {name: checkpoint.tensors[name].format for name in shapes}
    coded = {
        now[name]
        for name, format in formats(shapes, target).items()
        if format != now[name] and {format, now[name]} <= BLOCK_FORMATS.keys()
    }
    if coded:
        notes.append(
            f"the source is quantized already ({', '.join(sorted(coded))}): its errors add to the "
            "new ones"
        )
    return notes


def _gguf_metadata(
    checkpoint: Checkpoint, config: ModelConfig, target: Target
) -> Mapping[str, Any]:
    general = {"general.file_type": target.file_type, "general.quantization_version": 2}
    if checkpoint.kind == "gguf":
        kept = {k: v for k, v in checkpoint.metadata.items() if k != "general.alignment"}
        return kept | general
    generation = checkpoint.metadata["generation_config"]
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": folder.resolve().name,
        **general,
        **gguf_config(config),
        **sampler_export.to_gguf(defaults_from_hf(generation)),
        **text_export.to_gguf(folder, config.vocab_size),
    }


def _hf_files(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The JSON files that describe the network and its sampler, by name."""
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens", [])
    ends = [
        tokens.index(text) for text in family_of(checkpoint).markers.end_tokens if text in tokens
    ]
    generation = {
        **sampler_export.to_hf(defaults_from_gguf(checkpoint.metadata)),
        "bos_token_id": config.bos_id,
        "eos_token_id": list(dict.fromkeys((*config.eos_ids, *ends))),
        "pad_token_id": config.pad_id,
    }
    return {"config.json": hf_config(config, dtype), "generation_config.json": generation}
