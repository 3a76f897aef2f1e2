"""The table of who serves each operation, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path as FilePath

import pytest
import torch

import sfumato
from sfumato.diffusion.step import step
from sfumato.ops import registry
from sfumato.ops.cpu import library
from sfumato.ops.paths import Path, paths, table
from sfumato.ops.triton import self_test

DOCS = FilePath(__file__).parents[2] / "docs" / "hardware.md"
assert step is not None  # what other packages declare is declared
OPERATIONS = sorted(registry.operations())
SOURCE = str(FilePath(sfumato.__file__).parents[1])
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def served(device: torch.device, operation: str) -> Path:
    (path,) = [each for each in paths(device) if each.operation == operation]
    return path


def test_every_operation_has_a_row() -> None:
    assert [path.operation for path in paths(CPU)] == OPERATIONS
    assert {"move_rows", "step_noise", "vocabulary_mass", "vocabulary_pass"} < set(OPERATIONS)
    assert all(path.path and path.reason for path in paths(CPU))


def test_what_the_library_serves_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.kernels is not None:
        assert served(CPU, "linear").path == library.describe()[0]
        assert served(CPU, "linear").reason == "for weights that are packed for it, else torch"
    monkeypatch.setattr(library, "kernels", None)
    monkeypatch.setattr(library, "reason", "there was no compiler")
    for operation in ("linear", "rms_norm", "attend"):
        assert served(CPU, operation) == Path(operation, "torch", "there was no compiler")
    assert served(CPU, "route").path == "torch"


def test_what_passed_failed_and_was_not_tested_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "usable", lambda device: False)
    monkeypatch.setattr(self_test, "why_unusable", lambda device: "Triton is not installed")
    assert served(GPU, "route").reason == "Triton is not installed"
    monkeypatch.setattr(self_test, "usable", lambda device: True)
    monkeypatch.setattr(self_test, "_passed", {GPU: frozenset(("rms_norm", "linear Q8_0"))})
    failed = {"route": "it differs by 0.3", "experts Q8_0": "it does not compile"}
    monkeypatch.setattr(self_test, "_failed", {GPU: failed})
    assert served(GPU, "rms_norm") == Path("rms_norm", "Triton", "passed its test here")
    assert served(GPU, "route") == Path("route", "torch", "it differs by 0.3")
    monkeypatch.setitem(self_test._passed, GPU, self_test._passed[GPU] | {"prepare_heads"})
    assert served(GPU, "prepare_heads").reason == "for networks that norm values, else torch"
    assert served(GPU, "move_rows").reason == "its kernels have not been tested yet"
    why = "for weights in planes, else torch: its kernels have not been tested yet"
    assert served(GPU, "linear") == Path("linear", "Triton", why)  # of floats, that is
    assert served(GPU, "experts Q8_0") == Path("experts Q8_0", "torch", "it does not compile")
    in_planes = served(GPU, "linear, planes")
    assert in_planes.path == "Triton" and "here: Q8_0; failed or not" in in_planes.reason
    assert "Q2_K" in in_planes.reason.partition("; ")[2]
    assert not [path for path in paths(GPU) if path.operation == "experts, planes"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_can_be_turned_off(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_off", {operation})
    assert served(CPU, operation) == Path(operation, "torch", "SFUMATO_OFF asks for it")
    for device in (CPU, GPU):
        x = torch.ones(1)
        reference = registry.operations()[operation].reference
        assert registry.choose(operation, device, "panels", x) is reference


def test_names_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.names_in(" attend, linear ,") == {"attend", "linear"}
    monkeypatch.setattr(registry, "_off", registry.names_in("linear,atend"))
    for refuses in (sfumato.load, lambda: paths(CPU)):
        with pytest.raises(ValueError, match="SFUMATO_OFF: 'atend' is none of after_attention, "):
            refuses()


def test_the_table_of_operations_in_the_docs() -> None:
    """One row for each, in the order of the table: its name, what it computes, and its file."""
    text = DOCS.read_text(encoding="utf-8").partition("| operation | what it computes | file |\n")[
        2
    ]
    rows = text.partition("\n\n")[0].splitlines()[1:]
    assert rows == table(), "the rows must be:\n" + "\n".join(table())


def test_a_process_without_any_faster_form() -> None:
    """A quantized model is held as it is stored then, and writes what it writes with kernels."""
    code = (
        "import sfumato; from sfumato import ops; from sfumato.ops import registry;"
        "model = sfumato.load(quantize='q8_0');"
        "print(model.generate('What is the capital of France?', seed=1).text);"
        "print(type(model.network.transformer.layers[0].mlp.up_proj.weight).__name__)"
    )
    environment = os.environ | {"SFUMATO_OFF": ",".join(OPERATIONS), "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    text, kind = done.stdout.splitlines()
    assert (text, kind) == ("The capital is Paris.", "QuantizedTensor"), done.stderr
    assert "torch serves, since SFUMATO_OFF asks for it" in done.stderr
