"""The audit log: what a line says and never says, rotation, threads, disks that are full."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato
from sfumato.api import Reply
from sfumato.diffusion.limits import Stats
from sfumato.engine.audit import AuditLog, entry, facts, to_line, used_memory
from sfumato.engine.engine import Engine, EngineConfig
from sfumato.engine.events import Account, Failed, Finished
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.request import Request

NOW = datetime(2026, 3, 4, 5, 6, 7, 89000, UTC)
MEMORY = {"device": "cpu", "used": 1000, "budget": 4000}
FACTS = {"model": "embedded", "architecture": "diffusion-gemma", "memory": MEMORY}
SECRET, ANSWER = "the launch code is 1234", "it is 4321"
CHAT = "/v1/chat/completions"
REQUEST = Request(SECRET, id="req-1", endpoint=CHAT, user="ann", max_tokens=100, stop="5")
ACCOUNT = Account(
    request_id="req-1",
    endpoint="/v1/chat/completions",
    seed=7,
    prompt_tokens=30,
    cached_tokens=20,
    requested_tokens=100,
    output_tokens=96,
    thought_tokens=6,
    canvas_tokens=128,
    steps=(10, 6),
    convergence=("converged", "step_cap"),
    retries=1,
    queue_s=0.5,
    slot_wait_s=0.25,
    prefill_s=0.125,
    denoise_s=2.0,
    commit_s=0.0625,
    first_draft_s=1.0,
    first_commit_s=2.0,
    total_s=3.0,
    slot=2,
    context=8192,
    allocated=True,
)
REPLY = Reply(ANSWER, "think", (), [1, 2], "eos", Stats(30))
FINISHED = Finished(REPLY, ACCOUNT)


Opener = Callable[..., AuditLog]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens logs, and closes them in the end."""
    with ExitStack() as stack:

        def make(path: str | Path = tmp_path / "audit.jsonl", **options: Any) -> AuditLog:
            return stack.enter_context(closing(AuditLog(path, **options)))

        yield make


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_field_of_a_finished_request() -> None:
    assert entry(REQUEST, FINISHED, FACTS, now=NOW) == {
        "event": "finished",
        "timestamp": "2026-03-04T05:06:07.089+00:00",
        "request_id": "req-1",
        "endpoint": "/v1/chat/completions",
        "user": "ann",
        "model": "embedded",
        "architecture": "diffusion-gemma",
        "adapter": None,
        "success": True,
        "stop_reason": "eos",
        "error": None,
        "seed": 7,
        "tokens": {
            "prompt": 30,
            "cached": 20,
            "requested": 100,
            "output": 96,
            "thought": 6,
            "canvas": 128,
        },
        "steps": [10, 6],
        "convergence": ["converged", "step_cap"],
        "retries": 1,
        "seconds": {
            "queue": 0.5,
            "slot_wait": 0.25,
            "prefill": 0.125,
            "denoise": 2.0,
            "commit": 0.0625,
            "first_draft": 1.0,
            "first_commit": 2.0,
            "total": 3.0,
        },
        "speed": {
            "visible_tokens_per_second": 32.0,
            "canvas_tokens_per_second": 64.0,
            "ms_per_step": 125.0,
            "tokens_per_forward": 6.0,
        },
        "allocation": {"slot": 2, "context": 8192, "reused": True},
        "memory": {"device": "cpu", "used": 1000, "budget": 4000},
    }


def test_a_failed_request() -> None:
    failed = Failed("timeout", "after 3 s", replace(ACCOUNT, output_tokens=0, steps=()))
    written = entry(REQUEST, failed, FACTS)
    assert (written["event"], written["success"]) == ("failed", False)
    assert (written["stop_reason"], written["error"]) == (None, "timeout")
    assert written["speed"]["ms_per_step"] is None
    assert written["speed"]["visible_tokens_per_second"] == 0


def test_a_refused_request_has_no_account() -> None:
    written = entry(REQUEST, Failed("queue_full", "64 wait"), FACTS, now=NOW)
    assert written["error"] == "queue_full"
    assert written["tokens"]["requested"] == 100
    assert written["tokens"]["prompt"] is None
    assert [written[name] for name in ("steps", "seconds", "speed", "allocation")] == [None] * 4
    assert written.keys() == entry(REQUEST, FINISHED, FACTS).keys()


