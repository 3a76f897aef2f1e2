from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from sfumato import catalog, ops
from sfumato.catalog import EMBEDDED
from sfumato.cli import doctor
from sfumato.engine.memory.device_memory import Accelerator, Budget
from sfumato.model.families import open_checkpoint
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.ops.triton.planes import LAYOUTS

SPEED = {
    **{f"{name}_flops": 8e12 for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")},
    "float32_flops": 1e12,
    "bfloat16_flops": 3e12,
    "expert_flops": 4e12,
    "read_bytes": 1e15,
    "dequantized_weights": 2e9,
}
PLAIN = {name: SPEED[name] for name in ("float32_flops", "bfloat16_flops")} | {
    "read_bytes": 1e15,
    "dequantized_weights": 2e9,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(free=…, share=…) says what the probes and the memory of the next report are."""

    def say(
        free: float = 40e9, total: float = 64e9, share: float = 0.98, load: float = 0.1
    ) -> None:
        measured = doctor.Measured("cpu", SPEED, 7, load, share, 2)
        monkeypatch.setattr(doctor, "measure", lambda *_: measured)
        monkeypatch.setattr(doctor, "budget", lambda _: Budget(int(free), "a test"))
        monkeypatch.setattr(doctor, "device_memory", lambda _: int(total))
        monkeypatch.setattr(doctor, "memory_limit", lambda: None)
        monkeypatch.setattr(doctor, "pick_device", lambda: torch.device("cpu"))
        # To interpret each of Triton's kernels takes a quarter of a minute.
        monkeypatch.setattr(doctor.ops, "prepare", lambda *_, **__: None)

    return say


def test_the_verdict_comes_first(machine: Any, cli: Any) -> None:
    machine()
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    small, chat, first, steps, _, head, *lines = done.out.splitlines()
    assert small == f"{catalog.FIRST.title} fits (4.1 GB to download, 4.7 GB of memory):"
    assert chat == f"  sfumato chat -m {catalog.FIRST.name}"
    step = doctor.seconds(doctor.step_seconds(SPEED, "cpu", "Q4_K_M", 16.8e9))
    assert first == f"{catalog.MODEL} fits: take Q4_K_M, about {step} a step on this CPU."
    assert re.fullmatch(r"A text of 256 tokens takes 12 to 48 steps: \S+ \w+ to \S+ \w+\.", steps)
    assert head.split() == ["format", "memory", "fits", "a", "step"]
    fits = [line.split()[3] for line in lines[: len(catalog.PUBLISHED)]]
    assert fits == ["yes", "yes", "yes", "yes", "not", "not"]
    assert f"  {catalog.PUBLISHED[0].command}" in lines
    tuned = next(line for line in lines if line.startswith("To tune Q4_K_M by an adapter"))
    assert "1,024 tokens) takes about " in " ".join(lines)
    assert tuned
    assert "busy" not in done.out
    assert "features" not in done.out


def test_too_little_memory_is_the_verdict(machine: Any, cli: Any) -> None:
    machine(free=8e9, total=16e9)
    words = " ".join(cli("doctor").out.split())
    assert f"{catalog.MODEL} does not fit: Q4_K_M, the smallest, needs 18.9 GB, and 8 GB" in words
    assert "sfumato pull" not in words
    machine(free=4e9, total=16e9)
    words = " ".join(cli("doctor").out.split())
    assert f"sfumato chat -m {catalog.FIRST.name} --quantize q8_0 " in words
    machine(free=1e9, total=16e9)
    assert catalog.FIRST.name not in cli("doctor").out
    machine(free=8e9)
    words = " ".join(cli("doctor").out.split())
    assert "does not fit now, while other programs hold memory" in words


@pytest.mark.parametrize(("share", "load"), [(0.4, 0.1), (0.99, 6.0)])
def test_a_busy_machine_is_said_to_be_so(machine: Any, cli: Any, share: float, load: float) -> None:
    machine(share=share, load=load)
    words = " ".join(cli("doctor").out.split())
    assert f"busy (load {load:.1f} on" in words
    assert (f", and a probe got {share:.0%} of a core" in words) == (share < 0.9)


def test_fewer_threads_than_cores_are_named(
    machine: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr(doctor.environment, "usable_cores", lambda: torch.get_num_threads() + 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = " ".join(cli("doctor").out.split())
    n = torch.get_num_threads()
    assert f"for {n} of {n + 1} cores, to which OMP_NUM_THREADS limits threads." in words
    monkeypatch.setattr(doctor.environment, "usable_cores", torch.get_num_threads)
    assert "limits threads" not in cli("doctor").out


def test_a_device_that_torch_cannot_use_is_named_with_the_reason(
    machine: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    devices = [
        Accelerator("RTX 5090", "torch", "cuda:0", 34 * 10**9, 33 * 10**9, False, "no code; do x"),
        Accelerator("Radeon", "amdgpu", None, 10**9, 0, True),
    ]
    monkeypatch.setattr(doctor, "accelerators", lambda: devices)
    assert "RTX 5090 is not used: no code; do x." in cli("doctor").out
    words = " ".join(cli("doctor", "--verbose").out.split())
    assert "cuda:0: RTX 5090 (torch), 33 GB free; not in torch: Radeon (amdgpu), the mach" in words
    assert json.loads(cli("doctor", "--json").out)["devices"][0]["problem"] == "no code; do x"


@pytest.mark.parametrize("columns", [44, 80])
def test_no_line_is_too_wide_and_no_word_is_broken(
    machine: Any, cli: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    machine(share=0.4)
    words = _words(cli("doctor", "--verbose").out)
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cli("doctor", "--verbose")
    for line in done.out.splitlines():
        alone = len(line.split()) <= 3  # a command, or one long word
        assert len(line) <= columns or alone, line
    assert _words(done.out) == words
    names = {line.split()[0] for line in done.out.splitlines() if line}
    assert {"sfumato", "cpu", "memory", "runs", "measured", "backend", "bound"} <= names


def test_the_operations_and_who_serves_them(machine: Any, cli: Any) -> None:
    machine()
    rows = {row["operation"]: row for row in json.loads(cli("doctor", "--json").out)["operations"]}
    assert {"linear", "experts", "attend", "vocabulary_pass"} < set(rows)
    assert rows["route"]["path"] == "torch"
    line = f"linear {rows['linear']['path']}: {rows['linear']['reason']}"
    assert line in " ".join(cli("doctor", "--verbose").out.split())
    assert "served by, and why" not in cli("doctor").out


def test_a_device_without_kernels_is_tried_before_it_is_described(
    machine: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    tried: list[torch.device] = []
    monkeypatch.setattr(doctor, "has_twins", lambda device: False)
    monkeypatch.setattr(doctor, "try_device", lambda device, small: tried.append(device))
    cli("doctor")
    assert tried == []
    cli("doctor", "--verbose")
    assert tried == [torch.device("cpu")]


def test_a_gpu_is_tested_with_every_format_that_kernels_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[frozenset[str]] = []
    prepare = lambda device, hidden=0, formats=frozenset(): prepared.append(formats)  # noqa: E731
    monkeypatch.setattr("sfumato.ops.prepare", prepare)
    monkeypatch.setattr(doctor, "paths", lambda device: [])
    gpu = torch.device("cuda", 0)
    assert doctor.operations(gpu, tests=True) == []
    assert prepared == [frozenset(LAYOUTS)]
    doctor.operations(gpu, tests=False)
    assert len(prepared) == 1


def _words(text: str) -> list[str]:
    """The words of a report, without its numbers: free memory changes between two of them."""
    return re.sub(r"[\d.]*\d", "0", text).split()


def test_the_dtype_that_auto_picks_is_given_with_its_reason() -> None:
    """And it is the truth: the embedded model is small, and stored in bfloat16."""
    dtypes = doctor._dtypes("cpu")
    assert "float32 for quantized models and those under 105 MB (as fast there, and" in dtypes
    assert pick_dtype("auto", open_checkpoint(EMBEDDED), torch.device("cpu")) == torch.float32
    dtypes = doctor._dtypes("cuda")
    assert dtypes.startswith("bfloat16 for quantized models, else as stored")
    assert pick_dtype("auto", open_checkpoint(EMBEDDED), torch.device("cuda")) == torch.bfloat16


def test_json(cli: Any) -> None:
    """With real probes."""
    facts = json.loads(cli("doctor", "--json").out)
    assert facts["speed"]["float32_flops"] > 0
    assert facts["cpu"]["cores"] >= 1
    assert (facts["backend"], facts["backend_reason"]) == (ops.backend, ops.reason)
    assert facts["runs_on"] == str(pick_device())
    assert 1e6 < facts["speed"]["dequantized_weights"] < 1e13
    assert 0 < facts["busy"]["share"] <= 1
    assert [each["format"] for each in facts["formats"]] == [e.format for e in catalog.PUBLISHED]
    assert all(each["step_s"] > facts["least_s"] > 0 for each in facts["formats"])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.371, "0.37 s"), (8.14, "8.1 s"), (94.2, "94 s"), (390, "6.5 min")]
)
def test_times_have_two_digits(value: float, shown: str) -> None:
    assert doctor.seconds(value) == shown


def test_fits() -> None:
    memory = Budget(20, "a test")
    assert doctor.fits(20, memory, 30) == "yes"
    assert doctor.fits(25, memory, 30) == "not now"
    assert doctor.fits(25, memory, None) == doctor.fits(31, memory, 30) == "no"
    assert doctor.fits(1, None, 30) == "unknown"


def test_the_least_is_the_slower_of_arithmetic_and_reading() -> None:
    assert doctor.least_seconds(PLAIN, 16.8e9) == pytest.approx(doctor.work().flop / 3e12)
    slow = PLAIN | {"read_bytes": 1e9}
    assert doctor.least_seconds(slow, 16.8e9) == pytest.approx(16.8)


@pytest.mark.parametrize(("device", "rate"), [("cpu", 1e12), ("cuda:0", 3e12)])
def test_without_compiled_operations_all_is_dequantized(device: str, rate: float) -> None:
    """And the arithmetic is in the dtype that quantized models compute in there."""
    step = doctor.step_seconds(PLAIN, device, "Q4_K_M", 16.8e9)
    dequantizing = doctor.work().weights / 2e9
    assert step == pytest.approx(dequantizing + doctor.work().flop / rate)
    plain = doctor.step_seconds(PLAIN, device, "BF16", 50.5e9)
    assert plain == pytest.approx(doctor.work().flop / 3e12)


def test_the_work_is_that_of_the_published_sizes() -> None:
    """In multiply-adds for each of 256 positions: 8 of 128 experts in 30 layers, two products of
    the tied embedding."""
    work = doctor.work()
    assert (work.dense + work.experts) / 512 == pytest.approx(3.1e9, rel=0.02)
    assert work.experts / 512 == pytest.approx(30 * 8 * 3 * 2816 * 704)
    assert work.head / 512 == work.embedding == 262_144 * 2816
    assert work.weights == pytest.approx(25.25e9 + 2 * work.embedding, rel=1e-3)


def test_compiled_operations_dequantize_only_for_the_soft_embedding() -> None:
    """Experts have few positions each, and so a rate of their own."""
    step = doctor.step_seconds(SPEED, "cpu", "Q4_K_M", 16.8e9)
    work = doctor.work()
    layers = work.dense / 8e12 + work.experts / 4e12
    head = work.head / 8e12 + work.head / 1e12 + work.embedding / 2e9
    assert step == pytest.approx(doctor.LAYER_EXTRA * layers + head, rel=1e-3)
    slow = doctor.step_seconds(SPEED | {"read_bytes": 1e9}, "cpu", "Q4_K_M", 16.8e9)
    assert slow == pytest.approx(step + 16.8, rel=1e-3)
