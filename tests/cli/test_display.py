from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.cli.screen import Screen

from sfumato import Done, Draft, Settled
from sfumato.cli.display import Live, Plain, Region, is_visual
from sfumato.diffusion.limits import Stats


def drafted(canvas: int, step: int, text: str) -> Draft:
    """A canvas of at least 40 tokens, characters but for the end's id 0."""
    ids = torch.tensor([ord(c) for c in text.ljust(40, "\0")])
    sure = torch.ones(len(ids))
    return Draft(
        canvas, step, ids, 0 * sure, sure.bool(), 48, top_ids=ids[:, None], top_probs=sure[:, None]
    )


def commit(canvas: int, text: str) -> Settled:
    return Settled(canvas, text, "", [ord(c) for c in text], "converged")


def done(text: str, stop_reason: str = "eos") -> Done:
    stats = Stats(3, 20, 2, [3, 2], ["converged"] * 2, prefill_s=0.1, denoise_s=0.2, commit_s=0.1)
    reply: Any = SimpleNamespace(text=text, stats=stats, stop_reason=stop_reason)
    return Done(reply)


def live(width: int, tick: float = 1.0, **how: Any) -> tuple[Live, Screen]:
    """A display, and what it shows; `tick` is the time between two looks at the clock."""
    screen = Screen(width)
    console = Console(file=screen, width=width, height=24, force_terminal=True, **how)
    clock = map(float, itertools.count(step=tick))
    return Live(
        console, lambda ids: "".join(chr(i) for i in ids if i), clock=clock.__next__
    ), screen


def test_the_answer_is_what_stays() -> None:
    display, screen = live(40)
    with display:
        display.show(drafted(0, 1, "??????? ??????"))
        assert screen.terminal.lines[0] == "??????? ??????"
        assert screen.terminal.lines[-3].startswith("canvas 1 · step  1/48 · ━━")
        display.show(drafted(0, 2, "A board:\n12\n34"))
        assert screen.terminal.lines[:3] == ["A board:", "12", "34"]
        display.show(commit(0, "A board:\n12\n34"))
        display.show(drafted(1, 1, " and more text that needs a second line"))
        display.show(commit(1, " and more text that needs a second line"))
        display.show(done("A board:\n12\n34 and more text that needs a second line."))
    assert screen.terminal.lines == [
        "A board:",
        "12",
        "34 and more text that needs a second",
        "line.",
        "5 steps in 2 canvases · 80.0 ms/step",
        "4.00 tok/forward · 50.0 tok/s",
    ]


def test_the_speed_leaves_the_drawing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, moments = Screen(80), SimpleNamespace(now=0.0)
    console = Console(file=screen, width=80, height=24, force_terminal=True)
    draw = Region.draw

    def slowly(self: Region, *lines: Any, **above: Any) -> None:
        moments.now += 5.0
        draw(self, *lines, **above)

    monkeypatch.setattr(Region, "draw", slowly)
    with Live(console, lambda ids: "x", clock=lambda: moments.now) as shown:
        for step in (1, 2):
            moments.now += 0.1
            shown.show(drafted(0, step, "x"))
        assert "100 ms/step" in screen.terminal.lines[-2] + screen.terminal.lines[-1]


@pytest.mark.parametrize("width", [4, 8, 20, 200])
def test_the_footer_stays_where_it_is_while_denoising(width: int) -> None:
    display, screen = live(width)
    heights = set()
    with display:
        for step, text in enumerate(["aaaa bbbb " * 5, "x\n" * 25, "漢" * 50, " " * 50], 1):
            display.show(drafted(0, step, text))
            heights.add(len(screen.terminal.lines))
            assert all(len(line) < max(width, 5) for line in screen.terminal.lines)
    assert len(heights) == 1


def test_a_narrow_terminal_shows_every_figure_below_a_canvas_that_stays_in_place() -> None:
    display, screen = live(20)
    with display:
        display.show(drafted(0, 9, "one"))
        first = screen.terminal.lines
        display.show(drafted(0, 10, "one"))
        second = screen.terminal.lines
        display.show(done("one"))
    assert [line.lstrip() for line in second[-5:]] == [
        "step 10/48",
        "━━━━━━━",
        "1000 ms/step",
        "1.50 tok/forward",
        "1.50 tok/s",
    ]
    assert first.index("step  9/48") == second.index("step 10/48")
    assert screen.terminal.lines[-1] == "50.0 tok/s"


