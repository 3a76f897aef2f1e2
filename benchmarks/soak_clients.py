"""What the clients of benchmarks/soak.py do, and how they tell a right answer."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from benchmarks.soak_dialects import DIALECTS, WrongAnswer, check_vectors, text_of_stream
from prometheus_client.parser import text_string_to_metric_families

PROMPTS = (
    "Who are you?",
    "What is the capital of Japan?",
    "How do you work?",
    "What is the meaning of life?",
)
SEEDS = 8
PATIENCE_S = 120.0  # without a byte: the request is lost

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]
MALFORMED: tuple[tuple[str, bytes], ...] = (
    (CHAT, b""),
    (CHAT, b"{"),
    (CHAT, b"\xff\xfe\x00"),
    (CHAT, b"[]"),
    (CHAT, b"[" * 100_000),
    (CHAT, json.dumps({"messages": []}).encode()),
    (CHAT, json.dumps({"messages": "Hello"}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "unknown", "content": "Hello"}]}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "max_tokens": -2}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "max_tokens": "many"}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "temperature": -3}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "no_such_field": 1}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "seed": 2**70}).encode()),
    (CHAT, json.dumps({"messages": HELLO, "stop": [1]}).encode()),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hello"}], "temperature": NaN}'),
    (TEXT, json.dumps({"prompt": [10**9]}).encode()),
    (TEXT, json.dumps({"prompt": {}}).encode()),
    ("/v1/responses", b"{"),
    ("/v1/responses", json.dumps({"input": "Hello", "previous_response_id": "none"}).encode()),
    ("/v1/messages", json.dumps({"messages": HELLO}).encode()),
    ("/v1/messages", json.dumps({"messages": [], "max_tokens": 3}).encode()),
    ("/api/chat", json.dumps({"messages": "Hello"}).encode()),
    ("/api/generate", b"["),
    (VECTORS, json.dumps({"input": []}).encode()),
    ("/completion", json.dumps({"prompt": 3}).encode()),
    ("/tokenize", json.dumps({"content": None}).encode()),
    ("/detokenize", json.dumps({"tokens": [-1]}).encode()),
)
OVERSIZED: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: {"messages": [{"role": "user", "content": "many words " * 40_000}]},
    lambda: {"messages": HELLO, "max_tokens": 10**9},
    lambda: {"messages": HELLO * 20_000},
    lambda: {"messages": [{"role": "user", "content": "x" * (12 << 20)}]},
)


class Violation(Exception):
    """Something that the server promises does not hold."""


def message_of(error: Any) -> str:
    """The message of an error: an object's, or Ollama's text."""
    return str(error["message"] if isinstance(error, dict) else error)


def check_stream(lines: Iterable[bytes]) -> dict[int, str]:
    """The text of each choice of a stream, read to its end.

    Holds one finish reason for each, one [DONE], and nothing after."""
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    done = False
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if not data or line.startswith(b":"):
            continue
        if done:
            raise Violation(f"an event after [DONE]: {data[:200]!r}")
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise Violation(f"a stream ended in an error: {chunk['error']}")
        for choice in chunk["choices"]:
            index = choice["index"]
            piece = text_of(choice.get("delta") or choice)
            if index in reasons and (piece or choice.get("finish_reason")):
                raise Violation(f"choice {index} goes on after its finish reason")
            texts[index] += piece
            if choice.get("finish_reason"):
                reasons[index] = choice["finish_reason"]
    if not done or not reasons or reasons.keys() != texts.keys():
        raise Violation(f"a stream ended before its reply: finished {reasons}, [DONE] {done}")
    return dict(texts)


def check_whole(body: bytes) -> dict[int, str]:
    """The text of each choice of a plain reply, all of which have a finish reason."""
    choices = json.loads(body)["choices"]
    if not choices or not all(choice["finish_reason"] for choice in choices):
        raise Violation(f"a reply without an end: {body[:200]!r}")
    return {choice["index"]: text_of(choice.get("message") or choice) for choice in choices}


def text_of(part: dict[str, Any]) -> str:
    """Of a message, a delta or a choice of a text completion; thoughts come before the answer."""
    return "".join(part.get(key) or "" for key in ("reasoning_content", "content", "text"))


@dataclass
class Server:
    """Where requests go, and how."""

    host: str
    port: int
    key: str | None = None

    @contextmanager
    def request(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        with closing(HTTPConnection(self.host, self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, body, headers)
            yield connection.getresponse()

    def get(self, path: str) -> bytes:
        with self.request("GET", path) as response:
            body = response.read()
        if response.status != 200:
            raise Violation(f"GET {path}: HTTP {response.status}: {body[:200]!r}")
        return body

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, the values of its labels) → value."""
        families = text_string_to_metric_families(self.get("/metrics").decode())
        samples = (sample for family in families for sample in family.samples)
        return {(s.name, ",".join(s.labels.values())): s.value for s in samples}


