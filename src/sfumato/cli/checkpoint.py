"""`sfumato inspect`, `convert` and `merge`: what is in a checkpoint and what running it would take,
the same checkpoint in another format, and one with an adapter in its weights.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from sfumato import ops
from sfumato.catalog import EMBEDDED
from sfumato.cli.terminal import print_message, print_report, progress, size, table
from sfumato.convert import Converted, convert
from sfumato.convert.merge import convert_adapter, holds_adapter, merge
from sfumato.engine.memory.estimate import ModelFootprint, Tower
from sfumato.media.patches import BUDGETS
from sfumato.model.cache import slot_bytes
from sfumato.model.families import open_checkpoint
from sfumato.model.head import head_bytes
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.model_config import ModelConfig
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantization import quantized_on_load
from sfumato.model.vision.config import VisionConfig
from sfumato.model.vision.loading import find_tower, holds_tower, open_mmproj
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.errors import CheckpointError

CONTEXTS = (4096, 32768, 131072, 262144)


def main(args: argparse.Namespace) -> int:
    """Run the one that the options name. Raises ValueError or OSError for bad input."""
    commands = {"convert": _convert, "merge": _merge, "inspect": _inspect}
    return commands[args.command](args)


def _inspect(args: argparse.Namespace) -> int:
    summary: dict[str, Any]
    path = args.path or EMBEDDED
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        if not holds_tower(path):
            raise
        config, checkpoint = open_mmproj(path, None)
        tower = tower_facts(config, checkpoint)
        summary = {"path": tower["file"], "kind": "mmproj", "architecture": "clip", "vision": tower}
        lines = [f"{checkpoint.path}: a vision tower (mmproj)", *tower_report(tower)]
    else:
        summary = facts(checkpoint, args.quantize, args.cache_type)
        lines = report(summary)
    if args.tensors:
        listed = summary["list"] = [
            {"name": name, "format": t.format, "shape": list(t.shape), "bytes": t.nbytes}
            for name, t in checkpoint.tensors.items()
        ]
        shapes = ("×".join(map(str, each["shape"])) or "1" for each in listed)
        rows = [
            (each["name"], each["format"], shape, size(each["bytes"]))
            for each, shape in zip(listed, shapes, strict=True)
        ]
        lines += ["tensors", *table(rows)]
    print_report(args.json, summary, lines)
    return 0


def facts(
    checkpoint: Checkpoint, quantize: str | None = None, cache_type: str | None = None
) -> dict[str, Any]:
    """All facts of the report as plain values; sizes in bytes. For the memory, quantize: the
    format to which the checkpoint would be quantized as it is loaded; cache_type: how keys and
    values would be stored. Raises ValueError for a cache that the device does not have."""
    tensors = checkpoint.tensors.values()
    summary: dict[str, Any] = {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "architecture": str(
            checkpoint.metadata.get("general.architecture")
            if checkpoint.kind == "gguf"
            else checkpoint.metadata["config"].get("model_type")
        ),
        "tensors": len(tensors),
        "bytes": sum(t.nbytes for t in tensors),
        "formats": _formats(tensors),
        "vision": {
            "tensors": len(checkpoint.vision),
            "bytes": sum(t.nbytes for t in checkpoint.vision.values()),
        },
    }
    try:
        config = config_of(checkpoint)
        checkpoint.check_tensors(expected_shapes(config))
        if (tower := find_tower(checkpoint, config.hidden_size)) is not None:
            summary["vision"] = tower_facts(*tower)
    except ValueError as error:
        return summary | {"runs": False, "why_not": " ".join(str(error).split())}
    device = pick_device()
    if quantize:
        checkpoint = quantized_on_load(checkpoint, quantize, device)
    needs = memory(checkpoint, config, device, cache_type, tower)
    needs |= {"quantize": quantize, "cache_type": cache_type}
    return summary | {"runs": True, "config": asdict(config), "memory": needs}


def tower_facts(config: VisionConfig, tower: Checkpoint) -> dict[str, Any]:
    """The facts of a vision tower."""
    tensors = tower.tensors.values()
    return {
        "file": str(tower.path),
        "tensors": len(tensors),
        "bytes": sum(t.nbytes for t in tensors),
        "formats": _formats(tensors),
        "soft_tokens": [config.soft_tokens, *(n for n in BUDGETS if n != config.soft_tokens)],
        "config": asdict(config),
    }


def tower_report(facts: dict[str, Any]) -> list[str]:
    """The same as lines for people."""
    config, (usual, *others) = facts["config"], facts["soft_tokens"]
    patch, pool = config["patch"], config["pool"]
    formats = ", ".join(f"{each['tensors']} {name}" for name, each in facts["formats"].items())
    return [
        f"vision tower of {facts['file']}: {facts['tensors']} tensors, {size(facts['bytes'])} "
        f"({formats})",
        f"its {config['num_layers']} layers have the hidden size {config['hidden_size']}; a soft "
        f"token is {pool} x {pool} patches of {patch} x {patch} pixels, {config['text_size']} wide",
        f"a picture takes up to {usual} soft tokens, or as asked for "
        f"({', '.join(map(str, sorted(others)))})",
    ]


def memory(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    cache_type: str | None = None,
    tower: Tower | None = None,
) -> dict[str, Any]:
    """Bytes that running on `device` takes, in the dtype that is its default: the weights, those of
    the vision tower, the head's working buffer, and one request's cache by context length. Raises
    ValueError as `cache_dtype`."""
    dtype = pick_dtype("auto", checkpoint, device)
    given = checkpoint, config, device, dtype, cache_type
    subject = ModelFootprint.of_checkpoint(*given)
    seeing = ModelFootprint.of_checkpoint(*given, tower=tower)
    lengths = [n for n in CONTEXTS if n < config.context_length] + [config.context_length]
    return {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": subject.weights,
        "vision_tower": seeing.weights - subject.weights,
        "head_buffer": head_bytes(config, dtype, compiled=ops.multiplies_bf16(device)),
        "kv_cache": {
            str(length): slot_bytes(config, length, subject.cache_dtype) for length in lengths
        },
    }


def _formats(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    """Number and bytes of the tensors of each format, the largest share first."""
    tensors = list(tensors)
    count, nbytes = Counter(t.format for t in tensors), Counter[str]()
    for tensor in tensors:
        nbytes[tensor.format] += tensor.nbytes
    return {name: {"tensors": count[name], "bytes": total} for name, total in nbytes.most_common()}


def report(summary: dict[str, Any]) -> list[str]:
    """The facts as lines for people."""
    lines = [
        f"{summary['path']}: {summary['kind']}, {summary['architecture']}",
        f"{summary['tensors']} tensors, {size(summary['bytes'])}",
        *table(
            (name, f"{share['tensors']} tensors", size(share["bytes"]))
            for name, share in summary["formats"].items()
        ),
    ]
    if "config" in summary["vision"]:
        lines += tower_report(summary["vision"])
    elif vision := summary["vision"]["tensors"]:
        lines.append(f"vision, kept aside: {vision} tensors, {size(summary['vision']['bytes'])}")
    if not summary["runs"]:
        return [*lines, f"cannot run: {summary['why_not']}"]
    config, memory = summary["config"], summary["memory"]
    full = sum(not layer["sliding"] for layer in config["layers"])
    window = f"the others with a window of {config['sliding_window']}"
    layers = f"{full} full, {window}" if full < len(config["layers"]) else "all full"
    experts = f"{config['num_experts']} experts, {config['experts_per_token']} active"
    parts = experts if config["num_experts"] else f"an MLP of {config['intermediate_size']}"
    how = f"in {memory['dtype']}"
    for option in ("quantize", "cache_type"):
        if memory[option]:
            how += f", --{option.replace('_', '-')} {memory[option]}"
    fixed = memory["weights"] + memory["vision_tower"] + memory["head_buffer"]
    tower = [("vision tower", size(memory["vision_tower"]), "")] if memory["vision_tower"] else []
    return [
        *lines,
        f"{len(config['layers'])} layers ({layers}), hidden size {config['hidden_size']}, "
        f"vocabulary {config['vocab_size']}",
        f"{parts}; canvas of {config['canvas_length']}, context of {config['context_length']}",
        f"memory predicted on {memory['device']}, {how}:",
        *table(
            [
                ("weights", size(memory["weights"]), ""),
                *tower,
                ("vocabulary head's buffer", size(memory["head_buffer"]), ""),
                *(
                    (f"cache for {length} tokens", size(cache), f"{size(fixed + cache)} in all")
                    for length, cache in memory["kv_cache"].items()
                ),
            ]
        ),
    ]


def _convert(args: argparse.Namespace) -> int:
    if args.model or holds_adapter(args.source):
        if args.to:
            raise Refused("to", "an adapter keeps its numbers as they are", "leave it out")
        adapter = convert_adapter(args.source, args.out, args.model or EMBEDDED, args.force)
        print(f"{args.out}: {len(adapter.changes)} changes of rank {adapter.rank}")
        return 0
    with progress("converting", in_bytes=True) as show:
        done = convert(args.source, args.out, args.to, force=args.force, progress=show)
    return _say(done)


def _merge(args: argparse.Namespace) -> int:
    with progress("merging", in_bytes=True) as show:
        given = args.base, args.adapter, args.out, args.to
        done = merge(*given, force=args.force, progress=show)
    return _say(done)


def _say(done: Converted) -> int:
    for note in done.notes:
        print_message("note", note)
    counted = Counter(tensor.format for tensor in done.tensors).most_common()
    formats = ", ".join(f"{count} {name}" for name, count in counted)
    print(f"{done.path}: {done.target}, {size(done.nbytes)} ({formats})")
    return 0
