"""What hostile clients cost the others: one attack after another, beside an innocent request.

    .venv/bin/python -m benchmarks.hostile_clients [--seconds 5] [--clients 1,4] [--attacks NAME,…]

Starts `sfumato serve` with the embedded model on 127.0.0.1. First an innocent client asks alone,
and measures how long a step takes; then beside each attack, by each number of attackers. Meanwhile
/health is asked every 20 ms, and the server's resident memory is read. Prints a table and one JSON
line. Every attack ends after --seconds, each attacker waits for an answer before it sends again,
and nothing leaves this machine.

The first row is without an attack. Columns: milliseconds a step of the innocent request, waiting
included, and as a multiple of those alone; /health in milliseconds; by how many MB memory grew over
what it was before the attack; how requests were answered. Exit code 1 where /health takes over
250 ms at the 99th percentile, memory grows by more than 100 MB, or a request has no answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.hostile_attacks import ATTACKS, NUMBER, Attack
from benchmarks.soak_clients import CHAT, Server, Violation

MOST_CLIENTS, MOST_SECONDS = 32, 60.0
PATIENCE_S = 60.0  # for an answer
HEALTH_S, HEALTH_P99_S, GROWTH_MB = 0.02, 0.25, 100.0
ALONE = "none"
INNOCENT = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 64,
    "max_steps": 24,
    "confidence": 1e-9,  # never settled: every canvas takes all its steps
    "ignore_eos": True,
    "seed": 1,
}


@dataclass
class Measured:
    """What was seen beside one attack."""

    answers: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)  # when these replies were made
    resident: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str) -> None:
        with self.lock:
            self.notes.append(what)

    def answered(self, how: str) -> None:
        with self.lock:
            self.answers[how] += 1


def attacker(server: Server, attack: Attack, body: bytes, until: float, seen: Measured) -> None:
    """Sends the body until the time is over, and waits for each answer."""
    while time.monotonic() < until:
        try:
            status, _ = post(server, attack.path, numbered(body))
            seen.answered(str(status))
        except TimeoutError:
            seen.answered("no answer")
        except (OSError, HTTPException):
            seen.answered("cut off")


_numbers = itertools.count()


def numbered(body: bytes) -> bytes:
    """The body with another number in the place for one, where it has such a place."""
    return body.replace(NUMBER, b"%d" % next(_numbers))


def post(server: Server, path: str, body: bytes) -> tuple[int, bytes]:
    with closing(HTTPConnection(server.host, server.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def innocent(server: Server, goes_on: Callable[[], bool], seen: Measured, **more: Any) -> None:
    """One reply after another; each measures what a step took. more: fields of the request."""
    body = json.dumps(INNOCENT | more).encode()
    while goes_on():
        began = time.monotonic()
        try:
            status, answer = post(server, CHAT, body)
        except (OSError, HTTPException):
            seen.answered("innocent: cut off")
            continue
        if status != 200:
            seen.answered(f"innocent: {status}")
            time.sleep(0.1)
            continue
        # As the client has it, all waiting and queueing included.
        steps = json.loads(answer)["timings"]["diffusion"]["steps"]
        ended = time.monotonic()
        seen.step_ms.append(1e3 * (ended - began) / steps)
        seen.spans.append((began, ended))


def health(server: Server, goes_on: Callable[[], bool], seen: Measured) -> None:
    with closing(HTTPConnection(server.host, server.port, timeout=PATIENCE_S)) as connection:
        while goes_on():
            began = time.monotonic()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, HTTPException):
                seen.answered("health: cut off")
                connection.close()
            seen.health_s.append(time.monotonic() - began)
            time.sleep(HEALTH_S)


def resident_mb(pid: int) -> float:
    """What the process holds, by the system's account: the server itself may be too busy."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return 0.0


