from __future__ import annotations

import json
from typing import Any

import pytest

from sfumato.cli import doctor


def test_report(cli: Any) -> None:
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines()]
    assert {"sfumato", "cpu", "memory", "runs", "measured", "estimate"} <= set(names)
    assert "not a measurement" in done.out


def test_json(cli: Any) -> None:
    found = json.loads(cli("doctor", "--json").out)
    assert found["speed"]["float32_flops"] > 0
    assert found["cpu"]["cores"] >= 1


@pytest.mark.parametrize(
    ("flops", "read", "ms"),
    [(1e15, 1e9, doctor.STEP_BYTES / 1e6), (1e12, 1e15, doctor.STEP_FLOP / 1e9)],
)
def test_the_estimate_is_the_slower_of_the_two(flops: float, read: float, ms: float) -> None:
    speed = {"float32_flops": flops, "bfloat16_flops": flops / 2, "read_bytes": read}
    assert doctor.estimate(speed)["ms_per_step"] == pytest.approx(ms)
