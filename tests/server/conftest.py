"""Real servers on free ports: one of the embedded model for all tests, and any other on demand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

import sfumato
from sfumato.api import Model
from sfumato.engine import Engine, EngineConfig, Request, Terminal
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.http.uvicorn_server import Listener, bind
from sfumato.server.models import Models
from sfumato.server.service import Service


class Served:
    """A server, its engine and ways to ask it."""

    listener: Listener  # that answers

    def __init__(self, engine: Engine, url: str, service: Service) -> None:
        self.engine, self.url = engine, url
        self.service = service
        self.clients: dict[str, openai.OpenAI] = {}  # of each key
        self.http = httpx.Client(base_url=url, timeout=60, verify=False)

    def client(self, key: str = "any") -> openai.OpenAI:
        """One client for each key, until the server has ended."""
        if key not in self.clients:
            # verify: all authorities' certificates would be read for each client.
            plain = openai.DefaultHttpxClient(verify=False)
            url = f"{self.url}/v1"
            self.clients[key] = openai.OpenAI(
                base_url=url, api_key=key, max_retries=0, timeout=60, http_client=plain
            )
        return self.clients[key]

    def close(self) -> None:
        """Closes what this object made: the clients."""
        for client in (self.http, *self.clients.values()):
            client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str = "Who are you?", **body: Any) -> httpx.Response:
        messages = body.pop("messages", [{"role": "user", "content": text}])
        return self.post("/v1/chat/completions", messages=messages, **body)


@contextlib.contextmanager
def serving(
    model: Model,
    settings: ServerSettings | None = None,
    drain_s: float = 0.0,
    on_finish: Callable[[Request, Terminal], None] | None = None,
    name: str = "sfumato",
    others: Sequence[str] = (),
    front: Any = None,
    **config: Any,
) -> Iterator[Served]:
    """others: further names, each of another engine of this model that takes the first one's
    place. front: middleware, ASGI application to ASGI application, before all of the server's."""
    config = {"slots": 4, "context": 512} | config

    def load(name: str) -> Engine:
        return Engine(model, EngineConfig(**config), on_finish=on_finish).start()

    settings = settings or ServerSettings(keepalive_s=0.2)
    models = Models(name, load(name), others, load)
    engine, app = models.engine, create_app(models, settings)
    if front is not None:
        app.add_middleware(front)
    ready = threading.Event()
    bound = bind("127.0.0.1", 0)

    def is_ready() -> None:
        if app.state.batches is not None:
            app.state.batches.resume()
        ready.set()

    listener = Listener(app, drain_s, models.close, ready=is_ready)
    thread = threading.Thread(target=lambda: listener.run(sockets=[bound]), daemon=True)
    thread.start()
    assert ready.wait(20)
    served = Served(engine, f"http://127.0.0.1:{bound.getsockname()[1]}", app.state.service)
    served.listener = listener
    try:
        yield served
    finally:
        served.close()
        listener.should_exit = True
        thread.join(20)
        models.close()


@pytest.fixture(scope="session")
def embedded() -> Model:
    return sfumato.load()


@pytest.fixture(scope="session")
def server(embedded: Model) -> Iterator[Served]:
    """The embedded model's."""
    with serving(embedded) as served:
        yield served


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """serve(model, settings, slots=…) starts another one, until the test has ended."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **how: stack.enter_context(serving(*args, **how))


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something holds."""

    def wait(holds: Callable[[], bool], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, "it never came to hold"
            time.sleep(0.01)

    return wait