def test_a_cancelled_request_is_no_success() -> None:
    written = entry(REQUEST, Finished(replace(REPLY, stop_reason="cancelled"), ACCOUNT), FACTS)
    assert (written["event"], written["success"], written["stop_reason"]) == (
        "finished",
        False,
        "cancelled",
    )


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        Request(messages=[{"role": "user", "content": SECRET}], opening=SECRET),
        Request(ids=[4321, 1234]),
    ],
)
@pytest.mark.parametrize("event", [FINISHED, Failed("invalid", f"{SECRET} / {ANSWER}", ACCOUNT)])
def test_text_only_where_it_is_asked_for(request_: Request, event: Finished | Failed) -> None:
    secrets = (SECRET, "4321", "1234", "think")
    plain = json.dumps(entry(request_, event, FACTS, now=NOW))
    assert [secret for secret in secrets if secret in plain] == []
    full = json.dumps(entry(request_, event, FACTS, text=True, now=NOW))
    assert "1234" in full and ANSWER in full


def test_lines_are_there_at_once(opened: Opener) -> None:
    log = opened()
    log.append(to_line(entry(REQUEST, FINISHED, FACTS, log.text)))
    (line,) = lines(log.path)
    assert (line["request_id"], line.keys() & {"text"}) == ("req-1", set())
    log.close()
    again = opened(log.path, text=True)
    again.append(to_line(entry(REQUEST, FINISHED, FACTS, again.text)))
    again.close()
    assert [line.get("text", {}).get("answer") for line in lines(log.path)] == [None, ANSWER]


def test_rotation_by_size(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = opened(path, max_bytes=100, keep=2)
    for number in range(20):
        log.append(to_line({"number": number, "filling": "x" * 20}))
    names = ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())
    kept = [line["number"] for name in reversed(names) for line in lines(tmp_path / name)]
    assert kept == list(range(20))[-len(kept) :] and len(kept) >= 5


def test_a_line_over_the_limit_is_written_alone(opened: Opener, tmp_path: Path) -> None:
    log = opened(max_bytes=10, keep=1)
    for number in range(3):
        log.append(to_line({"number": number}))
    assert lines(log.path) == [{"number": 2}]
    assert lines(tmp_path / "audit.jsonl.1") == [{"number": 1}]


def test_rotation_without_older_files(opened: Opener, tmp_path: Path) -> None:
    log = opened(max_bytes=10, keep=0)
    log.append(to_line({"number": 0}))
    log.append(to_line({"number": 1}))
    assert [file.name for file in tmp_path.iterdir()] == ["audit.jsonl"]
    assert lines(log.path) == [{"number": 1}]


