"""benchmarks/gpu_first.py on a CPU, at tiny sizes: what serves here stands in for kernels."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import (
    gpu_compile,
    gpu_figures,
    gpu_first,
    gpu_kernel,
    gpu_options,
    gpu_parts,
    gpu_texts,
    gpu_tiles,
    gpu_transformers,
)
from benchmarks.gpu_cases import CASES, Sizes
from benchmarks.gpu_kernel import check_kernel, relative_errors
from benchmarks.gpu_step import outside_ms, touched_in_prefill, touched_in_step
from benchmarks.gpu_texts import ERROR, Side, compare_texts
from benchmarks.gpu_timing import median_ms, poison
from tests.support.kernels import interpreted
from tests.support.oracle import oracle_encode, oracle_logits

import sfumato
from sfumato.bench.step_cost import LIMITS, StepShape
from sfumato.bench.subject import random_config, random_subject
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.ops import reference
from sfumato.ops.triton import ahead_of_time, self_test, tiles
from sfumato.ops.triton.kernel import EXACT, Kernel
from sfumato.ops.triton.self_test import KernelTwin
from sfumato.ops.triton.tiles import Target, Tile

CPU = torch.device("cpu")
SIZES = Sizes(
    replace(DIFFUSION_GEMMA.config.from_hf(random_config("tiny"), {}), num_experts=8),
    *(StepShape(2, 16, 20), CPU, torch.float32),
)


@interpreted
def test_kernels_are_compiled_for_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all shapes, in processes of their own; what fails is told."""

    def compiled(kernel: Kernel, options: dict[str, Any], target: Target) -> SimpleNamespace:
        assert (target.name, target.number) == ("sm_89", 86)
        if not kernel.sizes.get("WEIGHTED", True):
            raise RuntimeError("no such norm")
        return SimpleNamespace()

    monkeypatch.setattr(ahead_of_time, "source_of", lambda kernel, tile, target: (kernel, {}))
    monkeypatch.setattr(ahead_of_time, "compile_source", compiled)
    findings = gpu_compile.compile_for("sm_89", 86, ("rms_norm", "linear"))
    # Norms with weights of either kind; seven matrices and three groups, for few and many tokens.
    assert findings["compiled"] == 2 * 2 + 2 * 10
    assert findings["failures"] == {
        f"rms_norm {shape}{kind} 0": "RuntimeError: no such norm"
        for shape in ("plain", "plain heads")
        for kind in ("", EXACT)
    }


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_right_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernel.self_test, "usable", lambda device: False)  # stand-ins
    findings = check_kernel(name, SIZES, LIMITS["h200"], 0.0)
    assert findings["passed"], findings
    assert findings["served_by"].startswith("a stand-in")
    assert 0 <= findings["floor_ms"] <= findings["predicted_ms"]
    assert findings["time"]["timed_by"] == "clock" and findings["tiles"] == []


def uneven_experts(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return reference.experts.reference(x, *others) * (
        1 + 1e-3 * len(x)
    )  # depends on the other rows


@pytest.mark.parametrize(
    ("function", "failing"),
    [
        (
            lambda *a: reference.experts.reference(*a) * float("nan"),
            {"right", "repeats", "same_alone"},
        ),
        (lambda *a: reference.experts.reference(*a) * (1 + 1e-4), {"right"}),
        (uneven_experts, {"right", "same_alone"}),
        (
            lambda *a: reference.experts.reference(*a) + 1e-9 * torch.rand(()),
            {"repeats", "same_alone"},
        ),
    ],
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, function: Any, failing: set[str]
) -> None:
    monkeypatch.setattr(gpu_kernel, "_kernel", lambda case, device: (function, "the test"))
    findings = check_kernel("experts", SIZES, LIMITS["h200"], 0.0)
    assert {key for key in ("right", "repeats", "same_alone") if not findings[key]} == failing
    assert not findings["passed"]


def test_errors_are_relative_to_the_exact_result() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    ids = torch.tensor([1, 2])
    assert relative_errors((exact + torch.tensor([0.0, 0.05]), ids), (exact, ids + 0)) == [
        pytest.approx(0.01),
        0,
    ]
    assert relative_errors((exact * float("nan"), ids), (exact, torch.tensor([1, 3]))) == [
        float("inf"),
        0.5,
    ]


def test_poison_fills_tensors_of_every_kind() -> None:
    kept: list[torch.Tensor] = []
    like = [torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)]
    poison(CPU, like)
    assert not any(tensor.any() for tensor in like) and not kept