def test_a_low_terminal_keeps_half_of_itself_for_the_canvas() -> None:
    screen = Screen(20)
    console = Console(file=screen, width=20, height=5, force_terminal=True)
    with Live(console, lambda ids: "".join(map(chr, ids))) as display:
        display.show(drafted(0, 1, "a\nb\nc\nd"))
        assert screen.terminal.lines == ["a", "b", "canvas 1", "step  1/48"]


def test_a_ctrl_c_on_the_way_out_leaves_the_cursor() -> None:
    display, screen = live(40)

    def pressed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), display:
        display._view.finish = pressed  # type: ignore[assignment, method-assign]
    assert screen.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_ascii_glyphs(encoding: str) -> None:
    class Narrow(Screen):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    screen = Narrow(60)
    console = Console(file=screen, width=60, height=24, force_terminal=True)
    with Live(console, lambda ids: "".join(map(chr, ids))) as display:
        display.show(drafted(0, 1, "a"))
        assert screen.terminal.lines[-2].startswith("canvas 1 - step  1/48 - ####")
        display.show(done("a"))
    assert screen.getvalue().isascii()


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupted_it_leaves_what_was_committed_and_the_last_draft(presses: int) -> None:
    display, screen = live(40)
    try:
        with display:
            display.show(drafted(0, 1, "First."))
            display.show(commit(0, "First."))
            display.show(drafted(1, 1, " Never\nmore"))
            if presses == 2:
                raise KeyboardInterrupt
            display.show(done("First.", "cancelled"))
    except KeyboardInterrupt:
        assert presses == 2
    assert screen.terminal.lines[:2] == ["First. Never", "more"]
    assert screen.terminal.lines[2:3] == (["5 steps in 2 canvases · 80.0 ms/step"] * (2 - presses))


def test_interrupted_before_any_text_it_shows_no_zeros() -> None:
    display, screen = live(80)
    with display:
        display.show(drafted(0, 1, "Haze"))
        reply = done("", "cancelled")
        reply.reply.stats.steps, reply.reply.stats.output_tokens = [], 0  # type: ignore[misc]
        display.show(reply)
    assert screen.terminal.lines == ["Haze"]
    display, screen = live(80)
    with pytest.raises(ValueError), display:
        display.show(drafted(0, 1, "Haze"))
        raise ValueError("what fails leaves what was committed alone")
    assert screen.terminal.lines == []


def test_drafts_that_come_too_fast_are_not_drawn() -> None:
    display, screen = live(40, tick=0.001)
    with display:
        display.show(drafted(0, 1, "one"))
        display.show(drafted(0, 2, "two"))
        assert screen.terminal.lines[0] == "one"


def test_no_color_leaves_no_color() -> None:
    display, screen = live(40, color_system="truecolor", no_color=True)
    with display:
        display.show(drafted(0, 1, "glow"))
    assert "glow" in screen.getvalue()
    assert not any(f"\x1b[{code}" in screen.getvalue() for code in ("3", "9", "38", "1;3", "1;9"))


def test_cut_off_replies_say_so() -> None:
    display, screen = live(60)
    with display:
        display.show(done("", "max_tokens"))
    assert "cut off by --max-tokens" in screen.terminal.lines[0]


def test_plain_spares_a_terminal_escape_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with Plain() as display:
        display.show(commit(0, "a\x1b[2Jb"))
    assert capsys.readouterr().out == "a·[2Jb\n"


@pytest.mark.parametrize(
    ("terminal", "term", "expected"),
    [(True, "xterm", True), (True, "dumb", False), (True, None, False), (False, "xterm", False)],
)
def test_is_visual(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str | None, expected: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.delenv("TERM", raising=False)
    if term:
        monkeypatch.setenv("TERM", term)
    assert is_visual() is expected
