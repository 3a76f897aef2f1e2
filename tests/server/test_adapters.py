"""Adapters as models of every dialect, loaded and unloaded while the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.random_adapter import random_changes
from tests.support.random_model import random_model

from sfumato import Engine, EngineConfig, Model
from sfumato.cli import serve
from sfumato.cli.arguments import CommandLine
from sfumato.model.adapter_files import WEIGHTS, AdapterFile, write_peft
from sfumato.refused import Refused
from sfumato.server.app import ServerSettings, create_app
from sfumato.server.models import Models, ServedAdapter

MESSAGES = [{"role": "user", "content": "x"}]
OLLAMA = {"stream": False, "options": {"num_predict": 9}}
LIMITS = {"max_tokens": 12, "seed": 3, "max_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, one that is broken, and one beside the folder."""
    folder = tmp_path_factory.mktemp("served") / "adapters"
    folder.mkdir()
    model = random_model()
    for seed, path in enumerate((folder / "a", folder / "b", folder / "broken", folder / "../out")):
        adapter = AdapterFile(random_changes(model.network, seed), 2, 2.0)
        write_peft(path, adapter, model.family, model.config)
    (folder / "broken" / WEIGHTS).write_bytes(b"no tensors")
    return folder


@pytest.fixture
def model(folder: Path) -> Model:
    model = random_model()
    model.load_adapter("a", folder / "a")
    return model


@pytest.fixture
def client(model: Model, folder: Path) -> Iterator[TestClient]:
    engine = Engine(model, EngineConfig(slots=2, context=256)).start()
    settings = ServerSettings(adapter_folder=folder)
    try:
        yield TestClient(create_app(Models("base", engine), settings))
    finally:
        engine.close()


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client: TestClient, name: str) -> str:
    body = post(client, "/v1/chat/completions", model=name, messages=MESSAGES, **LIMITS)
    assert body["model"] == name
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_every_dialect_names_an_adapter_as_a_model(client: TestClient, model: Model) -> None:
    base, adapted = chat(client, "base"), chat(client, "a")
    assert base != adapted
    prompt = {"prompt": "xy", **LIMITS}
    for path, fields, name in (
        ("/v1/completions", prompt, "model"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, "model"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 9}, "model"),
        ("/api/chat", {"messages": MESSAGES, **OLLAMA}, "model"),
        ("/api/generate", {"prompt": "x", **OLLAMA}, "model"),
        ("/v1/fill", {"parts": ["x", {"tokens": 2}], "seed": 1}, "model"),
        ("/completion", {"prompt": "xy", "n_predict": 9, "seed": 1}, "model"),
        ("/v1/embeddings", {"input": "x"}, "model"),
    ):
        answers = [post(client, path, model=each, **fields) for each in ("base", "a")]
        assert [each[name] for each in answers] == ["base", "a"], path
        assert len({str(sorted(each.items())) for each in answers}) == 2
    questions = {"q": {"type": "noul", "instructions": "Is it?"}}
    decided = [
        post(client, "/v1/decisions", model=each, state="x", questions=questions)
        for each in ("base", "a")
    ]
    assert decided[0]["answers"] != decided[1]["answers"]
    assert post(client, "/api/chat", model="a:latest", messages=MESSAGES, **OLLAMA)
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "a", "messages": MESSAGES, "stream": True} | LIMITS,
    ) as stream:
        assert '"model":"a"' in stream.read().decode()


def test_adapters_are_listed(client: TestClient) -> None:
    base, adapter = client.get("/v1/models").json()["data"]
    assert (base["id"], adapter["id"], adapter["parent"], adapter["root"]) == (
        "base",
        "a",
        "base",
        "a",
    )
    assert adapter["status"] == {"value": "loaded"} and "parent" not in base
    assert client.get("/v1/models/a").json() == adapter
    tags = client.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["base:latest", "a:latest"]
    assert tags[1]["details"]["parent_model"] == "base" and tags[0]["digest"] != tags[1]["digest"]
    assert post(client, "/api/show", model="a")["modelfile"] == "FROM base\nADAPTER a\n"
    assert client.get("/lora-adapters").json() == [{"id": 1, "path": "a", "scale": 0.0}]
    assert "sfumato_adapters 1.0" in client.get("/metrics").text


