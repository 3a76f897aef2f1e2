"""Log probabilities beside the text that they are of, on a model that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.conftest import Served, serving
from tests.support.answering_model import Answer, answering_model
from tests.support.scripted_model import VOCABULARY, tokenizer

from sfumato.server.http import route

BROKEN = VOCABULARY["<0xE2>"]  # the first byte of a character that never becomes one
QUOTED = "'<eos>' and <|tool_call>"


def ids(text: str, special: bool = True) -> list[int]:
    return tokenizer().encode(text, special)


ANSWERS: dict[str, Answer] = {
    # "zq j" is one token; other characters outside ASCII are two or three.
    "mixed": "<|channel>thought\nzq j, 日?<channel|>日本 zq jé, zq zq j."
    "<|tool_call>call:f{a:1}<tool_call|>Then zq j日 it ends.<turn|>",
    # A call ends a thought, as for the parser of replies.
    "inside": "<|channel>thought\nzq<|tool_call>call:f{}<tool_call|>so zq j.<turn|>",
    "broken": [*ids("a"), BROKEN, *ids("b"), BROKEN, *ids("<pad>c"), BROKEN],
    "quoted": [*ids("if ") + ids(QUOTED, special=False), *ids("<turn|>")],
}
TEXTS = {
    "mixed": "日本 zq jé, zq zq j.Then zq j日 it ends.",
    "inside": "so zq j.",
    "broken": "a\ufffdb\ufffdc\ufffd",
    "quoted": f"if {QUOTED}",
}
CASES = [
    *[(name, None) for name in ANSWERS],
    ("mixed", "本"),
    ("mixed", "n zq"),  # of which "zq j" has a part
    ("mixed", " jé"),
    ("mixed", "q j."),
    ("mixed", "zq j日 IT"),  # which does not come
    ("inside", " j"),
    ("broken", "\ufffdc"),
    ("quoted", "eos>"),
]


@pytest.fixture(scope="module")
def answering() -> Iterator[Served]:
    with serving(answering_model(ANSWERS)) as served:
        yield served


def chunks(answer: Any) -> list[dict[str, Any]]:
    data = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    lines = [line.removeprefix("data: ") for line in data]  # between them: what keeps it alive
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize(("name", "stop"), CASES)
def test_tokens_add_up_to_the_content(answering: Served, name: str, stop: str | None) -> None:
    text = TEXTS[name]
    text = text[: text.find(stop)] if stop and stop in text else text
    how: dict[str, Any] = {"stop": stop, "max_tokens": len(ids(ANSWERS["mixed"])) + 8}
    how |= {"logprobs": True, "top_logprobs": 1, "retry_empty": False}
    if name == "broken":
        how["max_tokens"] = len(ANSWERS["broken"])
    (plain,) = answering.chat(name, **how).json()["choices"]
    assert plain["message"]["content"] == text
    entries = plain["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    if name != "broken":
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert all(entry["logprob"] > -1e-3 for entry in entries)  # each is its own token's

    streamed = chunks(answering.chat(name, stream=True, **how))
    assert "".join(chunk["delta"].get("content") or "" for chunk in streamed) == text
    streamed_entries = []
    for chunk in streamed:
        logged = (chunk["logprobs"] or {}).get("content", [])
        assert "".join(entry["token"] for entry in logged) == (chunk["delta"].get("content") or "")
        streamed_entries += logged
    assert streamed_entries == entries


@pytest.mark.parametrize(("name", "stop"), CASES)
def test_offsets_of_text_completions(answering: Served, name: str, stop: str | None) -> None:
    body = {"prompt": f"<|turn>user\n{name}<turn|>\n<|turn>model", "logprobs": 1, "stop": stop}
    body |= {"max_tokens": 60 if name != "broken" else len(ANSWERS["broken"])}
    (plain,) = answering.post("/v1/completions", **body).json()["choices"]
    streamed = chunks(answering.post("/v1/completions", stream=True, **body))
    assert "".join(chunk["text"] for chunk in streamed) == plain["text"]
    tokens, offsets = plain["logprobs"]["tokens"], plain["logprobs"]["text_offset"]
    assert "".join(tokens) == plain["text"]
    at = [len("".join(tokens[:number])) for number in range(len(tokens))]
    assert offsets == at
    parts = [chunk["logprobs"] for chunk in streamed if chunk["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == tokens
    assert [offset for part in parts for offset in part["text_offset"]] == offsets


def test_large_answers_are_encoded_in_threads(answering: Served, monkeypatch: Any) -> None:
    looped: list[bool] = []

    def watched(encode: Any) -> Any:
        def encoded(value: Any, **how: Any) -> str:
            text: str = encode(value, **how)
            if '"top_logprobs":[' in text:
                looped.append(asyncio._get_running_loop() is not None)
            return text

        return encoded

    monkeypatch.setattr(route, "json", SimpleNamespace(dumps=watched(json.dumps)))
    fields = {"logprobs": True, "top_logprobs": 2}
    assert answering.chat("mixed", n=2, **fields).status_code == 200
    assert answering.chat("mixed", stream=True, **fields).status_code == 200
    assert answering.post("/v1/completions", prompt="Hi", logprobs=2).status_code == 200
    assert len(looped) > 4 and not any(looped)


LINE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer"},
        "k": {"enum": ["a", "b", "cc"]},
    },
    "required": ["name", "n", "k"],
    "additionalProperties": False,
}
# A canvas has 32 tokens, and what closes it goes beyond.
CLOSED = {"max_tokens": 40, "max_steps": 4, "seed": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_close_a_schema_beyond_the_canvas_have_entries(
    server: Served, stream: bool
) -> None:
    how: dict[str, Any] = CLOSED | {"guided_json": LINE, "stream": stream, "logprobs": True}
    answer = server.chat("Solve this Sudoku", **how, top_logprobs=3)
    assert answer.status_code == 200
    choices = chunks(answer) if stream else answer.json()["choices"]
    entries = [entry for each in choices for entry in (each["logprobs"] or {}).get("content", ())]
    text = "".join(entry["token"] for entry in entries)
    assert json.loads(text).keys() == LINE["properties"].keys() and len(entries) > 32
    assert choices[-1]["finish_reason"] == "stop"
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    # Chosen by the grammar alone, and by no scores.
    assert entries[-1]["logprob"] == 0.0
    assert entries[-1]["top_logprobs"][0]["token"] == entries[-1]["token"] == "}"


@pytest.mark.parametrize("post_sampling_probs", [False, True])
def test_n_probs_of_tokens_beyond_the_canvas(server: Served, post_sampling_probs: bool) -> None:
    body = {"prompt": "Solve this Sudoku", "n_predict": 40, "seed": 0, "n_probs": 3}
    body |= {"max_steps": 4, "json_schema": LINE, "post_sampling_probs": post_sampling_probs}
    for stream in (False, True):
        answer = server.http.post("/completion", json=body | {"stream": stream})
        assert answer.status_code == 200
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
        parts = lines if stream else [answer.json()]
        entries = [e for part in parts for e in part.get("completion_probabilities", ())]
        assert json.loads("".join(entry["token"] for entry in entries))
        assert len(entries) > 32


def test_legacy_log_probabilities_of_tokens_beyond_the_canvas(server: Served) -> None:
    body = {"prompt": "Solve this Sudoku", "logprobs": 3, "guided_json": LINE} | CLOSED
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["token_logprobs"]) > 32
