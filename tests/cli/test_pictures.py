"""Pictures and vision towers through the command line."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Terminal
from tests.support.pictures import file_of, picture
from tests.support.seeing_model import seeing_model, with_markers
from tests.support.vision_oracle import random_vision

from sfumato.catalog import EMBEDDED
from sfumato.cli import chat, generation
from sfumato.cli.arguments import CommandLine
from sfumato.cli.pictures import show
from sfumato.convert import convert
from sfumato.media.patches import Cut, patches_of

Q = "What is this?"


@pytest.fixture
def png(tmp_path: Path) -> str:
    (tmp_path / "a.png").write_bytes(file_of(picture(40, 30), "PNG"))
    return str(tmp_path / "a.png")


def parts_of(message: Any) -> list[tuple[Any, ...]]:
    """The parts of a message; of a picture its file and what the tower gets of it."""
    return [
        (part["path"], part["patches"].key) if part["type"] == "image" else (part["text"],)
        for part in message["content"]
    ]


def test_run_asks_about_pictures(use: Any, cli: Any, png: str) -> None:
    model, key = use("yes"), patches_of(picture(40, 30), Cut()).key
    done = cli("run", "--image", png, Q, "--image", png, "--system", "S", "--json")
    assert (done.code, json.loads(done.out)["text"]) == (0, "yes")
    system, question = model.requests[0]["messages"]
    assert (system["content"], question["role"]) == ("S", "user")
    assert parts_of(question) == [(png, key), (png, key), (Q,)]
    assert cli("run", Q).code == 0  # without a picture a message is a text, as before
    assert model.requests[1]["messages"] == [{"role": "user", "content": Q}]


def test_what_is_no_picture_is_refused_before_a_model_loads(
    cli: Any, png: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "load", lambda args: pytest.fail("loaded"))
    folder = Path(png).parent
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    for name, words in (
        ("b.png", "the PNG is truncated or damaged"),
        ("absent.png", "is no file; give the path of a picture"),
        (".", "is no file"),
    ):
        done = cli("run", "--image", png, "--image", str(folder / name), Q)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"sfumato: error: --image {folder / name}: ")
        assert words in done.err


def test_a_model_without_a_tower_says_so(cli: Any, png: str) -> None:
    done = cli("run", "--mmproj", "none", "--image", png, Q)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("this model reads no pictures; load its mmproj file too\n")


def test_a_gguf_model_with_its_mmproj_file_sees(cli: Any, png: str, tmp_path: Path) -> None:
    """From files to the answer, which depends on the picture and on nothing else that changes."""
    folder = tmp_path / "folder"
    seeing_model(folder)
    model = convert(with_markers(folder), tmp_path / "model.gguf", "f32").path
    mmproj = convert(folder, tmp_path / "mmproj-F32.gguf", "f32").path
    other = tmp_path / "other.png"
    other.write_bytes(file_of(picture(40, 30, 1), "PNG"))

    def answer(path: Path, image: str | Path, *words: str) -> str:
        given = ["-m", str(path), "--device", "cpu", "--image", str(image), "--max-tokens", "32"]
        given += [
            "--seed",
            "1",
        ]  # with another one rounded defaults decide a near tie
        done = cli("run", Q, *given, *words)
        assert done.code == 0, done.err
        return str(done.out)

    first = answer(model, png)
    assert first == answer(folder, png) == answer(model, png, "--mmproj", str(mmproj))
    assert first != answer(model, other)
    chatted = cli("chat", "-m", str(model), "--device", "cpu", "--max-tokens", "32", "--seed", "1",
                  stdin=f"/image {png}\n{Q}\n")  # fmt: skip
    assert chatted.code == 0, chatted.err
    assert chatted.out.strip() == f"(the next question has 1 picture)\n{first}".strip()


def test_chat_attaches_pictures_to_the_next_question(
    use: Any, cli: Any, png: str, tmp_path: Path
) -> None:
    model, key = use("yes"), patches_of(picture(40, 30), Cut()).key
    talk = tmp_path / "talk.json"
    lines = [f"/image {png}", f"/image {png}", Q, "And now?", f"/save {talk}", "/retry"]
    done = cli("chat", stdin="\n".join([*lines, "/clear", f"/load {talk}", "So?"]) + "\n")
    assert (done.code, done.err) == (0, "")
    assert "(the next question has 2 pictures)\nyes\nyes\n" in done.out
    first, second, _, last = (request["messages"] for request in model.requests)
    assert parts_of(first[0]) == [(png, key), (png, key), (Q,)]
    assert second[0] is first[0] and second[2]["content"] == "And now?"
    saved = json.loads(talk.read_text(encoding="utf-8"))
    image = {"type": "image", "path": png}
    assert saved[0]["content"] == [image, image, {"type": "text", "text": Q}]
    assert parts_of(last[0]) == parts_of(first[0]) and len(last) == 5


def test_pictures_that_cannot_be_attached(use: Any, cli: Any, png: str, tmp_path: Path) -> None:
    model, talk = use("yes"), tmp_path / "talk.json"
    answer = {"role": "assistant", "content": "yes"}
    for content in ([{"type": "image", "path": 7}], [], [["image"]], [{"type": "text"}],
                    [{"type": "image", "path": "x", "url": "y"}]):  # fmt: skip
        talk.write_text(json.dumps([{"role": "user", "content": content}, answer]))
        assert "its content must be text" in cli("chat", stdin=f"/load {talk}\n").err
    absent = [{"type": "image", "path": "/nowhere/x.png"}, {"type": "text", "text": Q}]
    talk.write_text(json.dumps([{"role": "user", "content": absent}, answer]))
    done = cli("chat", stdin=f"/load {talk}\n/image\n/image {tmp_path}\n/image {png}\n/clear\nHi\n")
    assert done.err.count("sfumato: error: ") == done.err.count("\n") == 3
    assert "'x.png' is no file" in done.err and "usage: /image FILE" in done.err
    assert model.requests[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert f"/image {png}" in chat.completions(f"/image {png[:-2]}")


def test_a_thumbnail_is_shown_where_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(term: str, **variables: str) -> str:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        for name in ("NO_COLOR", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": term, **variables}.items():
            monkeypatch.setenv(name, value)
        show(picture(40, 30))
        return terminal.getvalue()

    assert "▀" in shown("xterm-256color")
    assert "▀" in shown("xterm", COLORTERM="truecolor")
    assert shown("xterm-256color", NO_COLOR="1") == shown("dumb") == shown("vt100") == ""


def test_an_mmproj_file_is_inspected(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    random_vision(64).write_mmproj(path, {"ffn_up.weight": "Q8_0"})
    done = cli("inspect", str(path))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{path}: a vision tower (mmproj)",
        f"vision tower of {path}: 31 tensors, 142 kB (29 F32, 2 Q8_0)",
        "its 2 layers have the hidden size 32; a soft token is 3 x 3 patches of 4 x 4 pixels, "
        "64 wide",
        "a picture takes up to 280 soft tokens, or as asked for (70, 140, 560, 1120)",
    ]
    facts = json.loads(cli("inspect", str(path), "--json", "--tensors").out)
    assert (facts["kind"], facts["vision"]["config"]["num_layers"]) == ("mmproj", 2)
    assert {"layers.0.mlp.up_proj.weight"} <= {each["name"] for each in facts["list"]}


def test_the_tower_beside_a_model_is_inspected_with_it(cli: Any, tmp_path: Path) -> None:
    model = convert(EMBEDDED, tmp_path / "model.gguf", "bf16").path
    assert "vision tower" not in cli("inspect", str(model)).out
    random_vision(128).write_mmproj(tmp_path / "mmproj-F32.gguf")
    assert f"vision tower of {tmp_path / 'mmproj-F32.gguf'}: " in cli("inspect", str(model)).out
    facts = json.loads(cli("inspect", str(model), "--json").out)
    assert facts["vision"]["bytes"] <= facts["memory"]["vision_tower"]


def test_the_tower_counts_before_a_model_loads(tmp_path: Path) -> None:
    """The one that is found, and none where none is wanted."""
    convert(EMBEDDED, tmp_path / "model.gguf", "bf16")
    random_vision(128).write_mmproj(tmp_path / "mmproj-F32.gguf")
    words = ["run", "Hi", "-m", str(tmp_path / "model.gguf"), "--device", "cpu"]
    seeing, _ = generation.subject(CommandLine().parse_args(words, {}))
    assert seeing.tower is not None and seeing.tower[0].text_size == 128
    blind, _ = generation.subject(CommandLine().parse_args([*words, "--mmproj", "none"], {}))
    assert blind.tower is None


def test_an_mmproj_file_is_written(cli: Any, tmp_path: Path) -> None:
    random_vision(64).write_mmproj(tmp_path / "source.gguf")
    out = tmp_path / "mmproj-Q8_0.gguf"
    done = cli("convert", str(tmp_path / "source.gguf"), str(out), "--to", "q8_0")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: q8_0, ")


def test_hostile_mmproj_files_are_one_clear_line(cli: Any, tmp_path: Path) -> None:
    """Each command that reads one: what is wrong with which file, and no traceback."""
    path = tmp_path / "bad.gguf"
    random_vision(128).write_mmproj(path)
    good, draw = path.read_bytes(), random.Random(0)
    damaged = [b"", b"GGUF", good[:40], good[: len(good) // 2], b"\x00" * 64]
    for _ in range(12):
        at = draw.randrange(4, 3000)  # of the header
        damaged.append(good[:at] + bytes([draw.randrange(256)]) * 8 + good[at + 8 :])
    for data in damaged:
        path.write_bytes(data)
        for words in (("inspect", str(path)), ("run", "Hi", "--mmproj", str(path))):
            done = cli(*words)
            if done.code:
                assert (done.code, done.err.count("\n")) == (2, 1), done.err
                assert done.err.startswith(("sfumato: error: ", "sfumato: error: --mmproj"))
    random_vision(128).write_mmproj(path, metadata={"clip.projector_type": "gemma4uv"})
    done = cli("run", "Hi", "--mmproj", str(path))
    assert (done.code, "gemma4uv" in done.err, done.err.count("\n")) == (2, True, 1)
    done = cli("run", "Hi", "-m", str(path))
    assert "the file holds a vision tower and no model" in done.err


def test_a_replay_shows_the_pictures(use: Any, cli: Any, png: str, tmp_path: Path) -> None:
    use("yes")
    path = tmp_path / "replay.html"
    assert cli("run", "--image", png, Q, "--replay", str(path)).code == 0
    match = re.search(r'id="replay">(.*?)</script>', path.read_text("utf-8"))
    assert match
    (shown,) = json.loads(match[1])["pictures"]
    assert shown["name"] == "a.png" and shown["thumb"].startswith("data:image/jpeg;base64,")
