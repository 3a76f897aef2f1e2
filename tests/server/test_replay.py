"""A replay as one file: what is in it, what cannot get out of it, and how large it may be."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import pytest
import torch
from PIL import Image
from tests.support.pictures import file_of, picture

from sfumato import Draft, Settled
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.refused import Refused
from sfumato.server import replay
from sfumato.server.replay import Recorder, document, template, thumbnail

MARKERS = DIFFUSION_GEMMA.markers
NASTY = "</script><script>alert(1)</script><!--"


def draft(canvas: int, step: int, ids: list[int], noise: list[int] | None = None) -> Draft:
    n = len(ids)
    rest = torch.zeros(n, 1, dtype=torch.int64), torch.ones(n, 1)
    begun = None if noise is None else torch.tensor(noise)
    accepted = torch.tensor([True] * (n - 1) + [False])
    return Draft(
        canvas, step, torch.tensor(ids), torch.full((n,), 0.123), accepted, 8, *rest, begun
    )


def data_in(page: str) -> Any:
    match = re.search(
        r'<script type="application/json" id="replay">(.*?)</script>', page, re.DOTALL
    )
    assert match
    return json.loads(match[1])


def test_the_file_holds_the_steps_and_asks_for_nothing() -> None:
    recorder = Recorder("abcdefgh".__getitem__, MARKERS)
    recorder.draft(draft(0, 1, [0, 1], noise=[7, 6]))
    recorder.draft(draft(0, 2, [2, 1]))
    recorder.settled(Settled(0, "c", "", [2], "converged"))
    data = data_in(document(recorder.data("a model", "a question", "c", ["2 steps"])))
    texts, (canvas,) = data["texts"], data["canvases"]
    assert [texts[i] for i in canvas["noise"]] == ["h", "g"]
    assert [[texts[i] for i in d["tokens"]] for d in canvas["drafts"]] == [["a", "b"], ["c", "b"]]
    assert [texts[i] for i in canvas["settled"]] == ["c"] and "doubted" not in canvas
    assert canvas["drafts"][0] | {"tokens": []} == {
        "step": 1,
        "tokens": [],
        "entropy": [0.12, 0.12],
        "accepted": "10",
    }
    assert (data["model"], data["question"], data["text"]) == ("a model", "a question", "c")
    assert (data["demonstration"], data["remark"]) == ("", "")
    assert data["markers"]["call_open"] == MARKERS.call_open in data["markers"]["tokens"]
    assert not re.search(r"\b(?:src|href)=|@import|url\(|^\s*(?:import|export)\b", template(), re.M)


def test_a_canvas_that_is_drawn_again_is_kept_once() -> None:
    recorder = Recorder("abcdefgh".__getitem__, MARKERS)
    for step in (1, 2, 1):
        recorder.draft(draft(0, step, [step]))
    (canvas,) = recorder.data("", "", "", [])["canvases"]
    assert [one["step"] for one in canvas["drafts"]] == [1]


@pytest.mark.parametrize("text", [NASTY, "\u2028 \\u003c &lt; é", '/* SCRIPTS */ "REPLAY" $& \\1'])
def test_text_stays_text(text: str) -> None:
    recorder = Recorder(lambda _: text, MARKERS)
    recorder.draft(draft(0, 1, [0]))
    page = document(recorder.data(text, text, text, [text]))
    assert data_in(page)["question"] == data_in(page)["texts"][0] == text
    assert page.count("<script") == template().count("<script")
    assert page.count("<!--") == template().count("<!--") == 0


def test_a_long_replay_loses_steps_and_never_a_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_POSITIONS", 100)
    recorder = Recorder("abcdefgh".__getitem__, MARKERS)
    for canvas in range(30):
        for step in range(1, 9):
            recorder.draft(draft(canvas, step, [step % 8] * 5))
        recorder.settled(Settled(canvas, "", "", [0], "converged"))
        assert recorder._positions() <= max(100, 5 * (canvas + 1))
    canvases = recorder.data("", "", "", [])["canvases"]
    assert len(canvases) == 30
    assert [canvas["drafts"][-1]["step"] for canvas in canvases] == [8] * 30


def test_the_server_hands_out_the_template_under_its_policy(server: Any) -> None:
    answer = server.http.get("/replay.html")
    assert answer.status_code == 200 and answer.text == template()
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert replay.SLOT in answer.text and len(answer.content) < 200_000


def test_pictures_are_small_and_within_the_file() -> None:
    large, small = picture(900, 600, mode="RGBA"), picture(30, 40)
    shown = [thumbnail(file_of(large, "PNG"), "a.png"), thumbnail(small)]
    data = data_in(document(Recorder(str, MARKERS).data("m", "q", "t", [], pictures=shown)))
    assert [each["name"] for each in data["pictures"]] == ["a.png", "picture"]
    sizes = []
    for each in data["pictures"]:
        head, _, content = each["thumb"].partition(",")
        opened = Image.open(io.BytesIO(base64.b64decode(content)))
        assert (head, opened.format) == ("data:image/jpeg;base64", "JPEG")
        sizes.append(opened.size)
    assert sizes == [(320, 213), (30, 40)]
    assert large.size == (900, 600) and small.size == (30, 40)  # the caller's stay as they are
    assert data_in(document(Recorder(str, MARKERS).data("m", "q", "t", [])))["pictures"] == []
    with pytest.raises(Refused, match=r"^image: "):
        thumbnail(b"no picture")
