"""All kernels: their tiles, what prepares them, and what the compiler makes of them for a GPU."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu_aot
from benchmarks.gpu_unpack import inner_loop
from tests.support.kernels import interpreted, seen_as

from sfumato import ops
from sfumato.bench.subject import random_config
from sfumato.diffusion.step import step
from sfumato.model import loading
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.ops.registry import check_signature
from sfumato.ops.triton import (
    OPERATIONS,
    ahead_of_time,
    prepare,
    self_test,
    twins,
)
from sfumato.ops.triton import kernel as kernel_module
from sfumato.ops.triton import tiles as table_of_tiles
from sfumato.ops.triton.kernel import (
    FP_FUSION,
    Kernel,
    all_kernels,
    installed,
    launch,
)
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.self_test import KernelTwin, Sizes, Trial
from sfumato.ops.triton.tiles import CANDIDATES, Tile, candidates, table, tile_for
from sfumato.weights.formats import KINDS

CPU = torch.device("cpu")
INSTRUCTIONS = {
    "linear": "wgmma.m64n128k16",
    "linear_planes": "wgmma.m64n128k16",
    "experts_gate_up": "wgmma.m64n64k16",
    "experts_gate_up_planes": "wgmma.m64n64k16",
    # Of codes: 32 inputs an instruction, and not 16.
    "linear_fp8": "wgmma.m64n128k32",
    "linear_int8": "wgmma.m64n128k32",
    "experts_down_fp8": "wgmma.m64n64k32",
    "experts_down_int8": "wgmma.m64n64k32",
}
SPILLED = {
    "attention_256": 256,
    "attention_512": 512,
    "prefill_256": 8,
    "read_256": 64,
    "read_512": 512,
    "score_chunk": 104,
    "score_chunk_planes": 104,
}
"""Bytes a thread, of kernels that spill outside of their loops only (seen in the machine code):
attention and reads around the last block of keys, where a program masks values that do not exist;
the scores of the vocabulary in the statistics after the product."""


@interpreted
def test_every_kernel_has_tiles_for_every_architecture() -> None:
    assert set(table()["kernels"]) == set(all_kernels())
    for kernel in all_kernels():
        for target in table_of_tiles.TARGETS:
            uses = candidates(kernel, target)
            e4m3 = table_of_tiles.TARGETS[target].e4m3
            has_none = kernel.endswith("_bytes") if e4m3 else kernel.endswith("_fp8")
            assert bool(uses) is not has_none and all(
                0 < len(tiles) <= CANDIDATES for tiles in uses.values()
            )
            for tile in (tile for tiles in uses.values() for tile in tiles):
                assert tile.warps in (1, 2, 4, 8, 16) and 1 <= tile.stages <= 6
    for target in table_of_tiles.TARGETS:
        for kernel in ("linear_planes", "linear_gated_planes"):
            assert all(table_of_tiles.unpacking(kernel, each, target) > 1 for each in LAYOUTS)


def test_instructions_are_counted_in_the_loop_that_multiplies() -> None:
    """Not in one that waits, nor up to where code that stands apart leads back."""
    loop = [".L_x_1:", "  /*0000*/  FMUL R1 ;", ".L_x_3:", "  /*0010*/  HGMMA.64x64x16 R4 ;"]
    loop += ["  /*0020*/  @!P4 BRA `(.L_x_1) ;", "  /*0030*/  STG R1 ;", "  /*0038*/  EXIT ;"]
    apart = [".L_x_0:", "  /*0040*/  SYNCS R2 ;", "  /*0050*/  @!P0 BRA `(.L_x_0) ;"]
    apart += ["  /*0060*/  BRA `(.L_x_3) ;"]
    assert inner_loop("\n".join(loop + apart)) == {"FMUL": 1, "HGMMA": 1, "BRA": 1}
    amd = [".LBB0_3:", "  v_wmma_f32_16x16x16_bf16 v1, v1", "  s_cbranch_execz .LBB0_3"]
    amd += ["  s_branch .LBB0_3"]
    assert inner_loop("\n".join(amd)).total() == 2


@interpreted
def test_counts_are_not_specialized() -> None:
    """Numbers that change while serving, and addresses of rows of tables, have one code whatever
    they are: Triton would compile another for 1 and for multiples of 16."""
    for kernel in all_kernels().values():
        changing = {
            name
            for name, kind in kernel.types.items()
            if kind in ("i32", "i64") or (kind.startswith("*") and ":" not in kind)
        }
        named = set(kernel.function.kwargs["do_not_specialize"] or ())
        absent = {name for name, value in kernel.sizes.items() if value is None}
        assert named - absent == changing, kernel.name
        fixed = {name for name, kind in kernel.types.items() if kind in ("i32:16", "i64:16")}
        assert fixed <= {"q_stride", "k_stride", "v_stride", "length", "stored"}, kernel.name


@interpreted
def test_every_operation_passes_its_self_test() -> None:
    assert set(twins()) == set(OPERATIONS)
    assert self_test.usable(CPU)
    for twin in twins().values():
        twin.check(Trial(CPU))


def test_what_is_compiled_is_tried_with_the_widths_that_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the device: those of the 26B-A4B by default, and else those of the model."""
    real = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b"), {})
    sizes = loading._sizes(real)
    assert sizes == Sizes()
    assert {2816, 2112, 4096, 8192} <= {width for pair in sizes.products for width in pair}
    assert (sizes.expert, sizes.vocabulary) == (704, 262_144)
    none = {"num_experts": 0, "expert_size": 0, "experts_per_token": 0}
    small = loading._sizes(replace(real, **none, hidden_size=512, intermediate_size=96))
    widths = {width for pair in small.products for width in pair}
    assert widths == {512, 96, 4096, 2048, 8192, 1024} and small.expert == 704
    for interprets in (True, False):
        monkeypatch.setattr(self_test, "interpreting", lambda: interprets)  # noqa: B023
        trial = Trial(CPU, sizes)
        assert trial.sizes == (self_test.SMALL if interprets else sizes)
        assert trial.dtype == (torch.float32 if interprets else torch.bfloat16)
        assert trial.random((2, 3))[0].dtype == trial.dtype


