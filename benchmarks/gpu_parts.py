"""What each process of `gpu_first.py` does. Findings are plain values for its JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_cases import CASES, OPERATIONS
from benchmarks.gpu_figures import Setting, figures
from benchmarks.gpu_graph import compare
from benchmarks.gpu_kernel import TRITON, check_kernel
from benchmarks.gpu_options import sizes_of
from benchmarks.gpu_start import start
from benchmarks.gpu_step import kernels_one_by_one
from benchmarks.gpu_texts import compare_texts
from benchmarks.gpu_timing import device_limits, launch_gap_s

from sfumato.bench.environment import environment
from sfumato.bench.step_cost import DeviceLimits
from sfumato.bench.subject import Subject, random_subject
from sfumato.model.placement import pick_device
from sfumato.ops import triton
from sfumato.ops.triton import self_test
from sfumato.ops.triton.kernel import installed
from sfumato.ops.triton.tiles import architecture, own_architecture

CEILINGS = "1-ceilings.json"


class Findings:
    """The file of a part, written anew with each finding."""

    def __init__(self, path: Path) -> None:
        self._path, self._values = path, dict[str, Any]()

    def add(self, **values: Any) -> None:
        self._values |= values
        self._path.write_text(json.dumps(self._values), encoding="utf-8")


def kernel_names() -> list[str]:
    """The cases, the most valuable first, and then the operations that have none."""
    operations = set(triton.twins()) if installed() else set()
    return [*CASES, *sorted(operations - set(OPERATIONS.values()))]


def run(options: argparse.Namespace) -> None:
    """Runs one part, named as `kernel:experts`."""
    kind, _, name = options.part.partition(":")
    PARTS[kind](options, Findings(Path(options.file)), name)


def _ceilings(options: argparse.Namespace, findings: Findings, name: str) -> None:
    device = pick_device(options.device)
    small = device.type == "cpu"
    limits = device_limits(device, 256 if small else 8192, 1 << (22 if small else 32))
    findings.add(limits=asdict(limits), environment=environment())
    findings.add(launch_s=launch_gap_s(device), target=_target(device))


def _compile(options: argparse.Namespace, findings: Findings, name: str) -> None:
    text = (Path(options.out) / CEILINGS).read_text(encoding="utf-8")
    target = json.loads(text).get("target")
    if target is None:
        findings.add(compiled=0, skipped="kernels do not run on this device")
    elif options.sizes != "26b-a4b":
        findings.add(compiled=0, skipped="only the sizes of the 26B-A4B are known ahead of time")
    else:
        from benchmarks.gpu_compile import compile_all

        findings.add(**compile_all(*target))


def _kernel(options: argparse.Namespace, findings: Findings, name: str) -> None:
    seconds = options.kernel_seconds / 10  # of each of the two that are timed
    findings.add(**check_kernel(name, sizes_of(options), _limits(options), seconds))


def _step(options: argparse.Namespace, findings: Findings, name: str) -> None:
    subject = _subject(options)
    device = subject.network.device
    passed = [
        OPERATIONS.get(checked["kernel"], checked["kernel"])
        for checked in _checked_kernels(options)
        if checked.get("passed")
    ]

    def serve(operations: frozenset[str]) -> None:
        self_test.serve_only(device, operations)

    known = set(triton.twins()) if installed() else set()
    operations = [each for each in dict.fromkeys(passed) if each in known]
    steps = min(8, options.steps)
    rounds = kernels_one_by_one(subject.network, operations, serve, options.prefix, steps)
    findings.add(made_s=subject.about["made_s"], **rounds)


def _graph(options: argparse.Namespace, findings: Findings, name: str) -> None:
    subject = _subject(options)
    _prepare(options, subject.network.device)
    for rows in dict.fromkeys((1, options.rows)):
        compared = compare(subject.network, rows, options.prefix, min(8, options.steps))
        findings.add(**{f"rows_{rows}": compared}, passed=compared["same"])


def _figures(options: argparse.Namespace, findings: Findings, name: str) -> None:
    subject = _subject(options)
    _prepare(options, subject.network.device)
    real = options.sizes == "26b-a4b"
    setting = Setting(
        *(subject, _limits(options), options.prefix, options.steps, _format(options)),
        scale=1 if real else 64,
        kernel_errors=_kernel_errors(options),
    )
    taken: list[dict[str, Any]] = []
    for figure in figures(setting):
        taken.append(figure)
        findings.add(figures=taken)


def _kernel_errors(options: argparse.Namespace) -> dict[str, float]:
    """Of each case that was checked, the largest error of a result in units of torch's own."""
    ratios = {}
    for checked in _checked_kernels(options):
        pairs = zip(checked.get("errors", ()), checked.get("torch_errors", ()), strict=True)
        each = [error / own for error, own in pairs if own > 0]
        if each and checked["served_by"] == TRITON:
            ratios[checked["kernel"]] = max(each)
    return ratios


