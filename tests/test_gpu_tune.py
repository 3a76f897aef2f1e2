"""benchmarks/gpu_tune.py and the table that it writes, with stand-ins for kernels and devices."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu_options, gpu_tune
from benchmarks.gpu_kernel import TRITON
from benchmarks.gpu_tiles_table import section, with_section
from benchmarks.gpu_tune import fastest, library, main, slower

from sfumato.ops.triton import tiles
from sfumato.ops.triton.tiles import Tile

TABLE = files("sfumato.ops.triton").joinpath("tiles.toml").read_text(encoding="utf-8")
CPU = torch.device("cpu")


def tile(out: int, inner: int, stages: int = 3) -> Tile:
    return Tile({"OUT": out, "IN": inner}, 4, stages)


KNOWN = {
    "linear": {
        "few": (tile(64, 64), tile(64, 128), tile(64, 64, 4)),
        "many": (tile(128, 64), tile(256, 64)),
    },
    "merge": {"any": (tile(1, 1), tile(2, 2))},
}


def times(kernel: str, use: str, *ms: float | None) -> dict[str, Any]:
    return {"tiles": [{"kernel": kernel, "use": use, "ms": list(ms)}]}


def test_the_fastest_are_those_over_all_cases() -> None:
    one = times("merge", "any", 1.0, 1.2)
    assert fastest([one], KNOWN) == {("merge", "any"): 0}
    assert fastest([one, times("merge", "any", 5.0, 2.0)], KNOWN) == {("merge", "any"): 1}
    assert fastest([one, times("merge", "any", None, 9.0)], KNOWN) == {("merge", "any"): 1}
    assert fastest([times("merge", "any", None, None), times("merge", "any")], KNOWN) == {}


def test_tiles_of_one_kernel_agree_in_what_changes_sums() -> None:
    """The fastest of few tokens has another block of inputs than all of many tokens."""
    one_row = times("linear", "few", 3.0, 1.0, 2.0)
    assert fastest([one_row], KNOWN) == {("linear", "few"): 2, ("linear", "many"): 0}
    many = times("linear", "many", 3.0, 2.0)
    assert fastest([one_row, many], KNOWN) == {("linear", "few"): 2, ("linear", "many"): 1}


def test_what_torch_serves_faster() -> None:
    def case(operation: str, time: float, passed: bool = True) -> dict[str, Any]:
        torchs = {"torch_time": 2.0, "row_torch_time": 1.0}
        about = {"operation": operation, "served_by": TRITON, "passed": passed}
        return {**about, "time": time, "row_time": 1.0, **torchs}

    cases = [case("a", 2.5), case("a", 1.0), case("b", 2.5), case("c", 0.1, passed=False)]
    cases += [{"case": "d", "failed": "exit code 1"}, {"operation": "e", "served_by": "a stand-in"}]
    assert slower(cases) == ["b", "c"]


def test_what_the_library_makes_faster() -> None:
    """For one row and for all of them, where a row keeps its bits."""

    def case(outputs: int, time: float, row_time: float, keeps: bool = True) -> dict[str, Any]:
        taken = {"shape": [outputs, 8], "keeps_bits": keeps, "time": time, "row_time": row_time}
        return {"time": 2.0, "row_time": 1.0, "library": taken}

    cases = [case(1, 1.9, 0.9), case(2, 1.9, 0.99), case(3, 2.1, 0.5), case(4, 1.0, 0.5, False)]
    assert library([*cases, {"case": "d", "failed": "exit code 1"}, {"library": None}]) == [[1, 8]]


def test_the_lines_of_a_product_are_exchanged() -> None:
    first = section('NVIDIA "H200"', {("linear", "few"): tile(64, 128)}, ["route", "experts"])
    text = with_section(TABLE, 'NVIDIA "H200"', first)
    assert text.startswith(TABLE.rstrip())
    other = with_section(text, "other", section("other", {}, []))
    again = with_section(other, 'NVIDIA "H200"', section('NVIDIA "H200"', {}, ["linear"]))
    table = tomllib.loads(other)["measured"]
    assert table['NVIDIA "H200"'] == {
        "slower": ["experts", "route"],
        "tiles": {"linear": {"few": {"OUT": 64, "IN": 128, "warps": 4, "stages": 3}}},
    }
    assert tomllib.loads(again)["measured"] == {'NVIDIA "H200"': {"slower": ["linear"]}} | {
        "other": {"slower": []}
    }
    assert tomllib.loads(again)["kernels"] == tiles.table()["kernels"]
    old = '[measured."x"]\n[measured."x".tiles.linear]\nfew = 1\n[measured."x y"]\n'
    assert tomllib.loads(with_section(old, "x", section("x", {}, [])))["measured"] == {
        "x": {"slower": []},
        "x y": {},
    }
    with pytest.raises(ValueError):
        with_section('[a]\nb = """\n[measured."x"]\n"""\n[c]\n', "x", section("x", {}, []))


def test_measured_tiles_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tile(64, 64, 2)
    lines = section("H200", {("linear", "few"): chosen}, ["route"], [[24, 8], [8, 24]])
    text = with_section(TABLE, "H200", lines)
    device = torch.device("cuda", 5)
    monkeypatch.setattr(tiles, "table", lambda: tomllib.loads(text))
    monkeypatch.setattr(tiles, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    tiles.measured.cache_clear()
    assert tiles.tile_for("linear", device, "few") == chosen
    assert tiles.tile_for("linear", device, "many")["OUT"] == 128
    assert tiles.slower("route", device) and not tiles.slower("linear", device)
    assert not tiles.slower("route", CPU)
    assert tiles.library(device) == {(24, 8), (8, 24)} and not tiles.library(CPU)
    tiles.measured.cache_clear()


def test_what_was_measured_is_among_the_candidates() -> None:
    """In the checked-in table."""
    for product in tiles.table()["measured"].values():
        for kernel, uses in product.get("tiles", {}).items():
            known = tiles.table()["kernels"][kernel].values()
            for use, chosen in uses.items():
                assert any(chosen in each.get(use, ()) for each in known), f"{kernel} {use}"


def test_a_run_writes_findings_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One case that is measured as its process would, interpreted and so slower than torch; one
    that a stand-in measures; and one that fails."""
    measured = {
        "linear": {
            "case": "linear",
            "operation": "linear",
            "served_by": TRITON,
            "passed": True,
            "time": 1.0,
            "row_time": 1.0,
            "torch_time": 0.5,
            "row_torch_time": 0.5,
            **times("linear", "few", 3.0, 1.0, 2.0),
        }
    }
    measured["head"] = {"case": "head", "failed": "exit code 1"}
    apart = gpu_tune._measured_apart
    monkeypatch.setattr(
        gpu_tune, "_measured_apart", lambda case, o: measured.get(case) or apart(case, o)
    )

    def child(command: list[str], **others: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "benchmarks.gpu_tune"]:
            return real(command, **others)
        return subprocess.CompletedProcess(command, main(command[3:]), b"")

    real = subprocess.run
    monkeypatch.setattr(gpu_options.subprocess, "run", child)
    table = tmp_path / "tiles.toml"
    table.write_text(TABLE)
    out = tmp_path / "out.json"
    arguments = ["--out", str(out), "--table", str(table), "--device", "cpu", "--sizes", "tiny"]
    cases = [part for case in ("gated", "linear", "head") for part in ("--case", case)]
    assert main([*arguments, *cases, "--rows", "2", "--prefix", "20", "--seconds", "0"]) == 1
    findings = json.loads(out.read_text())
    assert [each.get("served_by", "")[:10] for each in findings["cases"]] == [
        *(TRITON, TRITON, ""),
    ]
    lines = tomllib.loads(table.read_text())["measured"]["this cpu"]
    assert lines["slower"] == ["linear", "linear_gated"] and set(lines["tiles"]["linear"]) == {
        "few",
        "many",
    }
    shown = capsys.readouterr().out
    assert "linear: right, 1.0000 ms, torch 0.5000 ms" in shown and "head: failed" in shown


