"""What hostile pictures cost the others: 400 of 70 kinds, beside a text reply and /health.

    .venv/bin/python -m benchmarks.hostile_pictures [--count 400] [--through reader,server] [-m …]

First the reader alone decodes them one after another, while a thread counts the pauses of others
(`reader`). Then `sfumato serve` gets each as OpenAI's image_url, --clients at a time, beside a text
reply and /health (`server`). The model has to read pictures for a 200; the embedded one answers 400
to each and so measures what comes before a tower. Prints a table, a row for each kind, and one JSON
line; nothing leaves this machine.

Columns: pictures of the kind; how many were read, refused and answered otherwise; the slowest in
milliseconds; the longest pause of another thread, or of /health, in milliseconds. Exit code 1 where
an answer is neither 200 nor a 400 that names the part, a pause is over a second, or memory, threads
or open files have grown at the end.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile_clients import (
    INNOCENT,
    Measured,
    Server,
    health,
    innocent,
    median,
    post,
    served,
)
from benchmarks.hostile_picture_kinds import BOMBS, KINDS, pictures
from benchmarks.soak_clients import CHAT

from sfumato.media.part import PictureSource
from sfumato.media.patches import Cut
from sfumato.media.picture import Limits
from sfumato.refused import Refused

FIELD = "messages[0].content[1].image_url"
THROUGH = ("reader", "server")
PAUSE_S, GROWTH_MB, HELD_MOST = 1.0, 100.0, 8
TICK_S = 0.005


@dataclass
class Row:
    """What became of the pictures of one kind."""

    answers: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slowest_s: float = 0.0
    pause_s: float = 0.0

    def add(self, answer: str, seconds: float) -> None:
        self.answers[answer] += 1
        self.slowest_s = max(self.slowest_s, seconds)


Rows = dict[str, Row]


def held(pid: int | str = "self") -> dict[str, float]:
    """What a process holds, by the system's account."""
    status = Path(f"/proc/{pid}/status").read_text()
    kinds = {"mb": r"VmRSS:\s+(\d+)", "most_mb": r"VmHWM:\s+(\d+)", "threads": r"Threads:\s+(\d+)"}
    matches = {name: re.search(pattern, status) for name, pattern in kinds.items()}
    amounts = {name: float(match[1]) if match else 0.0 for name, match in matches.items()}
    for name in ("mb", "most_mb"):
        amounts[name] = round(amounts[name] / 1000, 1)
    return amounts | {"files": float(len(os.listdir(f"/proc/{pid}/fd")))}


@contextmanager
def pauses() -> Iterator[Callable[[], float]]:
    """A thread that wakes often; gives its longest pause since it was asked last, in seconds."""
    longest, ended = [0.0], threading.Event()

    def tick() -> None:
        before = time.monotonic()
        while not ended.wait(TICK_S):
            now = time.monotonic()
            longest[0] = max(longest[0], now - before - TICK_S)
            before = now

    def ask() -> float:
        seconds, longest[0] = longest[0], 0.0
        return seconds

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield ask
    finally:
        ended.set()
        thread.join()


def through_reader(made: list[tuple[str, bytes]], limits: Limits | None = None) -> Rows:
    """Each picture read as a server reads it, one after another."""
    rows: Rows = defaultdict(Row)
    with pauses() as longest_pause:
        for kind, data in made:
            longest_pause()
            began = time.monotonic()
            try:
                PictureSource(data, FIELD).patches(Cut(), limits or Limits())
                answer = "200"
            except Refused as error:
                answer = "400" if error.field == FIELD else "400 without the field"
            except Exception as error:
                answer = type(error).__name__
            rows[kind].add(answer, time.monotonic() - began)
            rows[kind].pause_s = max(rows[kind].pause_s, longest_pause())
    return rows


