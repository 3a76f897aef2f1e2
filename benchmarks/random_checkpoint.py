"""Writes a GGUF file of random weights: real sizes and formats, nothing learnt.

    .venv/bin/python benchmarks/random_checkpoint.py random.gguf --preset 26b-a4b

For measuring what reads, loads and runs a file of full size (Q4_K_M: 16.8 GB) where the published
one is not at hand. The weights are those of `sfumato bench --random-weights`: values of deviation
width^-½ (0.019 at 2816) and small query norms, so that activations stay tame. `--sparse` writes
header and holes only: 16.8 GB that take 16 MB of disk, all zeros, for opening and inspecting.
`--tokenizer` takes the vocabulary and the chat template of another GGUF file; without it the file
has one of bytes and ASCII. A small `--vocab` leaves little but the layers in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.bench.subject import PRESETS, random_checkpoint
from sfumato.convert import BYTE, CONTROL, NORMAL, SCORE, UNUSED, gguf_tensors
from sfumato.convert.files import save_gguf
from sfumato.diffusion.checkpoint_defaults import defaults_of_process, defaults_to_gguf
from sfumato.model.families import Family, family_of
from sfumato.model.loading import config_of
from sfumato.model.quantization import TARGETS, QuantRecipe, formats
from sfumato.train.vocabulary import (
    BOS,
    CHARACTERS,
    EOS,
    GEMMA,
    MASK,
    PAD,
    QWEN,
    UNK,
)
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.files.atomic_write import atomic_path
from sfumato.weights.files.gguf import layout, read_gguf
from sfumato.weights.files.tensorfile import TensorStream


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--preset", choices=PRESETS, default="26b-a4b", help="sizes (%(default)s)")
    parser.add_argument("--format", choices=TARGETS, default="q4_k_m", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers; default: the preset's")
    parser.add_argument("--vocab", type=int, help="number of tokens; default: the preset's")
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file whose vocabulary to take")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--sparse", action="store_true", help="write holes instead of weights")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    args = parser.parse_args()
    checkpoint = random_checkpoint(args.preset, args.format, args.layers, args.seed, args.vocab)
    target = TARGETS[args.format]
    metadata = header(checkpoint, target, args.tokenizer)
    tensors = outgoing(checkpoint, target)
    if args.sparse:
        save_sparse(args.out, metadata, tensors, args.force)
    else:
        save_gguf(args.out, metadata, tensors, args.force)
    size = sum(tensor.nbytes for tensor in tensors)
    print(f"{args.out}: {len(tensors)} tensors, {size / 1e9:.3f} GB")


def header(
    checkpoint: Checkpoint, target: QuantRecipe, tokenizer: Path | None = None
) -> dict[str, Any]:
    """The metadata of a file of this target, with another file's vocabulary or a made-up one."""
    config, family = config_of(checkpoint), family_of(checkpoint)
    return {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": checkpoint.path.name,
        "general.file_type": target.file_type,
        "general.quantization_version": 2,
        **defaults_to_gguf(defaults_of_process(family.canvas), family.sampler),
        **vocabulary(config.vocab_size, family, tokenizer),
        **family.gguf_keys,
        **family.config.to_gguf(config),
    }


def outgoing(checkpoint: Checkpoint, target: QuantRecipe) -> list[TensorStream]:
    """The tensors of a file of this target, whatever formats the checkpoint's own are."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    return gguf_tensors(checkpoint, formats(shapes, target), config_of(checkpoint))


def save_sparse(
    path: Path, metadata: Mapping[str, Any], tensors: list[TensorStream], force: bool
) -> None:
    """The header and the size of a file, and of its tensors only the first: the config needs it."""
    head, starts = layout(metadata, tensors)
    with atomic_path(path, len(head), force) as part, part.open("xb") as stream:
        stream.write(head)
        for chunk in tensors[0].chunks():
            stream.write(chunk.numpy().data)
        stream.truncate(starts[-1] + tensors[-1].nbytes)


def vocabulary(rows: int, family: Family, path: Path | None) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file, or of a made-up vocabulary of bytes and ASCII with the
    markers of the family's chat format."""
    if path is not None:
        metadata = read_gguf(path).metadata
        count = len(metadata.get("tokenizer.ggml.tokens", ()))
        if count > rows:
            raise SystemExit(f"{path}: has {count} tokens, and the embedding {rows} rows")
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    side = next(side for side in (GEMMA, QWEN) if family.markers.turn_open in side.markers)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    known = [*side.markers, *bytes_, *CHARACTERS.replace(" ", "▁")]
    kinds = [CONTROL] * len(side.markers) + [BYTE] * 256 + [NORMAL] * len(CHARACTERS)
    rest = rows - len(known)
    ids = {"eos": EOS, "unknown": UNK, "padding": PAD, "mask": MASK}
    ids |= dict.fromkeys(["bos"] * bool(side.begin), BOS)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*known, *(f"[PAD{i}]" for i in range(len(known), rows))],
        "tokenizer.ggml.scores": np.full(rows, SCORE, np.float32),
        "tokenizer.ggml.token_type": np.array([*kinds, *[UNUSED] * rest], np.int32),
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": bool(side.begin),
        "tokenizer.chat_template": side.template,
    }


if __name__ == "__main__":
    main()
