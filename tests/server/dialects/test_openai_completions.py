"""OpenAI's text completions, with the real `openai` client."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.api import Model

PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def test_a_raw_prompt_is_what_the_template_makes(server: Any) -> None:
    chat = server.chat(seed=3).json()
    answer = server.client().completions.create(model="m", prompt=PROMPT, seed=3)
    assert answer.choices[0].text == chat["choices"][0]["message"]["content"]
    assert (answer.choices[0].finish_reason, answer.object) == ("stop", "text_completion")
    assert answer.usage.prompt_tokens == chat["usage"]["prompt_tokens"]


def test_several_prompts_n_and_ids(server: Any, embedded: Model) -> None:
    ids = embedded.prompt_ids("Who are you?")
    client = server.client().completions
    one = client.create(model="m", prompt=PROMPT, seed=3).choices[0].text
    assert client.create(model="m", prompt=ids, seed=3).choices[0].text == one
    many = client.create(model="m", prompt=[PROMPT, PROMPT], n=2, seed=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[2].text == one
    assert many.usage.prompt_tokens == 2 * len(ids)


def test_streaming_and_usage(server: Any) -> None:
    client = server.client().completions
    plain = client.create(model="m", prompt=PROMPT, seed=3).choices[0].text
    options: Any = {"include_usage": True}
    chunks = list(
        client.create(model="m", prompt=PROMPT, seed=3, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain
    assert len(chunks) > 4
    assert chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Any, stream: bool) -> None:
    made = server.client().completions.create(
        model="m", prompt=PROMPT, seed=3, logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    text = "".join(choice.text for choice in choices)
    logs = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for log in logs for token in log.tokens]
    offsets = [offset for log in logs for offset in log.text_offset]
    assert "".join(tokens) == text
    assert [text[at : at + len(t)] for at, t in zip(offsets, tokens, strict=True)] == tokens
    assert all(len(top) <= 2 for log in logs for top in log.top_logprobs)