class Soak:
    """What all clients share: the server, the tally, and the texts that seeds have given."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.violations: list[str] = []
        self.texts: dict[tuple[Any, ...], str] = {}
        self.rendered = dict.fromkeys(PROMPTS, "")  # question → the prompt that the template makes
        self.answered: set[str] = set()  # ids of requests whose reply was read to its end
        self.replies = 0  # that were read to their end, several of them to one request or not
        self.unread = 0  # that the server may have begun, and no client waited for
        self._lock = threading.Lock()

    def count(self, kind: str, outcome: str, seconds: float) -> None:
        with self._lock:
            self.seconds[kind, outcome].append(seconds)

    def read(self, response: HTTPResponse, replies: int) -> None:
        """A reply was read to its end."""
        with self._lock:
            self.answered.add(response.headers["X-Request-Id"])
            self.replies += replies

    def left(self, replies: int) -> None:
        """Replies were asked for that will not be read."""
        with self._lock:
            self.unread += replies

    def violated(self, what: str) -> None:
        with self._lock:
            self.violations.append(what)

    def same(self, key: tuple[Any, ...], text: str) -> None:
        """Holds that a request has the text that it had before."""
        with self._lock:
            before = self.texts.setdefault(key, text)
        if before != text:
            raise Violation(f"{key}: {text!r}, and before {before!r}")

    # What clients do. Each returns how it went, or raises Violation.

    def stream(self, rng: random.Random) -> str:
        return self._reply(rng, stream=True)

    def drafts(self, rng: random.Random) -> str:
        return self._reply(rng, stream=True, stream_drafts=True)

    def plain(self, rng: random.Random) -> str:
        return self._reply(rng, stream=False)

    def choices(self, rng: random.Random) -> str:
        return self._reply(rng, stream=rng.random() < 0.5, n=rng.randint(2, 3))

    def leave(self, rng: random.Random) -> str:
        """Disconnects: before the answer, or within the stream; half of them without a farewell."""
        fields = {**random_fields(rng), "max_tokens": 256}
        path, body = CHAT, fields
        if name := rng.choice((None, *DIALECTS)):
            path, body = self._in_dialect(name, fields)
        body = {**body, "stream": rng.random() < 0.7}
        server = self.server
        with closing(HTTPConnection(server.host, server.port, timeout=PATIENCE_S)) as connection:
            headers = {"Content-Type": "application/json"}
            if server.key:
                headers["Authorization"] = f"Bearer {server.key}"
            self.left(1)
            connection.request("POST", path, json.dumps(body), headers)
            if rng.random() < 0.5:  # a reset instead of an orderly end
                linger = struct.pack("ii", 1, 0)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if body["stream"] and rng.random() < 0.6:
                response = connection.getresponse()
                if response.status == 429:
                    return "queue full"
                for _ in range(rng.randint(0, 4)):
                    response.readline()
                return "within the stream"
            time.sleep(rng.random() * 0.3)
        return "before the answer"

    def responses(self, rng: random.Random) -> str:
        return self._reply_in("responses", rng)

    def messages(self, rng: random.Random) -> str:
        return self._reply_in("messages", rng)

    def ollama(self, rng: random.Random) -> str:
        return self._reply_in("ollama", rng)

    def llama(self, rng: random.Random) -> str:
        return self._reply_in("llama", rng)

    def embeddings(self, rng: random.Random) -> str:
        texts = rng.sample(PROMPTS, rng.randint(1, len(PROMPTS)))
        body = json.dumps({"input": texts}).encode()
        with self.server.request("POST", VECTORS, body) as response:
            if outcome := self._unanswered(response, VECTORS):
                self.left(len(texts) - 1)  # as of several choices
                return outcome
            check_vectors(json.loads(response.read()), len(texts))
            self.read(response, len(texts))
        return "whole"

    def malformed(self, rng: random.Random) -> str:
        path, body = rng.choice(MALFORMED)
        return self._refused(path, body)

    def grammars(self, rng: random.Random) -> str:
        """A hostile schema or grammar, or one that only looks so."""
        from benchmarks.hostile_grammars import hostile_request  # which needs this module

        path, body = hostile_request(rng.randrange(10**6))
        with self.server.request("POST", path, body) as response:
            answer = response.read()
            if response.status == 200:
                self.read(response, 1)
            else:
                self.left(1)  # one that is refused only by the engine has a line in the audit log
        if response.status not in (200, 400, 429):
            raise Violation(f"{path} {body[:80]!r}: HTTP {response.status}: {answer[:200]!r}")
        return f"HTTP {response.status}"

    def oversized(self, rng: random.Random) -> str:
        try:
            return self._refused(CHAT, json.dumps(rng.choice(OVERSIZED)()).encode())
        except (ConnectionError, HTTPException):
            return "cut off"  # the server need not read on

    def look(self, rng: random.Random) -> str:
        self.server.get(rng.choice(("/health", "/slots", "/state", "/metrics", "/memory")))
        return "whole"

    def _reply(self, rng: random.Random, **options: Any) -> str:
        body = {**random_fields(rng), **options}
        count = options.get("n", 1)
        with self.server.request("POST", CHAT, json.dumps(body).encode()) as response:
            if response.status == 429:
                response.read()
                self.left(count - 1)  # those before the one that was refused are taken back
                time.sleep(0.1 + rng.random())
                return "queue full"
            if response.status != 200:
                raise Violation(f"{body}: HTTP {response.status}: {response.read(500)!r}")
            if options["stream"]:
                texts = check_stream(iter(response.readline, b""))
            else:
                texts = check_whole(response.read())
            self.read(response, count)
        if texts.keys() != set(range(count)):
            raise Violation(f"{body}: has choices {list(texts)}")
        for index, text in texts.items():
            # The i-th choice has the seed plus i.
            key = (body["messages"][0]["content"], body["max_tokens"], body["seed"] + index)
            self.same(key, text)
        return "whole"

    def _in_dialect(self, name: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A chat's fields as a dialect's path and body."""
        dialect = DIALECTS[name]
        return dialect.path, dialect.body(fields, self.rendered[fields["messages"][0]["content"]])

    def _reply_in(self, name: str, rng: random.Random) -> str:
        """A chat's request in another dialect, whose text is that of chat."""
        fields, dialect = random_fields(rng), DIALECTS[name]
        path, body = self._in_dialect(name, fields)
        body = {**body, "stream": rng.random() < 0.7}
        with self.server.request("POST", path, json.dumps(body).encode()) as response:
            if outcome := self._unanswered(response, path):
                return outcome
            if body["stream"]:
                text = text_of_stream(iter(response.readline, b""), dialect)
            else:
                text = dialect.body_text(json.loads(response.read()))
            self.read(response, 1)
        self.same((fields["messages"][0]["content"], fields["max_tokens"], fields["seed"]), text)
        return "whole"

    def _unanswered(self, response: HTTPResponse, path: str) -> str | None:
        """How a request ended that has no answer; None where it has one."""
        if response.status == 429:
            response.read()
            time.sleep(1)
            return "queue full"
        if response.status != 200:
            raise Violation(f"{path}: HTTP {response.status}: {response.read(500)!r}")
        return None

    def _refused(self, path: str, body: bytes) -> str:
        with self.server.request("POST", path, body) as response:
            answer = response.read()
        if response.status not in (400, 413, 422):
            raise Violation(f"{path} {body[:80]!r}: HTTP {response.status}: {answer[:200]!r}")
        if not message_of(json.loads(answer)["error"]):
            raise Violation(f"{path} {body[:80]!r}: refused without saying why")
        return f"HTTP {response.status}"


