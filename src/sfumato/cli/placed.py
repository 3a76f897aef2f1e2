"""Where the options put a model: what is known of it before it is loaded, and how many of its
layers fit a card."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.api import EMBEDDED
from sfumato.cli.notes import print_message
from sfumato.engine import EngineConfig
from sfumato.engine.layer_choice import Subject, most_gpu_layers
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantize_on_load import quantized_on_load


def subject(args: argparse.Namespace) -> tuple[Subject, torch.device]:
    """The model that the options name, and its device. Raises ValueError or OSError."""
    checkpoint = open_checkpoint(Path(args.model) if args.model else EMBEDDED)
    config, device = config_of(checkpoint), pick_device(args.device)
    if args.quantize is not None:
        checkpoint = quantized_on_load(checkpoint, args.quantize, device)
    dtype = pick_dtype(args.dtype, checkpoint, device)
    return Subject(checkpoint, config, dtype, args.cache_type), device


def gpu_layers(args: argparse.Namespace, layout: Callable[[int], EngineConfig]) -> int | None:
    """The number of layers that `--gpu-layers` names; one line says which "auto" chose, for the
    engine that `layout` gives for the longest context of the model. Raises ValueError or OSError.
    """
    if args.gpu_layers != "auto":
        given: int | None = args.gpu_layers
        return given
    model, device = subject(args)
    layers = len(model.config.layers)
    engine = layout(model.config.context_length)
    count = most_gpu_layers(model, device, engine, args.experts_on_cpu)
    where = f"{count} of {layers} layers on {device}"
    rest = "" if count == layers else f", {layers - count} on the CPU"
    print_message("gpu-layers", f"{where}{rest}: as many as fit with {engine.context:,} positions")
    return count
