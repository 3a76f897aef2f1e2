"""Where the options put a model: what is known of it before it is loaded, how many of its layers
fit a card, and what becomes of the others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.api import EMBEDDED
from sfumato.cli.notes import print_message
from sfumato.engine import EngineConfig
from sfumato.engine.memory.guard import Subject, check_placed, most_gpu_layers
from sfumato.model.families import open_checkpoint
from sfumato.model.layer_devices import make_placement
from sfumato.model.loading import config_of
from sfumato.model.other_layers import faster_other_layers
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantization import quantized_on_load


def subject(args: argparse.Namespace) -> tuple[Subject, torch.device]:
    """The model that the options name, and its device. Raises ValueError or OSError."""
    checkpoint = open_checkpoint(Path(args.model) if args.model else EMBEDDED)
    config, device = config_of(checkpoint), pick_device(args.device)
    if args.quantize is not None:
        checkpoint = quantized_on_load(checkpoint, args.quantize, device)
    dtype = pick_dtype(args.dtype, checkpoint, device)
    return Subject(checkpoint, config, dtype, args.cache_type), device


def choose_layers(
    args: argparse.Namespace, layout: Callable[[int], EngineConfig], one_device: bool = False
) -> None:
    """Replaces "auto" of `--gpu-layers` and of `--other-layers` by what it stands for, and checks
    that every device holds its part, with the engine that `layout` gives for the longest context of
    the model. One line says which number of layers was chosen. one_device: whether a model that is
    on one device is checked too. Raises ValueError or OSError."""
    if not (one_device or args.gpu_layers is not None or args.experts_on_cpu or args.split):
        return
    if args.gpu_layers == "auto" and args.split:
        raise ValueError("--gpu-layers: auto is for one card; with --split name a number of layers")
    model, device = subject(args)
    engine = layout(model.config.context_length)
    if args.gpu_layers == "auto":
        args.gpu_layers = _most_layers(args, model, device, engine)
    given = device, len(model.config.layers), args.experts_on_cpu, args.gpu_layers, args.split
    placement = make_placement(*given)
    if placement.leaves_layers:
        _choose_other_layers(args, model, device)
        placement = make_placement(*given, other_layers=args.other_layers)
    check_placed(model, placement, engine)


def _most_layers(
    args: argparse.Namespace, model: Subject, device: torch.device, engine: EngineConfig
) -> int:
    """The number of layers that fit beside what the others take of the card."""
    layers, given = len(model.config.layers), (model, device, engine, args.experts_on_cpu)
    count, left = most_gpu_layers(*given), "on the CPU"
    if count < layers and device.type != "cpu":
        _choose_other_layers(args, model, device)
        if args.other_layers == "stream":
            left = "stream from the host's memory"
            count = most_gpu_layers(*given, other_layers=args.other_layers)
    where = f"{count} of {layers} layers on {device}"
    rest = "" if count == layers else f", {layers - count} {left}"
    print_message("gpu-layers", f"{where}{rest}: as many as fit with {engine.context:,} positions")
    return count


def _choose_other_layers(args: argparse.Namespace, model: Subject, device: torch.device) -> None:
    """Replaces "auto" of `--other-layers` by the faster of the others."""
    if args.other_layers == "auto":
        given = model.checkpoint, model.config, device, model.dtype
        args.other_layers = faster_other_layers(*given, args.activations, args.cache_type)
