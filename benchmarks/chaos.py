"""Replicas on Ray Serve that are killed while clients of all dialects ask them.

    PYTHONPATH=src .venv/bin/python benchmarks/chaos.py --minutes 15 --every 120

Starts Ray on this machine, `sfumato deploy ray` with two replicas of the embedded model, and
clients. Every two minutes one replica gets SIGKILL, or, every third time, SIGSTOP, so that it
hangs. Each request has to end once: whole, with the text that its seed always gives; in one error
event, where it is a stream that had begun; or refused in its dialect's words. A connection that
ends early, a second end, another text and a number of ends in /metrics that is not the number of
requests are violations. Prints tables and one JSON line; exit code 1 where there is a violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.soak_clients import CHAT, PROMPTS, VECTORS, Server, message_of, random_fields
from benchmarks.soak_dialects import (
    DIALECTS,
    REFUSED,
    Dialect,
    WrongAnswer,
    check_vectors,
    events,
)

from sfumato.cli.arguments import CommandLine
from sfumato.cli.terminal import table

LOOK_S = 0.5
SETTLE_S = 60.0  # until all replicas are back, at the end
TITLE = b"ray::ServeReplica:default:Engine"


def _finish(event: dict[str, Any]) -> bool:
    return bool(event["choices"]) and event["choices"][0]["finish_reason"] is not None


def _question(how: dict[str, Any]) -> str:
    return str(how["messages"][0]["content"])


KINDS = {
    **DIALECTS,
    "chat": Dialect(
        CHAT,
        lambda how, _: how,
        lambda body: body["choices"][0]["message"]["content"] or "",
        lambda event: "".join(c["delta"].get("content") or "" for c in event["choices"]),
        _finish,
    ),
    "completions": Dialect(
        "/v1/completions",
        lambda how, rendered: {**how, "prompt": rendered, "messages": None},
        lambda body: body["choices"][0]["text"],
        lambda event: "".join(choice["text"] for choice in event["choices"]),
        _finish,
    ),
    "generate": Dialect(
        "/api/generate",
        lambda how, _: {
            "prompt": _question(how),
            "options": {"num_predict": how["max_tokens"], "seed": how["seed"]},
        },
        lambda body: body["response"],
        lambda event: event["response"],
        lambda event: bool(event["done"]),
    ),
}
WHOLE = ("fill", "infill", "decisions", "embeddings")  # kinds whose answers come in one piece


def in_one_piece(kind: str, how: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose answer comes in one piece."""
    question = _question(how)
    if kind == "fill":
        parts = ["I am ", {"tokens": 6}, "."]
        return "/v1/fill", {"messages": how["messages"], "parts": parts, "seed": how["seed"]}
    if kind == "infill":
        how = {"n_predict": 6, "seed": how["seed"]}
        return "/infill", {"input_prefix": question, "input_suffix": ".", **how}
    if kind == "decisions":
        questions = {"good": {"type": "noul", "instructions": "Is it good?"}}
        return "/v1/decisions", {"state": question, "questions": questions}
    return VECTORS, {"input": question}


