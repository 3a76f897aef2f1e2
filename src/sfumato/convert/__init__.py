"""Conversion: a checkpoint of one kind becomes one of the other, or one of another format.

`convert()` joins the metadata of the network, of its sampler and of its tokenizer with the tensors.
One tensor is read, recoded and written at a time, in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sfumato.convert.files import (
    Progress,
    check_checkpoint_folder,
    config_files,
    save_folder,
    save_gguf,
)
from sfumato.convert.tokenizer_files import tokenizer_keys, write_tokenizer
from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults, defaults_to_gguf
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.model_config import ModelConfig
from sfumato.model.quantization import TARGETS, QuantRecipe, formats
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.atomic_write import check_writable
from sfumato.weights.files.tensorfile import TensorStream
from sfumato.weights.formats import of_files

HF_TARGETS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
NEAREST = "nearest"
"""The target of narrow checkpoints that keeps what loading makes of each tensor."""
DEFAULTS = {"gguf": "q4_k_m", "safetensors": "bf16"}

_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q6_K": 18}
"""GGUF's `general.file_type`, by the format of most tensors."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Converted:
    """What was written. `notes` say what the new checkpoint lacks."""

    path: Path
    target: str
    tensors: tuple[TensorStream, ...]
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

    to: a name in `TARGETS`; for a folder "bf16", "f16" or "f32". None: "q4_k_m" and "bf16"; for a
    narrow source "nearest", the blocks that are nearest to its matrices.
    force: replaces what is there. Raises CheckpointError, ConfigError, ValueError or OSError,
    naming what cannot be used or written; `out` is then as it was.
    """
    out = Path(out)
    kind = "gguf" if out.suffix.lower() == ".gguf" else "safetensors"
    if to != NEAREST:
        _recipe(out, kind, to)  # before anything is opened
    check_writable(out, force, check_checkpoint_folder)
    checkpoint = open_checkpoint(source)
    to, recipe = _recipe(out, kind, to, checkpoint)
    if kind == checkpoint.kind == "safetensors":
        raise ValueError(f"{out}: both are safetensors; give a name that ends in .gguf")
    config = config_of(checkpoint)
    shapes = expected_shapes(config)
    checkpoint.check_tensors(shapes)
    chosen = _kept(checkpoint, shapes) if to == NEAREST else formats(shapes, recipe)
    notes = _notes(checkpoint, chosen)
    if kind == "gguf":
        tensors = gguf_tensors(checkpoint, chosen, config)
        metadata = _gguf_metadata(checkpoint, config, recipe)
        save_gguf(out, metadata, tensors, force, progress)
    else:
        metadata = checkpoint.metadata
        tensors = hf_tensors(checkpoint, shapes, recipe.base)
        files = _hf_files(checkpoint, config, HF_TARGETS[to])
        tokenizer = partial(write_tokenizer, metadata)
        save_folder(out, files, tensors, tokenizer, force, progress)
    if "tokenizer.ggml.tokens" not in metadata:
        notes.append(f"{checkpoint.path} has no tokenizer, so the new checkpoint has none")
    return Converted(out, to, tuple(tensors), tuple(notes))


def _recipe(
    out: Path, kind: str, to: str | None, source: Checkpoint | None = None
) -> tuple[str, QuantRecipe]:
    """The target's name and recipe, if files of the kind can be of it; that of `NEAREST` is the one
    of most of the source's narrow tensors."""
    if out.suffix.lower() == ".safetensors":
        raise ValueError(f"{out}: name a folder for safetensors, or a file that ends in .gguf")
    joined = source.joined if source is not None and kind == "gguf" else {}
    if joined and to in (None, NEAREST):
        counted = Counter(tensor.info.format for tensor in joined.values())
        base = counted.most_common(1)[0][0]
        return NEAREST, QuantRecipe(base, _FILE_TYPES.get(base, TARGETS["bf16"].file_type))
    if to == NEAREST:
        raise ValueError(f"--to: {NEAREST!r} is for narrow checkpoints to GGUF files alone")
    known = TARGETS if kind == "gguf" else HF_TARGETS
    name = to or DEFAULTS[kind]
    if name not in known:
        if name.upper() in of_files("blocks") and kind == "gguf":
            raise ValueError(
                f"--to: {name!r} is none of {', '.join(known)}: blocks of {name.upper()} are read "
                "and run, and not made here"
            )
        where = "a GGUF file" if kind == "gguf" else "a folder of safetensors"
        raise ValueError(f"--to: {name!r} is none of {', '.join(known)}, which {where} can be")
    return name, TARGETS[name]


