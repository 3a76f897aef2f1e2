from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_decider import MODEL, ScriptedDecider

from sfumato.decisions.calibration import read_calibration

QUESTIONS = """
[questions.urgent]
type = "yes/no"
instructions = "Now?"
[questions.team]
type = "choice"
options = ["billing", "tech"]
"""
RUN = ("calibrate", "-q", "q.toml", "--labelled", "t.csv")


def table(rows: int) -> str:
    """Labels of which one in four is not what the probability of nearly 1 says."""
    dice = random.Random(1)
    lines = ["text,urgent,team"]
    for number in range(rows):
        sure = dice.random() < 0.5
        right = dice.random() < 0.75
        urgent = "yes" if sure == right else "no"
        team = ("billing" if sure else "tech") if number < 10 else ""
        lines.append(f"p {0.98 if sure else 0.02},{urgent},{team}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def decider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedDecider:
    monkeypatch.chdir(tmp_path)
    Path("q.toml").write_text(QUESTIONS)
    Path("t.csv").write_text(table(80))
    decider = ScriptedDecider()
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: MODEL)
    monkeypatch.setattr("sfumato.cli.rows.running", decider.running)
    return decider


def test_a_temperature_is_fitted_stored_and_applied(cli: Any, decider: ScriptedDecider) -> None:
    done = cli(*RUN, "--name", "mine", "--samples", "2")
    assert done.code == 0
    assert "warning: team: has 10 labels; a temperature needs 30 at least" in done.err
    # Labels are no part of what is asked.
    assert decider.requests[0].state == '{"text": "p 0.02"}' or "urgent" not in (
        decider.requests[0].state
    )
    lines = done.out.splitlines()
    assert lines[2].split()[:2] == ["urgent", "80"]
    assert lines[-1] == "use it: --calibration q.mine.calibration.toml"
    calibration = read_calibration("q.mine.calibration.toml")
    assert calibration.questions["urgent"].temperature > 2
    assert calibration.reading.samples == 2
    ElementTree.parse("q.mine.calibration.svg")
    run = ("decide", "t.csv", "-q", "q.toml", "-o", "o.jsonl", "--calibration", "mine")
    assert "made with samples = 2, and this has 1" in cli(*run).err
    Path("o.jsonl").unlink(missing_ok=True)
    assert cli(*run, "--samples", "2").code == 0
    answers = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert {round(abs(each["urgent_probability"] - 0.5), 3) for each in answers} != {0.48}
    assert {each["team_confidence"] for each in answers} == {0.96}


def test_the_figures_as_json(cli: Any, decider: ScriptedDecider) -> None:
    figures = json.loads(cli(*RUN, "--json").out)
    urgent = figures["urgent"]
    assert urgent["after"]["ece"] < urgent["before"]["ece"]
    assert urgent["after"]["accuracy"] == urgent["before"]["accuracy"]
    assert len(urgent["fold_temperatures"]) == 5
    assert "exists already" in cli(*RUN).err
    Path("q.default.calibration.toml").unlink()
    Path("q.default.calibration.svg").write_text("mine")
    assert "--name: q.default.calibration.svg: exists already" in " ".join(cli(*RUN).err.split())
    assert Path("q.default.calibration.svg").read_text() == "mine"
    assert cli(*RUN, "--force").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\na\n", "t.csv: has no labels; give it a column for each question: urgent, team"),
        ("text,urgent\na,maybe\n", "t.csv:2: column 'urgent': 'maybe' is none of yes, no"),
        (table(20), "urgent: has 20 labels"),
        ("text,urgent\n" + "p 0.3,yes\n" * 40, "urgent: all 40 labels are the same"),
    ],
)
def test_labels_that_do_not_suffice(
    cli: Any, decider: ScriptedDecider, text: str, message: str
) -> None:
    Path("t.csv").write_text(text)
    done = cli(*RUN)
    assert done.code == 2 and message in done.err.splitlines()[-1]
    assert not list(Path().glob("*.calibration.*"))


def test_too_many_rows_are_refused(
    cli: Any, decider: ScriptedDecider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.cli.decide.MOST_PROBABILITIES", 319)
    assert "would have 320 probabilities, and 319 are the most" in cli(*RUN).err


def test_a_name_is_plain(cli: Any, decider: ScriptedDecider) -> None:
    assert "has other characters" in cli(*RUN, "--name", "../x").err