def test_runs_are_timed_in_turns() -> None:
    order: list[int] = []
    runs = [lambda: order.append(0), lambda: order.append(1)]
    findings = median_ms(runs, CPU, 0.0)
    assert findings["runs"] == 5 and order[-4:] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_the_fastest_candidate_of_tiles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {use: tuple(Tile({"OUT": n}, 4, n) for n in (3, 1, 2)) for use in ("few", "many")}
    monkeypatch.setattr(tiles, "candidates", lambda kernel, target: table)
    monkeypatch.setattr(tiles, "architecture", lambda device: "sm_90")

    def milliseconds() -> float:
        stages = tiles.tile_for("linear", CPU, "few").stages
        if stages == 2:
            raise RuntimeError("out of shared memory")
        return float(stages)

    findings = gpu_tiles.measured_tiles(milliseconds, milliseconds)
    assert findings == [{"kernel": "linear", "use": "few", "ms": [3.0, 1.0, None], "fastest": 1}]
    assert tiles.tile_for("linear", CPU, "few").stages == 3


def options(folder: Path, part: str, **others: Any) -> argparse.Namespace:
    arguments = ["--out", str(folder), "--device", "cpu", "--sizes", "tiny", "--part", part]
    parsed = gpu_first._options([*arguments, "--file", str(folder / "results.jsonl")])
    small = {"rows": 2, "prefix": 20, "steps": 2, "kernel_seconds": 0.0, "began": time.time()}
    return argparse.Namespace(**vars(parsed) | small | others)


def test_the_parts_hand_on_what_they_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = gpu_parts.Results(tmp_path / "results.jsonl")
    monkeypatch.setattr(self_test, "_passed", {})

    def findings_of(part: str) -> Any:
        gpu_parts.run(options(tmp_path, part))
        return results.read()[part]

    ceilings = findings_of("ceilings")
    assert ceilings["limits"]["bytes_per_s"] > 1e8 and "commit" in ceilings["environment"]
    assert findings_of("kernel:gated")["passed"]
    assert findings_of("compile")["compiled"] == 0
    step = findings_of("step")
    assert step["torch_ms"] > 0 < step["kernels_ms"]
    times = [row["ms"] for row in step["profile"]]
    assert len(times) > 5 and times == sorted(times, reverse=True)
    ready = findings_of("start:warm")
    assert ready["goal"] == 20 and ready["reached"]
    parts = ("import", "kernels", "prompt", "steps")
    assert ready["ready_s"] == pytest.approx(sum(ready[f"{part}_s"] for part in parts))
    for part in ("layers", "graph"):
        compared = findings_of(part)
        assert compared["passed"] and compared["rows_2"]["same"]
    some = [
        figure for figure in gpu_figures.FIGURES if figure.name.startswith(("step, 1 r", "ten"))
    ]
    impossible = replace(some[0], name="none", taken=lambda setting: 1 / 0)
    monkeypatch.setattr(gpu_figures, "FIGURES", (*some, impossible))
    first, ten, none = findings_of("figures")["figures"]
    assert first["goal"] == 15 and first["measured"] > 0 < first["floor"] <= first["predicted"]
    assert 8 < first["experts_touched"] <= first["experts"] == 24
    assert (first["soft_embedding"], first["vocabulary"]) == ("exact", 512)
    assert ten["reached"] is (ten["measured"] <= 30)
    assert none["failed"].startswith("ZeroDivisionError")
    report = gpu_first.report(results.read())
    assert "| step, 1 row | ms | 15 |" in report and "| kernel:gated | ms |  |" in report