def _kept(checkpoint: Checkpoint, shapes: Shapes) -> dict[str, str]:
    """The format of every tensor for `NEAREST`: floats stay bfloat16, vectors and routers F32."""
    plain = formats(shapes, TARGETS["bf16"])
    joined = {name: tensor.info.format for name, tensor in checkpoint.joined.items()}
    return {name: joined.get(name, plain[name]) for name in shapes}


def _notes(checkpoint: Checkpoint, chosen: Mapping[str, str]) -> list[str]:
    notes = []
    if checkpoint.vision:
        notes.append(f"the {len(checkpoint.vision)} tensors of the vision tower are left out")
    now = {name: checkpoint.tensors[name].format for name in chosen}
    coded = {
        now[name]
        for name, format in chosen.items()
        if format != now[name] and {format, now[name]} <= of_files("blocks").keys()
    }
    if coded:
        notes.append(
            f"the source is quantized already ({', '.join(sorted(coded))}): its errors add to the "
            "new ones"
        )
    return notes


def _gguf_metadata(
    checkpoint: Checkpoint, config: ModelConfig, recipe: QuantRecipe
) -> Mapping[str, Any]:
    general = {"general.file_type": recipe.file_type, "general.quantization_version": 2}
    if checkpoint.kind == "gguf":
        kept = {k: v for k, v in checkpoint.metadata.items() if k != "general.alignment"}
        return kept | general
    family, folder = family_of(checkpoint), checkpoint.folder
    return {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": folder.resolve().name,
        **general,
        **family.config.to_gguf(config),
        **defaults_to_gguf(checkpoint_defaults(checkpoint), family.sampler),
        **tokenizer_keys(folder, config.vocab_size, family.markers),
    }


def _hf_files(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The JSON files that describe the network and its sampler, by name."""
    family, tokens = family_of(checkpoint), checkpoint.metadata.get("tokenizer.ggml.tokens", [])
    ends = [tokens.index(text) for text in family.markers.end_tokens if text in tokens]
    end_ids = list(dict.fromkeys((*config.eos_ids, *ends)))
    return config_files(family, config, checkpoint_defaults(checkpoint), end_ids, dtype)


def gguf_tensors(
    checkpoint: Checkpoint,
    chosen: Mapping[str, str],
    config: ModelConfig,
) -> list[TensorStream]:
    """The tensors of a GGUF file: the constants of the config, then those of `chosen` (canonical
    name → format, all of the network's) in their order."""
    family = family_of(checkpoint)
    constants = family.config.gguf_constants(config).items()
    file_name = family.tensor_names.gguf_name
    return [
        *(TensorStream.of(name, value, "F32") for name, value in constants),
        *(_stream(checkpoint, file_name(name), name, chosen[name]) for name in chosen),
    ]


def hf_tensors(checkpoint: Checkpoint, shapes: Shapes, format: str) -> list[TensorStream]:
    """The tensors of a safetensors folder, all in one format: F32, F16 or BF16."""
    file_name = family_of(checkpoint).tensor_names.transformers_name
    return [_stream(checkpoint, file_name(name), name, format) for name in shapes]


def _stream(checkpoint: Checkpoint, file_name: str, name: str, format: str) -> TensorStream:
    def chunks() -> Iterator[Tensor]:
        try:
            yield from checkpoint.recoded(name, format)
        except CheckpointError:
            raise  # names the file and the tensor of it
        except ValueError as error:
            info = checkpoint.tensors[name]
            raise ValueError(f"{info.file}: {info.name}: as {format}: {error}") from error

    return TensorStream(file_name, checkpoint.tensors[name].shape, format, chunks)
