"""`sfumato perplexity` on small texts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from sfumato.cli import main, train


def test_a_file_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the capital is paris. <|turn>"
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    assert main(["perplexity", str(path), "--json", "--context", "12", "--stride", "6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == len(text) and report["tokens"] == len(text), "markers are text"
    assert report["context"] == 12 and 1 < report["perplexity"] < 1e6
    assert report["bits_per_byte"] == pytest.approx(report["nats_per_token"] / 0.6931, rel=1e-3)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["perplexity", "-"]) == 0
    assert capsys.readouterr().out.startswith("perplexity      ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no text"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * 9, "has more than 8 bytes"),
        (None, "No such file"),
    ],
)
def test_bad_texts(
    data: bytes | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "MOST_BYTES", 8)
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    assert main(["perplexity", str(path)]) == 2
    assert message in capsys.readouterr().err