def test_limits_are_those_of_torchs_own_error() -> None:
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    torchs = exact.bfloat16()
    self_test.assert_near((exact * (1 + 2**-9)).bfloat16(), torchs, exact)
    with pytest.raises(AssertionError, match="the relative error is 1"):
        self_test.assert_near((exact * (1 + 2**-6)).bfloat16(), torchs, exact)
    with pytest.raises(AssertionError, match="not finite"):
        self_test.assert_near(torchs / 0, torchs, exact)
    chosen = torch.arange(100)
    self_test.assert_near(chosen.where(chosen > 0, 1), chosen, chosen)
    with pytest.raises(AssertionError, match=r"other integers: 3\.0%"):
        self_test.assert_near(chosen.where(chosen > 2, 7), chosen, chosen)


@interpreted
def test_every_twin_has_the_signature_of_its_reference() -> None:
    assert step is not None  # what other packages declare is declared
    for operation, twin in twins({*LAYOUTS, *KINDS}).items():
        check_signature(operation.split()[0], twin.function)
    with pytest.raises(TypeError, match=r"linear: the twin .* its reference"):
        check_signature("linear", lambda x, weight: x)


def test_a_kernel_that_is_wrong_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(trial: Trial) -> None:
        self_test.assert_near(torch.ones(3), torch.ones(3) + 1, torch.ones(3) + 1)

    monkeypatch.setattr(self_test, "_passed", {})
    twin_list = [
        KernelTwin(name, max, bool, check)
        for name, check in (("good", lambda trial: None), ("bad", wrong), ("worse", wrong))
    ]
    assert not self_test.serves("good", CPU)
    with caplog.at_level(logging.WARNING, logger=self_test.__name__):
        passed = self_test.prepare(Trial(CPU), {each.operation: each for each in twin_list}, dict)
    assert passed == {"good"} == self_test.prepared(CPU)
    assert self_test.serves("good", CPU) and not self_test.serves("bad", CPU)
    (record,) = caplog.records  # one line, since both fail for one reason
    assert record.getMessage().split(":")[0] == "bad, worse"
    assert record.getMessage().endswith("a row's bits then depend on the other rows")
    assert self_test.prepare(Trial(CPU), {}, dict) == {"good"}  # once a device


def test_one_line_says_that_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, logger="sfumato.ops.triton"):
        monkeypatch.setattr(self_test, "installed", lambda: False)
        assert not prepare(gpu) and not prepare(CPU)
        monkeypatch.setattr(self_test, "installed", lambda: True)
        monkeypatch.setattr(self_test, "architecture", lambda trial: None)
        assert not prepare(gpu)
        monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear",))})
        monkeypatch.setattr("sfumato.ops.triton._refused", set())
        twin = KernelTwin("linear", max, lambda x, weight, tile: False, lambda trial: None)
        monkeypatch.setattr("sfumato.ops.triton._twin", lambda operation: twin)
        with seen_as("cpu", "cuda"):
            for _ in range(2):
                ops.linear(torch.eye(3), torch.eye(3))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["kernels", "kernels", "linear"]
    assert "not installed" in lines[0] and "torch.float32 (3, 3)" in lines[2]


class Stub:
    """A kernel's function that fails where it is compiled."""

    arg_names = ("out",)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compiled(**parameters: object) -> None:
            raise ValueError("out of resource: shared memory\nmore lines")

        return compiled