def test_operations_are_tried_a_format_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passed is not tried again."""
    tried: list[str] = []

    def twins(formats: tuple[str, ...]) -> dict[str, KernelTwin]:
        names = ["linear", "route", *(f"linear {format}" for format in formats)]
        return {name: KernelTwin(name, max, bool, partial(check, name)) for name in names}

    def check(name: str, trial: self_test.Trial) -> None:
        tried.append(name)
        assert name != "route", "other experts"

    monkeypatch.setattr(gpu_parts.triton, "twins", twins)
    monkeypatch.setattr(self_test, "usable", lambda device: True)
    monkeypatch.setattr(gpu_parts, "FORMATS", ("", "Q8_0"))
    for _ in range(2):
        gpu_parts.run(options(tmp_path, "operations"))
    assert tried == ["linear", "route", "linear Q8_0", "route"]
    findings = gpu_parts.Findings(tmp_path / "results.jsonl", "step")
    assert findings.passed() == {"linear", "linear Q8_0"}
    results = gpu_parts.Results(tmp_path / "results.jsonl").read()
    assert gpu_first.wrong(results) == ["route: AssertionError: other experts"]
    assert "2 of 3 operations passed." in gpu_first.report(results)


def test_a_part_that_fails_or_hangs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had findings before that counts."""

    def child(code: str) -> Any:
        def run(command: list[str], timeout: float, **others: Any) -> Any:
            path = command[command.index("--file") + 1]
            return real([sys.executable, "-S", "-c", code, path], timeout=timeout, **others)

        return run

    real, parent = subprocess.run, gpu_first.Run(options(tmp_path / "out", ""))
    line = '{"part": "x", "a": 1}\\n{"part": "x", '  # the second one is cut off
    writes = f"import sys; open(sys.argv[1], 'a').write('{line}\\n'); "
    for code, expected in (
        (f"{writes}sys.exit(3)", {"a": 1, "failed": "exit code 3"}),
        ("print('what was wrong'); raise SystemExit(1)", {"failed": "exit code 1"}),
        (f"{writes}import time; time.sleep(60)", {"a": 1, "failed": "took more than 1.2 s"}),
        (writes, {"a": 1, "failed": ""}),
    ):
        monkeypatch.setattr(gpu_options.subprocess, "run", child(code))
        findings = parent.part(gpu_first.Part("x", 1.2))
        assert {k: findings[k] for k in expected} == expected
        assert ("a" in findings) == ("a" in expected), "of an earlier run nothing is left"
        assert (findings["output"].strip() == "what was wrong") == ("print" in code)
    assert not gpu_first.Run(options(tmp_path / "out", "", seconds=0.5)).has_time(
        gpu_first.Part("x", 1.2)
    )


def test_what_lies_outside_the_layers_and_which_experts_are_touched() -> None:
    network = random_subject("tiny", "f32", layers=5, device="cpu").network
    assert 8 < touched_in_step(network, 1, 10) <= 24
    assert touched_in_step(network, 1, 10, 16) < touched_in_step(network, 4, 10) <= 24
    assert 8 <= touched_in_prefill(network, 3) <= 24
    step_ms = 1e4  # far slower than the fifth of the layers
    outside = outside_ms(network, 10, 1, step_ms)
    assert outside is not None and outside < 0


def test_every_figure_of_a_release_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network small enough for it; the kernels' errors are those of parts before."""
    for name in ("CANVASES", "FAST_STEPS"):
        monkeypatch.setattr(gpu_figures, name, 1)
    many = ("step, 4 rows", "step, 16 rows", "ten questions read apart")  # as one, but slower
    some = [figure for figure in gpu_figures.FIGURES if figure.name not in many]
    monkeypatch.setattr(gpu_figures, "FIGURES", some)
    subject = random_subject("tiny", "f32", layers=5, device="cpu")
    errors = {"experts": 0.9, "head": 1.3}
    setting = gpu_figures.Setting(subject, LIMITS["h200"], 20, 1, 1024, errors)
    taken = {figure["figure"]: figure for figure in gpu_figures.figures(setting)}
    assert len(taken) == len(gpu_figures.FIGURES) and not any("failed" in f for f in taken.values())
    for figure in taken.values():
        assert figure["measured"] is not None and "reached" in figure
        if figure["unit"] in ("ms", "tok/s"):
            assert figure["predicted"] > 0 and 0 < figure["experts_touched"] <= 24
    error = taken["kernel error, of torch's own"]
    assert (error["measured"], error["reached"]) == (1.3, False)