ACTIONS: dict[str, tuple[Callable[[Soak, random.Random], str], float]] = {
    "stream": (Soak.stream, 5),
    "drafts": (Soak.drafts, 2),
    "plain": (Soak.plain, 4),
    "choices": (Soak.choices, 1),
    "responses": (Soak.responses, 2),
    "messages": (Soak.messages, 2),
    "ollama": (Soak.ollama, 2),
    "llama": (Soak.llama, 2),
    "embeddings": (Soak.embeddings, 1),
    "leave": (Soak.leave, 4),
    "malformed": (Soak.malformed, 3),
    "oversized": (Soak.oversized, 0.5),
    "grammars": (Soak.grammars, 1),
    "look": (Soak.look, 1),
}


def random_fields(rng: random.Random) -> dict[str, Any]:
    """One of few requests, so that most are asked more than once."""
    return {
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "max_tokens": rng.choice((16, 64, 128)),
        "seed": rng.randrange(SEEDS),
    }


def client(soak: Soak, number: int, seed: int, until: float) -> None:
    """One client's life."""
    rng = random.Random(f"{seed} {number}")
    names, weights = list(ACTIONS), [weight for _, weight in ACTIONS.values()]
    while time.monotonic() < until:
        (name,) = rng.choices(names, weights)
        start = time.monotonic()
        try:
            outcome = ACTIONS[name][0](soak, rng)
        except (Violation, WrongAnswer) as violation:
            outcome = "VIOLATION"
            soak.violated(f"{name}: {violation}")
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            outcome = "LOST"
            soak.violated(f"{name}: {type(error).__name__}: {error}")
        soak.count(name, outcome, time.monotonic() - start)
