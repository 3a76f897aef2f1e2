"""A self-test that passed runs once for a device, a version of Triton and a text of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton

from sfumato.ops.triton import self_test
from sfumato.ops.triton.self_test import SMALL, KernelTwin, Sizes, Trial

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU that is not there; the folder of Triton's cache, which is not made yet."""
    folder = tmp_path / "made later" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(self_test, "own_architecture", lambda device: 90)
    monkeypatch.setattr(self_test, "slower", lambda operation, device: False)
    return folder


class Start:
    """A start of a process, with the operations whose tests it ran."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, wrong: str = "", sizes: Sizes = SMALL
    ) -> None:
        self.ran: list[str] = []
        for name in ("_passed", "_failed", "_tried_with"):
            monkeypatch.setattr(self_test, name, {})
        names = "linear", "route"
        known = {name: KernelTwin(name, max, bool, lambda trial: None) for name in names}

        def tries(names: Sequence[str]) -> dict[str, str]:
            """In processes of their own."""
            self.ran += names
            return {name: "crashed: SIGSEGV" if name == wrong else "" for name in names}

        self.served = self_test.prepare(Trial(GPU, sizes), known, tries)


def test_a_second_start_tests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Start(monkeypatch)
    assert first.ran == ["linear", "route"] and first.served == {"linear", "route"}
    second = Start(monkeypatch)
    assert second.ran == [] and second.served == first.served


def test_what_fails_is_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Start(monkeypatch, wrong="route").served == {"linear"}
    failed = "the self-test of kernels failed (crashed: SIGSEGV)"
    assert self_test.failures(GPU) == {"route": failed}
    again = Start(monkeypatch)
    assert again.ran == ["route"] and again.served == {"linear", "route"}
    self_test.switch_off("linear", GPU, RuntimeError("out of shared memory"))
    assert Start(monkeypatch).ran == ["linear"], "its kernels did not run in a step"


@pytest.mark.parametrize(
    "change", ["triton", "driver", "device", "architecture", "variable", "source", "model"]
)
def test_other_circumstances_are_tested(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Start(monkeypatch)
    sizes = SMALL
    if change == "model":
        monkeypatch.setattr(self_test, "interpreting", lambda: False)
        sizes = Sizes()
    elif change == "triton":
        monkeypatch.setattr(triton, "__version__", "9.9")
    elif change == "driver":
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 99, raising=False)
    elif change == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another")
    elif change == "architecture":
        monkeypatch.setattr(self_test, "own_architecture", lambda device: 89)
    elif change == "variable":
        monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    else:
        folder = tmp_path / "ops" / "triton"
        folder.mkdir(parents=True)
        (folder / "experts.py").write_text("")
        monkeypatch.setattr(self_test, "__file__", str(folder / "self_test.py"))
    assert Start(monkeypatch, sizes=sizes).ran == ["linear", "route"]


@pytest.mark.parametrize("text", [b"", b"[", b"7", b"[1]", b'["li', b"\xff" * 9, b"[" * 99_999])
def test_a_broken_note_is_none(text: bytes, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Start(monkeypatch)
    (note,) = device.rglob("*.json")
    note.write_bytes(text)
    assert Start(monkeypatch).ran == ["linear", "route"]
    assert Start(monkeypatch).ran == [] and list(device.rglob("*.json")) == [note]


def test_a_folder_that_takes_no_note_costs_a_test(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.parent.write_bytes(b"a file in the folder's place")
    for _ in range(2):
        assert Start(monkeypatch).ran == ["linear", "route"]


def test_interpreted_kernels_leave_no_note(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_passed", {})
    twin = KernelTwin("linear", max, bool, lambda trial: None)
    assert self_test.prepare(Trial(CPU), {"linear": twin}, dict) == {"linear"}
    assert not device.exists() and self_test.kept(CPU) == frozenset()
