from __future__ import annotations

import csv
import importlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_openai_server import DONE, end, event, scripted, text
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.narrow_files import LAYOUTS, narrow_tensors, write_narrow

from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.guard import check_load
from sfumato.model.families import open_checkpoint
from sfumato.model.families.diffusion_gemma.config import hf_config

TINY = ("bench", "--random-weights", "tiny", "--fixed-steps", "2", "--repeats", "2")


def test_random_weights(cli: Any, tmp_path: Path) -> None:
    table, rows = tmp_path / "a.json", tmp_path / "a.csv"
    done = cli(
        *(*TINY, "--max-tokens", "32,64", "--context", "40", "--threads", "1", "--where"),
        *("--json", str(table), "--csv", str(rows), "--format", "q8_0", "--layers", "1"),
    )
    assert (done.code, done.err) == (0, "")
    assert "max tokens 64, threads 1, context 40: 2 requests measured" in done.out
    assert done.out.index("random tiny, q8_0") < done.out.index("max tokens 32")
    assert done.out.rstrip()[-1] == "┘"  # the result is what stands last
    report = json.loads(table.read_text())
    assert report["subject"]["model"] == "random tiny, q8_0"
    assert report["subject"]["layers"] == 1
    assert {"cpu", "cores", "commit", "backend", "gpu"} <= set(report["environment"])
    assert report["work"]["repeats"] == 2
    (first, second) = report["cases"]
    assert first["metrics"]["step_ms"]["count"] == 4
    assert second["metrics"]["prompt_tokens"]["p50"] == 40
    assert second["metrics"]["attention_ms"]["p50"] > 0
    with rows.open() as lines:
        assert [row["max_tokens"] for row in csv.DictReader(lines)] == ["32", "64"]


def test_random_weights_end_by_themselves_with_the_last_seeds(cli: Any) -> None:
    seed = str(2**64 - 3)  # each of three repeats takes the next one
    done = cli(
        *("bench", "--random-weights", "tiny", "--max-tokens", "32", "--json", "-"),
        *("--seed", seed, "--threads", "1"),
    )
    report = json.loads(done.out)
    assert (done.code, report["work"]["seed"]) == (0, int(seed))
    (case,) = report["cases"]
    assert case["metrics"]["steps_per_canvas"]["max"] == 8
    assert case["metrics"]["prompt_tokens"]["p50"] == 256


