"""llama-server's routes around the tokenizer."""

from __future__ import annotations

from typing import Any

from sfumato.api import Model

PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def test_tokenize_there_and_back(server: Any, embedded: Model) -> None:
    tokens = server.post("/tokenize", content="Who?<turn|>").json()["tokens"]
    assert tokens == embedded.tokenizer.encode("Who?<turn|>")
    assert server.post("/detokenize", tokens=tokens).json()["content"] == "Who?<turn|>"
    plain = server.post("/tokenize", content="<turn|>", parse_special=False).json()["tokens"]
    assert len(plain) > 1
    first = server.post("/tokenize", content="a", add_special=True).json()["tokens"][0]
    assert first == embedded.tokenizer.bos_id
    pieces = server.post("/tokenize", content="ab", with_pieces=True).json()["tokens"]
    assert [part["piece"] for part in pieces] == ["a", "b"]
    assert server.post("/detokenize", tokens=[10**6]).json()["error"]["param"] == "tokens"


def test_apply_template(server: Any) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = server.post("/apply-template", messages=messages).json()
    assert answer["prompt"] == f"<bos>{PROMPT}"
    bare = server.post("/apply-template", messages=messages, add_generation_prompt=False).json()
    assert not bare["prompt"].endswith("model\n")
