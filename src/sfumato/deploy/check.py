"""`python -m sfumato.deploy.check URL`: holds a server, of any maker, against what gateways expect
of a model server, and prints a table.

The exit status is 1 where something fails that a gateway cannot do without. What a server answers
is bounded, and believed in nothing."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sfumato.server.gateways import HEADERS, METRICS, REQUEST_ID, GatewayMetric

MOST_BYTES = 8 * 2**20  # of an answer
WATCHED = 256  # tokens of a reply during which the server is watched
NOT_READY_S = 5.0  # after a signal, until a server is not ready
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Wrong(Exception):
    """What is not as gateways expect it."""


@dataclass
class Server:
    """The server that is checked. Its methods raise Wrong, httpx.HTTPError and, for an answer of
    another shape, what reading it raises."""

    client: httpx.Client
    key: str | None = None  # sent below /v1; probes and metrics have none
    name: str | None = None  # of the model to ask; None: the first that the server lists

    def answering(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> AbstractContextManager[httpx.Response]:
        """The answer while it comes."""
        if self.key is not None and path.startswith("/v1"):
            headers["Authorization"] = f"Bearer {self.key}"
        return self.client.stream(method, path, json=body, headers=headers)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """The whole answer, whatever its status."""
        with self.answering(method, path, body, **headers) as answer:
            content = b""
            for part in answer.iter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise Wrong(f"the answer is over {MOST_BYTES:,} bytes")
        kept = {x: y for x, y in answer.headers.items() if x in (REQUEST_ID, "retry-after")}
        return httpx.Response(answer.status_code, headers=kept, content=content)

    def generated(self, path: str, route: str = "", headers: dict[str, str] | None = None) -> Any:
        """The JSON that answers a small request."""
        answer = self.ask("POST", path + route, self.body(path), **headers or {})
        if answer.status_code != 200:
            raise Wrong(f"status {answer.status_code}: {answer.text[:120]}")
        return answer.json()

    def body(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        """The body of a small request."""
        messages = [{"role": "user", "content": "Count from one to one hundred."}]
        prompt = {"messages": messages} if path == CHAT else {"prompt": "one, two,"}
        return {"model": self.model, **prompt, "max_tokens": 16} | fields

    @cached_property
    def model(self) -> str:
        """The name of the model to ask."""
        return self.name or self.models()[0]

    def models(self) -> list[str]:
        """The names that the server lists, one at least."""
        answer = self.ask("GET", "/v1/models")
        if not (names := [str(each["id"]) for each in answer.json()["data"]]):
            raise Wrong("lists no model")
        return names

    def scrape(self) -> dict[str, tuple[str, list[Any]]]:
        """Metrics by the names of their samples: the type, and the samples."""
        answer = self.ask("GET", "/metrics")
        if answer.status_code != 200:
            raise Wrong(f"status {answer.status_code} without a key")
        metrics: dict[str, tuple[str, list[Any]]] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                metrics.setdefault(sample.name, (family.type, []))[1].append(sample)
        return metrics

    def status(self, path: str) -> int | str:
        """The status of a probe; where there is no connection, that."""
        try:
            return self.ask("GET", path).status_code
        except httpx.TransportError:
            return "no connection"


def chunks(answer: httpx.Response) -> Iterator[Any]:
    """The chunks of a stream. Raises Wrong where it ends in an error, or without [DONE]."""
    if answer.status_code != 200:
        raise Wrong(f"status {answer.status_code}")
    nbytes, line = 0, ""
    for line in filter(None, answer.iter_lines()):
        nbytes += len(line)
        if nbytes > MOST_BYTES:
            raise Wrong(f"the stream is over {MOST_BYTES:,} bytes")
        if line.startswith("data:") and line != "data: [DONE]":
            chunk = dict(json.loads(line[5:]))
            if "error" in chunk:
                raise Wrong(f"the stream ended in an error: {str(chunk['error'])[:100]}")
            yield chunk
    if line != "data: [DONE]":
        raise Wrong("the stream broke off before data: [DONE]")


def _probe(path: str, server: Server) -> str:
    if (status := server.status(path)) != 200:
        raise Wrong(f"status {status}")
    return "200"


def _models(server: Server) -> str:
    return ", ".join(server.models()[:5])


def _reply(path: str, server: Server) -> str:
    body = server.generated(path)
    choice, usage = body["choices"][0], body["usage"]
    _ = choice["message"]["content"] if path == CHAT else choice["text"]
    return f"{int(usage['prompt_tokens'])} + {int(usage['completion_tokens'])} tokens"


def _stream(server: Server) -> str:
    with server.answering("POST", CHAT, server.body(stream=True)) as answer:
        return f"{sum(1 for _ in chunks(answer))} chunks, then [DONE]"


def _routed(server: Server) -> str:
    server.generated(CHAT, headers={name: f"check-{at}" for at, name in enumerate(HEADERS)})
    return f"{len(HEADERS)} headers are taken"


def _identified(server: Server) -> str:
    given = f"check-{time.time_ns()}"
    answer = server.ask("GET", "/v1/models", **{REQUEST_ID: given})
    if answer.headers.get(REQUEST_ID) != given:
        raise Wrong("the answer has another, or none")
    return "comes back"


def _metric(metric: GatewayMetric, server: Server) -> str:
    """A metric of the right type, with its labels and a value that can be."""
    metrics = server.scrape()
    name = next((name for name in metric.names if name in metrics), None)
    if name is None:
        if metric.may_lack:
            return "absent, as where there is nothing to say"
        raise Wrong("absent")
    kind, samples = metrics[name]
    if kind != metric.kind:
        raise Wrong(f"has the type {kind} and not {metric.kind}")
    labels = [each for each in metric.labels if each != "model_name"]
    for sample in samples:
        if not 0 <= sample.value <= (1 if name.endswith("_perc") else float("inf")):
            raise Wrong(f"{sample.value:g} cannot be")
        for label in labels:
            value = sample.labels.get(label)
            if value is None or not (value.isdecimal() or label.endswith("adapters")):
                raise Wrong(f"its label {label} is {value!r}")
    shown = ", ".join(f"{label} {samples[0].labels[label]}" for label in labels)
    return shown or f"{sum(sample.value for sample in samples):g}"


def _loaded(server: Server) -> str:
    """The metrics while a request runs."""
    body = server.body(stream=True, max_tokens=WATCHED, ignore_eos=True)
    with server.answering("POST", CHAT, body) as answer:
        for _ in chunks(answer):
            samples = server.scrape().get("vllm:num_requests_running", ("", []))[1]
            if sum(sample.value for sample in samples) >= 1:
                return "a running request is counted"
    raise Wrong("no running request was counted")


def _rendered(path: str, server: Server) -> str:
    """The tokens of a prompt; of completions, in an array."""
    body = server.generated(path, "/render")
    one = body if path == CHAT else body[0]
    tokens = [int(token) for token in one["token_ids"]]
    if not one["request_id"] or not tokens or not 0 <= min(tokens) <= max(tokens) < 2**32:
        raise Wrong("no request_id, or token_ids that cannot be")
    return f"{len(tokens)} tokens"


def _ended(process: int, server: Server) -> str:
    """SIGTERM while a request runs: nothing more is taken, and that request ends."""
    probe = "/readyz" if server.status("/readyz") == 200 else "/health"
    body = server.body(stream=True, max_tokens=WATCHED, ignore_eos=True)
    with server.answering("POST", CHAT, body) as answer:
        running = chunks(answer)
        next(running)
        try:
            os.kill(process, signal.SIGTERM)
        except OSError as error:
            raise Wrong(f"the process {process} gets no signal: {error.strerror}") from None
        began = time.monotonic()
        while (status := server.status(probe)) == 200:
            if time.monotonic() > began + NOT_READY_S:
                raise Wrong(f"is ready {NOT_READY_S:g} s after the signal")
            time.sleep(0.02)
        seconds = time.monotonic() - began
        late = server.ask("POST", CHAT, server.body())
        again = late.headers.get("retry-after")
        if late.status_code != 503 or again is None:
            raise Wrong(f"a new request got status {late.status_code}, Retry-After {again}")
        count = sum(1 for _ in running)
    return (
        f"{probe} {status} after {seconds:.2f} s; a new request: 503, Retry-After {again}; the "
        f"running one: {count} chunks more, [DONE]"
    )


@dataclass(frozen=True)
class Check:
    """One thing that gateways expect."""

    name: str
    readers: str  # which gateways, and what for
    probe: Callable[[Server], str]  # what was found; raises what `Server` raises
    needed: bool = False  # whether a gateway cannot do without it


_TOKENS = "llm-d: precise prefixes"
CHECKS = (
    Check("GET /health", "all: health", partial(_probe, "/health"), True),
    Check("GET /readyz", "Kubernetes: readiness", partial(_probe, "/readyz")),
    Check("GET /livez", "Kubernetes: liveness", partial(_probe, "/livez")),
    Check("GET /v1/models", "all: names", _models, True),
    Check(f"POST {CHAT}", "all", partial(_reply, CHAT), True),
    Check("… as a stream", "all", _stream, True),
    Check(f"POST {COMPLETIONS}", "all", partial(_reply, COMPLETIONS), True),
    Check("headers of routers", "llm-d, inference extension", _routed, True),
    Check(REQUEST_ID, "logs on both sides", _identified),
    *(Check(each.name, each.readers, partial(_metric, each), each.needed) for each in METRICS),
    Check("… under load", "all: load", _loaded),
    Check(f"POST {CHAT}/render", _TOKENS, partial(_rendered, CHAT)),
    Check(f"POST {COMPLETIONS}/render", _TOKENS, partial(_rendered, COMPLETIONS)),
)


def held(server: Server, checks: Sequence[Check] = CHECKS) -> tuple[Table, bool]:
    """The table of a server, and whether it has all that is needed."""
    table, has_all = Table("", "what", "for", "found"), True
    for check in checks:
        try:
            outcome, style, detail = "ok", "green", check.probe(server)
        except Exception as error:  # an answer may have any shape
            outcome, style = ("fails", "red") if check.needed else ("lacks", "yellow")
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            detail, has_all = f"{kind}{error}", has_all and not check.needed
        # A server may say anything: no markup, and nothing that moves a cursor.
        plain = "".join(each if each.isprintable() else " " for each in detail)[:200]
        table.add_row(Text(outcome, style), check.name, check.readers, Text(plain))
    return table, has_all


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser("sfumato.deploy.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("url", help="as http://127.0.0.1:8080")
    parser.add_argument("--key", help="sent with requests, and not with probes and metrics")
    parser.add_argument("--model", help="the one to ask; default: the first that is listed")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of an answer")
    parser.add_argument("--stop", type=int, metavar="PID", help="at last, see how SIGTERM ends it")
    args = parser.parse_args(argv)
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"{args.url!r} is no URL; write http://HOST:PORT")
    with httpx.Client(base_url=args.url, timeout=args.timeout) as client:
        server, checks = Server(client, args.key, args.model), CHECKS
        if server.status("/health") == "no connection":
            print(f"{args.url} cannot be reached", file=sys.stderr)
            return 1
        if args.stop is not None:
            ending = partial(_ended, args.stop)
            checks = (*checks, Check("SIGTERM", "all: rolling updates", ending, True))
        table, has_all = held(server, checks)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if not has_all:
        print("A gateway cannot do without what fails.")
    return 0 if has_all else 1


if __name__ == "__main__":
    raise SystemExit(main())