def test_llama_servers_clients_name_the_number(client: TestClient) -> None:
    fields = {"prompt": "xy", "n_predict": 9, "seed": 1}
    by_name = post(client, "/completion", model="a", **fields)
    by_number = post(client, "/completion", lora=[{"id": 1, "scale": 1}], **fields)
    assert by_number["content"] == by_name["content"] and by_number["model"] == "a"
    for scales in ([], [{"id": 1, "scale": 0}]):
        assert post(client, "/completion", lora=scales, **fields)["model"] == "base"
    for wrong in ([{"id": 1, "scale": 0.5}], [{"id": 7, "scale": 1}]):
        answer = client.post("/completion", json=fields | {"lora": wrong})
        assert answer.status_code == 400 and "lora" in answer.json()["error"]["message"]


def test_clients_load_and_unload_as_from_vllm(client: TestClient, model: Model) -> None:
    before = chat(client, "a")
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    answer = client.post(load, json={"lora_name": "b", "lora_path": "b"})
    assert answer.text == "Success: LoRA adapter 'b' added successfully."
    assert chat(client, "b") not in (before, chat(client, "base"))
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["base", "a", "b"]
    for body, status, words in (
        ({"lora_name": "c"}, 400, "lora_name, lora_path: both must be given"),
        ({"lora_name": "b", "lora_path": "b"}, 400, "lora_name: 'b' is the name of"),
        ({"lora_name": "base", "lora_path": "b"}, 400, "lora_name: 'base' is the name of"),
        ({"lora_name": "c d", "lora_path": "b"}, 400, "lora_name: 'c d' is no name"),
        ({"lora_name": "c", "lora_path": "none"}, 404, "lora_path: no adapter 'none'"),
        ({"lora_name": "c", "lora_path": "../out"}, 404, "lora_path: no adapter '../out'"),
        ({"lora_name": "c", "lora_path": "x\0"}, 404, "lora_path: no adapter"),
        ({"lora_name": "c", "lora_path": "broken"}, 400, "lora_path: "),
        ({"lora_name": "c", "lora_path": "."}, 400, "lora_path: "),
    ):
        answer = client.post(load, json=body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status and message.startswith(words), message
        assert "/tmp" not in message
    assert chat(client, "a") == before
    answer = client.post(unload, json={"lora_name": "a"})
    assert answer.text == "Success: LoRA adapter 'a' removed successfully."
    body = {"model": "a", "messages": MESSAGES}
    for answer in (
        client.post(unload, json={"lora_name": "a"}),
        client.post("/v1/chat/completions", json=body),
    ):
        assert answer.status_code == 404 and "'a'" in answer.json()["error"]["message"]
    assert client.post(load, json={"lora_name": "a", "lora_path": "b"}).status_code == 200
    assert chat(client, "a") == chat(client, "b")


def test_clients_load_none_where_no_folder_is_named(model: Model) -> None:
    with Engine(model, EngineConfig(slots=1, context=64)) as engine:
        client = TestClient(create_app(Models("base", engine)))
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = client.post(path, json={"lora_name": "a"})
            assert answer.status_code == 404
            assert "--allow-adapters" in answer.json()["error"]["message"]


def test_a_model_comes_back_without_what_a_client_loaded_and_has_removed() -> None:
    served = serve._served(CommandLine().parse_args(["serve", "--name", "m"], {}))
    adapters = {"gone": ServedAdapter("m", "nowhere", by_client=True)}
    engine = serve._Loader(served, None, adapters).made("m")
    assert not engine.adapters
    engine.close()
    with pytest.raises(ValueError, match="nowhere"):
        serve._Loader(served, None, {"gone": ServedAdapter("m", "nowhere")}).made("m")


def test_the_command_line_names_adapters_of_models() -> None:
    def named(*words: str) -> dict[str, tuple[str, str]]:
        args = CommandLine().parse_args(["serve", *words], {})
        adapters = serve._adapters(args, serve._served(args))
        return {name: (each.base, each.path) for name, each in adapters.items()}

    assert named("--adapter", "a=x/y", "--adapter", "b@m=z=1", "--name", "m") == {
        "a": ("m", "x/y"),
        "b": ("m", "z=1"),
    }
    two = ("-m", "m=embedded", "-m", "n=embedded")
    assert named(*two, "--adapter", "a@n=x") == {"a": ("n", "x")}
    for words, why in (
        ((*two, "--adapter", "a=x"), "write a@MODEL=PATH"),
        ((*two, "--adapter", "a@o=x"), "there is m, n"),
        ((*two, "--adapter", "m@n=x"), "'m' is the name of"),
        (("--adapter", "a"), "'a' is not NAME=PATH"),
        (("--adapter", "a b=x"), "'a b=x' is not NAME=PATH"),
    ):
        with pytest.raises(Refused, match=why):
            named(*words)
