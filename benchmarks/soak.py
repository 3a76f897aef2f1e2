"""Many clients at once, some of which break the protocol: no request may be lost.

    .venv/bin/python -m benchmarks.soak [--clients 64] [--seconds 60] [--url http://host:port]

Starts `sfumato serve` with the embedded model (or takes the server at --url) and sends it streams
and plain requests of every dialect with drafts, several choices and different seeds, disconnects at
random moments, malformed and oversized bodies, hostile schemas and grammars. Holds that every
request has exactly one terminal event, that a seed gives the same text in every dialect and
whatever else runs, that all slots are idle and the queue empty in the end, that memory at the end
is that at a third of the time, and, of its own server, that the audit log has one line per request
and SIGTERM ends it. Prints a table and one JSON line; exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak_clients import (
    ACTIONS,
    CHAT,
    PATIENCE_S,
    PROMPTS,
    Server,
    Soak,
    Violation,
    check_whole,
    client,
)

SETTLE_S = 30.0  # for disconnected requests to be noticed, and for the server to end


def probes(soak: Soak) -> None:
    """Each prompt alone: the texts that all others are held against."""
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        chat = json.dumps({"messages": messages}).encode()
        with soak.server.request("POST", "/apply-template", chat) as response:
            soak.rendered[prompt] = json.loads(response.read())["prompt"]
        for seed in (0, 1):
            body = {"messages": messages, "max_tokens": 64}
            with soak.server.request(
                "POST", CHAT, json.dumps({**body, "seed": seed}).encode()
            ) as response:
                texts = check_whole(response.read())
                soak.read(response, 1)
            soak.same((prompt, 64, seed), texts[0])


def idle(server: Server) -> str | None:
    """What keeps the server from being idle; None where it is."""
    metrics = server.metrics()
    held = {
        "queue": metrics["sfumato_queue_depth", ""],
        "busy slots": metrics["sfumato_slots", "busy"],
        "rows": sum(value for (name, _), value in metrics.items() if name == "sfumato_rows"),
        "GET /state": sum(slot["busy"] for slot in json.loads(server.get("/state"))["slots"]),
    }
    return ", ".join(f"{name}: {count:.0f}" for name, count in held.items() if count) or None


def resident(server: Server) -> float:
    """Bytes of the server's process."""
    return server.metrics()["process_resident_memory_bytes", ""]


