from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import file_of, picture
from tests.support.scripted_decider import MODEL, ScriptedDecider
from tests.support.seeing_model import seeing_model

import sfumato
from sfumato.decisions import read_questions

QUESTIONS = """
state = "{text}"
[questions.urgent]
type = "yes/no"
instructions = "Now?"
[questions.team]
type = "choice"
options = ["billing", "tech"]
"""
TABLE = "id,text\n1,p 0.9\n2,p 0.2\n3,too long\n4,p 0.7\n5,slow\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("q.toml").write_text(QUESTIONS)
    Path("t.csv").write_text(TABLE)
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: MODEL)
    return tmp_path


def scripted(monkeypatch: pytest.MonkeyPatch, **how: Any) -> ScriptedDecider:
    decider = ScriptedDecider(**how)
    monkeypatch.setattr("sfumato.cli.rows.running", decider.running)
    return decider


RUN = ("decide", "t.csv", "-q", "q.toml", "-o", "out.csv", "--concurrency", "1")


def test_a_table_is_decided_and_summed_up(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decider = scripted(monkeypatch)
    done = cli(*RUN, "--probabilities", "--seed", "3", "--samples", "auto")
    assert (done.code, done.err) == (0, "")
    assert [each.state for each in decider.requests][:2] == ["p 0.9", "p 0.2"]
    assert {(each.seed, each.samples) for each in decider.requests} == {(3, "auto")}
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert [row["urgent_answer"] for row in rows] == ["yes", "no", "", "yes", ""]
    assert rows[0] | {"id": "1", "team_answer": "billing", "team_confidence": "0.8"} == rows[0]
    assert json.loads(rows[1]["team_probabilities"]) == {"billing": 0.2, "tech": 0.8}
    assert [row["error"] for row in rows if row["error"]] == [
        "state: has no room",
        "timeout: took too long",
    ]
    lines = done.out.splitlines()
    assert lines[0].startswith("5 rows decided in ")
    assert lines[2].split() == ["urgent", "0.600", "0.900", "yes", "2,", "no", "1"]
    assert lines[4:] == [
        "2 rows have no answers (see their column error):",
        "  1 × state: has no room",
        "  1 × timeout: took too long",
    ]


def test_without_a_file_answers_are_printed(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output has the rows that a file would have, and nothing else."""
    scripted(monkeypatch)
    assert cli(*RUN).code == 0
    Path("t.tsv").write_text(TABLE.replace(",", "\t").replace("p 0.9", "p 0.9 é"))
    for more in ((), ("-o", "-")):
        done = cli("decide", "t.csv", "-q", "q.toml", *more)
        assert (done.code, done.out) == (0, Path("out.csv").read_text())
        assert done.err.startswith("5 rows decided in ")
    rows = list(
        csv.DictReader(cli("decide", "t.tsv", "-q", "q.toml").out.splitlines(), delimiter="\t")
    )
    assert rows[0]["text"] == "p 0.9 é" and rows[2]["error"] == "state: has no room"
    rows = [
        json.loads(line)
        for line in cli("decide", "t.csv", "-q", "q.toml", "--json").out.splitlines()
    ]
    assert [row["urgent_answer"] for row in rows] == ["yes", "no", None, "yes", None]

    def press(count: int) -> None:
        if count == 4:
            signal.raise_signal(signal.SIGINT)

    scripted(monkeypatch, on_request=press)
    done = cli("decide", "t.csv", "-q", "q.toml", "--concurrency", "1")
    assert (done.code, len(done.out.splitlines())) == (130, 3)
    assert "note: stopped after 2 of 5 rows; a file of --out is taken up" in done.err


def test_ctrl_c_leaves_whole_rows_and_the_same_command_goes_on(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(count: int) -> None:
        if count == 4:
            signal.raise_signal(signal.SIGINT)

    scripted(monkeypatch, on_request=press)
    done = cli(*RUN)
    assert done.code == 130
    assert "note: stopped after 2 of 5 rows; the same command goes on" in done.err
    assert len(Path("out.csv").read_text().splitlines()) == 3
    decider = scripted(monkeypatch)
    done = cli(*RUN, "--json")
    assert (done.code, decider.requests[0].state) == (0, "too long")
    figures = json.loads(done.out)
    assert (figures["rows"], figures["rows_before"], figures["failed"]) == (3, 2, 2)
    assert len(Path("out.csv").read_text().splitlines()) == 6
    decider = scripted(monkeypatch)
    done = cli(*RUN)
    assert (done.code, decider.requests) == (0, [])
    assert "(5 were there already)" in done.out


def test_another_table_or_other_questions_are_refused(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    assert cli(*RUN).code == 0
    Path("t.csv").write_text(TABLE.replace("5,slow", "6,slow"))
    done = cli(*RUN)
    assert done.code == 2 and "its 5 rows are not the first of t.csv" in done.err
    Path("t.csv").write_text(TABLE + "7,p 0.1\n")  # a table that has grown
    assert cli(*RUN).out.startswith("1 rows decided")
    assert "was made with other seed" in cli(*RUN, "--seed", "1").err
    with monkeypatch.context() as patch:  # the same path, retrained
        patch.setattr("sfumato.cli.generation.weights_of", lambda args: "other")
        assert "was made with other weights" in cli(*RUN).err
    Path("q.toml").write_text(QUESTIONS.replace("Now?", "When?"))
    assert "was made with other questions" in cli(*RUN).err
    assert cli(*RUN, "--force").out.startswith("6 rows decided")


def test_json_lines_keep_their_values(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    Path("t.jsonl").write_text('{"text": "0.9", "more": [1]}\n{"text": "0.1", "other": null}\n')
    run = ("decide", "t.jsonl", "-q", "q.toml", "-o", "o.jsonl", "--no-label-mass")
    assert cli(*run).code == 0
    first, second = map(json.loads, Path("o.jsonl").read_text().splitlines())
    assert first["more"] == [1] and first["urgent_probability"] == 0.9 and first["error"] is None
    assert second["other"] is None and "urgent_label_mass" not in second
    assert cli(*run).out.startswith("0 rows decided")
    with Path("t.jsonl").open("a") as table:
        table.write('{"text": "0.3", "a new key": 1}\n')
    assert cli(*run).out.startswith("1 rows decided")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("decide", "-q", "q.toml"), "give a table, or a text with --state and"),
        (("decide", "--state", "x", "-q", "q.toml", "-o", "o.csv"), "--out names the file"),
        (("decide", "t.csv", "-q", "q.toml", "-o", "t.csv"), "is the table itself"),
        (("decide", "t.csv", "-q", "q.toml", "-o", "no/o.csv"), "its folder does not exist"),
        (("decide", "t.csv", "-q", "none.toml", "-o", "o.csv"), "none.toml: No such file"),
        (("decide", "none.csv", "-q", "q.toml", "-o", "o.csv"), "none.csv: No such file"),
        (("decide", "t.csv", "-o", "o.csv"), "--questions is required"),
        ((*RUN, "--calibration", "mine"), "q.mine.calibration.toml: No such file"),
        ((*RUN, "--samples", "many"), "from 1 to 4096, and not auto"),
    ],
)
def test_wrong_use_is_one_line(cli: Any, files: Path, argv: tuple[str, ...], message: str) -> None:
    done = cli(*argv)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


def test_the_last_row_is_checked_before_the_model_is_loaded(cli: Any, files: Path) -> None:
    Path("t.csv").write_text(TABLE + "6\n")
    assert "t.csv:7: has 1 cells, and the header has 2" in cli(*RUN).err
    Path("q.toml").write_text(QUESTIONS.replace("{text}", "{body}"))
    Path("t.csv").write_text(TABLE)
    assert "t.csv:2: state: there is no column 'body'; there are id, text" in cli(*RUN).err
    assert not Path("out.csv").exists()


@pytest.fixture(scope="module")
def model() -> Any:
    return sfumato.load()


def test_one_text_is_shown_with_bars(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: model)
    run = ("decide", "--state", "-", "-q", "q.toml")
    done = cli(*run, stdin="Charged twice.")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("urgent: ") and lines[3].startswith("team: ")
    values = json.loads(cli(*run, "--json", stdin="Charged twice.").out)
    assert values["urgent_answer"] in ("yes", "no")
    assert sum(values["team_probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_questions_that_no_state_fits_are_refused_at_once(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: model)
    done = cli(*RUN, "--samples", "4096")
    assert done.code == 2 and "reads, and 4,096 are the most" in done.err


def test_a_table_has_the_answers_of_the_library(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: model)
    Path("t.csv").write_text("text\np 0.9\nThanks!\n")
    assert cli(*RUN[:-2], "--seed", "5", "--verify").code == 0
    questions = read_questions("q.toml").questions
    for row in csv.DictReader(Path("out.csv").read_text().splitlines()):
        decision = model.decide(row["text"], questions, seed=5)
        assert float(row["urgent_probability"]) == pytest.approx(
            decision["urgent"].probabilities[True], abs=1e-5
        )
        assert row["team_answer"] == decision["team"].value
        assert row["team_other"] == ("billing" if row["text"] == "p 0.9" else "")


def test_one_picture_is_decided_about(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states: list[Any] = []
    model = seeing_model(tmp_path / "model")
    decide = model.decide

    def seen(state: Any, *rest: Any, **how: Any) -> Any:
        states.append(state)
        return decide(state, *rest, **how)

    monkeypatch.setattr(model, "decide", seen)
    monkeypatch.setattr("sfumato.cli.generation.load", lambda args: model)
    for name, seed in (("a.png", 0), ("b.png", 1)):
        Path(name).write_bytes(file_of(picture(40, 40, seed), "PNG"))
    outs = []
    for images in (("a.png",), ("a.png",), ("b.png",), ("a.png", "b.png")):
        given = [word for name in images for word in ("--image", name)]
        done = cli("decide", *given, "--state", "Look.", "-q", "q.toml", "--json")
        assert (done.code, done.err) == (0, "")
        outs.append(json.loads(done.out))
        assert [part["type"] for part in states[-1]] == [*["image"] * len(images), "text"]
    assert outs[0] == outs[1] and outs[0] != outs[2] and outs[3] not in outs[:3]
    assert cli("decide", "--image", "a.png", "-q", "q.toml").code == 0
    for wrong, message in (
        (("--image", "q.toml"), "--image q.toml: the bytes are no picture"),
        (("--image", "no.png"), "--image no.png: 'no.png' is no file"),
        (("--image", "a.png", "--order", "schema"), "order, pictures: puts the state"),
        (("t.csv", "-o", "out.csv", "--image", "a.png"), "give a table, or a text"),
    ):
        done = cli("decide", *wrong, "-q", "q.toml")
        assert done.code == 2 and message in done.err
