"""The dialects are forms of one request: the same prompt, settings and seed give the same text."""

from __future__ import annotations

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