def _checked_kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    paths = sorted(Path(options.out).glob("2-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _start(options: argparse.Namespace, findings: Findings, name: str) -> None:
    sizes, prefix = options.sizes, options.prefix
    findings.add(**start(name, options.device, sizes, _format(options), prefix, options.began))


def _texts(options: argparse.Namespace, findings: Findings, name: str) -> None:
    """In float32, where torch serves, and in bfloat16 where kernels do."""
    device = pick_device(options.device)
    dtypes = [torch.float32, torch.bfloat16]
    compared = []
    for dtype in dtypes[:1] if device.type == "cpu" else dtypes:
        compared.append(compare_texts(options.device, dtype))
        passed = not any(each["wrong"] for each in compared)
        findings.add(compared=compared, passed=passed)


def _transformers(options: argparse.Namespace, findings: Findings, name: str) -> None:
    if find_spec("transformers") is None:
        findings.add(skipped="transformers is not installed")
        return
    from benchmarks import gpu_transformers

    network = _subject(options).network
    _prepare(options, network.device)
    kinds = list(gpu_transformers.CACHES)
    if network.device.type == "cpu":
        kinds.remove("compiled")
        findings.add(compiled={"skipped": "compiling for a CPU takes minutes"})
    steps = min(16, options.steps)
    for finding in gpu_transformers.compare(network, options.sizes, options.prefix, steps, kinds):
        findings.add(**finding)


def _prepare(options: argparse.Namespace, device: torch.device) -> None:
    """Kernels serve as they do in an engine; but of those that were tried in a step, the kept."""
    triton.prepare(device)
    path = Path(options.out) / "3-step.json"
    kept = json.loads(path.read_text(encoding="utf-8")).get("kept") if path.exists() else None
    if kept is not None:
        self_test.serve_only(device, frozenset(kept))


def _limits(options: argparse.Namespace) -> DeviceLimits:
    text = (Path(options.out) / CEILINGS).read_text(encoding="utf-8")
    return DeviceLimits(**json.loads(text)["limits"])


def _format(options: argparse.Namespace) -> str:
    return "f32" if pick_device(options.device).type == "cpu" else "bf16"


def _target(device: torch.device) -> tuple[str, int | str] | None:
    """Whose tiles the device has, and its own architecture as Triton names it; None where kernels
    are not compiled."""
    if not self_test.usable(device) or device.type != "cuda":
        return None
    name = architecture(device)
    assert name is not None  # else not usable
    return name, own_architecture(device)


def _subject(options: argparse.Namespace) -> Subject:
    return random_subject(options.sizes, _format(options), device=options.device)


PARTS: dict[str, Callable[[argparse.Namespace, Findings, str], None]] = {
    "ceilings": _ceilings,
    "compile": _compile,
    "kernel": _kernel,
    "step": _step,
    "graph": _graph,
    "figures": _figures,
    "start": _start,
    "texts": _texts,
    "transformers": _transformers,
}
