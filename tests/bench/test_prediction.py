"""The floors that are known by hand, and what a prediction adds to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sfumato.bench.step_cost import (
    LAUNCH_S,
    LIMITS,
    REACHED,
    KernelCost,
    StepShape,
    experts_touched,
    limits_named,
    limits_of_product,
    step_costs,
    step_time,
    stored_bytes,
)
from sfumato.bench.subject import random_checkpoint, random_config
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.loading import expected_shapes
from sfumato.ops.triton.planes import plane_bytes
from sfumato.ops.triton.tiles import unpacking

FULL = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b"), {})
STORED = stored_bytes(FULL)


@pytest.mark.parametrize(
    ("shape", "floor"),
    [
        (StepShape(1), 12.8),
        (StepShape(4), 19.4),
        (StepShape(16), 49.8),
        (StepShape(prefix=32768), 14.6),
        (StepShape(width=32), 10.4),
        (StepShape(width=4096, prefix=0, encodes=True), 35.8),
    ],
)
def test_floors_of_bfloat16_on_an_h200(shape: StepShape, floor: float) -> None:
    time = step_time(step_costs(FULL, shape, STORED), LIMITS["h200"])
    assert round(time.floor_ms, 1) == floor
    assert time.floor_ms < time.predicted_ms < 1.4 * time.floor_ms


@pytest.mark.parametrize(("format", "floor"), [("q8_0", 7.8), ("q4_k_m", 5.7)])
def test_floors_of_quantized_weights(format: str, floor: float) -> None:
    costs = step_costs(FULL, StepShape(), stored_bytes(FULL, format))
    assert round(step_time(costs, LIMITS["h200"]).floor_ms, 1) == floor


@pytest.mark.parametrize(("rows", "floor"), [(1, 7.0), (4, 12.2), (16, 35.9)])
def test_floors_of_8_bit_codes(rows: int, floor: float) -> None:
    """Of 1,400 TFLOP/s in the layers and 790 in the head; as before where codes are widened."""
    tensors = random_checkpoint("26b-a4b", "fp8").tensors
    formats = {name: info.format for name, info in tensors.items()}
    codes = [name for name, format in formats.items() if format == "FP8"]
    assert codes and not any("router" in name or "embed" in name for name in codes)
    stored = {name: info.nbytes for name, info in tensors.items()}
    costs = step_costs(FULL, StepShape(rows), stored, formats=formats)
    assert round(step_time(costs, LIMITS["h200"]).floor_ms, 1) == floor
    device = replace(LIMITS["a100"], bytes_per_s=1e15)
    widened = step_time(costs, device).floor_ms
    assert widened == step_time([replace(c, products="bf16") for c in costs], device).floor_ms


def test_a_matrix_without_codes_decides_for_its_kernel() -> None:
    formats = {f"layers.0.self_attn.{name}_proj.weight": "INT8" for name in "qko"}
    costs = step_costs(FULL, StepShape(), STORED, formats=formats)
    assert {c.name for c in costs if c.products == "INT8"} == {"output projection"}
    assert sum(c.name == "output projection" for c in costs) == 2, "other layers are apart"


def test_a_kernel_is_bound_by_what_takes_longest() -> None:
    device = replace(LIMITS["h200"], bytes_per_s=1e12, bf16_flops=1e14, float32_flops=1e13)
    reading = KernelCost("a", "layers", stored=1e9, passed=0, flop=1e9)
    computing = replace(reading, name="b", stored=1e6, flop=1e12)
    exact = replace(computing, name="c", products="float32")
    small = replace(reading, name="d", stored=0, flop=0, launches=4, part="outside")
    time = step_time([reading, computing, exact, small], device)
    assert [k.bound for k in time.kernels] == ["memory", "arithmetic", "arithmetic", "launch"]
    assert [k.floor_s for k in time.kernels] == [1e-3, 1e-2, 1e-2, 0]
    assert time.kernels[2].predicted_s == pytest.approx(1e-1 / REACHED + LAUNCH_S)
    assert time.outside_ms == pytest.approx(4e3 * LAUNCH_S)
    assert time.kernels[3].as_dict()["predicted_ms"] == pytest.approx(4e3 * LAUNCH_S)


def test_what_runs_beside_the_experts_adds_what_both_need() -> None:
    """Of a step of few tokens: bytes where reading bounds both, and no arithmetic."""
    device = replace(LIMITS["h200"], bytes_per_s=1e12, bf16_flops=1e14)
    experts = KernelCost("experts, down", "layers", stored=1e9, passed=0, flop=1e9)
    for flop, stored, bound in ((1e10, 1e7, "memory"), (3e11, 1e7, "arithmetic")):
        mlp = KernelCost("dense MLP", "layers", stored, 0, flop, 2, beside=True)
        alone, added = step_time([experts, mlp], device).kernels
        longest = max(1e-3 + stored / 1e12, (1e9 + flop) / 1e14) / REACHED
        assert added.predicted_s == pytest.approx(longest + 3 * LAUNCH_S - alone.predicted_s)
        assert added.bound == bound
        assert step_time([mlp], device).kernels[0].predicted_s > added.predicted_s
    for rows, beside in ((2, True), (3, False)):
        mlps = [c for c in step_costs(FULL, StepShape(rows), STORED) if c.name == "dense MLP"]
        assert [c.beside for c in mlps] == [beside]


@pytest.mark.parametrize(
    ("leaf", "kernel", "format", "counted", "tokens"),
    [
        ("self_attn.o_proj.weight", "output projection", "Q4_K", "linear", 128),
        ("mlp.up_proj.weight", "dense MLP", "Q6_K", "experts_gate_up", 64),
        ("experts.down_proj", "experts, down and sum", "Q5_0", "experts_gate_up", 64),
    ],
)
def test_planes_are_unpacked_for_each_tile_of_tokens(
    leaf: str, kernel: str, format: str, counted: str, tokens: int
) -> None:
    """Of experts those that are read, whose tokens fit a tile each until many rows choose them."""
    name = f"layers.0.{leaf}"
    rows, shape = (4, 16), expected_shapes(FULL)[name]
    slow = replace(LIMITS["h200"], issued=1e9)
    given = {**STORED, name: plane_bytes(format, shape)}
    each = unpacking(f"{counted}_planes", format, "sm_90") * math.prod(shape) / slow.issued
    for count in rows:
        costs = step_costs(FULL, StepShape(count), given, formats={name: format})
        (time,) = [t for t in step_time(costs, slow).kernels if t.cost.name == kernel]
        touched = experts_touched(FULL, 256 * count)
        of_experts = (touched / 128, 256 * 8 * count / touched) if "experts" in leaf else None
        share, own = of_experts or (1.0, 256.0 * count)
        assert time.bound == "unpacking"
        seconds = share * math.ceil(own / tokens) * each + time.cost.launches * LAUNCH_S
        assert time.predicted_s == pytest.approx(seconds)
    none = replace(slow, target="")
    assert all(t.bound != "unpacking" for t in step_time(costs, none).kernels)


def test_what_is_passed_costs_more_where_no_cache_holds_it() -> None:
    device = LIMITS["h200"]
    fits, not_ = (
        KernelCost("x", "layers", 0, passed=passed, flop=0)
        for passed in (0.9 * device.cache, 1.1 * device.cache)
    )
    near, far = (step_time([cost], device).predicted_ms for cost in (fits, not_))
    assert far > 2 * near


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("", None),
    ],
)
def test_products_are_known_by_their_drivers_names(product: str, name: str | None) -> None:
    limits = limits_of_product(product)
    assert (limits and limits.name) == name


def test_an_unknown_device_is_refused() -> None:
    assert limits_named("h200").measured
    with pytest.raises(ValueError, match=r"predict: 'h300' is none of h200, h100, "):
        limits_named("h300")
