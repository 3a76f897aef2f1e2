"""Tool calls and thoughts as fields of their own, on a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.answering_model import Answer, answering_model
from tests.support.scripted_model import END, tokenizer

from sfumato.server.app import ServerSettings

QUOTE = '<|"|>'
PARIS = f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE},days:2}}<tool_call|>"
ROME = f"<|tool_call>call:weather{{city:{QUOTE}Rome{QUOTE}}}<tool_call|>"
ANSWERS: dict[str, Answer] = {
    "one": f"{PARIS}<turn|>",
    "both": f"Let me see.{PARIS}{ROME}<turn|>",
    "think": "<|channel>thought\nHm, a hard one.<channel|>It is 4.<turn|>",
    "ramble": "<|channel>thought\n" + "on and " * 40 + "<channel|>It is 4.<turn|>",
    "none": "No tool is needed.<turn|>",
    "empty": "<turn|>",
    "quote": [*tokenizer().encode(f"Write {PARIS} and <eos>.", special=False), END],
    "broken": "<|tool_call>call:weather{city<tool_call|><turn|>",
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "The weather.",
            "parameters": {"type": "object"},  # no names of arguments, so that calls are free
            "strict": False,
        },
    }
    for name in ("weather", "time")
]


@pytest.fixture
def answering(serve: Callable[..., Any]) -> Any:
    return serve(answering_model(ANSWERS), ServerSettings(max_tokens=512))


def ask(answering: Any, text: str, **how: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return answering.client().chat.completions.create(model="m", messages=messages, **how)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function"}])
def test_a_call(answering: Any, choice: Any) -> None:
    if isinstance(choice, dict):
        choice = choice | {"function": {"name": "weather"}}
    (reply,) = ask(answering, "one", tools=TOOLS, tool_choice=choice).choices
    (call,) = reply.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
    assert call.id.startswith("call-")


def test_a_required_call_is_begun_even_where_the_model_would_not(answering: Any) -> None:
    choice: Any = {"type": "function", "function": {"name": "time"}}
    (reply,) = ask(answering, "none", tools=TOOLS, tool_choice=choice, max_tokens=40).choices
    # What follows the pinned opening is this model's usual text, so no call can be read in it.
    assert not reply.message.content
    answer = answering.chat("none", tools=TOOLS, tool_choice=choice, max_tokens=40).json()
    assert any("call:time{" in text for text in answer["warnings"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_none_of_the_tools_is_told(answering: Any, stream: bool) -> None:
    answer = answering.chat("one", tools=TOOLS[1:] * 2, tool_choice="required", stream=stream)
    assert "'weather' is of none of the tools" in answer.text
    answer = answering.chat("one", tools=TOOLS, tool_choice="required", stream=stream)
    assert "weather" in answer.text and "warnings" not in answer.text


def test_several_calls_and_text_before_them(answering: Any) -> None:
    (reply,) = ask(answering, "both", tools=TOOLS).choices
    cities = [json.loads(call.function.arguments)["city"] for call in reply.message.tool_calls]
    assert (reply.message.content, cities) == ("Let me see.", ["Paris", "Rome"])
    assert len({call.id for call in reply.message.tool_calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(answering: Any, stream: bool) -> None:
    made = ask(answering, "both", tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        calls, reason = joined(list(made))
    else:
        calls = [call.function.arguments for call in made.choices[0].message.tool_calls]
        reason = made.choices[0].finish_reason
    assert [json.loads(arguments)["city"] for arguments in calls] == ["Paris"]
    assert reason == "tool_calls"


def joined(chunks: list[Any]) -> tuple[list[str], str | None]:
    """The arguments of each call of a stream, and why it ended."""
    calls: list[str] = []
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert part.index == len(calls) and part.function.name == "weather"
                    calls.append("")
                calls[part.index] += part.function.arguments
    return calls, reason


def test_calls_stream_in_pieces(answering: Any) -> None:
    chunks = list(ask(answering, "both", tools=TOOLS, stream=True))
    calls, reason = joined(chunks)
    assert [json.loads(text)["city"] for text in calls] == ["Paris", "Rome"]
    assert reason == "tool_calls"
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == "Let me see."


def test_no_tools_means_none(answering: Any) -> None:
    """The token that begins a call is banned, whatever the model would say."""
    (reply,) = ask(answering, "one", tools=TOOLS, tool_choice="none", max_tokens=64).choices
    assert not reply.message.tool_calls
    assert reply.finish_reason != "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_quoted_call_is_text(answering: Any, stream: bool) -> None:
    """Written in ordinary tokens it calls nothing, also where one call is the most."""
    answer = answering.chat("quote", tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [c["delta"] for line in lines for c in json.loads(line)["choices"]]
        assert not any("tool_calls" in delta for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        message = answer.json()["choices"][0]["message"]
        assert "tool_calls" not in message
        content = message["content"]
    assert content == f"Write {PARIS} and <eos>."


def test_a_broken_call_is_told(answering: Any) -> None:
    answer = answering.chat("broken", tools=TOOLS, retry_empty=False).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "could not be read" in answer["warnings"][0]


def test_history_with_calls_and_results(answering: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "user", "content": "none"},
    ]
    answer = answering.chat(messages=messages, tools=TOOLS).json()
    assert answer["choices"][0]["message"]["content"] == "No tool is needed."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        # A name is written into the pinned opening of a call, where a marker would be one.
        *[
            (
                {"tools": [{"type": "function", "function": {"name": name}}]}
                | {"tool_choice": choice},
                "tools[0].function.name",
            )
            for name in ("f}<tool_call|><turn|>", "two words", "x" * 129)
            for choice in ("required", "none")
        ],
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f<eos>"}}]},
                    {"role": "tool", "content": "b"},
                ]
            },
            "messages[1].tool_calls[0].function.name",
        ),
    ],
)
def test_what_cannot_be_chosen(answering: Any, fields: dict[str, Any], param: str) -> None:
    answer = answering.chat("one", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_tool_calls_says_so(server: Any, stream: bool) -> None:
    warning = "tools: ignored, since this model's vocabulary has no tool calls"
    for choice in (None, "auto"):
        answer = server.chat(tools=TOOLS, tool_choice=choice, max_tokens=8, stream=stream)
        assert answer.status_code == 200 and answer.text.count(warning) == 1
    for unused in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert "warnings" not in server.chat(max_tokens=8, stream=stream, **unused).text


def test_a_model_without_tool_calls_cannot_be_made_to_call(server: Any) -> None:
    answer = server.chat(tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert "no tool calls" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_a_field_of_their_own(answering: Any, stream: bool) -> None:
    made = ask(answering, "think", stream=stream, reasoning_effort="high", logprobs=True)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in made if chunk.choices]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        answer = "".join(delta.content or "" for delta in deltas)
    else:
        message = made.choices[0].message
        thought, answer = message.reasoning_content, message.content
        tokens = made.choices[0].logprobs.content
        assert "".join(entry.token for entry in tokens) == answer
        assert made.usage.completion_tokens_details.reasoning_tokens > 10
    assert (thought, answer) == ("Hm, a hard one.", "It is 4.")


def test_a_thinking_budget_leaves_room_for_an_answer(answering: Any) -> None:
    answer = answering.chat("ramble", max_thinking_tokens=20, max_tokens=200).json()
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] <= 28  # a canvas is cut where the budget ends in it
    longer = answering.chat("ramble", max_thinking_tokens=100, max_tokens=200).json()["usage"]
    assert longer["completion_tokens_details"]["reasoning_tokens"] > details["reasoning_tokens"]


@pytest.mark.parametrize(
    ("fields", "thinks", "budget"),
    [
        ({}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, False, None),
        ({"reasoning_effort": "low"}, True, 512),
        ({"reasoning_effort": "medium"}, True, 2048),
        ({"reasoning_effort": "max"}, True, None),
        ({"reasoning_effort": "low", "max_thinking_tokens": 7}, True, 7),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, None),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
            False,
            None,
        ),
    ],
)
def test_efforts(
    answering: Any, monkeypatch: Any, fields: dict[str, Any], thinks: bool, budget: int | None
) -> None:
    seen = []
    submit = answering.engine.submit
    monkeypatch.setattr(
        answering.engine,
        "submit",
        lambda request, sink: seen.append(request) or submit(request, sink),
    )
    assert answering.chat("think", **fields).status_code == 200
    assert (seen[0].thinking, seen[0].max_thinking_tokens) == (thinks, budget)


def test_an_empty_answer_is_drawn_again_and_told(answering: Any) -> None:
    again = answering.chat("empty", max_tokens=16).json()
    assert again["timings"]["diffusion"]["retries"] >= 1
    assert again["warnings"]
    once = answering.chat("empty", max_tokens=16, retry_empty=False).json()
    assert once["timings"]["diffusion"]["retries"] == 0
    assert once["choices"][0]["message"]["content"] == ""
