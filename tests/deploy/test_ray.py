"""Two replicas on Ray Serve, of which one is killed or hangs while clients of all dialects ask."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import chaos
from benchmarks.soak_clients import CHAT, PROMPTS, Server

import sfumato
from sfumato.refused import Refused

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
REPLICAS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ray = pytest.importorskip("ray")
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield chaos.deployed(argparse.Namespace(replicas=REPLICAS, port=port))
    serve.shutdown()
    ray.shutdown()


def test_a_front_of_replicas_answers_as_a_model_alone(server: Server) -> None:
    messages = [{"role": "user", "content": PROMPTS[1]}]
    body = {"messages": messages, "seed": 3, "max_tokens": 64}
    with server.request("POST", CHAT, json.dumps(body).encode()) as response:
        answer = json.loads(response.read())
    alone = sfumato.load().generate(messages=messages, seed=3, max_tokens=64)
    assert answer["choices"][0]["message"]["content"] == alone.text
    assert {slot["id"] for slot in json.loads(server.get("/slots"))} == set(range(REPLICAS * 4))
    with server.request("POST", CHAT, json.dumps(body | {"max_tokens": "x"}).encode()) as response:
        assert response.status == 400


def test_each_request_ends_once_while_replicas_are_killed(server: Server) -> None:
    options = argparse.Namespace(minutes=0.7, every=12.0, clients=4, replicas=REPLICAS, seed=0)
    seen = chaos.run(options, server)
    assert seen.violations == []
    assert seen.back_s, "no replica was killed"
    assert sum(seen.ends.values()) == seen.sent > 0


def test_a_replica_that_hangs_is_replaced_and_nobody_waits_for_it(server: Server) -> None:
    seen = chaos.Chaos(server, dict.fromkeys(PROMPTS, ""))
    hang = 2  # of `strike`: the number of one that stops its replica
    striking = threading.Thread(target=seen.strike, args=(hang, REPLICAS))
    striking.start()
    rng, ends = random.Random(0), list[str]()
    while striking.is_alive() or not ends:
        ends.append(seen.ask("chat", rng))
    striking.join()
    assert {end.partition(":")[0] for end in ends} <= {"whole", "whole, streamed", "error event"}


def test_a_replica_that_does_not_answer_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.exceptions import RayActorError

    from sfumato.deploy import ray as on_ray

    async def answer(what: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what if what != "hangs" else await asyncio.Event().wait()

    async def results(of: list[Any]) -> list[Any]:
        return [SimpleNamespace(get_async=partial(answer, each)) for each in of]

    def handle(*of: Any) -> Any:
        made = SimpleNamespace(_fetch_replica_results_async=partial(results, list(of)))
        return SimpleNamespace(broadcast=lambda method: made)

    monkeypatch.setattr(on_ray, "ANSWER_S", 0.05)
    for of in (["a", "hangs", "b", RayActorError()], ["hangs"], []):
        given = asyncio.run(on_ray.RayReplicas(handle(*of)).all("report"))
        assert given == [each for each in of if each in ("a", "b")]


def test_options_come_as_arguments_of_serve_run() -> None:
    pytest.importorskip("ray")
    from sfumato.deploy import ray as on_ray

    made = on_ray.app({"model": "x.gguf", "replicas": "2", "max-replicas": "3", "slots": "6"})
    engine = made._bound_deployment.init_args[0]._bound_deployment
    scaling = engine._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 3)
    assert scaling.target_ongoing_requests == 6 and engine.max_ongoing_requests == 12
    for args in ({"replica": "2"}, {"replicas": "2", "max-replicas": "1"}, {"gpu-layers": "auto"}):
        with pytest.raises(Refused):
            on_ray.app(args)
