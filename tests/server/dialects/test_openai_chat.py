"""Chat completions with the real `openai` client, on the embedded model."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import openai
import pytest

import sfumato
from sfumato import Hole
from sfumato.api import Model
from sfumato.diffusion.sampler import FixedCount, Threshold
from sfumato.engine import ServedModel
from sfumato.server.chat.sampling import sampler_of
from sfumato.server.schemas import Sampling
from sfumato.text.prompt import prompt_ids

WHO = [{"role": "user", "content": "Who are you?"}]
SUDOKU = [{"role": "user", "content": "sudoku\n4..1\n.3.4\n....\n24.."}]
MODEL = "sfumato"


def test_a_reply(server: Any, embedded: Model) -> None:
    reply = server.client().chat.completions.create(model=MODEL, messages=WHO, seed=3)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == embedded.generate("Who are you?", seed=3).text
    assert (choice.finish_reason, reply.object) == ("stop", "chat.completion")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens == len(embedded.prompt_ids("Who are you?"))
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_prompt_is_rendered_once_however_many_replies(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = []

    def counted(*args: Any, **options: Any) -> list[int]:
        rendered.append(args)
        return prompt_ids(*args, **options)

    monkeypatch.setattr("sfumato.api.prompt_ids", counted)
    assert len(server.chat(n=3, seed=1).json()["choices"]) == 3
    assert len(rendered) == 1


def test_the_time_to_make_a_prompt_counts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **options: Any) -> list[int]:
        time.sleep(0.4)
        return prompt_ids(*args, **options)

    monkeypatch.setattr("sfumato.api.prompt_ids", slow)
    diffusion = server.chat(seed=1).json()["timings"]["diffusion"]
    assert 400 <= diffusion["queue_ms"] <= diffusion["first_draft_ms"]
    assert server.chat(seed=1, timeout=0.3).status_code == 504


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_replies_to_one_prompt_encode_it_once(server: Any, path: str) -> None:
    text = f"{path}: " + "a b c " * 20
    bodies = (
        {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    )
    before = server.engine.state().totals.encoded_tokens
    answer = server.post(f"/v1/{path}", **bodies, n=4, max_tokens=8, max_steps=2)
    usage = answer.json()["usage"]
    encoded = server.engine.state().totals.encoded_tokens - before
    assert usage["prompt_tokens"] > 100 and encoded <= usage["prompt_tokens"]


def test_timings_are_those_of_llama_server_and_diffusions_own(server: Any) -> None:
    timings = server.chat(seed=1).json()["timings"]
    assert {
        *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
        *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
    } <= timings.keys()
    diffusion = timings["diffusion"]
    assert diffusion["seed"] == 1
    assert diffusion["blocks"] == len(diffusion["convergence"])
    assert diffusion["steps"] == sum(diffusion["steps_per_block"]) >= diffusion["blocks"]
    assert diffusion["canvas_tokens"] == 32 * diffusion["blocks"]
    written = timings["predicted_n"] / diffusion["steps"]
    assert diffusion["tokens_per_forward"] == pytest.approx(written)
    assert diffusion["ms_per_step"] * diffusion["steps_per_second"] == pytest.approx(1000)


@pytest.mark.parametrize("where", ["sync", "async"])
def test_streaming_gives_the_same_text_in_small_pieces(server: Any, where: str) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": WHO, "seed": 3}
    plain = server.client().chat.completions.create(**fields).choices[0].message.content
    options = {"include_usage": True}

    def sync() -> list[Any]:
        return list(
            server.client().chat.completions.create(stream=True, stream_options=options, **fields)
        )

    async def later() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            stream = await client.chat.completions.create(
                stream=True, stream_options=options, **fields
            )
            return [chunk async for chunk in stream]

    chunks = sync() if where == "sync" else asyncio.run(later())
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    assert "".join(pieces) == plain
    assert len(pieces) > 4
    assert max(map(len, pieces)) <= 25
    assert choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert reasons == ["stop"] and choices[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_ends_with_done_and_has_timings(server: Any) -> None:
    body = server.chat(stream=True).text
    frames = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data")]
    assert frames[-1] == "[DONE]"
    last = json.loads(frames[-2])
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["diffusion"]["blocks"] >= 1
    assert not any("usage" in json.loads(frame) for frame in frames[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_streams_usage_comes_with_the_timings_of_a_single_reply(server: Any, path: str) -> None:
    """llama-server's clients read them there."""
    body: dict[str, Any] = {"messages": WHO} if "chat" in path else {"prompt": "Who?"}
    body |= {"max_tokens": 4, "max_steps": 2, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    for count in (1, 2):
        lines = server.post(path, **body, n=count).text.splitlines()
        last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
        assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
        assert ("timings" in last) == (count == 1)
    assert set(last["usage"]) >= {"prompt_tokens", "total_tokens"}


def test_n_replies_have_seeds_that_follow(server: Any) -> None:
    client = server.client().chat.completions
    how: dict[str, Any] = {"model": MODEL, "messages": SUDOKU, "temperature": 4.0}
    how |= {"max_tokens": 32, "extra_body": {"max_steps": 6}}
    three = client.create(n=3, seed=5, **how)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    for i, text in enumerate(texts):
        one = client.create(seed=5 + i, **how)
        assert one.choices[0].message.content == text
    assert three.usage.completion_tokens >= sum(map(len, texts)) - 3
    assert [c.timings["diffusion"]["seed"] for c in three.choices] == [5, 6, 7]


def test_n_streams_tell_their_numbers(server: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": WHO, "n": 2, "seed": 1}
    client = server.client().chat.completions
    plain = [choice.message.content for choice in client.create(**fields).choices]
    texts, reasons = ["", ""], []
    for chunk in client.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.index] * bool(choice.finish_reason)
    assert texts == plain
    assert sorted(reasons) == [0, 1]


def test_same_seed_same_text_whatever_else_runs(server: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": SUDOKU, "seed": 11, "temperature": 3.0}
    fields |= {"max_tokens": 32, "extra_body": {"max_steps": 6}}
    alone = server.client().chat.completions.create(**fields).choices[0].message.content

    async def eight_at_once() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            calls = [client.chat.completions.create(**fields)]
            calls += [
                client.chat.completions.create(model=MODEL, messages=WHO, seed=i) for i in range(6)
            ]
            replies = await asyncio.gather(*calls)
            return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(eight_at_once())[0] == alone


def test_a_seed_that_is_not_given_is_told(server: Any) -> None:
    first = server.chat().json()
    seed = first["timings"]["diffusion"]["seed"]
    again = server.chat(seed=seed).json()
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_of_the_tokens_of_the_content(server: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": WHO, "seed": 3}
    client = server.client().chat.completions
    made = client.create(logprobs=True, top_logprobs=3, stream=stream, **fields)
    if stream:
        chunks = [chunk.choices[0] for chunk in made]
        content = "".join(choice.delta.content or "" for choice in chunks)
        entries = [e for c in chunks if c.logprobs for e in c.logprobs.content]
    else:
        content = made.choices[0].message.content
        entries = made.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == content
    assert bytes(b for entry in entries for b in entry.bytes).decode() == content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # the argmax is what settles
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001


def test_more_alternatives_than_the_kernels_keep(server: Any) -> None:
    """Those that ask for few are told the same of them, and the same text."""

    def logs(**fields: Any) -> list[dict[str, Any]]:
        choice = server.chat(seed=3, logprobs=True, **fields).json()["choices"][0]
        return choice["logprobs"]["content"]  # type: ignore[no-any-return]

    twenty, eight = logs(top_logprobs=20), logs(top_logprobs=8)
    for wide, narrow in zip(twenty, eight, strict=True):
        assert wide["top_logprobs"][:8] == narrow["top_logprobs"]
        named = [top["token"] for top in wide["top_logprobs"]]
        probs = [top["logprob"] for top in wide["top_logprobs"]]
        assert len(set(named)) == 20 and probs == sorted(probs, reverse=True)
    prompt = {"prompt": "a", "seed": 3, "max_tokens": 5, "max_steps": 2}
    wide = server.post("/v1/completions", logprobs=20, **prompt).json()["choices"][0]["logprobs"]
    assert all(len(top) == 20 for top in wide["top_logprobs"])


def test_logprobs_without_alternatives(server: Any) -> None:
    entries = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert entries and all(entry["top_logprobs"] == [] for entry in entries)


def test_stop_length_and_bias(server: Any) -> None:
    stopped = server.chat(seed=3, stop="demo").json()["choices"][0]
    assert stopped["message"]["content"] == "I am Sfumato's embedded "
    assert stopped["finish_reason"] == "stop"
    assert server.chat(seed=3, stop=["", "demo"]).json()["choices"][0] == stopped
    assert server.chat(seed=3, stop=[""]).status_code == 200
    short = server.chat(seed=3, max_tokens=5).json()
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 5
    assert server.chat(seed=3, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5
    assert server.chat(seed=3, n_predict=5).json()["usage"]["completion_tokens"] == 5
    text = server.post("/v1/completions", prompt="Who?", seed=3, n_predict=5, ignore_eos=True,
                       max_steps=4)  # fmt: skip
    assert text.json()["usage"]["completion_tokens"] == 5
    ids = server.post("/tokenize", content="e").json()["tokens"]
    banned = server.chat(seed=3, logit_bias={str(ids[0]): -100}, max_steps=4).json()
    assert "e" not in banned["choices"][0]["message"]["content"]


def test_min_tokens_and_ignore_eos(server: Any) -> None:
    usual = server.chat(seed=3).json()["usage"]["completion_tokens"]
    more = server.chat(seed=3, min_tokens=usual + 20, max_steps=4, max_tokens=128).json()
    longer = more["usage"]["completion_tokens"]
    assert longer >= usual + 20
    through = server.chat(seed=3, ignore_eos=True, max_steps=4, max_tokens=64).json()
    assert through["usage"]["completion_tokens"] == 64
    assert through["choices"][0]["finish_reason"] == "length"
    text = through["choices"][0]["message"]["content"]
    assert len(server.post("/tokenize", content=text).json()["tokens"]) == 64  # no padding


@pytest.mark.parametrize(
    ("fields", "sampler"),
    [
        ({"max_steps": 2}, {"max_steps": 2}),
        ({"sampler": "fixed-count"}, {"sampler": "fixed-count"}),
        ({"entropy_bound": 0.01, "top_k": 4}, {"entropy_bound": 0.01, "top_k": 4}),
        ({"canvas_length": 16, "top_p": 0.9, "max_steps": 5},) * 2,
        ({"top_k": -1, "temperature": 0}, {"temperature": 0.0}),
        ({"settle_at_end": True}, {"settle_at_end": True}),
        ({"patience": 2}, {"patience": 2}),
    ],
)
def test_sampler_settings_per_request(
    server: Any, embedded: Model, fields: dict[str, Any], sampler: dict[str, Any]
) -> None:
    config = sfumato.SamplerConfig().options(**sampler)
    expected = embedded.generate("Who are you?", seed=2, sampler=config, max_tokens=32)
    answer = server.chat(seed=2, max_tokens=32, **fields).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["timings"]["diffusion"]["steps_per_block"] == expected.stats.steps


@pytest.mark.parametrize(
    ("fields", "sampler"),
    [
        ({"sampler": "fixed-count", "count": 3}, FixedCount(3)),
        ({"sampler": "threshold", "threshold": 0.99, "margin": 0.5}, Threshold(0.99, 0.5)),
    ],
)
def test_the_samplers_own_settings(
    server: Any, embedded: Model, fields: dict[str, Any], sampler: FixedCount | Threshold
) -> None:
    assert sampler_of(Sampling(**fields), ServedModel.of(embedded)).sampler == sampler
    assert server.chat(seed=2, max_tokens=32, **fields).status_code == 200


def test_schedule_and_stopping_per_request(server: Any) -> None:
    strict = server.chat(seed=2, confidence=1e-9, stability=3, max_steps=9, max_tokens=40).json()
    assert strict["timings"]["diffusion"]["convergence"][0] == "step_cap"
    cannot = "this demonstration model cannot answer that"
    assert strict["warnings"].count(cannot) == 1
    two_steps = {"seed": 2, "confidence": 1e-9, "max_steps": 2}
    for path, limit in (("/v1/completions", "max_tokens"), ("/completion", "n_predict")):
        answer = server.post(path, prompt="Hi", **two_steps, **{limit: 20})
        assert cannot in answer.json()["warnings"]
    assert server.chat("Hi", stream=True, max_tokens=20, **two_steps).text.count(cannot) == 1
    assert "warnings" not in server.chat("Who are you?").json()
    settled = server.chat("capital of Narnia", seed=1, max_tokens=64).json()
    assert set(settled["timings"]["diffusion"]["convergence"]) == {"converged"}
    assert settled["warnings"] == [cannot]  # as the command line says
    assert server.chat(t_min=2.0, t_max=1.0).json()["error"]["param"] == "t_min"
    for field, value, other in (("t_min", 5, "t_max, 0.8"), ("t_max", 0.2, "t_min, 0.4")):
        error = server.chat(**{field: value}).json()["error"]
        assert error["param"] == field
        assert f"{other} by the checkpoint's default; got {value}" in error["message"]
    assert server.chat(t_min=0.1, t_max=0.2).status_code == 200


def test_the_embedded_model_reads_a_question_that_needs_the_one_before(
    server: Any, embedded: Model
) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital is Paris."},
        {"role": "user", "content": "And of Japan?"},
    ]
    reply = server.chat(messages=messages, seed=1).json()
    assert reply["choices"][0]["message"]["content"] == "The capital is Tokyo."
    meant = "What is the capital of Japan?"
    note = f'the question was read as "{meant}"'
    assert reply["warnings"] == [note]
    ids = embedded.prompt_ids(messages=[*messages[:2], {**messages[2], "content": meant}])
    assert reply["usage"]["prompt_tokens"] == len(ids)  # of what was read
    shown = server.post("/apply-template", messages=messages).json()["prompt"]
    assert "And of" not in shown and embedded.tokenizer.encode(shown) == ids
    assert embedded.generate(messages, seed=1).warnings == (note,)
    filled = embedded.fill(["The capital is ", Hole(5), "."], messages=messages)
    assert (filled.text, filled.warnings) == ("The capital is Tokyo.", (note,))
    bad = [*messages, {"role": "user", "content": 3}]
    assert server.post("/apply-template", messages=bad).status_code == 400
    with pytest.raises(ValueError, match=r"messages\[3\].content"):
        embedded.prompt_ids(messages=[{"role": "user", "content": "x"}] * 3 + bad[3:])


def test_text_parts_developers_and_old_thoughts(server: Any, embedded: Model) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": "Hi.",
            "reasoning_content": "They greet me.",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
        },
        {"role": "user", "content": "Who are you?", "name": "Ann"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    answer = server.chat(messages=messages, seed=4).json()
    expected = embedded.generate(messages=plain, seed=4)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.stats.prompt_tokens


def test_a_conversation_pays_only_for_what_is_new(server: Any) -> None:
    first = server.chat("What is the capital of Japan?", seed=1).json()
    messages = [
        {"role": "user", "content": "What is the capital of Japan?"},
        first["choices"][0]["message"],
        {"role": "user", "content": "Who are you?"},
    ]
    second = server.chat(messages=messages, seed=1).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 1
    assert second["timings"]["cache_n"] == cached
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached


def test_models(server: Any) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "sfumato")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
