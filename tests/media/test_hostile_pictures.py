"""The benchmark of hostile pictures in its shortest form, and that it notices what it looks for."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import hostile_pictures
from benchmarks.hostile_clients import served
from benchmarks.hostile_picture_kinds import BOMBS, KINDS, MOST, OTHERS, WHOLE, pictures
from benchmarks.hostile_pictures import Row
from tests.support.seeing_model import seeing_model

ROOT = Path(__file__).resolve().parents[2]
LARGE = {name for name in BOMBS if name.endswith("most")}  # a gigabyte for a second


@pytest.mark.filterwarnings("ignore")  # Pillow's, about what is damaged
def test_every_picture_is_read_or_refused_by_its_field(note: Callable[[str], None]) -> None:
    made = list(pictures(120, without=LARGE))
    assert len(made) == 120 and {kind for kind, _ in made} == set(KINDS) - LARGE
    rows = hostile_pictures.through_reader(made)
    answers = {answer for row in rows.values() for answer in row.answers if row.answers[answer]}
    assert answers == {"200", "400"}, list(hostile_pictures.faults(rows))
    assert all(rows[kind].answers["200"] == 0 for kind in OTHERS)
    assert all(row.slowest_s < 20 for row in rows.values())
    slowest = max(rows, key=lambda kind: rows[kind].slowest_s)
    note(f"hostile pictures: {slowest} took {1e3 * rows[slowest].slowest_s:.0f} ms")


def test_the_reader_holds_nothing_at_the_end() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.hostile_pictures"]
    command += ["--through", "reader", "--count", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["reader"]["pictures"] == 3 and line["reader"]["answers"]["400"] == 3
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_served_model_answers_each(tmp_path: Path) -> None:
    seeing_model(tmp_path / "model")
    made = list(pictures(60, without=[*LARGE, *list(BOMBS)[8:]]))
    options = argparse.Namespace(slots=2)
    with served(options, tmp_path, "-m", str(tmp_path / "model")) as (server, pid):
        rows, seen = hostile_pictures.through_server(server, made, clients=2)
        assert hostile_pictures.held(pid)["threads"] > 1
    assert list(hostile_pictures.faults(rows)) == [] and seen.answers == {}
    assert sum(row.answers["200"] for row in rows.values()) > 3
    assert sum(row.answers["400"] for row in rows.values()) > 20
    assert seen.step_ms and max(seen.health_s) < 30


@pytest.mark.parametrize("kind", [*WHOLE, *OTHERS])
def test_kinds_are_what_they_say(kind: str) -> None:
    data = (WHOLE | OTHERS)[kind]()
    rows = hostile_pictures.through_reader([(kind, data)])
    assert rows[kind].answers == {"200" if kind in WHOLE else "400": 1}
    assert 10 < len(data) < MOST


def test_the_mutations_are_the_same_each_time() -> None:
    once, again = (list(pictures(60, 3, [*BOMBS, *OTHERS])) for _ in range(2))
    assert once == again


def test_what_does_not_hold_is_a_fault() -> None:
    good, bad = Row(), Row(pause_s=2.0)
    good.add("200", 0.1)
    good.add("400", 0.2)
    for answer in ("500", "400 without the field", "TimeoutError"):
        bad.add(answer, 3.0)
    assert list(hostile_pictures.faults({"GIF": good})) == []
    faults = "\n".join(hostile_pictures.faults({"GIF": good, "PNG": bad}))
    assert faults.count("PNG: ") == 4 and "GIF" not in faults and "2000 ms" in faults
    assert len(list(hostile_pictures.table({"GIF": good, "PNG": bad}))) == 3
    before = {"mb": 100.0, "threads": 4.0, "files": 9.0}
    assert list(hostile_pictures.grown(before, before)) == []
    after = {"mb": 300.0, "threads": 40.0, "files": 90.0}
    assert len(list(hostile_pictures.grown(before, after))) == 3


def test_an_error_that_names_the_part_differs_from_others() -> None:
    error = {"error": {"param": "messages[0].content[1].image_url", "message": "damaged"}}
    assert hostile_pictures.named(json.dumps(error).encode())
    for body in (b"", b"[]", b'{"error": null}', b'{"error": {"param": "messages"}}'):
        assert not hostile_pictures.named(body)
