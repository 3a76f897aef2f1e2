from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sfumato import ops
from sfumato.api import EMBEDDED
from sfumato.cli import doctor
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.weights.checkpoint import open_checkpoint


def test_report(cli: Any) -> None:
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines()]
    assert {"sfumato", "cpu", "memory", "runs", "measured", "estimate", "bound"} <= set(names)
    (backend,) = (line for line in done.out.splitlines() if line.startswith("backend"))
    assert f"on a CPU {ops.backend}: {ops.reason}" in backend
    assert "not a measurement" in done.out
    assert doctor._dtypes(str(pick_device())) in done.out


def test_the_dtype_that_auto_picks_is_told_with_its_reason() -> None:
    """And it is the truth: the embedded model is small, and stored in bfloat16."""
    told = doctor._dtypes("cpu")
    assert "float32 for quantized models and those under 105 MB (as fast there, and" in told
    assert pick_dtype("auto", open_checkpoint(EMBEDDED), torch.device("cpu")) == torch.float32
    told = doctor._dtypes("cuda")
    assert told.startswith("bfloat16 for quantized models, else as stored")
    assert pick_dtype("auto", open_checkpoint(EMBEDDED), torch.device("cuda")) == torch.bfloat16


def test_json(cli: Any) -> None:
    found = json.loads(cli("doctor", "--json").out)
    assert found["speed"]["float32_flops"] > 0
    assert found["cpu"]["cores"] >= 1
    assert (found["backend"], found["backend_reason"]) == (ops.backend, ops.reason)
    assert 1e6 < found["speed"]["dequantized_weights"] < 1e13


def test_only_compiled_operations_are_timed_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ops.backend.startswith("compiled")
    assert ("int8_flops" in doctor.measure(torch.device("cpu"))) == compiled
    monkeypatch.setattr(ops, "backend", "torch")
    assert "int8_flops" not in doctor.measure(torch.device("cpu"))


def speed(device: str, flops: float, read: float = 1e9, weights: float = 1e9) -> dict[str, Any]:
    """Measured speeds; bfloat16 is three times as quick as float32."""
    speeds = {"float32_flops": flops, "bfloat16_flops": 3 * flops}
    return {"device": device, **speeds, "read_bytes": read, "dequantized_weights": weights}


@pytest.mark.parametrize(
    ("flops", "read", "ms"),
    [(1e15, 1e9, doctor.STEP_BYTES / 1e6), (1e12, 1e15, doctor.STEP_FLOP / 3e9)],
)
def test_the_bound_is_the_slower_of_the_two(flops: float, read: float, ms: float) -> None:
    assert doctor.estimate(speed("cpu", flops, read))["bound_ms"] == pytest.approx(ms)


@pytest.mark.parametrize(("device", "factor"), [("cpu", 1), ("cuda:0", 3)])
def test_the_estimate_has_the_dequantization_in_it(device: str, factor: int) -> None:
    """And the arithmetic in the dtype that quantized models compute in there."""
    step = doctor.estimate(speed(device, 1e12, weights=2e9))
    assert step["dequantizing_ms"] == pytest.approx(doctor.STEP_WEIGHTS / 2e6)
    assert step["arithmetic_ms"] == pytest.approx(doctor.STEP_FLOP / 1e9 / factor)
    assert step["ms_per_step"] == pytest.approx(step["dequantizing_ms"] + step["arithmetic_ms"])


def test_compiled_operations_dequantize_only_for_the_soft_embedding() -> None:
    """Experts have few positions each, and so a rate of their own."""
    measured = speed("cpu", 1e12, 1e15, 2e9) | {"int8_flops": 8e12, "int8_expert_flops": 4e12}
    step = doctor.estimate(measured)
    soft = 512 * doctor.EMBEDDING
    blocks = (doctor.STEP_FLOP - soft - doctor.EXPERTS_FLOP) / 8 + doctor.EXPERTS_FLOP / 4
    assert step["dequantizing_ms"] == pytest.approx(doctor.EMBEDDING / 2e6)
    assert step["arithmetic_ms"] == pytest.approx((blocks + soft) / 1e9)
    assert step["bound_ms"] == pytest.approx(doctor.STEP_FLOP / 8e9)
    slow = doctor.estimate(measured | {"read_bytes": 1e9})
    assert slow["arithmetic_ms"] == pytest.approx(doctor.STEP_BYTES / 1e6 + soft / 1e9)