def test_torch_serves_once_a_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_module, "interpreting", lambda: False)
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear", "route"))})
    stub, own = Kernel("stub", Stub(), {}, {}), Tile({}, 4, 1)

    def failing(x: torch.Tensor, weight: torch.Tensor, tile: int | None) -> torch.Tensor:
        launch(stub, (1,), own, CPU, out=x)
        return x

    twin = KernelTwin("linear", failing, lambda x, weight, tile: True, lambda trial: None)
    monkeypatch.setattr("sfumato.ops.triton._twin", lambda operation: twin)
    x = torch.eye(3)
    with seen_as("cpu", "cuda"), caplog.at_level(logging.WARNING, logger=self_test.__name__):
        with pytest.raises(RuntimeError):  # an error of the caller's, which torch raises too
            ops.linear(x, torch.ones(3, 2))
        assert self_test.prepared(CPU) == {"linear", "route"} and not caplog.records
        for _ in range(2):
            assert torch.equal(ops.linear(x, 2 * x), 2 * x)
    assert self_test.prepared(CPU) == {"route"}
    (record,) = caplog.records
    assert "linear" in record.getMessage() and "ValueError: out of" in record.getMessage()


def test_where_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "interpreting", lambda: False)
    assert not self_test.usable(CPU)
    assert table_of_tiles.architecture(torch.device("meta")) is None
    monkeypatch.setattr(self_test, "installed", lambda: True)
    monkeypatch.setattr(self_test, "os", SimpleNamespace(name="nt"))
    assert self_test.why_unusable(torch.device("cuda", 0)).startswith("Windows lacks")


def _items(node: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
    pairs = zip(node.keys, node.values, strict=True)
    return ((key, value) for key, value in pairs if key is not None)


def test_sums_are_those_that_the_sources_name() -> None:
    """Each product of matrices names its precision, and the one place that launches kernels says
    whether a product and a sum may be contracted: defaults differ between versions of Triton. The
    test below holds what the compiler made of it."""
    precisions, launches = [], []
    for path in sorted(Path(ahead_of_time.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                options = {ast.unparse(key): ast.unparse(value) for key, value in _items(node)}
                if "'num_warps'" in options:
                    launches.append((path.name, options.get("'enable_fp_fusion'")))
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if called.startswith("tl.dot"):
                precisions.append((called, given.get("input_precision")))
    router = "'tf32x3' if TF32 else 'ieee'"
    assert set(precisions) == {("tl.dot", "'ieee'"), ("tl.dot", router)}
    sources = ("ahead_of_time.py", "kernel.py")
    assert launches == [(source, "FP_FUSION") for source in sources] and not FP_FUSION


@interpreted
def test_every_variant_of_a_kernel_is_compiled() -> None:
    """The usual step has no row that commits, and a decision needs no masses."""
    made = list(ahead_of_time.jobs(["sm_90"], ["attention_512", "score_chunk", "move_rows"]))
    variants = [(job.kernel, job.variant) for job in made]
    assert variants == [
        *(("attention_512", ""), ("attention_512", "denoise")),
        *(("score_chunk", ""), ("score_chunk", "decide"), ("move_rows", "")),
    ]
    for kernel in all_kernels().values():
        known = {*kernel.sizes, *kernel.types}
        assert all(set(sizes) <= known for sizes in kernel.variants.values())


@interpreted
def test_tiles_of_an_unknown_kernel() -> None:
    assert tile_for("linear", CPU, "few")["TOKENS"] == 128
    with pytest.raises(KeyError):
        tile_for("none", CPU)
    with pytest.raises(SystemExit, match="2"):
        gpu_aot.main(["--kernel", "none"])


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_what_is_compiled_ahead_of_time_is_what_is_launched() -> None:
    """To the key of Triton's cache, in which launches of the 26B-A4B on sm_90 then find all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.launch_keys"],
        env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    findings = json.loads(run.stdout)
    assert not findings["missing"], findings
    assert set(findings["names"]) == {k for k in table()["kernels"] if candidates(k, "sm_90")}


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize(
    "kernels",
    [
        ("linear", "linear_int8", "experts_gate_up_planes", "experts_down_fp8"),
        pytest.param((), id="all", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(kernels: tuple[str, ...]) -> None:
    """The tiles that serve on sm_90: within its shared memory, with no spills in a loop, and with
    the same matrix instruction whatever the number of tokens."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_aot"]
    run = subprocess.run(
        [*command, "--target", "sm_90", "--json", *(f"--kernel={name}" for name in kernels)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stdout + run.stderr
    instructions: dict[str, set[tuple[str, ...]]] = {}
    for result in results:
        assert not result["error"] and result["spilled"] <= SPILLED.get(result["kernel"], 0), result
        instructions.setdefault(result["kernel"], set()).add(tuple(result["instructions"]))
    assert all(len(kinds) == 1 for kinds in instructions.values()), instructions
    assert instructions.keys() == {*kernels} or {*INSTRUCTIONS} < instructions.keys()
    for kernel in INSTRUCTIONS.keys() & instructions.keys():
        assert instructions[kernel] == {(INSTRUCTIONS[kernel],)}
