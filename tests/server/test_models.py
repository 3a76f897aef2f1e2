"""Several registered models, of which one is loaded at a time."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.fake_engine import FakeEngine

from sfumato.cli import serve
from sfumato.cli.arguments import CommandLine
from sfumato.engine import Health
from sfumato.refused import Refused
from sfumato.server import models as models_module
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.metrics import Metrics
from sfumato.server.models import Models, ServedAdapter

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer k"}


class Held(FakeEngine):
    """An engine whose replies can be held back, and that can be closed."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.is_held, self.is_closed = False, False
        self.held: list[Callable[[], Any]] = []

    def submit(self, request: Any, sink: Any = None) -> Any:
        assert not self.is_closed
        if not self.is_held:
            return super().submit(request, sink)
        later = FakeEngine()
        handle: Any = type("Handle", (), {"cancel": lambda self: None, "terminal": None})()
        self.held.append(partial(later.submit, request, sink))
        return handle

    def release(self) -> None:
        self.is_held = False
        for deliver in self.held:
            deliver()

    def health(self) -> Health:
        return Health(not self.is_closed, None, 1.0, 0, len(self.held))

    def close(self, drain_s: float = 0.0, join_s: float = 0.0) -> None:
        self.is_closed = True


class Registry:
    """Three models. What loads one waits for `may_load`."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.broken: set[str] = set()
        self.may_load = threading.Event()
        self.may_load.set()
        self.engine: Any = Held("a")
        self.models = Models("a", self.engine, ["b", "c"], self.load)

    def load(self, name: str) -> Any:
        self.loads.append(name)
        assert self.engine.is_closed and not self.models.is_loaded, "two models at a time"
        assert self.may_load.wait(10)
        if name in self.broken:
            raise RuntimeError(f"no memory for /srv/models/{name}.gguf")
        self.engine = Held(name)
        return self.engine


Check = Callable[[httpx.AsyncClient, Registry], Awaitable[None]]


def run(check: Check, **settings: Any) -> None:
    async def main() -> None:
        registry = Registry()
        fixed = ServerSettings(**settings)
        app = create_app(registry.models, fixed)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await check(client, registry)

    asyncio.run(main())


def body(model: str | None, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, **({"model": model} if model else {}), **more}


def ask(client: httpx.AsyncClient, model: str | None, **more: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(CHAT, json=body(model, **more)))


async def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < limit, "it never came to hold"
        await asyncio.sleep(0.005)


async def statuses(client: httpx.AsyncClient, **headers: Any) -> dict[str, str]:
    cards = (await client.get("/v1/models", **headers)).json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def test_a_request_has_its_model_loaded_in_the_place_of_the_other() -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        for name in (None, "a", "gpt-4o", "other"):  # as where there is one model
            assert (await ask(client, name)).json()["model"] == "a"
        assert registry.loads == []
        assert (await ask(client, "b")).json()["model"] == "b"
        assert (await ask(client, "gpt-4o")).json()["model"] == "b"
        assert await statuses(client) == {"b": "loaded", "a": "unloaded", "c": "unloaded"}
        assert (await client.get("/v1/models/c")).json()["status"] == {"value": "unloaded"}
        cards = (await client.get("/v1/models")).json()["data"]
        assert all(card["created_at"].endswith("Z") and card["display_name"] for card in cards)
        missing = await client.get("/v1/models/d")
        assert missing.status_code == 404
        assert "there are 'a', 'b', 'c', 'other'" in missing.json()["error"]["message"]
        tag = await ask(client, "a:latest")  # is Ollama's alone: the loaded model answers
        assert tag.json()["model"] == "b"
        props = (await client.get("/props")).json()
        assert (props["model"], props["models"]) == ("b", ["a", "b", "c"])
        assert (await ask(client, "other")).json()["model"] == "a"  # an alias
        # Every route has the model loaded that its body names, whose clients' names differ.
        ollama = await client.post("/api/chat", json=body("c:latest", stream=False))
        assert ollama.json()["model"] == "c"
        assert 0 < ollama.json()["load_duration"] < 1e9 * time.monotonic()
        decision = {
            "model": "b",
            "state": "x",
            "questions": {"q": {"type": "noul", "instructions": "Is it?"}},
        }
        assert (await client.post("/v1/systemone", json=decision)).json()["model"] == "b"
        await client.post("/tokenize", json={"model": "a", "content": "x"})
        # Lists of Ollama's have all; a client that goes through the list loads none.
        loads = registry.loads.copy()
        assert loads == ["b", "a", "c", "b", "a"]
        names = [each["name"] for each in (await client.get("/api/tags")).json()["models"]]
        assert names == ["a:latest", "other:latest", "b:latest", "c:latest"]
        for name in names:
            assert (await client.post("/api/show", json={"model": name})).status_code == 200
        assert (await client.post("/api/show", json={"model": "d"})).status_code == 404
        assert registry.loads == loads

    run(check, aliases=("other",))


def test_the_server_answers_while_a_model_is_loaded() -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        registry.may_load.clear()
        client.headers = httpx.Headers(KEY)
        answer = ask(client, "b", stream=True)
        await until(lambda: registry.loads)
        got = {path: (await client.get(path)) for path in ("/health", "/livez", "/readyz", "/")}
        assert {path: each.status_code for path, each in got.items()} == {
            "/health": 200,
            "/livez": 200,
            "/readyz": 503,
            "/": 200,
        }
        assert got["/health"].json()["status"] == "loading"
        assert "'b' is being loaded" in got["/readyz"].json()["reason"]
        assert await statuses(client) == {"a": "unloaded", "b": "loading", "c": "unloaded"}
        props = await client.get("/props")
        assert props.status_code == 503 and props.json()["error"]["code"] == "model_loading"
        assert (await client.get("/api/ps")).json() == {"models": []}
        assert (await client.get("/metrics")).status_code == 200
        # Nothing waits that has no key, or a wrong body.
        for name in ("a", "b", None):
            refused = await client.post(
                CHAT, json=body(name), headers={"Authorization": "Bearer x"}
            )
            assert refused.status_code == 401
            assert (await client.post(CHAT, json=body(name, n=0))).status_code == 400
        assert registry.models.health().waiting == 1
        registry.may_load.set()
        assert '"model":"b"' in (await answer).text.replace(" ", "")
        assert (await client.get("/readyz")).status_code == 200
        # And without a key no model is loaded.
        client.headers = httpx.Headers()
        assert (await client.post(CHAT, json=body("a"))).status_code == 401
        assert registry.loads == ["b"]

    run(check, api_keys=("k",))


@pytest.mark.parametrize("stream", [False, True])
def test_requests_enter_in_their_order(stream: bool) -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        first = registry.engine
        first.is_held = True
        running = ask(client, "a", stream=stream)
        await until(lambda: first.held)
        later = []
        for name in ("b", "a", "c", "b", None):
            later.append(ask(client, name, stream=stream))
            await until(lambda: registry.models.health().waiting == len(later))
        assert not registry.loads, "what runs ends first"
        first.release()
        answers = [(await each).text for each in (running, *later)]
        # Those that wait for one model enter together, and none waits for ever.
        assert registry.loads == ["b", "a", "c"]
        for text, name in zip(answers, ("a", "b", "a", "c", "b", "b"), strict=True):
            assert f'"model":"{name}"' in text.replace(" ", "")
        assert registry.models.health().waiting == 0

    run(check)


def test_what_cannot_be_loaded_is_a_503_and_the_model_before_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        registry.broken.add("b")
        answer = await ask(client, "b")
        assert answer.status_code == 503 and 55 < int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert error["code"] == "model_unavailable" and "no memory for b.gguf" in error["message"]
        assert (await ask(client, None)).json()["model"] == "a"
        assert (await ask(client, "b")).status_code == 503
        assert registry.loads == ["b", "a"], "it was tried again at once"
        monkeypatch.setattr(models_module, "AGAIN_S", 0.0)
        registry.broken |= {"a", "c"}
        assert (await ask(client, "c")).status_code == 503
        await until(lambda: registry.models.loading is None)
        for path, status in (("/livez", 200), ("/readyz", 503), ("/health", 503), ("/props", 503)):
            assert (await client.get(path)).status_code == status, path
        assert await statuses(client) == dict.fromkeys("abc", "unloaded")
        answers = [(await ask(client, name)).status_code for name in ("a", None)]
        assert answers == [503, 503]
        registry.broken.clear()
        assert (await ask(client, None)).json()["model"] == "a"
        assert (await client.get("/readyz")).status_code == 200

    run(check)


def test_an_adapter_has_its_name_once_it_is_loaded_and_until_its_file_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        loaded, models = Future[Any](), registry.models
        registry.engine.load_adapter = lambda name, path: loaded
        monkeypatch.setattr(models_module, "ADAPTER_S", 0.0)
        with pytest.raises(TimeoutError):
            models.load_adapter("x", "path")
        assert not models.adapters
        loaded.set_result(None)
        assert models.adapters == {"x": ServedAdapter("a", "path", by_client=True)}
        for name in "ba":  # a comes back without it
            assert (await ask(client, name)).json()["model"] == name
        assert (await ask(client, "x")).status_code == 404 and not models.adapters

    run(check)


def test_an_engine_that_does_not_end_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        def close(*_: Any) -> None:
            registry.engine.is_closed = True
            raise RuntimeError("a thread is stuck")

        monkeypatch.setattr(registry.engine, "close", close)
        failed = await ask(client, "b")
        assert failed.status_code == 503 and "RuntimeError" in failed.text
        assert (await ask(client, "c")).json()["model"] == "c"

    run(check)


def test_waiting_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(client: httpx.AsyncClient, registry: Registry) -> None:
        first, models = registry.engine, registry.models
        monkeypatch.setattr(models_module, "CHECK_S", 0.01)
        first.is_held = True
        running = ask(client, "a")
        await until(lambda: first.held)
        with monkeypatch.context() as patched:
            patched.setattr(models_module, "WAIT_S", 0.02)
            late = await ask(client, "b")
        assert late.status_code == 503 and late.headers["retry-after"]
        assert late.json()["error"]["code"] == "model_loading"
        with monkeypatch.context() as patched:
            patched.setattr(models_module, "MOST_WAITING", 0)
            assert "the limit" in (await ask(client, "b")).text
        # A client that has gone has no model loaded, and lets in who came after it.
        scope = {"type": "http"}
        left: Any = type("Http", (), {"scope": scope, "receive": disconnected})()
        with pytest.raises(Exception, match="disconnected"):
            await models.wait(left, "b")
        waiting = ask(client, "b")
        await until(lambda: models.health().waiting == 1)
        behind = ask(client, "a")
        await until(lambda: models.health().waiting == 2)
        # The end of the server ends those that wait at once, and lets end what runs.
        assert models.under_way() == 1
        models.close()
        for each in (waiting, behind):
            assert (await each).json()["error"]["code"] == "shutdown"
        first.release()
        assert (await running).status_code == 200 and registry.loads == []

    async def disconnected() -> dict[str, str]:
        return {"type": "http.disconnect"}

    run(check)


def served(*words: str) -> serve.Served:
    return serve._served(CommandLine().parse_args(["serve", *words], {}))


def test_models_have_the_names_that_options_give_them(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.gguf"
    odd.touch()
    assert list(served("-m", f"a={'x' * 300}")) == ["a"]  # longer than any file's name
    assert list(served()) == ["sfumato-embedded"]
    assert list(served("--name", "toy")) == ["toy"]
    assert list(served("-m", str(odd), "-m", "toy=embedded", "--model=x=y/z.gguf")) == [
        "a=b.gguf",
        "toy",
        "x",
    ]
    first, second = served("-m", "a=embedded-masks", "-m", "b=embedded", "--mmproj", "f").values()
    assert first.model.endswith("embedded_masks") and second.model is None
    assert (first.mmproj, second.mmproj) == ("f", None)
    for words, why in (
        (("-m", "a=x", "-m", "a=y"), "two are called 'a'"),
        (("-m", "=x"), "NAME=PATH"),
        (("-m", "a="), "NAME=PATH"),
        (("-m", "a b,=x"), "model: 'a b,' is no name of a model: .*without spaces"),
        (("--name", "a b"), "name: 'a b' is no name of a model"),
        (("-m", "a=x", "-m", "b=y", "--alias", "b"), "alias: 'b' is the name of a model"),
        (("-m", "a=x", "--name", "b"), "name"),
        (("-m", "x", "-m", "y", "--name", "b"), "name"),
    ):
        with pytest.raises(Refused, match=why):
            served(*words)


def test_the_packaged_models_take_each_others_place() -> None:
    """As `serve` loads them: the memory of the one before is free, and the counters go on."""
    args = ("-m", "toy=embedded", "-m", "masks=embedded-masks", "--context", "256", "--slots", "1")
    loader = serve._Loader(served(*args), None)
    models = Models("toy", loader.made("toy"), ["masks"], loader.replaced)
    models.engine.start()
    network = weakref.ref(models.engine.model.network)
    app = create_app(models, ServerSettings(), loader.metrics)

    async def main() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for name in ("toy", "masks"):
                answer = await ask(client, name, max_tokens=8)
                assert answer.json()["model"] == name, answer.text
            gc.collect()
            assert network() is None, "the model before is still in memory"
            assert (await client.get("/props")).json()["architecture"] != "DiffusionGemma"
            lines = (await client.get("/metrics")).text.splitlines()
            (count,) = (line for line in lines if line.startswith("sfumato_requests_total{"))
            assert count.endswith(" 2.0")

    try:
        asyncio.run(main())
    finally:
        models.close()
        gc.unfreeze()
    assert isinstance(loader.metrics, Metrics)