def measured(
    server: Server, pid: int, seconds: float, attack: Attack | None, clients: int
) -> Measured:
    """The innocent request and /health, beside the attack where there is one."""
    body = attack.make() if attack else b""
    seen = Measured()
    until = time.monotonic() + seconds
    watches = (server, lambda: time.monotonic() < until, seen)
    threads = [
        threading.Thread(target=innocent, args=watches),
        threading.Thread(target=health, args=watches),
    ]
    if attack:
        threads += [
            threading.Thread(target=attacker, args=(server, attack, body, until, seen))
            for _ in range(clients)
        ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    while True:
        seen.resident.append(resident_mb(pid))
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    for thread in threads:
        thread.join(max(0.0, until + PATIENCE_S - time.monotonic()))
        if thread.is_alive():
            seen.answered("no answer")
    return seen


def median(times: list[float]) -> float | None:
    return statistics.median(times) if times else None


def percentile(times: list[float]) -> float:
    """The 99th."""
    return sorted(times)[min(len(times) - 1, len(times) * 99 // 100)] if times else PATIENCE_S


def figures(
    name: str, clients: int, seen: Measured, alone_ms: float | None, before_mb: float
) -> dict[str, Any]:
    times = sorted(seen.health_s) or [PATIENCE_S]
    step = median(seen.step_ms)
    return {
        "attack": name,
        "clients": clients,
        "answers": dict(sorted(seen.answers.items())),
        "step_ms": step and round(step, 2),
        "slowdown": step and alone_ms and round(step / alone_ms, 2),
        "health_p50_ms": round(1e3 * times[len(times) // 2], 1),
        "health_p99_ms": round(1e3 * percentile(times), 1),
        "health_max_ms": round(1e3 * times[-1], 1),
        "growth_mb": round(max(seen.resident) - before_mb, 1),
    }


def faults(result: dict[str, Any]) -> Iterator[str]:
    if result["attack"] == ALONE:
        return
    where = f"{result['attack']} by {result['clients']}"
    if result["health_p99_ms"] > 1e3 * HEALTH_P99_S:
        yield f"{where}: /health took {result['health_p99_ms']} ms at the 99th percentile"
    if result["growth_mb"] > GROWTH_MB:
        yield f"{where}: memory grew by {result['growth_mb']} MB"
    for how, count in result["answers"].items():
        if how in ("no answer", "health: cut off", "500") or how.startswith("innocent"):
            yield f"{where}: {how} ({count} times)"


HEAD = (
    f"{'attack':12}{'by':>4}{'step ms':>9}{'slower':>8}{'p50':>8}{'p99':>8}{'max':>8}"
    f"{'MB':>8}  answers"
)


def row(result: dict[str, Any]) -> str:
    def shown(value: float | None, suffix: str = "") -> str:
        return "-" if value is None else f"{value:g}{suffix}"

    answers = ", ".join(f"{how}: {count}" for how, count in result["answers"].items())
    return (
        f"{result['attack']:12}{result['clients']:4}{shown(result['step_ms']):>9}"
        f"{shown(result['slowdown'], '×'):>8}{result['health_p50_ms']:8.1f}"
        f"{result['health_p99_ms']:8.1f}{result['health_max_ms']:8.1f}{result['growth_mb']:8.1f}"
        f"  {answers}"
    )


@contextmanager
def served(options: argparse.Namespace, folder: Path, *more: str) -> Iterator[tuple[Server, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server("127.0.0.1", free.getsockname()[1])
    command = [sys.executable, "-m", "sfumato", "serve", "--port", str(server.port)]
    command += ["--slots", str(options.slots), "--context", "512", *more]
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_for(server, process, log)
        yield server, process.pid
    finally:
        process.kill()
        process.wait()


def wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            server.get("/health")
            return
        except (OSError, HTTPException, Violation):
            time.sleep(0.1)
    raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')[-4000:]}")


def run(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Each attack against a server of its own: what one leaves behind is not the next one's. Of
    one attack by several numbers of clients, memory counts from before the first."""
    names = options.attacks or list(ATTACKS)
    for name in names:
        attack = ATTACKS[name]
        with served(options, folder) as (server, pid):
            post(server, CHAT, json.dumps(INNOCENT).encode())  # the first one warms it up
            alone = measured(server, pid, min(options.seconds, 3.0), None, 0)
            step = median(alone.step_ms)
            before = resident_mb(pid)
            if name == names[0]:  # what a machine that is busy with other things gives, too
                yield figures(ALONE, 0, alone, step, alone.resident[0])
            for clients in [attack.clients] if attack.clients else options.clients:
                seen = measured(server, pid, options.seconds, attack, clients)
                yield figures(name, clients, seen, step, before)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5, help="of each attack (%(default)s)")
    parser.add_argument("--clients", type=listed(int), default=[1, 4], help="at a time (1,4)")
    parser.add_argument("--attacks", type=listed(str), help=", ".join(ATTACKS))
    parser.add_argument("--slots", type=int, default=4, help="of the server (%(default)s)")
    options = parser.parse_args()
    for name in options.attacks or ():
        if name not in ATTACKS:
            parser.error(f"--attacks: there is no {name!r}; choose from {', '.join(ATTACKS)}")
    if not all(0 < count <= MOST_CLIENTS for count in options.clients):
        parser.error(f"--clients: from 1 to {MOST_CLIENTS}")
    if not 0 < options.seconds <= MOST_SECONDS:
        parser.error(f"--seconds: up to {MOST_SECONDS:g}")
    return options


def main() -> int:
    options = arguments()
    results = []
    print(f"{'':33}/health in ms\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for result in run(options, Path(folder)):
            results.append(result)
            print(row(result), flush=True)
    wrong = [fault for result in results for fault in faults(result)]
    for fault in wrong:
        print(f"FAULT: {fault}")
    about = {name: ATTACKS[name].about for name in options.attacks or ATTACKS}
    print("\n".join(f"  {name}: {text}" for name, text in about.items()))
    line = {"benchmark": "hostile_clients", "seconds": options.seconds, "cpus": os.cpu_count()}
    print(json.dumps({**line, "results": results, "faults": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
