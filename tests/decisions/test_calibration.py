from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.decisions.test_fit import drawn

from sfumato import Score, YesNo
from sfumato.decisions.calibration import (
    ModelIdentity,
    calibration_path,
    calibration_text,
    find_calibration,
    fit,
    read_calibration,
    tempered,
)
from sfumato.decisions.schema import schema_of
from sfumato.diffusion.constraints.questions import Reading, ScoreAnswer, YesNoAnswer

NAME = 'an "urgent"\n😀 one'
QUESTIONS = schema_of({NAME: YesNo("Now?"), "anger": Score("calm", "mild", "furious")}).questions
MODEL = ModelIdentity("tiny.gguf", "ab12", "float32", "int8", "")
READING = Reading(samples="auto", joint=False)
FITTED = fit(*drawn(60, 2.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    text = calibration_text(MODEL, READING, QUESTIONS, {NAME: FITTED}, "2026-11-22")
    path = calibration_path(tmp_path / "q.toml", "mine")
    path.write_text(text, encoding="utf-8")
    return path


def test_it_is_found_by_name_and_by_path(path: Path) -> None:
    assert path.name == "q.mine.calibration.toml"
    calibration = find_calibration(path.with_name("q.toml"), "mine")
    assert calibration == read_calibration(path) == find_calibration(Path("x.toml"), str(path))
    assert (calibration.model, calibration.reading) == (MODEL, READING)
    assert calibration.questions[NAME].temperature == pytest.approx(FITTED.temperature, abs=1e-4)


def test_it_is_applied_to_the_questions_that_it_has(path: Path) -> None:
    calibration = read_calibration(path)
    answers = {NAME: YesNoAnswer((0.9, 0.1), 0.5, True), "anger": ScoreAnswer((0.1, 0.6, 0.3))}
    applied = calibration.apply(answers, QUESTIONS, MODEL, READING)
    temperature = calibration.questions[NAME].temperature
    assert applied[NAME] == YesNoAnswer(tempered((0.9, 0.1), temperature), 0.5, True)
    assert applied["anger"] is answers["anger"]


def test_it_is_refused_for_anything_else(path: Path) -> None:
    calibration = read_calibration(path)
    calibration.check(QUESTIONS, MODEL, READING)
    calibration.check(QUESTIONS, replace(MODEL, name="renamed"), READING)
    with pytest.raises(ValueError, match=r"'tiny\.gguf' with the weights ab12.*cd3"):
        calibration.check(QUESTIONS, replace(MODEL, weights="cd3"), READING)
    for name in ("dtype", "activations", "quantize"):
        with pytest.raises(ValueError, match=f"was made with {name} = .*loaded with 'x'"):
            calibration.check(QUESTIONS, replace(MODEL, **{name: "x"}), READING)
    with pytest.raises(ValueError, match="samples = 'auto', and this has 3"):
        calibration.check(QUESTIONS, MODEL, replace(READING, samples=3))
    with pytest.raises(ValueError, match="no temperature for any"):
        calibration.check({"x": QUESTIONS[NAME]}, MODEL, READING)
    changed = {**QUESTIONS, NAME: replace(QUESTIONS[NAME], instructions="When?")}
    with pytest.raises(ValueError, match="has other words"):
        calibration.check(changed, MODEL, READING)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("format = 1", "format = 2", "format must be 1"),
        ("model = {", "model = 1 # {", "must have a model with name, weights, dtype"),
        ('weights = "ab12"', "weights = 5", "must have a model with name, weights, dtype"),
        ("orders = 1", 'orders = "x"', "orders: 'x' is no such value as 1"),
        ("temperature = ", "temperature = 1e9 #", "must have a temperature from 0.05 to 20.0"),
    ],
)
def test_a_malformed_file_is_refused(path: Path, before: str, after: str, message: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_calibration(path)
