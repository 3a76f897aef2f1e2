from __future__ import annotations

import random

import pytest
from rich.text import Text

from sfumato.cli.display import GLOW, HAZE, HAZE_GLOW, SETTLED, THOUGHT, CanvasDrawing


def view_of_characters() -> CanvasDrawing:
    """Ids are code points; 0 stands for the special tokens, which show as nothing."""
    return CanvasDrawing(lambda ids: "".join(chr(i) for i in ids if i))


def draft(
    view: CanvasDrawing, text: str, accepted: bool | list[bool] = True, canvas: int = 0
) -> None:
    flags = accepted if isinstance(accepted, list) else [accepted] * len(text)
    view.draft(canvas, [ord(c) for c in text], flags)


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def style_at(line: Text, column: int) -> str:
    return next((str(s.style) for s in line.spans if s.start <= column < s.end), SETTLED)


@pytest.mark.parametrize("width", [4, 20, 80])
def test_the_number_of_lines_never_changes_while_denoising(width: int) -> None:
    rng = random.Random(0)
    view = view_of_characters()
    counts, widths = set(), set()
    for _ in range(40):
        draft(view, "".join(rng.choice("abc  \n\0\0漢") for _ in range(64)), rng.random() < 0.5)
        lines = view.lines(width, 12)
        counts.add(len(lines))
        widths.update(line.cell_len for line in lines)
    assert len(counts) == 1
    assert max(widths) <= width


def test_a_board_looks_like_a_board() -> None:
    view = view_of_characters()
    draft(view, "1234\n3412\n2143\n4321" + "\0" * 13)
    assert plain(view.lines(40, 10)) == ["1234", "3412", "2143", "4321"]


def test_no_more_lines_than_the_terminal_has() -> None:
    view = view_of_characters()
    draft(view, "x\n" * 40)
    assert len(view.lines(40, 5)) == 5


def test_another_size_is_laid_out_afresh() -> None:
    view = view_of_characters()
    draft(view, "one two three four five six seven eight nine")
    wide, narrow = view.lines(80, 20), view.lines(20, 20)
    assert len(narrow) > len(wide)
    assert all(line.cell_len <= 20 for line in narrow)
    assert len(view.lines(80, 20)) == len(wide)


def test_changed_characters_glow_and_fade() -> None:
    view = view_of_characters()
    draft(view, "ab")
    for _ in range(len(GLOW)):
        draft(view, "ab")
    assert style_at(view.lines(40, 9)[0], 1) == SETTLED
    for expected in (*GLOW, SETTLED):
        draft(view, "aX")
        (line, *_) = view.lines(40, 9)
        assert style_at(line, 0) == SETTLED
        assert style_at(line, 1) == expected


def test_what_is_not_accepted_is_dim_even_after_it_was() -> None:
    view = view_of_characters()
    draft(view, "ab", [True, False])
    assert style_at(view.lines(40, 9)[0], 1) == HAZE_GLOW[0]
    for _ in range(4):
        draft(view, "ab", [True, False])
    (line, *_) = view.lines(40, 9)
    assert [style_at(line, 0), style_at(line, 1)] == [SETTLED, HAZE]
    draft(view, "ab", [False, True])
    (line, *_) = view.lines(40, 9)
    assert [style_at(line, 0), style_at(line, 1)] == [HAZE, SETTLED]
    assert view.share == 0.5


def test_commit_gives_whole_lines_and_carries_the_rest() -> None:
    view = view_of_characters()
    draft(view, "The quick brown")
    assert plain(view.commit("The quick brown", 11)) == ["The quick"]
    assert view.carry.plain == "brown"
    draft(view, " fox", canvas=1)
    assert view.lines(11, 9)[0].plain == "brown fox"
    assert plain(view.commit(" fox\njumps", 11)) == ["brown fox"]
    assert plain(view.finish()) == ["jumps"]
    assert view.finish() == []


def test_a_word_that_two_canvases_share_is_not_split() -> None:
    view = view_of_characters()
    assert plain(view.commit("The elep", 9)) == []
    assert plain(view.commit("hant", 9)) == ["The"]
    assert view.carry.plain == "elephant"


def test_indentation_survives() -> None:
    view = view_of_characters()
    assert plain(view.commit("if x:\n    return  y\n", 40)) == ["if x:", "    return  y"]


def test_a_thought_has_lines_and_a_style_of_its_own() -> None:
    view = view_of_characters()
    assert view.commit("", 40, thought="Let me") == []
    lines = view.commit("Yes.", 40, thought=" think.")
    assert [(line.plain, line.style) for line in lines] == [("Let me think.", THOUGHT)]
    assert [(line.plain, line.style) for line in view.finish()] == [("Yes.", SETTLED)]


def test_counts_only_accepted_tokens_that_show() -> None:
    view = view_of_characters()
    draft(view, "ab\0\0", [True, False, True, True])
    assert view.accepted == 1


def test_doubted_text_is_underlined() -> None:
    """Over lines that are broken, in a last line that goes on, and past what is replaced."""
    view = view_of_characters()
    lines = view.commit("one\ttwo three four", 12, doubted=[range(4, 13)])
    lines += view.commit(" five", 12, doubted=[range(1, 3)])
    lines += view.finish()
    assert plain(lines) == ["one    two", "three four", "five"]
    underlined = [
        "".join(line.plain[at] for at in range(len(line)) if style_at(line, at) == "underline")
        for line in lines
    ]
    assert underlined == ["two", "three", "fi"]
