from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_adapter import random_adapter

import sfumato.convert
from sfumato.catalog import EMBEDDED
from sfumato.model.adapter_files import write_peft
from sfumato.model.families import DIFFUSION_GEMMA, open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.quantization import TARGETS
from sfumato.options.table import FORMATS


def test_the_listed_formats_are_those_there_are() -> None:
    assert list(TARGETS) == list(FORMATS)


def test_help(cli: Any) -> None:
    done = cli("convert", "--help")
    assert done.code == 0
    assert done.out.startswith("usage: sfumato convert")
    assert "q4_k_m, q5_k_m, q8_0" in done.out


def test_convert_and_back(cli: Any, tmp_path: Path) -> None:
    done = cli("convert", str(EMBEDDED), str(tmp_path / "x.gguf"), "--to", "q8_0")
    assert done.code == 0
    assert done.out.startswith(f"{tmp_path / 'x.gguf'}: q8_0, 1.86 MB (73 F32, 42 Q8_0, 5 F16)")
    assert done.err == (
        "sfumato: note: the 42 tensors of the vision tower are left out; `sfumato convert "
        f"{EMBEDDED} mmproj-NAME.gguf` writes them\n"
    )
    done = cli("convert", str(tmp_path / "x.gguf"), str(tmp_path / "back"))
    assert (done.code, done.err) == (0, "")
    assert {t.format for t in open_checkpoint(tmp_path / "back").tensors.values()} == {"BF16"}
    assert cli("run", "Hi", "--model", str(tmp_path / "back"), "--max-tokens", "8").code == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("{e}", "{t}/x.gguf", "--to", "q9"), "invalid choice: 'q9'"),
        (("{e}", "{t}/there.gguf"), "there.gguf: exists already"),
        (("{t}/none", "{t}/x.gguf"), "none: does not exist"),
        (("{e}", "{t}/folder"), "both are safetensors"),
        (("{e}",), "the following arguments are required: out"),
    ],
)
def test_what_cannot_be_is_one_line(
    cli: Any, tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    (tmp_path / "there.gguf").touch()
    done = cli("convert", *(arg.format(e=EMBEDDED, t=tmp_path) for arg in argv))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("sfumato: error: ")
    assert message in done.err
    assert len(done.err.split("\n\n")[0].splitlines()) == 1  # what follows is advice
    assert (tmp_path / "there.gguf").read_bytes() == b""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("out", ["x.gguf", "back"])
def test_a_signal_leaves_nothing(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, out: str
) -> None:
    source = EMBEDDED
    if out == "back":
        source = tmp_path / "source.gguf"
        assert cli("convert", str(EMBEDDED), str(source)).code == 0

    def convert(*given: Any, progress: Callable[[int, int], None], **more: Any) -> None:
        def interrupt(count: int, total: int) -> None:
            assert any(item.suffix == ".part" for item in tmp_path.iterdir())
            signal.raise_signal(number)

        sfumato.convert.convert(*given, progress=interrupt, **more)

    monkeypatch.setattr("sfumato.cli.checkpoint.convert", convert)
    before = set(tmp_path.iterdir())
    assert cli("convert", str(source), str(tmp_path / out)).code == code
    assert set(tmp_path.iterdir()) == before


def test_force(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert cli("convert", str(EMBEDDED), str(tmp_path / "x.gguf"), "--force").code == 0
    assert open_checkpoint(tmp_path / "x.gguf").tensors


def test_merge_and_the_other_kind_of_adapter(cli: Any, tmp_path: Path) -> None:
    checkpoint, adapter = open_checkpoint(EMBEDDED), tmp_path / "adapter"
    config = config_of(checkpoint)
    write_peft(adapter, random_adapter(config), DIFFUSION_GEMMA, config)
    done = cli("convert", str(adapter), str(tmp_path / "adapter.gguf"), "-m", "embedded")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'adapter.gguf'}: 51 changes of rank 3\n"
    done = cli("convert", str(tmp_path / "adapter.gguf"), str(tmp_path / "again"))
    assert (done.code, done.err) == (0, "")
    out = str(tmp_path / "merged.gguf")
    done = cli("merge", "embedded", str(tmp_path / "again"), "-o", out, "--to", "q4_k")
    assert done.code == 0
    assert done.out.startswith(f"{out}: q4_k, ")
    assert "rounds the changed weights by" in done.err
    for argv, message in (
        (("merge", "embedded", str(adapter), "-o", out), "merged.gguf: exists already"),
        (("merge", "embedded", str(adapter)), "error: --out is required"),
        (("merge", "embedded", str(EMBEDDED), "-o", "x"), "is no adapter; give a folder with"),
        (("convert", str(adapter), "x", "--to", "f16"), "--to: an adapter keeps its numbers"),
        (("convert", str(EMBEDDED), "x", "-m", str(EMBEDDED)), "is no adapter; give a folder"),
    ):
        done = cli(*argv)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
