"""Text completions, and llama-server's own routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sfumato.api import Model

PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def test_a_raw_prompt_is_what_the_template_makes(server: Any) -> None:
    chat = server.chat(seed=3).json()
    found = server.client().completions.create(model="m", prompt=PROMPT, seed=3)
    assert found.choices[0].text == chat["choices"][0]["message"]["content"]
    assert (found.choices[0].finish_reason, found.object) == ("stop", "text_completion")
    assert found.usage.prompt_tokens == chat["usage"]["prompt_tokens"]


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
    whole = client.create(model="m", prompt=PROMPT, seed=3).choices[0].text
    options: Any = {"include_usage": True}
    chunks = list(
        client.create(model="m", prompt=PROMPT, seed=3, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
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


def test_llama_completion(server: Any) -> None:
    found = server.post("/completion", prompt=PROMPT, n_predict=12, seed=3).json()
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 12)
    assert found["timings"]["predicted_n"] == 12
    words = server.post("/completion", prompt=PROMPT, stop=["demo"], seed=3).json()
    assert (words["stop_type"], words["content"][-9:]) == ("word", "embedded ")
    neutral = {"cache_prompt": True, "min_p": 0, "repeat_penalty": 1.0, "mirostat": 0}
    assert server.post("/completion", prompt=PROMPT, n_predict=4, **neutral).status_code == 200
    refused = server.post("/completion", prompt=PROMPT, min_p=0.1).json()["error"]
    assert refused["param"] == "min_p"


def test_llama_completion_streams(server: Any) -> None:
    whole = server.post("/completion", prompt=PROMPT, seed=3).json()["content"]
    text = server.post("/completion", prompt=PROMPT, seed=3, stream=True).text
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(frame["content"] for frame in found) == whole
    assert [frame["stop"] for frame in found] == [False] * (len(found) - 1) + [True]


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
    found = server.post("/apply-template", messages=messages).json()
    assert found["prompt"] == f"<bos>{PROMPT}"
    bare = server.post("/apply-template", messages=messages, add_generation_prompt=False).json()
    assert not bare["prompt"].endswith("model\n")