def load(soak: Soak, clients: int, seconds: float, seed: int) -> list[float]:
    """All clients at once. Returns the server's resident bytes, about a hundred over the time."""
    began = time.monotonic()
    until = began + seconds
    threads = [
        threading.Thread(target=client, args=(soak, number, seed, until), daemon=True)
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    memory = []
    while time.monotonic() < until:
        memory.append(resident(soak.server))
        time.sleep(seconds / 100)
    for number, thread in enumerate(threads):
        thread.join(max(0.0, until + PATIENCE_S - time.monotonic()))
        if thread.is_alive():
            soak.violated(f"client {number} waits for an answer that does not come")
    return memory


def growth(memory: list[float]) -> float:
    """Bytes by which the last tenth of the readings lies over the tenth after the first third."""
    tenth = max(1, len(memory) // 10)
    third = len(memory) // 3
    return statistics.median(memory[-tenth:]) - statistics.median(memory[third : third + tenth])


def run(soak: Soak, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is done to one server; what does not hold goes into soak.violations."""
    probes(soak)
    before = soak.server.metrics()
    memory = load(soak, options.clients, options.seconds, options.seed)
    until = time.monotonic() + SETTLE_S
    while (busy := idle(soak.server)) and time.monotonic() < until:
        time.sleep(0.1)
    if busy:
        soak.violated(f"not idle {SETTLE_S:.0f} s after the last request: {busy}")
    grown = growth(memory)
    if grown > options.growth_mib * 2**20:
        soak.violated(f"resident memory grew by {grown / 2**20:.1f} MiB after the first third")
    try:
        soak.server.get("/health")
        probes(soak)
    except (Violation, OSError, HTTPException) as error:
        soak.violated(f"afterwards: {error}")
    after = soak.server.metrics()
    ended = Counter[str]()
    for (name, labels), value in after.items():
        if name == "sfumato_requests_total":
            ended[labels.partition(",")[2] or labels] += int(value - before.get((name, labels), 0))
    if bad := {kind for kind in ("internal", "memory") if ended[kind]}:
        soak.violated(f"requests failed: {', '.join(sorted(bad))}")
    return {
        "requests": sum(len(times) for times in soak.seconds.values()),
        "outcomes": dict(ended),
        "texts": len(soak.texts),
        "resident_mib": round(memory[-1] / 2**20, 1),
        "growth_mib": round(grown / 2**20, 2),
    }


@contextmanager
def served(options: argparse.Namespace, soak: Soak, folder: Path) -> Iterator[None]:
    """A server of our own; SIGTERM ends it, and then its audit log is looked at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        soak.server.port = free.getsockname()[1]
    audit, log = folder / "audit.jsonl", folder / "server.log"
    command = [sys.executable, "-m", "sfumato", "serve", "--port", str(soak.server.port)]
    command += ["--slots", str(options.slots), "--context", str(options.context)]
    command += ["--audit-log", str(audit)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        await_health(soak.server, process, log)
        yield
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            soak.violated(f"the server runs on {SETTLE_S:.0f} s after SIGTERM")
        else:
            if code not in (0, -signal.SIGTERM):
                soak.violated(f"the server ended with exit code {code}")
    finally:
        process.kill()
        process.wait()
    for line in audited(audit.read_text().splitlines(), soak):
        soak.violated(line)
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        soak.violated(f"the server's log has a trace: …{text[text.index('Traceback') :][:3000]}")


def audited(lines: list[str], soak: Soak) -> Iterator[str]:
    """What is wrong with an audit log, by what clients have seen: a reply that was read has one
    line, and one that no client waited for has one at most. Refusals took no time and do not
    count."""
    entries = [entry for line in lines if (entry := json.loads(line))["seconds"]]
    ids = Counter(entry["request_id"] for entry in entries)
    if twice := [name for name, count in ids.items() if count > 1]:
        yield f"audit log: {len(twice)} requests ended more than once, as {twice[0]}"
    if lost := soak.answered - ids.keys():
        yield f"audit log: {len(lost)} replies are not in it, as {min(lost)}"
    if not 0 <= (count := len(entries)) - soak.replies <= soak.unread:
        yield f"audit log: {count} lines for {soak.replies} replies, and {soak.unread} unread"


def await_health(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            server.get("/health")
            return
        except (OSError, HTTPException, Violation):
            time.sleep(0.1)
    raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')[-4000:]}")


def table(soak: Soak) -> Iterator[str]:
    yield f"{'':12}{'outcome':18}{'count':>8}{'p50 s':>9}{'p95 s':>9}{'max s':>9}"
    order = list(ACTIONS)
    for (kind, outcome), times in sorted(
        soak.seconds.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
    ):
        times.sort()
        cuts = [times[round(share * (len(times) - 1))] for share in (0.5, 0.95, 1)]
        yield f"{kind:12}{outcome:18}{len(times):8}" + "".join(f"{cut:9.2f}" for cut in cuts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="a server that runs; default: one of our own")
    parser.add_argument("--api-key", default=os.environ.get("SFUMATO_API_KEY"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--slots", type=int, default=8, help="of our own server (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="of a slot (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what clients do (%(default)s)")
    parser.add_argument(
        "--growth-mib", type=float, default=16, help="memory that may be added (%(default)s)"
    )
    options = parser.parse_args()
    parts = urlsplit(options.url or "http://127.0.0.1")
    soak = Soak(Server(parts.hostname or "127.0.0.1", parts.port or 80, options.api_key))
    if options.url:
        report = run(soak, options)
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            served(options, soak, Path(folder)),
        ):
            report = run(soak, options)
    print("\n".join(table(soak)))
    for violation, count in Counter(soak.violations).most_common(20):
        print(f"VIOLATION ({count}×): {violation[:4000]}")
    settings = {"clients": options.clients, "seconds": options.seconds}
    line = {"benchmark": "soak", **settings, **report, "violations": len(soak.violations)}
    print(json.dumps(line))
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