def test_threads_write_whole_lines(opened: Opener, tmp_path: Path) -> None:
    log = opened(max_bytes=4000, keep=100)

    def write(thread: int) -> None:
        for number in range(100):
            log.append(to_line({"thread": thread, "number": number}))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [line for file in tmp_path.iterdir() for line in lines(file)]
    assert len(written) == 800
    assert len({(line["thread"], line["number"]) for line in written}) == 800


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_warning(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    log = opened("/dev/full")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.append(to_line(entry(REQUEST, FINISHED, FACTS, log.text)))
    (warning,) = caplog.messages
    assert "No space left" in warning and "/dev/full" in warning


def test_half_a_line_is_taken_back(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    log = opened()
    log.append(to_line({"number": 0}))
    real = log._file
    assert real is not None

    class Filling:
        """A disk with room for 5 bytes."""

        fileno = staticmethod(real.fileno)

        def write(self, data: bytes) -> int | None:
            return real.write(data[:5])

    log._file = Filling()  # type: ignore[assignment]
    log.append(to_line({"number": 1}))
    log.append(to_line({"number": 2}))
    log._file = real
    log.append(to_line({"number": 3}))
    assert [line["number"] for line in lines(log.path)] == [0, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "lines lost: 2" in caplog.messages[1]


def test_half_a_line_of_a_crash_spoils_no_other(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"number":0}\n{"numb')
    log = opened(path)
    assert path.read_bytes().endswith(b'{"numb'), "opening a log writes nothing"
    log.append(to_line({"number": 1}))
    log.append(to_line({"number": 2}))
    log.close()
    opened(path).append(to_line({"number": 3}))
    assert path.read_bytes() == (
        b'{"number":0}\n{"numb\n{"number":1}\n{"number":2}\n{"number":3}\n'
    )
    path.write_bytes(b'{"numb')
    opened(path, max_bytes=10).append(to_line({"number": 4}))
    assert lines(path) == [{"number": 4}], "the half line is in the file before"
    assert Path(f"{path}.1").read_bytes() == b'{"numb'


def test_half_a_line_that_cannot_be_taken_back_spoils_no_other(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened()
    real = log._file
    assert real is not None

    class Filling:
        """A disk with room for 5 bytes, where no file can be cut."""

        fileno = staticmethod(real.fileno)

        def write(self, data: bytes) -> int | None:
            return real.write(data[:5])

    def fails(*_: int) -> None:
        raise OSError("cannot be cut")

    log._file = Filling()  # type: ignore[assignment]
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", fails)
        log.append(to_line({"number": 1}))
    log._file = real
    log.append(to_line({"number": 2}))
    assert log.path.read_bytes() == b'{"num\n{"number":2}\n'


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent/audit.jsonl cannot be written .*No such file"):
        AuditLog(tmp_path / "absent" / "audit.jsonl")
    with pytest.raises(ValueError, match="Is a directory"):
        AuditLog(tmp_path)


def test_after_the_end_nothing_is_written(opened: Opener) -> None:
    log = opened()
    log.close()
    log.close()
    log.append(to_line(entry(REQUEST, FINISHED, FACTS, log.text)))
    assert log.path.read_bytes() == b""


def test_facts_of_a_model(tmp_path: Path) -> None:
    model = sfumato.load(device="cpu")
    written = facts(model, "mine", Budget(4000, "a test"))
    used = written["memory"]["used"]
    memory = {"device": "cpu", "used": used, "budget": 4000}
    assert written == {"model": "mine", "architecture": "diffusion-gemma", "memory": memory}
    assert facts(model, "mine", None)["memory"]["budget"] is None
    if Path("/proc/self/statm").exists():
        assert used is not None and 50e6 < used < 50e9
    assert used_memory(torch.device("cpu"), proc=tmp_path) is None


@pytest.fixture
def engine_and_log(opened: Opener) -> Iterator[tuple[Engine, AuditLog]]:
    log = opened()
    engine = Engine(
        sfumato.load(),
        EngineConfig(slots=2, context=512),
        on_finish=lambda request, event: log.append(
            to_line(entry(request, event, FACTS, log.text))
        ),
    ).start()
    yield engine, log
    engine.close()


def test_an_engine_writes_one_line_for_each_request(
    engine_and_log: tuple[Engine, AuditLog],
) -> None:
    engine, log = engine_and_log
    handles = [engine.submit(Request("Who are you?", seed=seed, max_tokens=64)) for seed in (1, 2)]
    replies = [handle.result() for handle in handles]
    cancelled = engine.submit(Request("Who are you?", max_tokens=256))
    cancelled.cancel()
    cancelled.result()
    engine.close()
    written = {line["request_id"]: line for line in lines(log.path)}
    assert written.keys() == {handle.id for handle in (*handles, cancelled)}
    for handle, reply in zip(handles, replies, strict=True):
        line = written[handle.id]
        assert line["success"] and line["stop_reason"] == reply.stop_reason
        assert line["tokens"]["output"] == len(reply.token_ids)
        assert line["steps"] == reply.stats.steps
        assert line["seconds"]["total"] >= line["seconds"]["denoise"] > 0
        assert line["allocation"]["context"] == 512
    assert written[cancelled.id]["stop_reason"] == "cancelled"


def test_a_file_that_was_moved_away_is_followed_by_another(opened: Opener, tmp_path: Path) -> None:
    log = opened()
    log.append(to_line({"number": 0}))
    log.path.rename(tmp_path / "moved")
    log.append(to_line({"number": 1}))
    log.path.unlink()
    log.path.touch()  # as logrotate's `create` does
    log.append(to_line({"number": 2}))
    assert lines(tmp_path / "moved") == [{"number": 0}]
    assert lines(log.path) == [{"number": 2}]
