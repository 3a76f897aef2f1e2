"""The machine code of the kernels, run in an emulator of gfx1151: each operation's own test, in the
dtype that serves there, against float64, in a process of its own. Every access to memory is checked
against the tensors of the launch, of which each stands at the oddest place that the compiler
allows. The emulator's own special values come first, so that its faults are told from the
kernels'. Seconds are those of a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.support.emulated_gpu import FOLDER, why_absent

from sfumato.ops import triton as kernels
from sfumato.ops.triton.planes import OPERATIONS

if FOLDER not in os.environ:
    pytest.skip("minutes in an emulator: run by `make test-emulated`", allow_module_level=True)

EVERY = tuple(dict.fromkeys(name for known in OPERATIONS.values() for name in known))
FORMATS = EVERY if os.environ.get("FULL") == "1" else ("Q4_K", "FP8")
ROWS = (
    *("attend_padded", "experts", "linear", "linear_each", "linear_gated", "route"),
    "vocabulary_pass",
)
SECONDS = 3000

pytestmark = pytest.mark.skipif(bool(why_absent()), reason=why_absent() or "it is there")


def run(*words: str) -> dict[str, object]:
    """The line of JSON of a test in a process of its own."""
    others = {"TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, "-m", "tests.support.emulated_gpu.tried", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"test"')]
    assert lines, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    line: dict[str, object] = json.loads(lines[-1])
    return line


def test_the_emulator_knows_special_values_and_lanes() -> None:
    assert not run("special_values")["error"]


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", kernels.twins(FORMATS))
def test_an_operation_is_right_as_machine_code(name: str, note: Callable[[str], None]) -> None:
    line = run("operation", name)
    note(f"{name}: {line['instructions']:,} instructions of waves in {line['seconds']} s")
    assert not line["error"]


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    "name", [name for name in kernels.twins(FORMATS) if name.split()[0] in ROWS]
)
def test_a_rows_bits_are_the_same_in_any_company(name: str) -> None:
    assert not run("rows", name)["error"]


@pytest.mark.timeout(SECONDS)
def test_a_reply_of_the_embedded_model(note: Callable[[str], None]) -> None:
    """Every kernel of encode, step and commit, for rows that join and leave."""
    line = run("reply")
    note(f"{line['note']}, {line['instructions']:,} instructions of waves in {line['seconds']} s")
    assert not line["error"]
