"""What each process of `gpu_first.py` does, and the file of their findings: plain values."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_cases import CASES as CASES
from benchmarks.gpu_figures import Setting, figures
from benchmarks.gpu_graph import compare
from benchmarks.gpu_kernel import TRITON, check_kernel
from benchmarks.gpu_options import sizes_of
from benchmarks.gpu_start import start
from benchmarks.gpu_step import profiled, step_times
from benchmarks.gpu_texts import compare_texts
from benchmarks.gpu_timing import device_limits, launch_gap_s

from sfumato.bench.environment import environment
from sfumato.bench.step_cost import DeviceLimits
from sfumato.bench.subject import Subject, random_subject
from sfumato.device_trial import network_of
from sfumato.model.network import Network
from sfumato.model.placement import pick_device
from sfumato.ops import triton
from sfumato.ops.triton import self_test, tries
from sfumato.ops.triton.self_test import Trial
from sfumato.ops.triton.tiles import architecture, own_architecture

OPERATIONS = "operations"
FORMATS = ("", "Q4_K", "Q6_K", "Q5_0", "Q8_0", "FP8", "INT8", "INT4", "NVFP4")
"""Of weights, in the order in which operations are tried with them; "": floats."""
START_S = 120.0  # of a server
_TRIED = "operation "


class Results:
    """A file of findings, a line of JSON each, which says of what part it is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, part: str, **values: Any) -> None:
        """Writes a line at once. begins: whether what was known of the part counts no more."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **values}) + "\n")

    def read(self) -> dict[str, dict[str, Any]]:
        """The findings of each part; later ones replace those before."""
        parts: dict[str, dict[str, Any]] = {}
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.splitlines():
            with suppress(ValueError):  # a line that was cut off
                values = json.loads(line)
                name = values.pop("part")
                if values.pop("begins", False):
                    parts.pop(name, None)
                parts.setdefault(name, {}).update(values)
        return parts


class Findings:
    """What a part finds, and what others have found."""

    def __init__(self, path: Path, part: str) -> None:
        self._results, self._part = Results(path), part

    def add(self, **values: Any) -> None:
        self._results.add(self._part, **values)

    def of(self, part: str) -> dict[str, Any]:
        return self._results.read().get(part, {})

    def kernels(self) -> list[dict[str, Any]]:
        """The findings of all cases that were checked."""
        results = self._results.read().items()
        return [findings for name, findings in results if name.startswith("kernel:")]

    def passed(self) -> frozenset[str] | None:
        """The operations that passed; None where none has been tried."""
        known = tried(self._results.read())
        return frozenset(name for name, why in known.items() if not why) if known else None


def tried(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The operations that were tried, with a format where it has one, and why each failed."""
    pairs = results.get(OPERATIONS, {}).items()
    return {key.removeprefix(_TRIED): why for key, why in pairs if key.startswith(_TRIED)}


def run(options: argparse.Namespace) -> None:
    """Runs one part, named as `kernel:experts`."""
    (part,) = options.part
    kind, _, name = part.partition(":")
    PARTS[kind](options, Findings(Path(options.file), part), name)


def _operations(options: argparse.Namespace, findings: Findings, name: str) -> None:
    """A format at a time; those that were tried before are left out."""
    device = pick_device(options.device)
    if not self_test.usable(device):
        findings.add(skipped="kernels do not run on this device")
        return
    trial = Trial(device)
    for format in FORMATS:
        known, before = triton.twins((format,) if format else ()), findings.passed() or ()
        own = [each for each in known if each.partition(" ")[2] == format]
        if left := [each for each in own if each not in before]:
            if device.type == "cpu":
                results = {each: self_test.why_wrong(known[each], trial) for each in left}
            else:
                results = tries.run(trial, (format,), left)
            findings.add(**{f"{_TRIED}{each}": why for each, why in results.items()})


def _ceilings(options: argparse.Namespace, findings: Findings, name: str) -> None:
    device = pick_device(options.device)
    small = device.type == "cpu"
    limits = device_limits(device, 256 if small else 8192, 1 << (22 if small else 32))
    findings.add(limits=asdict(limits), environment=environment())
    findings.add(launch_s=launch_gap_s(device), target=_target(device))


def _compile(options: argparse.Namespace, findings: Findings, name: str) -> None:
    target = findings.of("ceilings").get("target")
    if target is None:
        findings.add(compiled=0, skipped="kernels do not run on this device")
    elif options.sizes != "26b-a4b":
        findings.add(compiled=0, skipped="only the sizes of the 26B-A4B are known ahead of time")
    else:
        from benchmarks.gpu_compile import compile_for

        findings.add(**compile_for(*target))


