"""The prompt in answers of text completions: `echo` as lm-eval sends it, and `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sfumato.api import Model
from sfumato.diffusion.causal import log_likelihoods

PATH = "/v1/completions"
PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def own_scores(model: Model, ids: list[int]) -> list[float]:
    slot = model.network.new_slot(1)
    logs: list[float] = log_likelihoods(model.network, slot, torch.tensor(ids)).tolist()
    return logs


def lm_eval_logprobs(answer: Any, contexts: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval's `LocalCompletionsAPI.parse_logprobs` reads an answer."""
    results = []
    for choice, context in zip(sorted(answer["choices"], key=lambda c: c["index"]), contexts,
                               strict=True):  # fmt: skip
        logs = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(log == max(top.values()) for log, top in zip(logs, tops, strict=True))
        results.append((sum(logs), greedy))
    return results


def lm_eval_body(prompts: list[list[int]], **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    return {**body, "echo": True, "prompt": prompts} | changes


def test_log_likelihoods_as_lm_eval_asks_for_them(server: Any, embedded: Model) -> None:
    context = embedded.prompt_ids("What is the capital of France?")
    own = embedded.generate("What is the capital of France?", mode="causal", seed=1,
                            sampler=None, max_tokens=6).token_ids  # fmt: skip
    other = embedded.tokenizer.encode("a fish and a bird")
    prompts = [context + own, context + other]
    answer = server.post(PATH, **lm_eval_body(prompts)).json()
    results = lm_eval_logprobs(answer, [len(context)] * 2)
    expected = [sum(own_scores(embedded, ids)[len(context) - 1 :]) for ids in prompts]
    assert [log for log, _ in results] == pytest.approx(expected, abs=1e-4)
    assert results[1][1] is False
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        logs = choice["logprobs"]
        assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
        assert len(logs["tokens"]) == len(ids) + 1, "an entry for the token that is written, too"


def test_a_greedy_continuation_is_found_to_be_one(server: Any, embedded: Model) -> None:
    """Up to the end token, which has an entry though it is no text."""
    context = embedded.prompt_ids("What is the capital of France?")
    body = {"prompt": context, "temperature": 0, "mode": "causal", "max_tokens": 200}
    choice = server.post(PATH, **body, logprobs=1).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    own = embedded.tokenizer.encode(choice["text"])
    answer = server.post(PATH, **lm_eval_body([context + own])).json()
    ((_, greedy),) = lm_eval_logprobs(answer, [len(context)])
    assert greedy
    echoed = answer["choices"][0]
    assert echoed["logprobs"]["tokens"][-1] in ("<turn|>", "<eos>", "<|turn>")
    assert echoed["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 0
    logs = choice["logprobs"]["token_logprobs"]
    assert logs == pytest.approx(echoed["logprobs"]["token_logprobs"][len(context) : -1], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_text_and_offsets(server: Any, stream: bool, logprobs: int | None) -> None:
    made = server.client().completions.create(
        model="m", prompt=PROMPT, seed=3, echo=True, logprobs=logprobs, stream=stream,
        temperature=0, max_tokens=8,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    text = "".join(choice.text for choice in choices)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
    plain = server.post(PATH, prompt=PROMPT, mode="causal", temperature=0, max_tokens=8).json()
    assert text == PROMPT + plain["choices"][0]["text"]
    logs = [choice.logprobs for choice in choices if choice.logprobs]
    assert bool(logs) == (logprobs is not None)
    for log in logs:
        pairs = zip(log.text_offset[1:], log.tokens[1:], strict=True)
        assert all(text[at : at + len(token)] == token for at, token in pairs)
        assert log.text_offset[0] == 0 and all(len(top) <= 2 for top in log.top_logprobs[1:])


def test_no_reply_at_all(server: Any, embedded: Model) -> None:
    ids = embedded.prompt_ids("Who are you?")
    answer = server.post(PATH, **lm_eval_body([ids], max_tokens=0)).json()
    choice = answer["choices"][0]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own_scores(embedded, ids))
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    text = server.post(PATH, prompt=PROMPT, echo=True, max_tokens=0).json()["choices"][0]["text"]
    assert text == PROMPT


def test_prompt_logprobs_as_vllm_has_them(server: Any, embedded: Model) -> None:
    ids = embedded.prompt_ids("Who are you?")
    answer = server.client().completions.create(
        model="m", prompt=ids, seed=3, max_tokens=4, extra_body={"prompt_logprobs": 2}
    )
    first, *listed = answer.choices[0].prompt_logprobs
    assert first is None and len(listed) == len(ids) - 1
    logs = own_scores(embedded, ids)
    for token, log, entries in zip(ids[1:], logs, listed, strict=True):
        own = entries[str(token)]
        assert own["logprob"] == pytest.approx(log, abs=1e-5)
        assert 2 <= len(entries) <= 3 and next(iter(entries)) == str(token)
        best = max(entries.values(), key=lambda entry: entry["logprob"])
        assert best["rank"] == 1 and (own["rank"] == 1) == (own is best)
    plain = server.post(PATH, prompt=ids, seed=3, max_tokens=4).json()
    assert answer.choices[0].text == plain["choices"][0]["text"], "the reply stays a canvas's"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 asks for nothing"),
        ({"echo": True, "mode": "canvas"}, "echo: the reply is written in the mode causal"),
        ({"echo": True, "max_steps": 4}, "echo: the reply is written in the mode causal, without"),
        ({"echo": True, "logprobs": 1, "logprob_token_ids": [5]}, "leave logprob_token_ids out"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: only without stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: "),
        ({"echo": True, "vllm_xargs": {"diffusion_read_only": True}}, "mode: causal replies"),
        ({"mode": "both"}, "mode: must be canvas or causal"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Any, body: dict[str, Any], message: str) -> None:
    answer = server.post(PATH, prompt="Hello", **body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_chats_and_llama_server_have_the_mode_too(server: Any, embedded: Model) -> None:
    expected = embedded.generate("Who are you?", mode="causal", seed=3, max_tokens=9).text
    answer = server.chat(mode="causal", seed=3, max_tokens=9).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["timings"]["diffusion"]["blocks"] == 1
    completion = server.post("/completion", prompt=PROMPT, mode="causal", seed=3, n_predict=9)
    assert completion.json()["content"] == expected
    assert server.chat(prompt_logprobs=1).status_code == 400
