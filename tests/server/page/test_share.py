"""Replays that are shared, from the page or the command line: one file that plays by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.page.browsing import SOLUTION, SUDOKU, Script, ask, expect, wait

from sfumato.cli import main

NASTY = "</script><script>document.title = 'taken'</script><!--"


def data_in(path: Path) -> dict[str, Any]:
    match = re.search(r'id="replay">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def saved(page: Any, path: Path) -> Path:
    with page.expect_download() as download:
        page.locator(".reply").last.get_by_role("button", name="Save replay").click()
    assert download.value.suggested_filename == "sfumato-replay.html"
    download.value.save_as(path)
    return path


def test_a_replay_plays_without_a_server_and_what_a_model_wrote_stays_text(
    open_page: Callable[..., Any], open_replay: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page()
    ask(page, SUDOKU)
    wait(page)
    mine = saved(page, tmp_path / "page.html")
    page.get_by_role("button", name="New conversation").click()
    tokens = [NASTY, " $& <b>x</b>"]
    Script().draft(0, 1, tokens).settle(0, tokens).delta(content="".join(tokens)).end().play(page)
    ask(page, NASTY)
    wait(page)
    nasty = saved(page, tmp_path / "nasty.html")
    theirs = tmp_path / "cli.html"
    assert main(["run", SUDOKU, "--seed", "1", "--replay", str(theirs)]) == 0
    for path in (mine, theirs):
        replay = open_replay(path)
        slider, canvas = replay.locator("input[type=range]"), replay.locator(".reply .canvas").last
        slider.press("Home")  # it plays from the beginning; now it waits
        expect(replay.locator(".where")).to_have_text("noise")
        assert canvas.inner_text() != SOLUTION
        slider.press("ArrowRight")
        expect(replay.locator(".where")).to_have_text("step 1")
        expect(canvas.locator(".given")).to_have_text(["1", "1", "2", "1", "4"])
        replay.get_by_label("How long each step is shown").select_option("80")
        replay.get_by_label("Play the replay").click()
        expect(replay.locator(".where")).to_have_text("settled")
        assert canvas.inner_text().strip() == SOLUTION
        assert replay.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    one, other = data_in(mine), data_in(theirs)
    assert one.keys() == other.keys()
    # The same question and seed: both exports hold the same steps.
    for data in (one, other):
        for step in data["canvases"][0]["drafts"]:
            assert len(step.pop("entropy")) == len(step["tokens"])  # rounded in two ways
    assert (one["texts"], one["canvases"]) == (other["texts"], other["canvases"])
    replay = open_replay(nasty)
    expect(replay.locator(".said")).to_have_text(NASTY)
    expect(replay.locator(".where")).to_have_text("settled")
    expect(replay.locator(".reply .canvas").last).to_contain_text(" $& <b>x</b>")
    assert replay.title() == "Sfumato: a replay"
    assert replay.locator("b").count() == 0


def test_a_replay_is_saved_as_a_video_and_the_recording_can_be_stopped(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page()
    tokens = [["a ", "b\n"], ["<b>", "b\n"]]
    script = Script().draft(0, 1, tokens[0]).draft(0, 2, tokens[1]).settle(0, tokens[1])
    script.delta(content="<b>b\n").end().play(page)
    ask(page, "film it")
    wait(page)
    video = page.locator(".actions button", has_text="video")
    with page.expect_download() as download:
        video.click()
    assert download.value.suggested_filename == "sfumato-replay.webm"
    path = tmp_path / "replay.webm"
    download.value.save_as(path)
    assert path.read_bytes()[:4] == b"\x1a\x45\xdf\xa3"  # how WebM begins
    assert 1_000 < path.stat().st_size < 1_000_000
    expect(page.get_by_role("button", name="Save video")).to_be_visible()
    page.get_by_role("button", name="Save video").click()
    page.get_by_role("button", name="Stop recording").click()
    expect(page.get_by_role("button", name="Not saved")).to_be_visible()
