"""Lines of batches, the texts of their results, and a program that is killed on the way."""

from __future__ import annotations

import json
from typing import Any

CHAT = "/v1/chat/completions"

KILLED = """
import os, signal, sys
from sfumato.cli import main
from sfumato.server.batches import Store

count, real = 0, Store.answered

def answered(store, *how):
    global count
    count += 1
    if count == 4:
        store._lock.acquire()  # else another line's end would end this transaction
        store._base.execute("DELETE FROM lines")  # in a transaction that never ends
        os.kill(os.getpid(), signal.SIGKILL)
    real(store, *how)

Store.answered = answered
sys.exit(main(sys.argv[1:]))
"""
"""As the command line, until the fourth result is to be kept."""


def line(name: str, url: str = CHAT, **body: Any) -> bytes:
    fields = {"custom_id": name, "method": "POST", "url": url, "body": body}
    return json.dumps(fields).encode() + b"\n"


def ask(number: int, **how: Any) -> dict[str, Any]:
    how = {"seed": number, "max_tokens": 8, "max_steps": 4, "temperature": 1.5} | how
    return {"messages": [{"role": "user", "content": f"Name {number} colors"}]} | how


def texts_of(results: str) -> dict[str, str]:
    """The text of each result, by custom_id; no line may come twice."""
    rows = [json.loads(each) for each in results.splitlines()]
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
    assert len(bodies) == len(rows)
    return {name: body["choices"][0]["message"]["content"] for name, body in bodies.items()}
