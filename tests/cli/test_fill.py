"""`sfumato fill` and `sfumato edit`, on the embedded model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.conftest import FakeEngine
from tests.support.scripted_model import scripted

import sfumato
from sfumato import Done, Draft, Hole
from sfumato.catalog import EMBEDDED
from sfumato.cli import generation
from sfumato.cli.display import filling
from sfumato.cli.files import TextFile
from sfumato.cli.fill import edited, holes_of

QUICK = ("--steps", "2")
FRANCE = "What is the capital of France?"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.py"
    path.write_bytes(b"a = 1\r\nb = 2\r\n")
    path.chmod(0o640)
    return path


def test_holes_are_written_in_braces() -> None:
    assert holes_of("a{{6}}b{{<=8}}{{x|y z}}") == (
        *("a", Hole(6), "b", Hole(at_most=8)),
        Hole(choices=("x", "y z")),
    )
    assert holes_of("{{ name }} {% if a|b %} {{x}}") == ("{{ name }} {% if a|b %} {{x}}",)
    with pytest.raises(ValueError, match=r"\{\{0\}\}: tokens: must be"):
        holes_of("{{0}}")


def test_a_text_is_filled(cli: Any) -> None:
    done = cli("fill", "The capital is {{5}}.", "--reply-to", FRANCE)
    assert (done.code, done.out) == (0, "The capital is Paris.\n")
    piped = cli("fill", "-", "--reply-to", FRANCE, stdin="The capital is {{5}}.")
    assert piped.out == done.out


def test_json_has_the_holes(cli: Any) -> None:
    done = cli("fill", "It is {{Rome|Paris}}.", "--json", "--reply-to", FRANCE)
    report = json.loads(done.out)
    (hole,) = report["holes"]
    assert report["text"] == f"It is {hole['text']}." and len(hole["alternatives"]) == 2
    assert 0.5 <= hole["probability"] <= 1


def test_a_file_is_filled_at_a_place(cli: Any, page: Path) -> None:
    done = cli("fill", str(page), "--at", "2:5", "--tokens", "3", *QUICK)
    assert done.code == 0 and page.read_bytes() == b"a = 1\r\nb = 2\r\n"
    removed, added = (line for line in done.out.splitlines()[3:] if line[0] in "+-")
    assert removed == "-b = 2" and added.startswith("+b = ") and added.endswith("2")
    assert len(added) == len("+b = 2") + 3
    assert cli("fill", str(page), "--at", "2:5", "--tokens", "3", "--write", *QUICK).code == 0
    assert page.read_bytes() == f"a = 1\r\n{added[1:]}\r\n".encode()
    assert page.stat().st_mode & 0o777 == 0o640
    backup = page.with_name("page.py.bak")
    assert backup.read_bytes() == b"a = 1\r\nb = 2\r\n"
    assert backup.stat().st_mode & 0o777 == 0o640


def test_a_file_may_have_holes(cli: Any, tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("I am {{2}}.\n")
    done = cli("fill", str(letter), "--write", *QUICK)
    assert done.code == 0 and letter.read_text().startswith("I am ")
    assert "-I am {{2}}." not in letter.read_text() and len(letter.read_text()) == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no hole",), "the text has no hole: write {{6}}"),
        (("longer than any file's name " * 30,), "the text has no hole: write {{6}}"),
        (("{{3}}", "--tokens", "3"), "--tokens: belongs to --at"),
        (("{{3}}", "--system", "x"), "--system: belongs to a conversation"),
        (("{{3}}", "--write"), "--write: there is no file"),
        (("{{3}}.", "-m", "embedded-masks"), "begin with text before the hole, or give --reply-to"),
        (("{{99}}",), "holes and the text between them take 99"),
        (("FILE", "--at", "2"), "--at: must be LINE:COLUMN"),
        (("FILE", "--at", "9:1"), "has 3 lines, and no line 9"),
        (("FILE", "--at", "1:7"), "column 7 is beyond its end"),
        (("FILE", "--at", "1:1", "--tokens", "1", "--at-most", "2"), "give at most one"),
        (("/nowhere/at/all", "--at", "1:1"), "No such file"),
    ],
)
def test_what_cannot_be_filled(cli: Any, page: Path, words: Any, message: str) -> None:
    done = cli("fill", *(str(page) if word == "FILE" else word for word in words))
    assert done.code == 2 and message in " ".join(done.err.split())


def test_an_edit_shows_and_writes_what_changes(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("The capital is Rome.\n")
    how = ("What", "is", "it?", "--steps", "3", "--seed", "1")
    done = cli("edit", str(file), *how)
    assert done.code == 0 and file.read_text() == "The capital is Rome.\n"
    lines = done.out.splitlines()
    assert lines[0].startswith("--- ") and "-The capital is Rome." in lines
    report = json.loads(cli("edit", str(file), *how, "--json", "--write", "--force").out)
    assert file.read_text() == report["text"] and report["diff"] == lines
    assert report["written"] and report["backup"] == f"{file}.bak"
    assert (tmp_path / "answer.txt.bak").read_text() == "The capital is Rome.\n"
    assert 0 <= report["accepted_prediction_tokens"] <= 20
    cut = cli("edit", str(file), *how, "--max-tokens", "2")
    assert cut.code == 2 and "longer than 2 tokens, and nothing was written" in cut.err


def test_the_embedded_model_overwrites_no_file(cli: Any, page: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sfumato.cli.generation.answer", lambda *_: pytest.fail("was asked"))
    for model in ((), ("-m", os.path.relpath(EMBEDDED))):
        done = cli("edit", str(page), "shorter", "--write", *model)
        assert done.code == 2 and "the embedded model has not learnt to change files" in done.err
    assert page.read_bytes() == b"a = 1\r\nb = 2\r\n" and len(list(page.parent.iterdir())) == 1


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """says(text, hesitate) makes every load() return a model that replies so."""

    def use(text: str, hesitate: int = 0) -> None:
        model = scripted(f"{text}<turn|>", 32, hesitate)
        taken = ("messages", "max_tokens", "seed", "sampler", "prediction", "cancelled")
        streams: Any = SimpleNamespace(
            stream=lambda **fields: model.stream(**{name: fields[name] for name in taken})
        )
        monkeypatch.setattr(generation, "load", lambda args: model)
        monkeypatch.setattr(generation, "engine", lambda *_: FakeEngine(streams))

    return use


@pytest.mark.parametrize(
    ("hesitate", "options", "why"),
    [
        (8, (), "1 of 1 canvases did not settle from the file's text and were drawn without it"),
        (4, ("--steps", "3"), "and 1 of 1 canvases did not settle"),
    ],
)
def test_what_did_not_settle_overwrites_no_file(
    cli: Any, says: Any, page: Path, hesitate: int, options: tuple[str, ...], why: str
) -> None:
    says("a = 1\nb = 3", hesitate)
    done = cli("edit", str(page), "count", "--write", *options)
    assert done.code == 2 and f"{page}: was not written: " in done.err and why in done.err
    assert done.out.startswith(f"--- {page}") and "force" in done.err
    report = json.loads(cli("edit", str(page), "count", "--write", "--json", *options).out)
    assert (report["written"], report["backup"]) == (False, None)
    assert page.read_bytes() == b"a = 1\r\nb = 2\r\n" and len(list(page.parent.iterdir())) == 1
    assert cli("edit", str(page), "count", "--write", "--force", *options).code == 0
    assert page.read_bytes() != b"a = 1\r\nb = 2\r\n"
    assert page.with_name("page.py.bak").read_bytes() == b"a = 1\r\nb = 2\r\n"


def test_a_reply_that_settles_is_written(cli: Any, says: Any, page: Path) -> None:
    says("a = 1\nb = 3")
    done = cli("edit", str(page), "count", "--write")
    assert (done.code, page.read_bytes()) == (0, b"a = 1\r\nb = 3\r\n")
    assert f"note: written; {page}.bak has the text before" in done.err
    says("a = 1\nb = 3")
    assert "nothing changes" in cli("edit", str(page), "count", "--write").err
    assert len(list(page.parent.iterdir())) == 2, "and no second backup"


def test_a_file_that_changes_meanwhile_is_kept(
    cli: Any, says: Any, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("a = 1\nb = 3")
    answer = generation.answer

    def and_another_program_writes(*args: Any) -> Any:
        page.write_text("theirs")
        return answer(*args)

    monkeypatch.setattr("sfumato.cli.generation.answer", and_another_program_writes)
    done = cli("edit", str(page), "count", "--write", "--force")
    assert done.code == 2 and "has changed since it was read" in done.err
    assert "+b = 3" in done.out, "the text is not lost"
    assert page.read_text() == "theirs" and len(list(page.parent.iterdir())) == 1


def test_what_cannot_be_edited(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "some").write_text("text")
    assert "the instruction: is empty" in cli("edit", str(tmp_path / "some"), " ").err
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, message in (("empty", "is empty"), ("bytes", "is not UTF-8"), (".", "is a folder")):
        done = cli("edit", str(tmp_path / name), "x")
        assert done.code == 2 and message in " ".join(done.err.split())


def test_a_reply_becomes_a_text() -> None:
    assert edited("a\n", "b") == "b\n" and edited("a", "b\n\n") == "b"
    assert edited("a\n", "```python\nb\nc\n```\n") == "b\nc\n"
    assert edited("```\na\n```\n", "```\nb\n```") == "```\nb\n```\n"


def test_a_display_shows_the_complete_text_once() -> None:
    model = sfumato.load()
    engine = sfumato.Engine(model, sfumato.EngineConfig(slots=1, context=64))
    request = sfumato.Request(
        ids=[2], parts=["I am ", Hole(3)], drafts=True, sampler=sfumato.SamplerConfig(max_steps=2)
    )
    events: list[Any] = []
    engine.submit(request, events.append)
    while engine.step():
        pass
    given = (*events[:-1], Done(events[-1].reply))
    shown: list[Any] = [e for each in given if (e := filling(each, shows_text=True)) is not None]
    assert len(shown) == len(events) - 1 >= 2  # without the canvas that settled
    assert all(isinstance(event, Draft) for event in shown[:-1])
    assert shown[-1].reply.text == events[-1].reply.filled.text


def test_no_backup_is_replaced_and_no_link_followed(tmp_path: Path) -> None:
    real, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    real.mkdir()
    (real / "a.txt").write_text("0")
    (tmp_path / "a.txt").symlink_to(real / "a.txt")
    elsewhere.write_text("other")
    (real / "a.txt.bak").symlink_to(elsewhere)
    (real / "a.txt.bak.2").symlink_to(tmp_path / "nothing")
    for number in (1, 2):
        backup = TextFile.read(str(tmp_path / "a.txt")).write(str(number))
        assert backup == real.resolve() / f"a.txt.bak.{number + 2}", "beside the file itself"
        assert backup.read_text() == str(number - 1)
    assert (tmp_path / "a.txt").is_symlink() and (real / "a.txt").read_text() == "2"
    assert elsewhere.read_text() == "other" and not (tmp_path / "nothing").exists()


def test_backups_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.cli.files.MOST_BACKUPS", 2)
    path = tmp_path / "a"
    path.write_text("0")
    for number in (1, 2):
        TextFile.read(str(path)).write(str(number))
    with pytest.raises(ValueError, match="has 2 backups, and was not written; remove some"):
        TextFile.read(str(path)).write("3")
    assert path.read_text() == "2"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "a.bak", "a.bak.2"]


def test_a_full_disk_leaves_the_file_and_no_half_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls, failing = tmp_path / "a", list[int](), 1
    path.write_text("mine")
    sync = os.fsync

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    for failing in (1, 2):  # noqa: B007 (the new file, then the backup)
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            TextFile.read(str(path)).write("other")
        assert path.read_text() == "mine" and [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_told_before_the_model_loads(
    cli: Any, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: pytest.fail("was loaded"))
    access = os.access
    for refused, message in ((page, "is read-only"), (page.parent, "cannot be written")):
        with monkeypatch.context() as patched:  # root may write everywhere
            patched.setattr(
                os, "access", lambda path, mode, no=refused: path != no and access(path, mode)
            )
            done = cli("edit", str(page), "shorter", "--write")
        assert done.code == 2 and message in done.err


def test_what_has_no_end_is_not_read_to_its_end(cli: Any) -> None:
    assert "has more than 16,777,216 bytes" in cli("edit", "/dev/zero", "shorter").err


def test_a_file_of_text(tmp_path: Path) -> None:
    path = tmp_path / "unix"
    path.write_text("a\nb\n")
    file = TextFile.read(str(path))
    file.write("c\n")
    assert path.read_bytes() == b"c\n" and not file.has_crlf
    assert file.diff("a\nb\n") == []
    for held in (b"a\r\nb\r\n", b"a\r\nb\nc\n"):
        path.write_bytes(held)
        file = TextFile.read(str(path))
        file.write(file.text)
        assert path.read_bytes() == held and file.has_crlf == (b"b\n" not in held)
