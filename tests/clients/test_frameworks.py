"""Frameworks on top of the APIs: an agent's loop, or a typed object where a framework is for that.

A framework that is not in the environment is skipped; `make test-clients` has two environments.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from pydantic import BaseModel
from tests.clients.conftest import ANSWER, ASKED, QUESTION, SOFT, png, weather

pytestmark = pytest.mark.clients
ELSEWHERE = "not in this environment: run by make test-clients"


class Place(BaseModel):
    city: str


def test_langchain(url: str) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason=ELSEWHERE)
    for responses in (False, True):
        chat = langchain.ChatOpenAI(
            model="m", base_url=f"{url}/v1", max_retries=0, use_responses_api=responses
        ).bind_tools([weather])
        messages: list[Any] = [("user", QUESTION)]
        first, *rest = chat.stream(messages)
        message = sum(rest, first)
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "content": weather(**call["args"])}]
        messages[-1]["tool_call_id"] = call["id"]
        assert "".join(part.text for part in chat.stream(messages)) == ANSWER


def test_langchains_pictures(seeing_url: str) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason=ELSEWHERE)
    openai: Any = pytest.importorskip("openai")
    for responses in (False, True):
        chat = langchain.ChatOpenAI(
            model="m", base_url=f"{seeing_url}/v1", max_retries=0, use_responses_api=responses
        )
        data = base64.b64encode(png(int(responses))).decode()
        shown = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": data}
        content: list[Any] = [shown, {"type": "text", "text": ASKED}]
        messages: list[Any] = [{"role": "user", "content": content}]
        message = chat.invoke(messages)
        assert message.usage_metadata["input_tokens"] > SOFT
        again = chat.invoke([*messages, ("assistant", message.text), ("user", "And?")])
        assert again.usage_metadata["input_token_details"]["cache_read"] > SOFT
        shown["data"] = "aGk="
        with pytest.raises(openai.BadRequestError, match=r"content\[0\]\.image_url: .* no picture"):
            chat.invoke(messages)


def test_instructor(url: str) -> None:
    instructor: Any = pytest.importorskip("instructor", reason=ELSEWHERE)
    openai: Any = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        typed = instructor.from_openai(client, mode=mode)
        messages = [{"role": "user", "content": "Which object?"}]
        how: Any = {"model": "m", "messages": messages, "max_retries": 0}
        assert typed.chat.completions.create(response_model=Place, **how).city == "Paris"


def test_pydantic_ai(url: str) -> None:
    ai: Any = pytest.importorskip("pydantic_ai", reason=ELSEWHERE)
    from pydantic_ai.models.openai import (  # type: ignore[import-not-found, unused-ignore]
        OpenAIChatModel,
        OpenAIResponsesModel,
    )
    from pydantic_ai.providers.openai import (  # type: ignore[import-not-found, unused-ignore]
        OpenAIProvider,
    )

    async def streamed(agent: Any) -> str:
        async with agent.run_stream(QUESTION) as run:
            return str(await run.get_output())

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("m", provider=OpenAIProvider(base_url=f"{url}/v1"))
        agent = ai.Agent(model, tools=[weather])
        assert asyncio.run(streamed(agent)) == ANSWER


def test_llm(url: str) -> None:
    llm: Any = pytest.importorskip("llm", reason=ELSEWHERE)
    from llm.default_plugins.openai_models import (  # type: ignore[import-not-found, unused-ignore]
        Chat,
    )

    model = Chat("m", api_base=f"{url}/v1", supports_tools=True, key="any")
    assert isinstance(model, llm.KeyModel)
    assert "".join(model.chain(QUESTION, tools=[weather], key="any")) == ANSWER


def test_llama_index(url: str) -> None:
    like: Any = pytest.importorskip("llama_index.llms.openai_like", reason=ELSEWHERE)
    from llama_index.core.agent import (  # type: ignore[import-not-found, unused-ignore]
        FunctionAgent,
    )

    model = like.OpenAILike(
        model="m", api_base=f"{url}/v1", is_chat_model=True, is_function_calling_model=True
    )

    async def answer() -> str:
        return str(await FunctionAgent(tools=[weather], llm=model).run(QUESTION))

    assert asyncio.run(answer()) == ANSWER


@pytest.mark.parametrize(
    ("model", "path"),
    [("openai/m", "/v1"), ("anthropic/m", ""), ("ollama_chat/m", "")],
)
def test_litellm(url: str, model: str, path: str) -> None:
    litellm: Any = pytest.importorskip("litellm", reason=ELSEWHERE)
    function = {"name": "weather", "parameters": Place.model_json_schema()}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: Any = {"model": model, "api_base": f"{url}{path}", "messages": messages, "stream": True}
    how |= {"tools": [{"type": "function", "function": function}], "api_key": "any"}
    first = litellm.stream_chunk_builder(list(litellm.completion(**how))).choices[0].message
    (call,) = first.tool_calls
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id}]
    messages[-1] |= {"name": "weather", "content": weather("Paris")}
    assert (
        litellm.stream_chunk_builder(list(litellm.completion(**how))).choices[0].message["content"]
        == ANSWER
    )


def test_litellm_speaks_anthropics_api(url: str) -> None:
    """Its bridge: Anthropic's messages in, OpenAI's API out."""
    litellm: Any = pytest.importorskip("litellm", reason=ELSEWHERE)
    tools = [{"name": "weather", "input_schema": Place.model_json_schema()}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: Any = {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "any", "tools": tools}

    async def ask() -> Any:
        return await litellm.anthropic.messages.acreate(messages=messages, max_tokens=100, **how)

    first = asyncio.run(ask())
    (call,) = (block for block in first["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": weather("Paris")}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    assert asyncio.run(ask())["content"][-1]["text"] == ANSWER
