from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfumato.cli import display


def test_progress_counts_from_one_and_shows_the_accepted_share() -> None:
    assert display.progress(0, 3, 48, 0.5) == ["canvas 1", "step  3/48", "━━━━╌╌╌"]


def test_speed() -> None:
    assert display.speed(4, 0.1, 30) == ["25.0 ms/step", "7.50 tok/forward", " 300 tok/s"]
    assert display.speed(0, 0.1, 0) == []


def test_summary() -> None:
    stats = SimpleNamespace(
        steps=[3, 2], canvases=2, prefill_s=0.1, denoise_s=0.3, commit_s=0.1, output_tokens=50
    )
    assert display.summary(stats) == [
        "5 steps in 2 canvases",
        "100 ms/step",
        "10.0 tok/forward",
        "100 tok/s",
    ]


FIELDS = ["step 3/48", "25.0 ms/step", "7.50 tok/forward", " 300 tok/s"]


def plain(fields: list[str], width: int, most: int = 99) -> list[str]:
    return [line.plain for line in display.lines(fields, width, most)]


def test_fields_that_do_not_fit_go_to_the_next_line() -> None:
    assert plain(FIELDS, 80) == ["step 3/48 · 25.0 ms/step · 7.50 tok/forward ·  300 tok/s"]
    assert plain(FIELDS, 24) == [
        "step 3/48 · 25.0 ms/step",
        "7.50 tok/forward",
        " 300 tok/s",
    ]


def test_eighty_columns_have_it_all_in_one_line() -> None:
    fields = display.progress(98, 10, 48, 0.5) + display.speed(1, 1.0, 1000)
    assert len(plain(fields, 79)) == 1


def test_a_field_too_wide_for_a_line_is_broken_at_words() -> None:
    assert plain(["15 steps in 12 canvases", "25.0 ms/step"], 14) == [
        "15 steps in 12",
        "canvases",
        "25.0 ms/step",
    ]


@pytest.mark.parametrize("width", range(1, 60))
def test_nothing_is_lost_and_no_line_is_too_wide(width: int) -> None:
    lines = plain(FIELDS, width)
    assert max(map(len, lines)) <= width
    bare = "".join("".join(lines).replace("·", "").split())
    assert bare == "".join("".join(FIELDS).split())


def test_more_lines_than_there_is_room_for_are_left_out() -> None:
    assert plain(FIELDS, 20, most=2) == ["step 3/48", "25.0 ms/step"]


@pytest.mark.parametrize("value", [0.001, 9.994, 9.996, 99.94, 99.96, 999.4, 9999.4])
def test_a_speed_keeps_its_width_whatever_it_is(value: float) -> None:
    assert len(display.speed(1, value / 1000, 0)[0]) == len("25.0 ms/step")


def test_progress_keeps_its_width() -> None:
    fields = [display.progress(0, step, 48, step / 48) for step in (1, 9, 10, 48)]
    assert len({tuple(map(len, each)) for each in fields}) == 1
