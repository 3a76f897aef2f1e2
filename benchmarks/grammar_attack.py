"""Thousands of hostile schemas and grammars against a live server, which must stay alive.

    .venv/bin/python -m benchmarks.grammar_attack [--grammars 5000] [--clients 4] [--first 0]

Starts `sfumato serve` with the embedded model on 127.0.0.1. Attackers send the requests of
`hostile_grammars`, each of them once, and some clients leave before the answer. An innocent request
without a grammar measures its steps, and /health is asked every 20 ms; by turns the attackers send
ordinary requests of the same length, and rest. Then --bombs clients send grammars that compile for
longer than they may, and another one small expressions, as before without the others. Prints one
JSON line.

Exit code 1 where the server ends, a request has no answer, or another answer than 200, 400 or 429;
where /health takes over 250 ms at the 99th percentile, the innocent median step takes over 1.3
times as long as beside ordinary requests, or a small expression over 1.5 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.hostile_clients import (
    HEALTH_P99_S,
    Measured,
    health,
    innocent,
    median,
    percentile,
    post,
    resident_mb,
    served,
)
from benchmarks.hostile_grammars import bomb, hostile_request, ordinary, trivial
from benchmarks.soak_clients import CHAT, Server, Violation

MOST_RATIO, MOST_TRIVIAL_S = 1.3, 1.5
ATTACK, PLAIN, REST = "attack", "plain", "rest"
TURN_S = {ATTACK: 8.0, PLAIN: 3.0, REST: 3.0}
LEAVES = 0.05  # of the requests: the client does not wait for the answer
ALLOWED = ("200", "400", "429", "left")


class Turns:
    """What the attackers do, by turns: attack, send ordinary requests, or rest."""

    def __init__(self, scale: float) -> None:
        """scale: of the seconds of turns."""
        self._scale = scale
        self._changed, self._kind, self._inside = threading.Condition(), REST, 0
        self.spans: dict[str, list[tuple[float, float]]] = {ATTACK: [], PLAIN: [], REST: []}

    @contextmanager
    def request(self) -> Iterator[str]:
        """Within, one request is sent and answered, of the kind that is given."""
        with self._changed:
            self._changed.wait_for(lambda: self._kind != REST)
            self._inside += 1
            kind = self._kind
        try:
            yield kind
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def take(self, kind: str) -> None:
        """One turn, which begins when all requests of the last one have been answered."""
        with self._changed:
            self._kind = REST
            self._changed.wait_for(lambda: not self._inside)
            self._kind = kind
            self._changed.notify_all()
        began = time.monotonic()
        time.sleep(TURN_S[kind] * self._scale)
        self.spans[kind].append((began, time.monotonic()))

    def step_ms(self, seen: Measured, kind: str) -> float | None:
        """The median of the innocent steps in such turns."""
        return median(
            [
                ms
                for ms, (began, ended) in zip(seen.step_ms, seen.spans, strict=True)
                if any(begin <= began and ended <= end for begin, end in self.spans[kind])
            ]
        )


def attacker(server: Server, numbers: Iterator[int], turns: Turns, seen: Measured) -> None:
    """Sends what no other attacker has sent, until all is sent."""
    for number in numbers:
        path, body = hostile_request(number)
        kind = PLAIN
        while kind == PLAIN:
            with turns.request() as kind:
                if kind == PLAIN:
                    post(server, CHAT, ordinary(number))
                else:
                    attack(server, number, path, body, seen)


def attack(server: Server, number: int, path: str, body: bytes, seen: Measured) -> None:
    try:
        if random.Random(number).random() < LEAVES:
            leave(server, path, body)
            seen.answered("left")
            return
        status, answer = post(server, path, body)
        while status == 429:
            seen.answered("429")
            time.sleep(0.5)
            status, answer = post(server, path, body)
        seen.answered(str(status))
        if str(status) not in ALLOWED:
            seen.note(f"request {number}: {status} {answer[:300]!r}")
    except TimeoutError:
        seen.answered("no answer")
        seen.note(f"request {number}: no answer")
    except (OSError, HTTPException) as error:
        seen.answered("cut off")
        seen.note(f"request {number}: {error!r}")


def leave(server: Server, path: str, body: bytes) -> None:
    """Sends a request, and disconnects."""
    with closing(HTTPConnection(server.host, server.port, timeout=10)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        time.sleep(0.05)


def fuzzed(server: Server, pid: int, options: argparse.Namespace) -> tuple[Measured, Turns]:
    """All hostile requests, beside an innocent one and /health."""
    seen, turns, stop = Measured(), Turns(options.turns), threading.Event()
    last = options.first + options.grammars
    counter = itertools.count(options.first)
    numbers = iter(lambda: min(next(counter), last), last)
    attackers = [
        threading.Thread(target=attacker, args=(server, numbers, turns, seen), daemon=True)
        for _ in range(options.clients)
    ]
    watched = (server, lambda: not stop.is_set(), seen)
    short = {"max_tokens": 32, "max_steps": 6}  # so that most replies are made within one turn
    beside = [
        threading.Thread(target=innocent, args=watched, kwargs=short, daemon=True),
        threading.Thread(target=health, args=watched, daemon=True),
    ]
    for thread in (*attackers, *beside):
        thread.start()
    while any(thread.is_alive() for thread in attackers):
        for kind in TURN_S:
            turns.take(kind)
        seen.resident.append(resident_mb(pid))
    stop.set()
    for thread in beside:
        thread.join()
    return seen, turns


def send_bomb(server: Server, number: int, seen: Measured) -> None:
    try:
        seen.answered(str(post(server, CHAT, bomb(number))[0]))
    except (OSError, HTTPException) as error:
        seen.answered(f"bomb: {error!r}")


def ratio(ms: float | None, of: float | None) -> float | None:
    return round(ms / of, 2) if ms and of else None


def small(server: Server, number: int, seen: Measured) -> float:
    """Seconds that a small expression takes."""
    began = time.monotonic()
    status, _ = post(server, CHAT, trivial(number))
    seen.answered(f"small: {status}")
    return time.monotonic() - began


def beside_bombs(server: Server, bombs: int, seen: Measured) -> list[float]:
    """Seconds of small expressions, one after another, while other clients' bombs are compiled."""
    threads = [threading.Thread(target=send_bomb, args=(server, n, seen)) for n in range(bombs)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # they come first
    times: list[float] = []
    while any(thread.is_alive() for thread in threads):
        times.append(small(server, len(times), seen))
    return times


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with served(options, folder) as (server, pid):
        bombs = Measured()
        small(server, 10**6, bombs)  # starts what the first grammar starts
        before = resident_mb(pid)
        seen, turns = fuzzed(server, pid, options)
        alone = [small(server, -number, bombs) for number in range(1, 10)]
        times = beside_bombs(server, options.bombs, bombs)
        try:
            server.get("/health")
            is_alive = True
        except (Violation, OSError, HTTPException):
            is_alive = False
    step = {kind: turns.step_ms(seen, kind) for kind in TURN_S}
    return {
        "benchmark": "grammar_attack",
        "grammars": options.grammars,
        "first": options.first,
        "clients": options.clients,
        "is_alive": is_alive,
        "answers": dict(sorted((seen.answers + bombs.answers).items())),
        "health_p99_ms": round(1e3 * percentile(seen.health_s), 1),
        "health_max_ms": round(1e3 * max(seen.health_s), 1),
        "step_ms": {kind: ms and round(ms, 2) for kind, ms in step.items()},
        "ratio": ratio(step[ATTACK], step[PLAIN]),
        "ratio_to_alone": ratio(step[ATTACK], step[REST]),
        "small_alone_s": round(max(alone), 2),
        "small_beside_bombs_s": round(max(times, default=0.0), 2),
        "small_beside_bombs_median_s": round(median(times) or 0.0, 2),
        "growth_mb": round(max(seen.resident) - before, 1),
        "notes": seen.notes[:20],
    }


def faults(result: dict[str, Any]) -> Iterator[str]:
    if not result["is_alive"]:
        yield "the server is dead"
    for how, count in result["answers"].items():
        if how not in (*ALLOWED, "small: 200"):
            yield f"{how} ({count} times)"
    if result["health_p99_ms"] > 1e3 * HEALTH_P99_S:
        yield f"/health took {result['health_p99_ms']} ms at the 99th percentile"
    if (result["ratio"] or 0) > MOST_RATIO:
        yield f"a neighbour's step took {result['ratio']} times as long as beside others"
    if result["small_beside_bombs_s"] > MOST_TRIVIAL_S:
        yield f"a small expression beside bombs took {result['small_beside_bombs_s']} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--grammars", type=int, default=5000, help="(%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="attackers (%(default)s)")
    parser.add_argument("--bombs", type=int, default=4, help="at once (%(default)s)")
    parser.add_argument("--turns", type=float, default=1, help="their length (%(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="of the server (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    for line in (*result["notes"], *(wrong := list(faults(result)))):
        print(f"FAILS: {line}")
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