def body_of(data: bytes) -> bytes:
    """A request of one step with the picture, in OpenAI's form."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
    message = {"role": "user", "content": parts}
    return json.dumps({"messages": [message], "max_tokens": 8, "max_steps": 1}).encode()


def named(answer: bytes) -> bool:
    """Whether an error names the part of the request that has the picture."""
    try:
        param = json.loads(answer)["error"]["param"] or ""
    except (ValueError, KeyError, TypeError):
        return False
    return "messages[0].content" in param


def through_server(
    server: Server, made: list[tuple[str, bytes]], clients: int
) -> tuple[Rows, Measured]:
    """Each picture sent, some clients at a time, beside a text reply and /health."""
    rows: Rows = defaultdict(Row)
    seen, over, lock = Measured(), threading.Event(), threading.Lock()

    def send(kind: str, data: bytes) -> None:
        began = time.monotonic()
        try:
            status, answer = post(server, CHAT, body_of(data))
            how = str(status) if status != 400 or named(answer) else "400 without the field"
        except Exception as error:
            how = type(error).__name__
        with lock:
            rows[kind].add(how, time.monotonic() - began)

    watches = (server, lambda: not over.is_set(), seen)
    threads = [threading.Thread(target=watch, args=watches) for watch in (innocent, health)]
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(send, *zip(*made, strict=True)))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return rows, seen


def alone_ms(server: Server, seconds: float = 3.0) -> float | None:
    """What a step of the text reply takes while no pictures arrive."""
    seen, until = Measured(), time.monotonic() + seconds
    innocent(server, lambda: time.monotonic() < until, seen)
    return median(seen.step_ms)


def grown(before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    if after["mb"] - before["mb"] > GROWTH_MB:
        yield f"memory grew from {before['mb']} to {after['mb']} MB"
    for name in ("threads", "files"):
        if after[name] - before[name] > HELD_MOST:
            yield f"{name} grew from {before[name]:.0f} to {after[name]:.0f}"


def faults(rows: Rows) -> Iterator[str]:
    for kind, row in rows.items():
        for answer, count in row.answers.items():
            if answer not in ("200", "400"):
                yield f"{kind}: {answer} ({count} times)"
        if row.pause_s > PAUSE_S:
            yield f"{kind}: the others paused for {1e3 * row.pause_s:.0f} ms"


def table(rows: Rows) -> Iterator[str]:
    yield f"{'kind':26}{'read':>6}{'400':>6}{'other':>7}{'slowest ms':>12}{'pause ms':>10}"
    for kind, row in rows.items():
        other = sum(row.answers.values()) - row.answers["200"] - row.answers["400"]
        yield (
            f"{kind:26}{row.answers['200']:6}{row.answers['400']:6}{other:7}"
            f"{1e3 * row.slowest_s:12.0f}{1e3 * row.pause_s:10.0f}"
        )


def warm_up(made: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The bombs, and some of the others: what decoders and the allocator keep, they keep once."""
    return [each for i, each in enumerate(made) if each[0] in BOMBS or i % 10 == 0]


def read_all(made: list[tuple[str, bytes]]) -> dict[str, Any]:
    through_reader(warm_up(made))
    gc.collect()
    before = held()
    rows = through_reader(made)
    gc.collect()
    after = held()
    print("\n".join(table(rows)), flush=True)
    return summary(rows, before, after, [*faults(rows), *grown(before, after)])


def serve_all(made: list[tuple[str, bytes]], options: argparse.Namespace) -> dict[str, Any]:
    options.slots = 4
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options, Path(folder), *(("-m", options.model) if options.model else ())) as (
            server,
            pid,
        ),
    ):
        post(server, CHAT, json.dumps(INNOCENT).encode())
        through_server(server, warm_up(made), options.clients)
        alone, before = alone_ms(server), held(pid)
        rows, seen = through_server(server, made, options.clients)
        time.sleep(1.0)
        after = held(pid)
    print("\n".join(table(rows)), flush=True)
    wrong = [*faults(rows), *grown(before, after)]
    slowest = max(seen.health_s, default=0.0)
    if slowest > PAUSE_S:
        wrong.append(f"/health took {1e3 * slowest:.0f} ms")
    wrong += [f"{how} ({count} times)" for how, count in seen.answers.items()]
    step = median(seen.step_ms)
    beside = {
        "health_max_ms": round(1e3 * slowest, 1),
        "step_ms": step and round(step, 2),
        "slowdown": step and alone and round(step / alone, 2),
    }
    return summary(rows, before, after, wrong) | beside


def summary(
    rows: Rows, before: dict[str, float], after: dict[str, float], wrong: list[str]
) -> dict[str, Any]:
    answers: dict[str, int] = defaultdict(int)
    for row in rows.values():
        for answer, count in row.answers.items():
            answers[answer] += count
    for fault in wrong:
        print(f"FAULT: {fault}")
    return {
        "pictures": sum(answers.values()),
        "kinds": len(rows),
        "answers": dict(answers),
        "slowest_ms": round(1e3 * max(row.slowest_s for row in rows.values())),
        "pause_ms": round(1e3 * max(row.pause_s for row in rows.values())),
        "before": before,
        "after": after,
        "faults": wrong,
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=400, help="of pictures (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (%(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="at a time (%(default)s)")
    parser.add_argument("--through", default=",".join(THROUGH), help="%(default)s")
    parser.add_argument("-m", "--model", help="that reads pictures (the embedded one does not)")
    options = parser.parse_args(given)
    if unknown := set(options.through.split(",")) - set(THROUGH):
        parser.error(f"--through: there is no {min(unknown)!r}; choose from {', '.join(THROUGH)}")
    if not (0 < options.count <= 100_000 and 0 < options.clients <= 32):
        parser.error("--count: from 1 to 100000; --clients: from 1 to 32")
    return options


def main() -> int:
    options = arguments()
    made = list(pictures(options.count, options.seed))
    line: dict[str, Any] = {"benchmark": "hostile_pictures", "count": len(made), "of": len(KINDS)}
    for way in options.through.split(","):
        print(f"through the {way}", flush=True)
        line[way] = read_all(made) if way == "reader" else serve_all(made, options)
    print(json.dumps(line | {"cpus": os.cpu_count()}))
    return 1 if any(line[way]["faults"] for way in options.through.split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())