def _kernel(options: argparse.Namespace, findings: Findings, name: str) -> None:
    seconds = options.kernel_seconds / 10  # of each of the two that are timed
    findings.add(**check_kernel(name, sizes_of(options), _limits(findings), seconds))


def _layers(options: argparse.Namespace, findings: Findings, name: str) -> None:
    """A sliding and a full layer, where the network has both among its first six."""
    network = random_subject(options.sizes, _format(options), 6, options.device).network
    layers = network.config.layers
    full = next((at for at, layer in enumerate(layers) if not layer.sliding), 0)
    _compared(options, findings, network_of(network, sorted({0, full})))


def _step(options: argparse.Namespace, findings: Findings, name: str) -> None:
    subject = _subject(options)
    network, steps = subject.network, min(8, options.steps)
    passed = findings.passed() or frozenset()
    for key, served in (("torch_ms", frozenset[str]()), ("kernels_ms", passed)):
        self_test.serve_only(network.device, served)
        taken = step_times(network, 1, options.prefix, steps)["median_ms"]
        findings.add(made_s=subject.about["made_s"], **{key: taken})
    findings.add(profile=profiled(network, options.prefix))


def _serve(options: argparse.Namespace, findings: Findings, name: str) -> None:
    """The embedded model, as a user serves it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    began, base = time.monotonic(), f"http://127.0.0.1:{port}"
    command = "-m", "sfumato", "serve", "--device", options.device, "--port", str(port)
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    try:
        while not (is_ready := _answers(f"{base}/health")):
            if process.poll() is not None or time.monotonic() - began > START_S:
                break
            time.sleep(0.2)
        assert is_ready, f"no server after {time.monotonic() - began:.0f} s"
        findings.add(ready_s=time.monotonic() - began)
        question = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"messages": [question], "seed": 1}).encode()
        request = urllib.request.Request(f"{base}/v1/chat/completions", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            reply = json.loads(answer.read(1 << 20))["choices"][0]["message"]["content"]
        findings.add(reply=reply, passed="Paris" in reply)
    finally:
        process.terminate()
        process.wait(20)


def _answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def _graph(options: argparse.Namespace, findings: Findings, name: str) -> None:
    _compared(options, findings, _subject(options).network)


def _compared(options: argparse.Namespace, findings: Findings, network: Network) -> None:
    """Steps with and without graphs, of one row and of all."""
    _prepare(findings, network.device)
    for rows in dict.fromkeys((1, options.rows)):
        results = compare(network, rows, options.prefix, min(8, options.steps))
        findings.add(**{f"rows_{rows}": results}, passed=results["same"])
        if not results["same"]:
            return


def _figures(options: argparse.Namespace, findings: Findings, name: str) -> None:
    subject = _subject(options)
    _prepare(findings, subject.network.device)
    real = options.sizes == "26b-a4b"
    setting = Setting(
        *(subject, _limits(findings), options.prefix, options.steps),
        scale=1 if real else 64,
        kernel_errors=_kernel_errors(findings),
    )
    taken: list[dict[str, Any]] = []
    for figure in figures(setting):
        taken.append(figure)
        findings.add(figures=taken)


def _kernel_errors(findings: Findings) -> dict[str, float]:
    """Of each case that was checked, the largest error of a result in units of torch's own."""
    ratios = {}
    for checked in findings.kernels():
        pairs = zip(checked.get("errors", ()), checked.get("torch_errors", ()), strict=True)
        each = [error / own for error, own in pairs if own > 0]
        if each and checked["served_by"] == TRITON:
            ratios[checked["kernel"]] = max(each)
    return ratios


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
    _prepare(findings, network.device)
    kinds = list(gpu_transformers.CACHES)
    if network.device.type == "cpu":
        kinds.remove("compiled")
        findings.add(compiled={"skipped": "compiling for a CPU takes minutes"})
    steps = min(16, options.steps)
    for finding in gpu_transformers.compare(network, options.sizes, options.prefix, steps, kinds):
        findings.add(**finding)


def _prepare(findings: Findings, device: torch.device) -> None:
    """Kernels serve as they do in an engine; where operations were tried, those that passed."""
    passed = findings.passed()
    if passed is None:
        triton.prepare(device)
    else:
        self_test.serve_only(device, passed)


def _limits(findings: Findings) -> DeviceLimits:
    return DeviceLimits(**findings.of("ceilings")["limits"])


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
    OPERATIONS: _operations,
    "ceilings": _ceilings,
    "layers": _layers,
    "serve": _serve,
    "compile": _compile,
    "kernel": _kernel,
    "step": _step,
    "graph": _graph,
    "figures": _figures,
    "start": _start,
    "texts": _texts,
    "transformers": _transformers,
}
