"""The rule for all files that commands write beside what they print."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from sfumato.cli import files


def test_a_file_is_replaced_with_force_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write(str(path), "é\udcff", False, "json")
    assert path.read_bytes() == "é?".encode()
    path.chmod(0o600)
    for step in (files.check, lambda *args: files.write(args[0], "other", *args[1:])):
        with pytest.raises(ValueError, match=r"json: .*a\.json: exists already; .*--force"):
            step(str(path), False, "json")
    assert path.read_bytes() == "é?".encode()
    files.write(str(path), b"other", True, "json")
    assert path.read_bytes() == b"other" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write(str(tmp_path / "link"), "new", False)
    assert (tmp_path / "real").read_text() == "new" and (tmp_path / "link").is_symlink()
    with pytest.raises(ValueError, match="exists already"):
        files.write(str(tmp_path / "link"), "newer", False)


def test_a_disk_that_is_full_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(str(path), "new", True)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_pipes_and_devices_have_nothing_to_lose(tmp_path: Path) -> None:
    files.check("/dev/null", False)
    files.write("/dev/null", "x", False)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.write(str(pipe), "through", False)
    reader.join(60)
    assert read == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert files.is_stream("/dev/stdout") and not files.is_stream(str(tmp_path / "new"))
