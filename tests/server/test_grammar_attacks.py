"""Schemas and grammars that used to end the server, or to hold up everybody, against a live one.

The server is a process of its own: a crash of it is seen here, and not suffered.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.grammar_attack import ALLOWED
from benchmarks.hostile_attacks import rule_chains
from benchmarks.hostile_clients import post, served
from benchmarks.hostile_grammars import bomb, hostile_request, tool, trivial
from benchmarks.soak_clients import CHAT, Server
from tests.diffusion.constraints.test_depth import LINKS, chain
from tests.server.http.test_inflight import Ends
from tests.support.random_model import random_model

from sfumato.diffusion.constraints.trials import Trials

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(argparse.Namespace(slots=2), tmp_path_factory.mktemp("live")) as (server, _):
        yield server


def lark(length: int) -> str:
    lines = [f'r{i}: "a" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "b"'])


@cache
def schemas() -> dict[str, Any]:
    return dict(_schemas())


def _schemas() -> Iterator[tuple[str, Any]]:
    for name in ("items", "allOf", "anyOf", "oneOf", "required", "optional", "reference"):
        for length in (1000, 2500):
            schema = chain(length, LINKS[name])
            if len(json.dumps(schema)) < 2**18:
                yield f"{name} {length}", schema


def refused(live: Server, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a request that is refused; the server lives on."""
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    body = (chat if path == CHAT else {"prompt": "Hello"}) | {"max_tokens": 4} | fields
    status, answer = post(live, path, json.dumps(body).encode())
    assert status == 400, answer[:500]
    assert post(live, CHAT, trivial(0))[0] == 200
    error: dict[str, Any] = json.loads(answer)["error"]
    return error


@pytest.mark.parametrize("name", schemas())
def test_chains_of_references(live: Server, name: str) -> None:
    why = "has a chain of"
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schemas()[name]}}
    error = refused(live, CHAT, response_format=named)
    assert error["param"] == "response_format.json_schema.schema" and why in error["message"]


def test_chains_in_every_field(live: Server) -> None:
    schema = chain(1500, LINKS["items"])
    for path, fields, param in (
        ("/completion", {"json_schema": schema}, "json_schema"),
        ("/completion", {"grammar": rule_chains(1, 4000)}, "grammar"),
        (CHAT, {"guided_json": json.dumps(schema)}, "guided_json"),
        (CHAT, {"guided_grammar": lark(4000)}, "guided_grammar"),
        (CHAT, {"guided_grammar": f"start: %json {json.dumps(schema)}"}, "guided_grammar"),
        (CHAT, {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (CHAT, {"guided_regex": "(" * 4000 + "a" + ")*" * 4000}, "guided_regex"),
    ):
        error = refused(live, path, **fields)
        assert error["param"] == param and "make it flatter" in error["message"]


@pytest.mark.parametrize("length", [1000, 2000, 3000])
@pytest.mark.parametrize("make", [lark, lambda length: rule_chains(1, length)])
def test_chains_of_rules(live: Server, length: int, make: Callable[[int], str]) -> None:
    error = refused(live, CHAT, guided_grammar=make(length))
    assert "rules, each of which refers to the next" in error["message"]


def test_tools(serve: Callable[..., Any]) -> None:
    """Of a model that calls tools, which the embedded one does not."""
    one = serve(random_model())
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}}
    parameters |= {"$defs": chain(1500, LINKS["items"])["$defs"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    error = one.chat(tools=[{"type": "function", "function": function}], max_tokens=4).json()
    assert error["error"]["param"] == "tools[0].function.parameters"
    assert "has a chain of" in error["error"]["message"]
    rng = random.Random(0)
    for _ in range(30):
        answer = one.chat(tools=[tool(rng)], tool_choice="required", max_tokens=4)
        assert answer.status_code in (200, 400), answer.text
    trials = one.engine.model.grammars.cache.trials
    assert trials is not None and trials.process is not None


def test_a_compilation_has_a_limit_of_time(live: Server) -> None:
    status, answer = post(live, CHAT, bomb(0))
    error = json.loads(answer)["error"]
    assert status == 400 and error["param"] == "guided_grammar"
    assert "takes more than 1 s of the processor's time" in error["message"]


def test_clients_that_leave_end_their_compilations(
    serve: Callable[..., Any], embedded: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, compiled = Ends(), []
    outcome = Trials._outcome
    monkeypatch.setattr(
        Trials, "_outcome", lambda *args: (compiled.append(args[1]), outcome(*args))[1]
    )
    one = serve(embedded, on_finish=heard)
    host, port = one.http.base_url.host, one.http.base_url.port
    assert post(Server(host, port), CHAT, trivial(0))[0] == 200  # the process runs
    trials = one.engine.model.grammars.cache.trials
    leaving = []
    for number in range(4):
        connection = http.client.HTTPConnection(host, port)
        connection.request("POST", CHAT, bomb(number), {"Content-Type": "application/json"})
        leaving.append(connection)
    eventually(lambda: len(trials._open) == 4, 30)
    for connection in leaving:
        connection.close()
    eventually(lambda: not trials._open, 30)
    eventually(lambda: heard.kinds()["cancelled"] == 4, 30)
    assert post(Server(host, port), CHAT, trivial(1))[0] == 200
    assert [source.kind for source in compiled] == ["regex", "regex"]  # and no bomb


def test_a_deadline_ends_a_compilation(live: Server) -> None:
    body = json.loads(bomb(1)) | {"timeout": 0.05}
    status, answer = post(live, CHAT, json.dumps(body).encode())
    assert status == 504 and json.loads(answer)["error"]["code"] == "timeout"


def test_hostile_requests_are_the_same_for_the_same_number() -> None:
    assert hostile_request(7) == hostile_request(7) != hostile_request(8)
    assert len({hostile_request(number)[1] for number in range(200)}) > 180


def attacked(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.grammar_attack", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert line["is_alive"] and not line["notes"], line
    assert {*line["answers"]} <= {*ALLOWED, "small: 200"}, line
    return line


def test_a_hostile_grammar_of_every_field_and_route(note: Callable[[str], None]) -> None:
    first, count = 2548, 14
    requests = [hostile_request(number) for number in range(first, first + count)]
    fields = set().union(*(json.loads(body) for _, body in requests))
    assert fields >= {"response_format", "json_schema", "guided_json", "structured_outputs",
                      "guided_regex", "guided_grammar", "grammar", "guided_choice", "tools",
                      "tool_choice"}  # fmt: skip
    assert len({path for path, _ in requests}) == 3
    how = ("--grammars", str(count), "--first", str(first), "--turns", "0.1", "--bombs", "1")
    line = attacked(*how)
    note(f"grammar attack: {line}")
    assert sum(line["answers"].values()) >= count


@pytest.mark.slow
def test_five_thousand_hostile_grammars(note: Callable[[str], None]) -> None:
    line = attacked()
    note(f"grammar attack: {line}")
    assert line["health_p99_ms"] < 1000 and line["growth_mb"] < 500