def test_a_case_with_a_kernel_is_checked_with_its_fastest_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And keeps the first ones where it is wrong with them."""
    timed = {"kernel": "linear", "use": "few", "ms": [2.0, 1.0]}
    wrong = False
    taken: list[int] = []

    def check(name: str, *others: Any) -> dict[str, Any]:
        number = tiles.tile_for("linear", CPU, "few").stages
        taken.append(number)
        time = {"median_ms": float(number)}
        keys = "time", "torch_time", "row_time", "row_torch_time"
        right = not (wrong and len(taken) % 2 == 0)
        about = {"case": name, "served_by": TRITON, "passed": right, "tiles": [timed]}
        return about | dict.fromkeys(keys, time)

    uses = {"few": (tile(64, 64, 4), tile(64, 64, 2))}
    monkeypatch.setattr(gpu_tune, "check_kernel", check)
    monkeypatch.setattr(gpu_tune, "device_limits", lambda *others: None)
    monkeypatch.setattr(tiles, "table", lambda: {"kernels": {"linear": {}}, "measured": {}})
    monkeypatch.setattr(tiles, "candidates", lambda kernel, target: uses)
    sizes: Any = type("Sizes", (), {"device": CPU})()
    findings = gpu_tune.measure("linear", sizes, 0.0)
    assert taken == [4, 2] and findings["time"] == 2.0 and findings["tiles"] == [timed]
    wrong = True
    findings = gpu_tune.measure("linear", sizes, 0.0)
    assert findings["passed"] and findings["time"] == 4.0 and findings["tiles"] == []


def test_a_case_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **others: Any) -> Any:
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        return real(sleep, timeout=timeout, **others)

    real = subprocess.run
    monkeypatch.setattr(gpu_options.subprocess, "run", run)
    options = gpu_tune._options(["--out", str(tmp_path / "x"), "--limit", "0.3"])
    findings = gpu_tune._measured_apart("linear", options)
    assert findings == {"case": "linear", "failed": "took more than 0.3 s", "output": ""}
