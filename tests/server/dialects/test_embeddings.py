"""Vectors over HTTP, in three APIs: the same numbers, and what is refused."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from sfumato.api import Model

TEXT = "The tide comes in."


def own_vector(model: Model, text: str, kind: str = "mean") -> list[float]:
    """Of bos and the text, markers in it as text."""
    bos = model.tokenizer.bos_id
    ids = torch.tensor([bos, *model.tokenizer.encode(text, special=False)])
    (hidden,) = model.network.encode_hidden([ids], [model.network.new_slot(512)])
    vector = hidden[-1] if kind == "last" else hidden.float().mean(dim=0)
    numbers: list[float] = normalize(vector.float(), dim=0).tolist()
    return numbers


def test_three_apis_give_the_same_numbers(server: Any, embedded: Model) -> None:
    texts = [TEXT, "<|turn>x", ""]
    data = server.post("/v1/embeddings", input=texts).json()
    ours = [item["embedding"] for item in data["data"]]
    for vector, text in zip(ours, texts, strict=True):
        assert vector == pytest.approx(own_vector(embedded, text), abs=1e-4)
    assert [item["index"] for item in data["data"]] == [0, 1, 2] and data["object"] == "list"
    assert data["usage"]["prompt_tokens"] == data["usage"]["total_tokens"] > 6
    lists = server.post("/embedding", content=texts).json()
    assert [item["embedding"] for item in lists] == [[pytest.approx(v, abs=1e-6)] for v in ours]
    ollama = server.post("/api/embed", model="m", input=texts, keep_alive="5m").json()
    assert ollama["embeddings"] == [pytest.approx(vector, abs=1e-6) for vector in ours]
    assert ollama["prompt_eval_count"] == data["usage"]["prompt_tokens"]
    assert ollama["total_duration"] > 0
    older = server.post("/api/embeddings", model="m", prompt=TEXT, options={}).json()
    assert older == {"embedding": pytest.approx(ours[0], abs=1e-6)}
    assert server.post("/api/embeddings", model="m", prompt="").json() == {"embedding": []}
    assert server.post("/api/embed", model="m", input=[]).json()["embeddings"] == []


def test_with_openais_client(server: Any, embedded: Model) -> None:
    """Which asks for base64 by itself; token ids, and fewer dimensions."""
    client = server.client()
    made = client.embeddings.create(model="m", input=TEXT, extra_body={"pooling": "last"})
    expected = own_vector(embedded, TEXT, "last")
    assert made.data[0].embedding == pytest.approx(expected, abs=1e-4)
    ids = [embedded.tokenizer.bos_id, *embedded.tokenizer.encode(TEXT)]
    some = client.embeddings.create(model="m", input=[ids, ids], dimensions=16)
    expected = normalize(torch.tensor(own_vector(embedded, TEXT)[:16]), dim=0).tolist()
    assert [item.embedding for item in some.data] == [pytest.approx(expected, abs=1e-4)] * 2
    raw = server.post("/v1/embeddings", input=TEXT, encoding_format="base64").json()
    (text,) = (item["embedding"] for item in raw["data"])
    numbers = struct.unpack(f"<{embedded.config.hidden_size}f", base64.b64decode(text))
    assert numbers == pytest.approx(own_vector(embedded, TEXT), abs=1e-4)


@pytest.mark.parametrize(
    "value",
    [
        [5, 6, "of", 7],
        {"prompt_string": TEXT},
        {"content": [{"type": "text", "text": "The "}, {"type": "text", "text": "tide"}]},
        [TEXT, [5, "a"], {"prompt_string": ""}],
    ],
)
def test_forms_of_input(server: Any, value: Any) -> None:
    count = len(value) if isinstance(value, list) and isinstance(value[0], str) else 1
    answer = server.post("/v1/embeddings", input=value)
    assert answer.status_code == 200 and len(answer.json()["data"]) == count


def test_a_long_text(server: Any) -> None:
    """Ollama's is cut; others are refused."""
    long = "word " * 2000
    answer = server.post("/api/embed", input=long).json()
    assert answer["prompt_eval_count"] == 512 and len(answer["embeddings"]) == 1
    error = server.post("/api/embed", input="a b " * 50_000, truncate=False)
    assert error.status_code == 400 and list(error.json()) == ["error"]
    error = server.post("/v1/embeddings", input="a b " * 50_000).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input: is empty"),
        ({"input": [[]]}, "input: is empty"),
        ({"input": [[-1]]}, "input: token ids must lie in"),
        ({"input": [1, True]}, r"input\[1\]: must be a token id or a text"),
        ({"input": [True]}, r"input\[0\]: must be a text"),
        ({"input": {"content": "a"}}, "input: must be a text"),
        (
            {"input": {"content": [{"type": "image_url"}]}},
            r"input\.content\[0\]\.image_url: must be",
        ),
        ({"input": {"prompt_string": "a", "multimodal_data": ["x"]}}, "has 1 pictures, and"),
        (
            {"input": {"prompt_string": "<__media__>", "multimodal_data": ["x"]}},
            r"input\.multimodal_data\[0\]: the picture's base64 data are damaged",
        ),
        ({"input": {"a": 1}}, r"input\.a: unknown"),
        ({"input": ["a"] * 2049}, "input: at most 2,048 prompts"),
        ({"input": "a", "dimensions": 10_000}, "dimensions: must be at most"),
        ({"input": "a", "pooling": "cls"}, "pooling: must be 'mean' or 'last'"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: "),
        ({"input": 5}, "input: "),
        ({}, "input: "),
    ],
    ids=str,
)
def test_refusals(server: Any, body: Any, message: str) -> None:
    answer = server.post("/v1/embeddings", **body)
    assert answer.status_code == 400
    with pytest.raises(ValueError, match=f"^{message}|: .*{message}"):
        raise ValueError(answer.json()["error"]["message"])


def test_one_answer_is_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.server.dialects.embeddings.MOST_NUMBERS", 1000)
    error = server.post("/v1/embeddings", input=["a"] * 9).json()["error"]
    assert "send the texts in parts" in error["message"]
    error = server.post("/embedding", input="a", content="a").json()["error"]
    assert error["message"] == "input, content: give exactly one of them"
