"""What `gpu_first.py` and `gpu_tune.py` share of their command lines: sizes, processes of parts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from benchmarks.gpu_cases import Sizes

from sfumato.bench.step_cost import StepShape
from sfumato.bench.subject import random_config
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.placement import pick_device

_NAMES = ("out", "device", "sizes", "rows", "prefix")


def new_parser(description: str, out: str) -> argparse.ArgumentParser:
    """With the options of both; out: what --out names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", required=True, help=out)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="26b-a4b", help="26b-a4b, 180m or tiny")
    parser.add_argument("--rows", type=int, default=4, help="canvases of a kernel's call")
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--file", help=argparse.SUPPRESS)  # of a process of one part
    return parser


def sizes_of(options: argparse.Namespace) -> Sizes:
    """What cases are made of."""
    config = DIFFUSION_GEMMA.config.from_hf(random_config(options.sizes), {})
    shape = StepShape(options.rows, config.canvas_length, options.prefix)
    device = pick_device(options.device)
    return Sizes(config, shape, device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def run_part(
    module: str,
    options: argparse.Namespace,
    file: Path,
    others: Sequence[str],
    limit: float,
    variables: Mapping[str, str] | None = None,
) -> tuple[str, bytes]:
    """Runs a module with these options and others in a process of its own, which is to leave its
    findings in a file: why it failed, empty where it did not, and its output.

    variables: of the environment, beside those of this process.
    """
    shared = [part for name in _NAMES for part in (f"--{name}", str(getattr(options, name)))]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *shared, "--file", str(file), *others],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
            env=os.environ | paths | dict(variables or {}),
        )
    except subprocess.TimeoutExpired as late:
        return f"took more than {limit:.3g} s", late.stdout or b""
    if done.returncode == 0:
        return "", done.stdout
    return f"exit code {done.returncode}", done.stdout