def replica_pids(title: bytes = TITLE) -> list[int]:
    """The processes of replicas, oldest first, that come from this process."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if not (folder / "cmdline").read_bytes().startswith(title):
                continue
            pid = int(folder.name)
            while pid not in (0, os.getpid()):
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                pid = int(status[1])
        except OSError:
            continue
        if pid:
            pids.append((folder.stat().st_mtime, int(folder.name)))
    return [pid for _, pid in sorted(pids)]


def stream_end(lines: Iterable[bytes], dialect: Dialect) -> tuple[str, str]:
    """How a stream ended, "whole" or "error", and its text or the error's. Raises WrongAnswer where
    it has not one end."""
    text, how = "", ""
    for event in events(lines):
        if how:
            raise WrongAnswer(f"an event after the terminal one: {json.dumps(event)[:200]}")
        if event.get("type") in REFUSED or event.get("error"):
            error = event.get("error") or event.get("response", {}).get("error") or event
            how, text = "error", message_of(error)
        else:
            text += dialect.piece(event)
            how = "whole" if dialect.is_last(event) else ""
    if not how:
        raise WrongAnswer("a stream ended without its terminal event")
    return how, text


@dataclass
class Chaos:
    """What the clients share."""

    server: Server
    rendered: dict[str, str]
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, how it ended
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[tuple[Any, ...], str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)  # after a kill, until all replicas are there
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def same(self, key: tuple[Any, ...], text: str) -> None:
        with self.lock:
            before = self.texts.setdefault(key, text)
        if before != text:
            raise WrongAnswer(f"{key}: {text!r}, and before {before!r}")

    def ask(self, kind: str, rng: random.Random) -> str:
        """Asks once, and returns how it ended. Raises WrongAnswer."""
        how, streams = random_fields(rng), kind not in WHOLE and rng.random() < 0.6
        if kind in WHOLE:
            path, body = in_one_piece(kind, how)
        else:
            path = KINDS[kind].path
            body = KINDS[kind].body(how, self.rendered[_question(how)]) | {"stream": streams}
            body = {name: value for name, value in body.items() if value is not None}
        with self.server.request("POST", path, json.dumps(body).encode()) as response:
            if response.status != 200:
                answer = response.read()
                try:
                    message = message_of(json.loads(answer)["error"])
                except (ValueError, KeyError, TypeError):
                    raise WrongAnswer(f"HTTP {response.status}: {answer[:300]!r}") from None
                return f"HTTP {response.status}: {message[:60]}"
            if streams:
                end, text = stream_end(iter(response.readline, b""), KINDS[kind])
                if end == "error":
                    return f"error event: {text[:60]}"
            else:
                answer = json.loads(response.read())
                text = self._text(kind, answer)
        family = kind if kind in WHOLE else "text"
        self.same((family, _question(how), how["max_tokens"], how["seed"]), text)
        return "whole, streamed" if streams else "whole"

    def _text(self, kind: str, answer: Any) -> str:
        if kind not in WHOLE:
            return KINDS[kind].body_text(answer)
        if kind == "embeddings":
            check_vectors(answer, 1)
            return ""
        kept = {"fill": "text", "infill": "content", "decisions": "answers"}[kind]
        return json.dumps(answer[kept] if kept in answer else sorted(answer))

    def client(self, seed: str, until: float) -> None:
        """One client's life."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            kind, begun = rng.choice((*KINDS, *WHOLE)), time.monotonic()
            with self.lock:
                self.sent += 1
            try:
                end = self.ask(kind, rng)
            except WrongAnswer as error:
                end = "VIOLATION"
                self.violations.append(f"{kind}: {error}")
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                end = "LOST"
                self.violations.append(f"{kind}: {type(error).__name__}: {error}")
            with self.lock:
                self.ends[kind, end] += 1
                self.seconds[end.partition(":")[0]].append(time.monotonic() - begun)
            if end.startswith("HTTP"):
                time.sleep(1.0)

    def strike(self, number: int, replicas: int) -> None:
        """Ends a replica, or stops it; waits until all are there again."""
        pids, begun = replica_pids(), time.monotonic()
        how = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
        os.kill(pids[number % len(pids)], how)
        print(f"{how.name} to replica {pids[number % len(pids)]} of {pids}", flush=True)
        while pids[number % len(pids)] in (now := replica_pids()) or len(now) < replicas:
            time.sleep(LOOK_S)
        self.back_s.append(time.monotonic() - begun)
        print(f"  another process after {self.back_s[-1]:.1f} s", flush=True)


def deployed(options: argparse.Namespace) -> Server:
    """Starts Ray and the application."""
    import ray

    from sfumato.deploy import ray as on_ray

    words = ["--replicas", str(options.replicas), "--health-timeout", "15", "--drain", "10"]
    args = CommandLine().parse_args(["deploy", "ray", *words, "--port", str(options.port)])
    # Processors are by count here: more replicas than this machine would place on its own.
    ray.init(
        num_cpus=4 + options.replicas,
        object_store_memory=150_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )
    on_ray.start(args)
    return Server("127.0.0.1", options.port)


def ends(server: Server) -> float:
    """Requests that have ended, as the front counts them."""
    return sum(
        value for (of, _), value in server.metrics().items() if of == "sfumato_requests_total"
    )


def run(options: argparse.Namespace, server: Server) -> Chaos:
    rendered = {}
    for question in PROMPTS:
        body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
        with server.request("POST", "/apply-template", body) as response:
            rendered[question] = json.loads(response.read())["prompt"]
    chaos, ends_before = Chaos(server, rendered), ends(server)
    until = time.monotonic() + 60 * options.minutes
    clients = [
        threading.Thread(target=chaos.client, args=(f"{options.seed} {number}", until))
        for number in range(options.clients)
    ]
    for each in clients:
        each.start()
    number, due = 0, time.monotonic() + options.every
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        if time.monotonic() >= due and due + options.every / 2 < until:
            chaos.strike(number, options.replicas)
            number, due = number + 1, due + options.every
    for each in clients:
        each.join()
    time.sleep(3.0)
    if (ended := ends(server) - ends_before) != chaos.sent:
        chaos.violations.append(f"{chaos.sent} requests were sent, and {ended:g} have an end")
    return chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two strikes")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chaos = run(options, deployed(options))
    rows = [(kind, end, f"{count:,}") for (kind, end), count in sorted(chaos.ends.items())]
    print("\n".join(table([("kind", "end", "requests"), *rows])))
    slowest = {end: round(max(each), 2) for end, each in chaos.seconds.items()}
    figures = {
        "sent": chaos.sent,
        "ends": sum(chaos.ends.values()),
        "back_s": [round(each, 1) for each in chaos.back_s],
        "slowest_s": slowest,
        "violations": len(chaos.violations),
    }
    print(json.dumps(figures))
    for violation in chaos.violations[:50]:
        print(violation, file=sys.stderr)
    from ray import serve

    serve.shutdown()
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
