"""The dialects are forms of one request: the same prompt, settings and seed give the same text."""

from __future__ import annotations

import json
from typing import Any

QUESTION = "Who are you?"
MESSAGES = [{"role": "user", "content": QUESTION}]
HOW: dict[str, Any] = {"seed": 5, "temperature": 1.5, "max_steps": 2}
LIMITED = HOW | {"max_tokens": 12}
OLLAMA = {"options": HOW | {"num_predict": 12}, "stream": False}


def test_every_dialect_gives_the_same_text(server: Any) -> None:
    rendered = server.post("/apply-template", messages=MESSAGES).json()["prompt"]

    def ask(path: str, **body: Any) -> Any:
        answer = server.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    (chat,) = ask("/v1/chat/completions", messages=MESSAGES, **LIMITED)["choices"]
    (completion,) = ask("/v1/completions", prompt=rendered, **LIMITED)["choices"]
    (item,) = ask("/v1/responses", input=QUESTION, **HOW, max_output_tokens=12)["output"]
    texts = {
        "completions": completion["text"],
        "responses": item["content"][0]["text"],
        "messages": ask("/v1/messages", messages=MESSAGES, **LIMITED)["content"][0]["text"],
        "/api/chat": ask("/api/chat", messages=MESSAGES, **OLLAMA)["message"]["content"],
        "/api/generate": ask("/api/generate", prompt=QUESTION, **OLLAMA)["response"],
        "/completion": ask("/completion", prompt=rendered, **LIMITED)["content"],
    }
    assert len(chat["message"]["content"]) == 12
    assert texts == dict.fromkeys(texts, chat["message"]["content"])


def test_every_dialect_has_what_a_second_reader_finds(server: Any) -> None:
    """The same numbers, in a body and at the end of a stream; a fill and the causal mode have no
    second reader."""
    question = "What is the capital of Bulgaria?"
    messages = [{"role": "user", "content": question}]
    rendered = server.post("/apply-template", messages=messages).json()["prompt"]
    fields = LIMITED | {"verify": "report"}
    ollama = {"options": OLLAMA["options"] | {"verify": "report"}, "stream": False}

    def ask(path: str, **body: Any) -> Any:
        answer = server.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    responses = {"input": question, **HOW, "max_output_tokens": 12, "verify": "report"}
    (chat,) = ask("/v1/chat/completions", messages=messages, **fields)["choices"]
    (completion,) = ask("/v1/completions", prompt=rendered, **fields)["choices"]
    bodies = {
        "completions": completion,
        "responses": ask("/v1/responses", **responses),
        "messages": ask("/v1/messages", messages=messages, **fields),
        "/api/chat": ask("/api/chat", messages=messages, **ollama),
        "/completion": ask("/completion", prompt=rendered, **fields),
    }
    read, text = chat["verification"], chat["message"]["content"]
    assert {name: body["verification"] for name, body in bodies.items()} == dict.fromkeys(
        bodies, read
    )
    assert len(read["tokens"]) == 12 and all(token["rank"] >= 1 for token in read["tokens"])
    for doubt in read["doubts"]:
        assert text[doubt["start"] :].startswith(doubt["text"])
    assert any(doubt["nats"] > 2 for doubt in read["doubts"]), "a country that was not trained on"
    stream = server.post(
        "/v1/chat/completions", messages=messages, stream=True, stream_drafts=True, **fields
    ).text
    frames = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert frames[-1]["choices"][0]["verification"] == read
    (settled,) = (frame["settled"] for frame in frames if "settled" in frame)
    doubted = [at for at, token in enumerate(read["tokens"]) if token["logprob"] < -2.302585]
    assert settled["doubted"] == doubted
    plain = ask("/v1/chat/completions", messages=messages, **LIMITED)["choices"][0]
    assert plain["message"]["content"] == text and "verification" not in plain
    for path, wrong in (
        ("/v1/fill", {"parts": ["a", {"tokens": 1}]}),
        ("/v1/chat/completions", {"messages": messages, "mode": "causal"}),
    ):
        answer = server.post(path, verify="report", **wrong)
        assert answer.status_code == 400 and "verify" in answer.text, answer.text
    assert server.post("/v1/chat/completions", messages=messages, verify="redo").status_code == 400
