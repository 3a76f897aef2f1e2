"""The clients of Anthropic and Ollama: an agent's loop, streamed."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.clients.conftest import ANSWER, ASKED, QUESTION, SOFT, png, weather

pytestmark = pytest.mark.clients
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_anthropic(url: str) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="run by make test-clients")
    client = anthropic.Anthropic(base_url=url, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: Any = {"model": "m", "max_tokens": 100, "messages": messages}
    how["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    with client.messages.stream(**how) as stream:
        (call,) = stream.get_final_message().content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    with client.messages.stream(**how) as stream:
        assert stream.get_final_text() == ANSWER


def test_anthropics_pictures(seeing_url: str) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="run by make test-clients")
    client = anthropic.Anthropic(base_url=seeing_url, max_retries=0)
    data = base64.b64encode(png(2)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    how: Any = {"model": "m", "messages": [{"role": "user", "content": content}]}
    with client.messages.stream(max_tokens=16, **how) as stream:
        final = stream.get_final_message()
    count = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(**how).input_tokens == count > SOFT
    answered = {"role": "assistant", "content": final.content or "."}
    how["messages"] += [answered, {"role": "user", "content": "And?"}]
    assert client.messages.create(max_tokens=16, **how).usage.cache_read_input_tokens > SOFT
    source["data"] = "aGk="
    with pytest.raises(
        anthropic.BadRequestError, match=r"content\[0\]\.source\.data: .* no picture"
    ):
        client.messages.create(max_tokens=16, **how)
    content[0] = content[1]
    content += [{"type": "image", "source": source}] * 9
    with pytest.raises(anthropic.BadRequestError, match=r"content\[10\]\.source\.data: 9 pictures"):
        client.messages.create(max_tokens=16, **how)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_tool_runner(url: str, streams: bool) -> None:
    """It asks for a thread, is refused, and goes on without one."""
    anthropic: Any = pytest.importorskip("anthropic", reason="run by make test-clients")
    client = anthropic.Anthropic(base_url=url, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: Any = {"model": "m", "max_tokens": 100, "messages": messages, "stream": streams}
    runner = client.beta.messages.tool_runner(**how, tools=[anthropic.beta_tool(weather)])
    turns = [one.get_final_message() if streams else one for one in runner]
    assert [one.stop_reason for one in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[0].text == ANSWER


def test_ollama(url: str) -> None:
    ollama: Any = pytest.importorskip("ollama", reason="run by make test-clients")
    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    how: Any = {"model": "m", "messages": messages, "tools": [weather], "stream": True}
    (call,) = [one for part in client.chat(**how) for one in part.message.tool_calls or ()]
    result = weather(**call.function.arguments)
    messages.append({"role": "assistant", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_name": "weather", "content": result})
    assert "".join(part.message.content or "" for part in client.chat(**how)) == ANSWER


def test_ollamas_pictures(seeing_url: str) -> None:
    ollama: Any = pytest.importorskip("ollama", reason="run by make test-clients")
    client = ollama.Client(host=seeing_url)
    messages: list[Any] = [{"role": "user", "content": ASKED, "images": [png()]}]
    *_, last = client.chat(model="m", messages=messages, stream=True)
    assert last.prompt_eval_count > SOFT
    made = client.generate(model="m", prompt=ASKED, images=[png()])
    assert made.prompt_eval_count == last.prompt_eval_count
    assert "vision" in client.show(client.list().models[0].model).capabilities
    for images, why in (([b"no"], r"images\[0\]: .* no picture"), ([png()] * 9, "9 pictures")):
        messages[0]["images"] = images
        with pytest.raises(ollama.ResponseError, match=rf"messages\[0\]\..*{why}") as error:
            client.chat(model="m", messages=messages)
        assert error.value.status_code == 400
