"""`sfumato list` and `sfumato remove`, on a cache that a stand-in for the hub has filled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sfumato import catalog, hub
from sfumato.catalog import EMBEDDED
from sfumato.cli import main, models
from sfumato.cli.terminal import table

from .conftest import Q4, Q8, REPO, Terminal
from .stand_in import StandIn


@pytest.fixture
def folder(hub_server: StandIn, cli: Any) -> Path:
    """The cache's folder of a repository of which two files were pulled, and a tower."""
    hub_server.repos[REPO]["mmproj-F16.gguf"] = b"tower"
    for format in ("Q4_K_M", "Q8_0"):
        assert cli("pull", f"hf:{REPO}:{format}").code == 0
    return hub.cache_folder(REPO)


def test_the_list_shows_what_is_here_and_what_is_not(
    hub_server: StandIn, folder: Path, cli: Any
) -> None:
    tiny = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    hub_server.repos["someone/tiny"] = tiny
    hub_server.repos["someone/llama"] = tiny | {"config.json": b'{"model_type": "llama"}'}
    for repo in ("tiny", "llama"):
        cli("pull", "--force", f"hf:someone/{repo}")
    part = hub.cache_folder("someone/half") / "blobs" / ("b" * 64 + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 5000)
    listed = json.loads(cli("list", "--json").out)
    here = {each["name"]: each for each in listed["models"]}
    names = {f"hf:{REPO}:{Q4}": "Q4_K_M", f"hf:{REPO}:{Q8}": "Q8_0"}
    names |= {"hf:someone/half": "in part"}
    assert {name: here[name]["format"] for name in names} == names
    assert set(here) == {*catalog.PACKAGED, "hf:someone/tiny", *names}
    assert listed["others"] == 1  # llama
    assert here[f"hf:{REPO}:{Q8}"]["bytes"] == 8000 + len(b"tower")
    assert here["hf:someone/half"]["bytes"] == 5000
    assert Path(here["hf:someone/tiny"]["path"], "model.safetensors").exists()
    assert [each["name"] for each in listed["published"]] == list(catalog.CATALOGUE)
    assert not any(each["here"] for each in listed["published"])
    plain = cli("list").out
    for entry in catalog.CATALOGUE.values():
        assert f"  {entry.name}" in plain and entry.size in plain
    assert "\x1b" not in plain and here[f"hf:{REPO}:{Q8}"]["path"] in plain


def test_a_narrow_terminal_gets_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a" * 20, "b c " * 10], ["d", "e"]]
    plain = models._rows(rows)
    assert plain == table(rows) and len(plain[0]) > 40  # in a file
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    lines = "\n".join(models._rows(rows)).splitlines()
    assert lines[0].startswith(f"  {'a' * 20}: b c") and lines[-1] == "  d: e"
    assert max(map(len, lines)) < 40


def test_one_file_goes_and_the_others_stay(folder: Path, cli: Any) -> None:
    path = Path(cli("pull", f"hf:{REPO}:Q4_K_M").out.strip())
    blob = path.resolve()
    refused = cli("remove", f"hf:{REPO}:Q4_K_M")
    assert (refused.code, path.exists()) == (2, True)
    assert f"would remove 2 files in {folder}, which frees 4 kB; --force does so" in refused.err
    done = cli("remove", "--force", f"hf:{REPO}:Q4_K_M")
    assert (done.code, done.out) == (0, f"removed 2 files in {folder}, which frees 4 kB\n")
    assert not path.is_symlink() and not blob.exists()
    assert sorted(item.name for item in path.parent.iterdir()) == ["mmproj-F16.gguf", Q8]
    assert "no such file; there are tiny-Q8_0.gguf (8 kB)" in cli("remove", f"hf:{REPO}:{Q4}").err
    # With the last weights the whole repository goes.
    assert cli("remove", "--force", f"hf:{REPO}:{Q8}").out.startswith("removed all of")
    assert not folder.exists()
    assert "is not on this machine; `sfumato list`" in cli("remove", f"hf:{REPO}:{Q8}").err


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False), ("", False)])
def test_a_question_is_asked_first(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, answer: str, goes: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["remove", f"hf:{REPO}"]) == 0
    assert folder.exists() is not goes
    assert "Remove it? [y/N]" in capsys.readouterr().err


def test_nothing_outside_the_cache_is_removed(folder: Path, cli: Any, tmp_path: Path) -> None:
    """Neither by a name with dots, nor by links out of the repository, its folder's included."""
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(b"mine")
    link = next((folder / "snapshots").iterdir()) / "tiny-Q6_K.gguf"
    link.symlink_to(outside)
    os.symlink(tmp_path, folder / "snapshots" / "loop")
    for name in ("../hub", "hf:../hub", f"hf:{REPO}:../x", str(outside), "embedded"):
        assert cli("remove", "--force", name).code == 2
    planned = cli("remove", f"hf:{REPO}:Q6_K")
    assert "1 files in" in planned.err and "frees 0 B" in planned.err
    assert cli("remove", "--force", f"hf:{REPO}:Q6_K").code == 0
    assert outside.read_bytes() == b"mine" and not link.is_symlink()
    link.symlink_to(outside)
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert "is not on this machine" in cli("remove", "--force", f"hf:{REPO}").err
    folder.unlink()
    elsewhere.rename(folder)
    assert cli("remove", "--force", f"hf:{REPO}").code == 0
    assert not folder.exists() and outside.read_bytes() == b"mine"


def test_what_is_being_downloaded_stays(folder: Path, cli: Any) -> None:
    (lock, *_) = (folder.parent / ".locks" / folder.name).glob("*.lock")
    with hub.library().utils.WeakFileLock(str(lock)):
        busy = cli("remove", "--force", f"hf:{REPO}")
    assert busy.code == 2 and "is being downloaded; wait, or stop that" in busy.err
    assert folder.exists()


def test_without_the_library_the_list_says_so(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = cli("list")
    assert done.code == 0 and "pip install huggingface_hub" in done.err
    assert done.out.startswith("On this machine:\n  embedded")
