"""What a running batch costs a client that waits, and what the batch gets meanwhile.

    PYTHONPATH=src .venv/bin/python -m benchmarks.batch_beside_clients [--rounds 6] [--requests 8]

One client asks the embedded model one request after another, all of the same work, of four slots.
Rounds interleave three cases: the client alone, with a batch that yields (in the background,
as `/v1/batches` runs it), and with the same batch as any other client's requests. At the end the
batch has the engine alone. Prints the medians and their ratios, and lines of the batch per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import sfumato
from sfumato.engine import Engine, EngineConfig
from sfumato.server.app import create_app
from sfumato.server.batches import Asking, Record, Store, answer
from sfumato.server.http.middleware import WITHIN, ASGIApp, Receive, Scope, Send
from sfumato.server.models import Models
from sfumato.server.settings import ServerSettings

PATH = "/v1/chat/completions"
WORK = {"max_tokens": 32, "ignore_eos": True, "max_steps": 8, "confidence": 1e-9}
CASES = ("alone", "yields", "equal")


def body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me about the number {number}."}]
    return {"messages": messages, "seed": number, **WORK}


def lines(count: int) -> list[tuple[int, bytes]]:
    fields = ({"custom_id": str(n), "method": "POST", "url": PATH} for n in range(count))
    rows = (json.dumps(each | {"body": body(n)}).encode() for n, each in enumerate(fields))
    return list(enumerate(rows, 1))


class Batch:
    """Asks lines without an end, until it is stopped."""

    def __init__(self, app: ASGIApp, store: Store, name: str, yields: bool) -> None:
        store.put(Record(name, "", "batch", None, {}), lines(2000))
        self.done, self._is_over = 0, False

        async def within(scope: Scope, receive: Receive, send: Send) -> None:
            if yields:
                scope[WITHIN] = ""
            await app(scope, receive, send)

        over = {"is_over": lambda: self._is_over, "on_line": self._count}
        asking = Asking(within, store, name, ServerSettings(), at_a_time=8, **over)  # type: ignore[arg-type]
        self._task = asyncio.create_task(answer(asking))

    def _count(self) -> None:
        self.done += 1

    async def stop(self) -> None:
        self._is_over = True
        await self._task


async def measure(args: argparse.Namespace, app: ASGIApp, store: Store) -> None:
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    rates: dict[str, list[float]] = {case: [] for case in (*CASES, "batch alone")}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for number in range(args.rounds):
            for case in CASES:
                batch = None
                if case != "alone":
                    batch = Batch(app, store, f"{case}{number}", case == "yields")
                    await asyncio.sleep(args.head_start)  # until its slots are taken
                began, before = time.perf_counter(), batch.done if batch else 0
                for each in range(args.requests):
                    sent = time.perf_counter()
                    answered = await client.post(PATH, json=body(each), timeout=None)
                    assert answered.status_code == 200, answered.text
                    seconds[case].append(time.perf_counter() - sent)
                if batch is not None:
                    rates[case].append((batch.done - before) / (time.perf_counter() - began))
                    await batch.stop()
        batch, began = Batch(app, store, "alone", True), time.perf_counter()
        await asyncio.sleep(args.alone)
        rates["batch alone"].append(batch.done / (time.perf_counter() - began))
        await batch.stop()
    alone = median(seconds["alone"])
    for case in CASES:
        rate = f"; {median(rates[case]):.2f} lines/s" if rates[case] else ""
        p50 = median(seconds[case])
        print(f"client, {case}: p50 {p50:.3f} s, {p50 / alone:.2f} of alone{rate}")
    print(f"batch alone: {rates['batch alone'][0]:.2f} lines/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=8, help="of the client in each round")
    parser.add_argument("--head-start", type=float, default=1.0, help="seconds of a batch")
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of the batch alone")
    args = parser.parse_args()
    config = EngineConfig(slots=4, context=512)
    with tempfile.TemporaryDirectory() as folder, Engine(sfumato.load(), config) as engine:
        app = create_app(Models("embedded", engine), ServerSettings(page=False))
        asyncio.run(measure(args, app, Store(Path(folder) / "store", 2**30)))


if __name__ == "__main__":
    main()
