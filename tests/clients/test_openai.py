"""OpenAI's own clients: an agent's loop over chat and over responses, embeddings, agents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.clients.conftest import ANSWER, ASKED, QUESTION, SOFT, data_url, weather

pytestmark = pytest.mark.clients
openai: Any = pytest.importorskip("openai", reason="run by make test-clients")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model="m", messages=messages, tools=[tool]) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    with client.chat.completions.stream(model="m", messages=messages, tools=[tool]) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_responses(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    with client.responses.stream(model="m", input=QUESTION, tools=[tool]) as stream:
        first = stream.get_final_response()
    (call,) = first.output
    result = weather(**json.loads(call.arguments))
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": result}]
    with client.responses.stream(
        model="m", input=given, tools=[tool], previous_response_id=first.id
    ) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_pictures(seeing_url: str) -> None:
    client = openai.OpenAI(base_url=f"{seeing_url}/v1", max_retries=0)
    for stream in (False, True):
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": data_url(), "detail": "low"}},
            {"type": "text", "text": ASKED},
        ]
        how: Any = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        if stream:
            how["stream_options"] = {"include_usage": True}
            *_, made = client.chat.completions.create(stream=True, **how)
        else:
            made = client.chat.completions.create(**how)
        assert made.usage.prompt_tokens > SOFT
    content: list[Any] = [
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_text", "text": ASKED},
    ]
    shown: list[Any] = [{"role": "user", "content": content}]
    *_, end = client.responses.create(model="m", input=shown, stream=True)
    first = end.response
    again = client.responses.create(model="m", input="And?", previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens == made.usage.prompt_tokens
    assert again.usage.input_tokens_details.cached_tokens > SOFT


def test_refused_pictures(seeing_url: str) -> None:
    client = openai.OpenAI(base_url=f"{seeing_url}/v1", max_retries=0)
    for url, count, where, why in (
        ("data:;base64,aGk=", 1, "messages[0].content[0].image_url", "no picture"),
        (data_url(), 9, "messages[0].content[8].image_url", "9 pictures"),
        ("https://example.org/a.png", 1, "messages[0].content[0].image_url", "not fetched"),
    ):
        content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}] * count
        with pytest.raises(openai.BadRequestError, match=why) as error:
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": content}]
            )
        assert error.value.param == where


def test_embeddings(embedded_url: str) -> None:
    client = openai.OpenAI(base_url=f"{embedded_url}/v1", max_retries=0)
    made = client.embeddings.create(model="m", input=["a", "b"])  # in base64
    again = client.embeddings.create(model="m", input="b", encoding_format="float")
    assert made.data[1].embedding == pytest.approx(again.data[0].embedding, abs=1e-6)


def test_agents(url: str) -> None:
    agents: Any = pytest.importorskip("agents", reason="needs openai 3: make test-clients")
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="a", model=kind("m", client), tools=[agents.function_tool(weather)]
        )
        assert agents.Runner.run_sync(agent, QUESTION).final_output == ANSWER
