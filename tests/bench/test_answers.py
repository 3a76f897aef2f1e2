"""Tasks with known answers: how they are read, when a reply is right, what rows come to."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from sfumato.bench import answers
from sfumato.bench.answers import Answered, AskedTask, Verdict, task_of, verdict


def reply(text: str) -> SimpleNamespace:
    return SimpleNamespace(text=text, verification=None)


@pytest.mark.parametrize(
    ("accepted", "text", "outcome"),
    [
        (["Bern", "Berne"], "The capital is **BERN**.", "right"),
        (["Bern"], "Berlin, or Berne.", "wrong"),
        (["García Márquez"], "Gabriel Garcia Marquez wrote it.", "right"),
        (["8"], "It has 18 planets.", "wrong"),
        (["8"], "8", "right"),
        (["3"], "About 3.14", "wrong"),
        (["1000000"], "1,000,000 people", "right"),
        (["H2O"], "H₂O", "right"),
        (["東京"], "東京です。", "right"),
        (["K"], "The symbol is Kr.", "wrong"),
        (["Rome"], " \n", "abstained"),
        (["Rome"], "I’m not sure, sorry.", "abstained"),
        (["Rome"], "I do not know much, but it is Rome.", "right"),
    ],
)
def test_a_reply_is_right_where_it_has_an_accepted_answer(accepted, text, outcome):
    assert verdict(task_of({"question": "?", "answers": accepted}), reply(text)).outcome == outcome


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"question": "a"}, "must have answers or a check, and not both"),
        ({"question": "a", "answers": ["b"], "check": "True"}, "and not both"),
        ({"question": " ", "answers": ["b"]}, "question must be a text"),
        ({"question": "a" * 100_001, "answers": ["b"]}, "question has 100,001 characters"),
        ({"question": "a", "answers": ["b"] * 101}, "a list of 1 to 100 texts"),
        ({"question": "a", "answers": []}, "a list of 1 to 100 texts"),
        ({"question": "a", "answers": ["!"]}, "has no letter and no digit; write a check"),
        ({"question": "a", "answers": [8]}, "answers must be a text"),
        ({"question": "a", "check": "1 +"}, "check: is not Python"),
        ({"question": "a", "check": "(" * 3_000}, "check: is not Python"),
        ({"question": "a", "answer": ["b"]}, "unknown key 'answer'; the nearest is 'answers'"),
    ],
)
def test_what_is_no_task_is_refused(cells, why):
    with pytest.raises(ValueError, match=why):
        task_of(cells)


def test_checks_run_apart_and_within_bounds(monkeypatch):
    checks = {
        "int(answer) % 7 == 0": Verdict("right"),
        "import re\nright = re.fullmatch('[0-9]{3}', answer)": Verdict("wrong"),
        "answer.nope()": Verdict(
            "wrong", "its check raised AttributeError: 'str' object has no attribute 'nope'"
        ),
        "import os\nos._exit(3)": Verdict("failed", "its check ended with 3: "),
        "import os\nright = set(os.environ) <= {'LC_CTYPE'} and not os.listdir()": Verdict("right"),
    }
    for check, expected in checks.items():
        assert verdict(AskedTask("?", check=check), reply("14")) == expected, check
    monkeypatch.setattr(answers, "CHECK_S", 0.3)
    assert answers.run_check("while True: pass", "").note == "its check took longer than 0.3 s"


def test_the_packaged_facts_are_tasks():
    lines = answers.FACTS.read_text("utf-8").splitlines()
    tasks = [task_of(json.loads(line)) for line in lines]
    assert len({task.question for task in tasks}) == len(tasks) == 60
    # No question gives its answer away.
    assert all(verdict(task, reply(task.question)).outcome == "wrong" for task in tasks)


def test_rows_come_to_figures_a_table_and_a_picture():
    rows = [
        Answered(1, 4, "a?", "A", "right", forwards=4, canvases=2, tokens=8, seconds=1),
        Answered(2, 4, "b?", "", "abstained", forwards=2, canvases=1, seconds=3),
        Answered(1, None, "a?", "B", "wrong", forwards=9, canvases=1, tokens=2, seconds=2),
        Answered(2, None, "b?", "", "failed", "timeout"),
    ]
    assert [answers.answered_of(asdict(row)) for row in rows] == rows
    first = asdict(rows[0])
    for wrong in ({**first, "outcome": "good"}, {**first, "task": "1"}, {}):
        with pytest.raises(ValueError, match="is no row of answers"):
            answers.answered_of(wrong)
    four, own = answers.figures(rows)
    counts = {"right": 1, "wrong": 0, "abstained": 1, "failed": 0}
    assert four | counts == four and (own["max_steps"], own["right_share"]) == (None, 0)
    assert (four["forwards_per_task"], four["forwards_per_canvas"]) == (3, 2)
    assert (four["tokens_per_forward"], four["seconds"]) == (8 / 6, 4)
    # Wilson's interval of 50 in 60: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    assert answers.interval(50, 60) == pytest.approx((0.7197, 0.9069), abs=1e-4)
    assert answers.interval(0, 1)[0] == 0 and answers.interval(1, 1)[1] == 1
    console = Console(width=40)
    with console.capture() as captured:
        console.print(answers.to_table([four, own]))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[:2] == [["steps", "4", "own"], ["tasks", "2", "2"]]
    assert ["share", "right", "50%", "0%"] in lines and "…" not in captured.get()
    picture = ElementTree.fromstring(answers.plot([own, four], "a < b"))
    tags = [each.tag.rpartition("}")[2] for each in picture.iter()]
    assert (tags.count("polyline"), tags.count("circle")) == (1, 2)
    assert "a < b" in "".join(picture.itertext())
