from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfumato.cli.view import footer


def test_progress_counts_from_one_and_shows_the_accepted_share() -> None:
    assert footer.progress(0, 3, 48, 0.5) == ["canvas 1", "step 3/48", "━━━━━╌╌╌╌╌"]


def test_speed() -> None:
    assert footer.speed(4, 0.1, 30) == ["25.0 ms/step", "7.50 tok/forward", "300 tok/s"]
    assert footer.speed(0, 0.1, 0) == []


def test_pace_leaves_the_drawing_out() -> None:
    moments = iter([0.0, 0.1, 5.0, 5.3])
    pace = footer.Pace(lambda: next(moments))
    pace.arrived(is_step=True)
    pace.resume()
    pace.arrived(is_step=True)
    assert (pace.steps, pace.busy_s) == (2, pytest.approx(0.4))


def test_summary() -> None:
    stats = SimpleNamespace(
        steps=[3, 2], canvases=2, prefill_s=0.1, denoise_s=0.3, commit_s=0.1, output_tokens=50
    )
    assert footer.summary(stats) == [
        "5 steps in 2 canvases",
        "100 ms/step",
        "10.0 tok/forward",
        "100 tok/s",
    ]


@pytest.mark.parametrize("width", range(1, 40))
def test_what_does_not_fit_is_left_out(width: int) -> None:
    line = footer.line(["step 3/48", "25 ms/step", "7.5 tok/forward"], width)
    assert line.plain.startswith("step 3/48"[:width])
    assert line.cell_len <= width
