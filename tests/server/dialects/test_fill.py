"""Texts with holes over HTTP: /v1/fill, suffix, and what editors send to /infill."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.conftest import serving

import sfumato
from sfumato import Hole
from sfumato.api import Model
from sfumato.server.examples import CANNOT

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PARTS: list[Any] = ["The capital is ", {"tokens": 5}, "."]
QUICK: dict[str, Any] = {"seed": 3, "max_steps": 3}


def frames(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_fill_is_that_of_the_library(server: Any, embedded: Model) -> None:
    answer = server.post("/v1/fill", parts=PARTS, messages=MESSAGES, **QUICK).json()
    config = sfumato.SamplerConfig(max_steps=3)
    parts = ["The capital is ", Hole(5), "."]
    plain = embedded.fill(parts, messages=MESSAGES, seed=3, sampler=config)
    assert (answer["object"], answer["text"]) == ("fill", plain.text)
    (hole,) = answer["holes"]
    assert hole["text"] == plain.holes[0].text and hole["tokens"] == len(hole["token_ids"]) == 5
    assert hole["probabilities"] == pytest.approx(plain.holes[0].probabilities)
    assert "alternatives" not in hole and "warnings" not in answer
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["timings"]["diffusion"]["steps"] == sum(plain.stats.steps)


def test_without_a_token_to_begin_with_the_text_begins() -> None:
    model = sfumato.load("embedded-masks")
    with serving(model, slots=1) as served:
        answer = served.post("/v1/fill", parts=PARTS, seed=3).json()
        assert answer["text"] == model.fill(["The capital is ", Hole(5), "."], seed=3).text
        refused = served.post("/v1/fill", parts=PARTS[1:]).json()["error"]
        assert refused["message"].startswith("parts: must begin with text")
        reply = served.chat("qqq zzz", seed=1, max_tokens=64).json()
        assert reply["warnings"][-1] == CANNOT  # it is a toy too


def test_choices_come_with_their_probabilities(server: Any) -> None:
    parts = ["The capital is ", {"choices": ["Rome", "Paris", "London"]}, "."]
    answer = server.post("/v1/fill", parts=parts, messages=MESSAGES).json()
    (hole,) = answer["holes"]
    by_text = {each["text"]: each for each in hole["alternatives"]}
    assert list(by_text) == ["Rome", "Paris", "London"]
    assert sum(each["probability"] for each in by_text.values()) == pytest.approx(1)
    best = max(by_text.values(), key=lambda each: each["score"])
    assert (hole["text"], hole["probability"]) == (best["text"], best["probability"])
    assert answer["text"] == f"The capital is {hole['text']}."
    assert answer["timings"]["diffusion"]["steps"] == 0  # nothing was open


def test_a_stream_has_drafts_and_then_the_text(server: Any) -> None:
    plain = server.post("/v1/fill", parts=PARTS, **QUICK).json()
    text = server.post("/v1/fill", parts=PARTS, stream=True, stream_drafts=True, **QUICK).text
    *drafts, settled, last = frames(text)
    assert [frame["draft"]["step"] for frame in drafts] == [1, 2, 3][: len(drafts)]
    assert all(frame["draft"]["text"].startswith("The capital is ") for frame in drafts)
    pinned = drafts[0]["draft"]["pinned"]
    assert pinned == [True] * 15 + [False] * 5 + [True]
    assert settled["settled"]["token_ids"] == last["holes"][0]["token_ids"]
    assert last["text"] == plain["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parts": ["x"]}, "parts"),
        ({"parts": []}, "parts"),
        ({"parts": ["x", 3]}, "parts"),
        ({"parts": ["x", {"tokens": 99}]}, "parts"),
        ({"parts": ["x", {"width": 1}]}, "parts[1].width"),
        ({"parts": ["x", {"tokens": 1, "at_most": 2}]}, "parts[1]"),
        ({"parts": ["x", {"tokens": 10**9}]}, "parts[1]"),
        ({"parts": ["x", {"choices": ["a"] * 65}]}, "parts[1]"),
        ({"parts": PARTS, "stop": "x"}, "stop"),
        ({"parts": PARTS, "messages": MESSAGES, "prompt": "x"}, "prompt"),
        ({"parts": PARTS, "max_tokens": 3}, "max_tokens"),
        ({"parts": ["y" * 10**6, {"tokens": 1}]}, "parts[0]"),
    ],
)
def test_what_cannot_be_filled_is_a_400(server: Any, body: Any, param: str) -> None:
    answer = server.post("/v1/fill", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_text_before_a_suffix(server: Any, embedded: Model) -> None:
    client = server.client().completions
    how: Any = {"prompt": "The capital of ", "suffix": " is Paris.", "seed": 3, "logprobs": 1}
    how["extra_body"] = {"max_steps": 3}
    (choice,) = client.create(model="m", max_tokens=4, **how).choices
    parts = ["The capital of ", Hole(at_most=4), " is Paris."]
    config = sfumato.SamplerConfig(max_steps=3)
    plain = embedded.fill([parts[0], parts[1], parts[2]], seed=3, sampler=config)
    assert 1 <= len(choice.text) <= 4 and "".join(choice.logprobs.tokens) == choice.text
    assert choice.finish_reason == ("length" if len(choice.text) == 4 else "stop")
    assert len(plain.holes[0].alternatives) == 4
    chunks = client.create(model="m", max_tokens=4, stream=True, **how)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    both = client.create(model="m", max_tokens=4, n=2, **how).choices
    assert len(both) == 2 and both[0].text == choice.text


def test_a_long_suffix_is_read_as_far_as_it_fits(server: Any) -> None:
    how: dict[str, Any] = {"prompt": "a", "max_steps": 1, "suffix": "b" * 100, "seed": 1}
    answer = server.post("/v1/completions", max_tokens=2, **how).json()
    assert any("29 of 100 tokens were read" in line for line in answer["warnings"])
    for field, value in (("ignore_eos", True), ("min_tokens", 3), ("canvas_length", 2)):
        refused = server.post("/v1/completions", **how | {field: value}).json()["error"]
        assert refused["param"] == field
    echoed = server.post("/v1/completions", prompt="a", suffix="b", max_tokens=2, echo=True)
    assert echoed.json()["error"]["param"] == "suffix"
    causal = server.post("/v1/fill", parts=PARTS, mode="causal").json()["error"]
    assert causal["param"] == "mode"


LLAMA_VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def f(x):\n",
    "input_suffix": "\n    return y\n",
    "input_extra": [{"text": "y = 3\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    y =",
    "n_predict": 4,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "no"],
}
"""The body that llama.vim sends, and llama.vscode but for `response_fields`."""


def test_llama_vim_gets_its_fields(server: Any) -> None:
    answer = server.post("/infill", **LLAMA_VIM, **QUICK)
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    assert fields.keys() == {"content", "timings/prompt_n", "timings/predicted_n", "truncated"}
    assert 1 <= len(fields["content"]) == fields["timings/predicted_n"] <= 4
    del (body := dict(LLAMA_VIM))["response_fields"]
    complete = server.post("/infill", **body, **QUICK).json()
    assert complete["content"] == fields["content"] and complete["stop"] is True
    text = server.post("/infill", **body | {"stream": True}, **QUICK).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == fields["content"]


def test_llama_vim_fills_the_cache_while_its_user_does_not_type(server: Any) -> None:
    extra = [{"text": "some text that no other test has\n", "time": [1, 2], "filename": "b.py"}]
    warm = {
        "input_prefix": "",
        "input_suffix": "",
        "input_extra": extra,
        "prompt": "",
        "n_predict": 0,
        "temperature": 0.0,
        "stream": False,
        "samplers": [],
        "cache_prompt": True,
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
    }
    assert server.post("/infill", **warm, response_fields=[""]).json() == {}
    assert server.post("/infill", **warm).json()["content"] == ""
    body = LLAMA_VIM | {"input_extra": extra, "response_fields": ["timings/cache_n"]}
    assert server.post("/infill", **body, **QUICK).json()["timings/cache_n"] >= 40


def test_infill_without_a_suffix_goes_on_until_it_ends(server: Any) -> None:
    prompt = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"
    plain = server.post("/completion", prompt=prompt, n_predict=9, **QUICK).json()["content"]
    body = {"input_prefix": prompt, "n_predict": 9}
    markers_are_text = server.post("/infill", **body, **QUICK).json()
    assert markers_are_text["tokens_evaluated"] > 30 and plain != ""
    for part in ({"text": 3}, {"filename": "a.py"}):
        wrong = server.post("/infill", input_prefix="a", input_extra=[part])
        assert wrong.json()["error"]["param"] == "input_extra[0].text"


def test_a_prediction_is_counted(server: Any) -> None:
    prediction = {"type": "content", "content": "The capital is Paris."}
    answer = server.chat(MESSAGES[0]["content"], prediction=prediction, seed=3).json()
    assert answer["choices"][0]["message"]["content"] == prediction["content"]
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (21, 0)
    client = server.client().chat.completions
    typed: Any = {"messages": MESSAGES, "prediction": prediction, "seed": 3}
    assert (
        client.create(model="m", **typed).usage.completion_tokens_details.accepted_prediction_tokens
        == 21
    )
    for wrong in ({"type": "x", "content": "a"}, {"content": [{"type": "image"}]}):
        refused = server.chat("Hi", prediction=wrong).json()["error"]
        assert refused["param"].startswith("prediction")
    thinking = server.chat("Hi", prediction=prediction, reasoning_effort="low").json()["error"]
    assert thinking["message"].startswith("prediction: says nothing of a thought")