def test_the_embedded_model_answers_a_file(cli: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is the capital of France?\nWhat is the capital of Italy?\n")
    options = ("--prompts", str(prompts), "--repeats", "1", "--max-tokens", "32", "--json", "-")
    options += ("--soft-top-k", "16:4", "--fixed-steps", "4")
    done = cli("bench", *options, "--ignore-eos", "--top-k", "20", "--min-tokens", "3")
    assert done.out.count("\n") == 1
    report = json.loads(done.out)
    metrics = report["cases"][0]["metrics"]
    assert metrics["output_tokens"] == {"count": 2, "min": 32, "p50": 32, "p95": 32, "max": 32}
    assert metrics["load_s"]["p50"] > 0
    described = report["subject"]["sampler"]
    assert "Never(), top_k 20, min_tokens 3, ignore_eos True, soft_top_k SoftTopK" in described


def test_variables_for_other_commands_do_no_harm(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFUMATO_DEVICE is for what runs here: with --url it means nothing, and is no error."""
    monkeypatch.setenv("SFUMATO_DEVICE", "cuda:77")
    monkeypatch.setenv("SFUMATO_THREADS", "1")  # what later tests of this process have, too
    monkeypatch.setenv("SFUMATO_MODEL", "model.gguf")
    monkeypatch.setenv("SFUMATO_API_KEY", "secret")
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    script = [text("Hello"), end(), event(choices=[], usage=usage), DONE]
    with scripted(lambda body: iter(script)) as server:
        done = cli("bench", "--url", server.url, "--repeats", "1", "--json", "-")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["subject"]["model"] == "painter"  # the server's, not the file
    monkeypatch.delenv("SFUMATO_DEVICE")
    monkeypatch.setenv("SFUMATO_MODEL", "hf:owner/name")  # which nothing is downloaded for
    done = cli(*TINY, "--max-tokens", "32", "--concurrency", "2", "--csv", "-")
    (row,) = csv.DictReader(done.out.splitlines())
    assert row["concurrency"] == "2" and float(row["throughput_tps_p50"]) > 0
    assert row["requests"] == "2"


def test_a_server(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_API_KEY", "secret")
    usage = {"prompt_tokens": 9, "completion_tokens": 5}

    def script(body: dict[str, Any]) -> Any:
        return iter([text("Hello"), end(), event(choices=[], usage=usage), DONE])

    with scripted(script) as server:
        options = ("--ignore-eos", "--min-tokens", "2", "--top-k", "7", "--drafts", "--seed", "3")
        done = cli("bench", "--url", server.url + "/", "--concurrency", "1,2", *options)
    assert (done.code, done.err) == (0, "")
    assert "concurrency 2: 9 requests measured" in done.out
    assert "secret" not in done.out
    body = server.bodies[-1]
    assert body.items() >= {
        "model": "painter", "ignore_eos": True, "min_tokens": 2, "top_k": 7, "stream_drafts": True,
    }.items()  # fmt: skip
    assert {b["seed"] for b in server.bodies} == {3, 4, 5}
    assert set(server.keys) == {"Bearer secret"}


def test_a_server_cannot_take_the_report(cli: Any) -> None:
    """Markup in names and errors is text, and what it says of itself need not make sense."""
    usage = {"prompt_tokens": -1, "completion_tokens": 10**400}

    def script(body: dict[str, Any]) -> Any:
        if body["seed"] == 1:
            return iter([event(error={"message": "[/x] :cat: \x1b[2J"})])
        return iter([text("Hello"), end(), event(choices=[], usage=usage), DONE])

    with scripted(script, models='{"data": [{"id": "[/x] :cat: \\ud800"}]}') as server:
        done = cli("bench", "--url", server.url, "--prompt-tokens", "4")
    assert (done.code, done.err) == (0, "")
    assert "2 requests measured" in done.out
    assert "1 failed, the first:" in done.out
    assert "[/x] :cat: \ufffd[2J" in done.out
    assert "[/x] :cat: \ufffd\n" in re.sub(" +\n", "\n", done.out)


def test_ctrl_c_reports_what_was_measured(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def press(number: int, count: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.cli.bench._show_progress", press)
    path = tmp_path / "a.json"
    done = cli(*TINY, "--max-tokens", "32", "--json", str(path))
    assert done.code == 130
    assert "1 requests measured" in done.out
    assert "interrupted" in done.err
    report = json.loads(path.read_text())
    assert (report["interrupted"], report["cases"][0]["requests"]) == (True, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--random-weights", "27b"), "--random-weights: '27b' is none of"),
        (("--random-weights", "tiny", "-m", "x"), "--random-weights: does not go with -m"),
        (("--random-weights", "tiny", "--prompts", "x"), "does not go with --prompts"),
        (("--random-weights", "tiny", "--quantize", "q8_0"), "are made in the format of --format"),
        (("--layers", "3"), "--layers: belongs to --random-weights"),
        (("--url", "http://a/v1", "--threads", "2"), "--threads: is for measuring this machine"),
        (("--url", "http://a/v1", "--activations", "bf16"), "--activations: is for measuring this"),
        (("--url", "http://a/v1", "--cache-type", "fp8"), "--cache-type: is for measuring this"),
        (("--random-weights", "tiny", "--activations", "int4"), "argument --activations"),
        (("--url", "http://a/v1", "--dtype", "float32"), "--dtype: is for measuring this machine"),
        (("--drafts",), "--drafts: is for measuring a server"),
        (("--url", "a"), "url: 'a' is not like http://localhost:8000/v1"),
        (
            ("--prompts", "x", "--prompt-tokens", "3"),
            "--prompts, --prompt-tokens: give at most one",
        ),
        (("--prompts", "/nowhere/x"), "/nowhere/x: No such file"),
        (("--csv", "/nowhere/x.csv"), "--csv: /nowhere/x.csv: the folder /nowhere does not exist"),
        (("--json", "a.b", "--csv", "./a.b"), "two of them name one file"),
        (("--plot", "x.pdf"), "plot: x.pdf ends in neither"),
        (("--threads", "1,0"), "argument --threads: '0' is not a whole number from 1 to 1024"),
        (("--json", "{t}"), "--json: {t}: is a folder; name a file"),
        (("--csv", "{t}"), "--csv: {t}: is a folder; name a file"),
        (("--plot", "{t}/a.svg"), "--plot: {t}/a.svg: is a folder; name a file"),
        (("--json", ""), "argument --json: the path is empty"),
        (("--csv", ""), "argument --csv: the path is empty"),
        (("--plot", ""), "argument --plot: the path is empty"),
        (("--prompts", ""), "argument --prompts: the path is empty"),
        (("--url", ""), "url: '' is not like http://localhost:8000/v1"),
        (("--json", "-", "--csv", "-"), "--json, --csv: only one of them can go to standard"),
        (("--seed", str(2**64 - 1), "--repeats", "2"), "--seed: each repeat takes the next one"),
        (("--context", "1,"), "argument --context: '' is not a whole number from 0 on"),
    ],
)
def test_bad_options_are_one_line(
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("sfumato.load", lambda *_, **__: pytest.fail("was loaded"))
    (tmp_path / "a.svg").mkdir()
    done = cli("bench", *(option.format(t=tmp_path) for option in options))
    assert (done.code, done.out) == (2, "")
    assert message.format(t=tmp_path) in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["json", "csv", "plot"])
def test_no_report_replaces_a_file(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "mine.svg"
    path.write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr("sfumato.cli.bench._subject", lambda args: pytest.fail("was loaded"))
        done = cli(*TINY, f"--{option}", str(path))
    assert done.code == 2 and f"--{option}: {path}: exists already" in done.err
    assert path.read_text() == "mine"
    if option != "plot":
        assert cli(*TINY, "--max-tokens", "32", f"--{option}", str(path), "--force").code == 0
        assert path.read_text() != "mine"


def test_figures_are_shown_where_a_file_cannot_be_written(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, rows = tmp_path / "a.json", tmp_path / "a.csv"

    def another_program_writes(number: int, count: int) -> None:
        path.write_text("theirs")

    monkeypatch.setattr("sfumato.cli.bench._show_progress", another_program_writes)
    done = cli(*TINY, "--max-tokens", "32", "--json", str(path), "--csv", str(rows))
    assert done.code == 2 and f"--json: {path}: exists already" in done.err
    assert path.read_text() == "theirs" and rows.read_text().count("\n") == 2
    assert "2 requests measured" in done.out


def test_a_missing_matplotlib_is_told_before_measuring(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return usual(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    done = cli(*TINY, "--plot", "a.png")
    assert done.code == 2
    assert "pip install matplotlib" in done.err


def test_where_the_memory_ends_a_line_says_what_to_do(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made, where that can be known."""
    budget = Budget(10**9, "the test")
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.bench.subject.check_load", partial(check_load, ask=lambda _: budget))
        patch.setattr("sfumato.bench.subject.load_network", lambda *_: pytest.fail("was made"))
        done = cli("bench", "--random-weights", "26b-a4b", "--format", "bf16")
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "--random-weights: the model (50." in done.err and "fewer --layers" in done.err
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    monkeypatch.setattr("sfumato.bench.measure.measure", lambda *_, **__: raised(error))
    done = cli(*TINY)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "does not suffice (CUDA out of memory. Tried to allocate 2 GiB); take" in done.err


def raised(error: Exception) -> Any:
    raise error


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without such a device")
def test_a_device_that_is_not_here_is_named(cli: Any) -> None:
    done = cli("bench", "--random-weights", "26b-a4b", "--device", "cuda")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "device: 'cuda' cannot be used here (" in done.err


def test_a_prediction_runs_nothing(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    options = ("bench", "--random-weights", "26b-a4b", "--predict", "rtx-4090")
    done = cli(*options, "--concurrency", "1,4", "--json", str(tmp_path / "p.json"))
    assert (done.code, done.err) == (0, "")
    assert "rtx-4090: 4 x 256 positions, prefix 512; nothing was run" in done.out
    assert "published, less what programs do not reach (data sheet)" in done.out
    assert "The weights (50.5 GB) do not fit its memory (25.8 GB)." in done.out
    again = cli(*options, "--json", str(tmp_path / "p.json"))
    assert again.code == 2 and "exists already" in again.err
    document = json.loads((tmp_path / "p.json").read_text())
    one, four = (step["predicted_ms"] for step in document["steps"])
    assert 50 < one < four
    done = cli("bench", "--predict", "h200", "--random-weights", "26b-a4b", "--json", "-")
    (step,) = json.loads(done.out)["steps"]
    assert round(step["floor_ms"], 1) == 12.8
    blocks = json.loads(cli(*options[:3], "--format", "q4_k_m", *options[3:], "--json", "-").out)
    assert round(blocks["weights_bytes"] / 1e9, 2) == 17.05  # in planes; in the file 16.79
    assert "'h300' is none of h200" in cli(*options[:-1], "h300").err
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli(*options).out
    assert "floor, ms" in narrow and "TFLOP" not in narrow and "…" not in narrow
    assert "--predict: of what" in cli("bench", "--predict", "h200").err


def test_a_prediction_counts_published_int4_as_the_file_does(cli: Any, tmp_path: Path) -> None:
    """Codes and scales; the shapes that stand beside them take nothing on a GPU."""
    config = gguf_config(256, 256, 256)
    tensors = narrow_tensors(random_state(config, 1), LAYOUTS["int4"])
    write_narrow(tmp_path, tensors, LAYOUTS["int4"], hf_config(config))
    done = cli("bench", "--predict", "h200", "-m", str(tmp_path), "--json", "-")
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shapes = {name for name in sizes if name.endswith("weight_shape")}
    expected = sum(size for name, size in sizes.items() if name not in shapes)
    assert shapes and json.loads(done.out)["weights_bytes"] == expected


@pytest.mark.parametrize("format", ["Q2_K", "Q3_K", "IQ3_XXS", "IQ3_S"])
def test_a_prediction_counts_the_bytes_of_low_bit_blocks(
    cli: Any, tmp_path: Path, format: str
) -> None:
    """As on a GPU: those of the file, but for the scales of Q3_K, which take a byte each there."""
    path = tmp_path / "model.gguf"
    config = gguf_config(256, 256, 256)
    write_gguf(path, random_state(config, 1), config, {"*.mlp.*_proj.weight": format})
    infos = open_checkpoint(path).tensors.values()
    matrices = [info for info in infos if info.format == format]
    assert len(matrices) == 3 * len(config.layers)
    done = cli("bench", "--predict", "h200", "-m", str(path), "--json", "-")
    larger = 4 * sum(info.nbytes for info in matrices) // 110 if format == "Q3_K" else 0
    assert json.loads(done.out)["weights_bytes"] == sum(info.nbytes for info in infos) + larger