def test_texts_are_the_same_or_go_apart_at_an_edge() -> None:
    prompts = gpu_texts.PROMPTS[:1]
    results = compare_texts("cpu", torch.float32, prompts)
    assert (results["texts"], results["same"], results["wrong"], results["apart"]) == (1, 1, 0, [])
    models = [sfumato.load(device="cpu", dtype=name) for name in ("float32", "bfloat16")]
    unfamiliar = "sing!"
    apart = [gpu_texts._first_difference(*map(Side, models), unfamiliar, seed) for seed in range(3)]
    assert any(apart), "bfloat16 decides otherwise here and there, but only where it is close"
    assert all(each is None or each["distance"] < ERROR[torch.bfloat16] for each in apart), apart

    class OtherNoise(Side):
        def open(self, seed: int, number: int) -> None:
            super().open(seed + 1, number)

    wrong = gpu_texts._first_difference(Side(models[0]), OtherNoise(models[0]), unfamiliar, 0)
    assert wrong is not None and wrong["distance"] > ERROR[torch.float32]


def test_transformers_reads_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    network = random_subject("tiny", "f32", layers=3, device="cpu").network
    model = gpu_transformers.their_model(network, "tiny")
    ids, canvas = torch.arange(30) + 5, torch.arange(32) * 3
    slot = network.new_slot(30)
    network.encode([ids], [slot])
    ours = network.head.logits(network.denoise([canvas], [slot]))
    theirs = oracle_logits(model, canvas, oracle_encode(model, ids))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    results: dict[str, Any] = {}
    for finding in gpu_transformers.compare(network, "tiny", 20, 2):
        results |= finding
    assert (results["layers"], results["of_layers"]) == (3, 3) and results["sfumato_ms"] > 0
    for name, goal in (("default", 2), ("compiled", 1.2)):
        ratio = results[name]["median_ms"] / results["sfumato_ms"]
        assert (results[name]["goal"], results[name]["times_as_fast"]) == (goal, ratio)


def test_where_the_memory_ends_both_have_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def compared(network: Any, *_: Any) -> Any:
        tried.append(len(network.config.layers))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield {"default": {}}

    monkeypatch.setattr(gpu_transformers, "_compared", compared)
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: None)
    network = random_subject("tiny", "f32", layers=5, device="cpu").network
    *_, layers, last = gpu_transformers.compare(network, "tiny", 20, 2)
    assert tried == [5, 2] and layers == {"layers": 2, "of_layers": 5} and last == {"default": {}}


def test_a_run_goes_on_where_the_one_before_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    known = {
        "figures": {"figures": [{"figure": "step, 1 row", "unit": "ms", "measured": 1.0}]},
        "transformers": {
            "default": {"times_as_fast": 2.5, "goal": 2.0, "reached": True},
            "compiled": {"failed": "RuntimeError: no"},
        },
        "start:warm": {"ready_s": 30.0, "goal": 20.0, "reached": False},
    }

    def part(run: gpu_first.Run, part: gpu_first.Part) -> dict[str, Any]:
        order.append(part.name)
        fails = part.name == "graph" and order.count("graph") == 1
        run.results.add(part.name, failed="a fault" if fails else "", **known.get(part.name, {}))
        return run.results.read()[part.name]

    monkeypatch.setattr(gpu_first.Run, "part", part)
    monkeypatch.setattr(gpu_first.Run, "has_time", lambda run, part: len(order) != 2)
    arguments = ["--out", str(tmp_path / "out"), "--device", "cpu", "--sizes", "tiny"]
    assert gpu_first.main(arguments) == 0 and order == ["operations", "ceilings"]
    assert (
        "left for the next command: layers, step, compile, kernel:experts"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(gpu_first.Run, "has_time", lambda run, part: True)
    assert gpu_first.main(arguments) == 1, "a part failed"
    assert order[2:5] == ["layers", "step", "compile"] and len(order) == len(set(order))
    last = ["serve", "figures", "graph", "texts", "start:warm", "start:cold", "transformers"]
    assert order[-7:] == last and "kernel:experts" in order
    assert gpu_first.main(arguments) == 0 and order[-2:] == ["transformers", "graph"]
    assert gpu_first.main([*arguments, "--part", "step"]) == 0 and order[-2:] == ["graph", "step"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| step, 1 row | ms |  |  |  | 1 |" in report
    assert "| transformers, default | times | 2 |  |  | 2.5 |" in report
    assert "| start:warm | s | 20 |  |  | 30 |" in report
    with pytest.raises(SystemExit, match="--part: none: is none of operations, ceilings"):
        gpu_first.main([*arguments, "--part", "none"])
