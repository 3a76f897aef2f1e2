"""`sfumato batch`: every dialect, killed and taken up, and what it never overwrites."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.batch_files import KILLED, ask, line, texts_of

SRC = Path(__file__).parents[2] / "src"
USER = [{"role": "user", "content": "Hi"}]
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/api/chat": {"messages": USER},
    "/completion": {"prompt": "Hi", "n_predict": 4},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/fill": {"parts": ["a", {"tokens": 1}]},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b?"}]},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_dialect_in_the_order_of_its_lines(cli: Any, here: Path) -> None:
    lines = [line(url, url, **body) for url, body in OTHERS.items()]
    Path("in.jsonl").write_bytes(b"".join([*lines, line("wrong", n=1)]))
    done = cli("batch", "in.jsonl", "-o", "out.jsonl")
    assert done.code == 0 and "9 of 9 lines answered" in done.err, done.err
    assert "1 results are errors" in done.err
    rows = [json.loads(each) for each in Path("out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [*OTHERS, "wrong"]
    statuses = [row["response"]["status_code"] for row in rows]
    assert statuses == [200] * len(OTHERS) + [400], rows
    assert all(row["response"]["request_id"] and row["error"] is None for row in rows)
    assert rows[1]["response"]["body"]["store"] is False
    before = Path("out.jsonl").read_bytes()
    done = cli("batch", "in.jsonl", "-o", "out.jsonl")
    assert done.code == 2 and "exists already" in done.err
    assert Path("out.jsonl").read_bytes() == before and len(list(here.iterdir())) == 2


def test_killed_and_taken_up(cli: Any, here: Path) -> None:
    names = [f"r{number}" for number in range(5)]
    data = b"".join(line(name, **ask(number)) for number, name in enumerate(names))
    Path("in.jsonl").write_bytes(data)
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    run = "batch", "in.jsonl", "-o", "out.jsonl"
    killed = subprocess.run([sys.executable, "-c", KILLED, *run], env=environment, timeout=250)
    assert killed.returncode == -9 and not Path("out.jsonl").exists()
    Path("in.jsonl").write_bytes(data.replace(b"Name 3", b"Say 3"))
    assert "results of another input or model" in cli(*run).err
    Path("in.jsonl").write_bytes(data)
    assert re.search(r"[234] of 5 lines answered", cli(*run).err)  # as many as were not kept
    assert list(texts_of(Path("out.jsonl").read_text())) == names


def test_wrong_lines_leave_nothing(cli: Any, here: Path) -> None:
    Path("in.jsonl").write_bytes(2 * line("a", **ask(1)))
    done = cli("batch", "in.jsonl", "-o", "out.jsonl")
    assert done.code == 2 and "in.jsonl: line 2: custom_id: 'a' is that of line 1 too" in done.err
    assert [path.name for path in here.iterdir()] == ["in.jsonl"]
