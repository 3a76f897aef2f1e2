from __future__ import annotations

from pathlib import Path

import pytest

from sfumato import Choice, Score, YesNo
from sfumato.decisions.question_file import read_questions

TEXT = """
state = "Subject: {subject}"

[questions]
red = "bool"

[questions.late]
type = "bool"
instructions = "Late?"

[questions.urgent]
type = "yes/no"
instructions = "Reply needed?"
yes = "money is moving"

[questions.team]
type = "choice"
options = ["billing", "tech"]

[questions.kind]
type = "choice"
options = { bug = "does not work", other = "" }

[questions.anger]
type = "score"
levels = ["calm", "furious"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "q.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_questions_and_a_template(tmp_path: Path) -> None:
    file = read_questions(written(tmp_path, TEXT))
    assert file.state and file.state.columns == ["subject"]
    assert file.questions == {
        "red": YesNo(),
        "late": YesNo("Late?"),
        "urgent": YesNo("Reply needed?", yes="money is moving"),
        "team": Choice(["billing", "tech"]),
        "kind": Choice({"bug": "does not work", "other": ""}),
        "anger": Score("calm", "furious"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = \n", r"q\.toml: is not TOML: .*line 1"),
        ("", "has no questions"),
        ("stat = 'x'", "unknown key 'stat'; the nearest is 'state'"),
        ("state = 3\n[questions.a]\ntype='yes/no'", "state must be a text"),
        ("state = '{'\n[questions.a]\ntype='yes/no'", r"q\.toml: state: .*names no column"),
        ("questions.a = 3", r"\[questions\.a\]: must be a table"),
        ("[questions.a]\ntype='int'", r"\[questions\.a\]: type must be one of yes/no, bool, "),
        ("red = 'bool'", r"red: is a question outside .* table \[questions\.red\] with a type"),
        ("[red]\ntype='bool'", r"red: is a question outside .* table \[questions\.red\] with"),
        ("[question.red]\ntype='bool'", "unknown key 'question'; the nearest is 'questions'"),
        ("[questions]\nred = 'int'", r"\[questions\.red\]: must be a table with a type"),
        ("[questions.a]\ntype='yes/no'\nlevels=[]", r"unknown key 'levels'; the nearest is"),
        ("[questions.a]\ntype='choice'\noptions='b'", "options must be a list or a table"),
        ("[questions.a]\ntype='choice'\noptions=['b','b']", "'b' is there twice"),
        ("[questions.a]\ntype='score'\nlevels=[1]", "a level must be a text"),
        ("[questions.a]\ntype='yes/no'\nyes=1", "yes must be a text"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_questions(written(tmp_path, text))
    assert "q.toml" in str(raised.value)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has more than 4,194,304 bytes"):
        read_questions(written(tmp_path, "#" * (4 << 20) + "\n"))
