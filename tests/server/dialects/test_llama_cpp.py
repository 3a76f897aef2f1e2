"""llama-server's own completion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.conftest import serving

PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"


def test_llama_completion(server: Any) -> None:
    answer = server.post("/completion", prompt=PROMPT, n_predict=12, seed=3).json()
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 12)
    assert answer["timings"]["predicted_n"] == 12
    words = server.post("/completion", prompt=PROMPT, stop=["demo"], seed=3).json()
    assert (words["stop_type"], words["content"][-9:]) == ("word", "embedded ")
    neutral = {"cache_prompt": True, "min_p": 0, "repeat_penalty": 1.0, "mirostat": 0}
    assert server.post("/completion", prompt=PROMPT, n_predict=4, **neutral).status_code == 200
    refused = server.post("/completion", prompt=PROMPT, min_p=0.1).json()["error"]
    assert refused["param"] == "min_p"


def test_llama_completion_streams(server: Any) -> None:
    plain = server.post("/completion", prompt=PROMPT, seed=3).json()["content"]
    text = server.post("/completion", prompt=PROMPT, seed=3, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(frame["content"] for frame in events) == plain
    assert [frame["stop"] for frame in events] == [False] * (len(events) - 1) + [True]


def stream_of(server: Any, **body: Any) -> list[Any]:
    text = server.post("/completion", stream=True, **body).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_what_an_answer_says_beside_the_text(server: Any, embedded: Any) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n_predict": 9, "temperature": 0.5, "top_k": 7}
    answer = server.post("/completion", **body, return_tokens=True, stop=["demo", "zz"]).json()
    assert answer["prompt"] == "<bos>" + PROMPT and answer["truncated"] is False
    assert embedded.tokenizer.decode(answer["tokens"]) == answer["content"]
    assert (answer["has_new_line"], answer["stopping_word"]) == (False, "")
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["top_k"]) == (3, 9, 7)
    assert (settings["temperature"], settings["stop"]) == (0.5, ["demo", "zz"])
    assert settings["logit_bias"] == []
    plain = server.post("/completion", **body, response_fields=[]).json()
    assert plain["tokens"] == [] and plain["content"] == answer["content"]
    word = server.post("/completion", prompt=PROMPT, seed=3, stop=["demo", "zz"]).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", "demo")
    ending = server.post("/completion", prompt=PROMPT, n_predict=4, ignore_eos=True, seed=1).json()
    biases = ending["generation_settings"]["logit_bias"]
    assert biases == [{"token": i, "bias": None} for i in embedded.end_ids]


def test_frames_have_tokens_and_the_last_one_has_the_rest(server: Any, embedded: Any) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n_predict": 12}
    *parts, last = stream_of(server, **body)
    assert all(frame["tokens"] for frame in parts)
    ids = [token for frame in parts for token in frame["tokens"]]
    assert embedded.tokenizer.decode(ids) == "".join(frame["content"] for frame in parts)
    assert last["generation_settings"]["stream"] is True and last["prompt"]
    assert (last["content"], last["tokens"]) == ("", [])


def test_several_prompts_in_each_form(server: Any, embedded: Any) -> None:
    """Of one seed: the same prompt in another form has the same text."""
    bos, ids = embedded.tokenizer.bos_id, embedded.tokenizer.encode(PROMPT)
    forms = [PROMPT, [bos, *ids], {"prompt_string": PROMPT}, [bos, PROMPT]]
    answers = server.post("/completion", prompt=forms, n_predict=6, seed=4).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert len({answer["content"] for answer in answers}) == 1
    frames = stream_of(server, prompt=forms[:2], n_predict=6, seed=4)
    for number in (0, 1):
        texts = [frame["content"] for frame in frames if frame["index"] == number]
        assert "".join(texts) == answers[0]["content"]
    one = server.post("/completion", prompt=[bos, PROMPT], max_tokens=6, seed=4).json()
    assert one["content"] == answers[0]["content"]
    wrong = server.post("/completion", prompt=["a", {"prompt_string": "b", "multimodal_data": [1]}])
    assert wrong.json()["error"]["param"] == "prompt[1].multimodal_data"
    many = server.post("/completion", prompt=["a"] * 129).json()["error"]
    assert many["message"].startswith("prompt: at most 128 prompts")


def test_no_token_is_written_where_none_is_wanted(server: Any) -> None:
    """The prompt is in the cache afterwards."""
    prompt = "nothing else in these tests begins like this, " * 3
    empty = server.post("/completion", prompt=prompt, n_predict=0).json()
    assert (empty["content"], empty["tokens_predicted"]) == ("", 0)
    assert empty["timings"]["predicted_n"] == 0
    again = server.post("/completion", prompt=prompt + "now", n_predict=1).json()
    assert again["timings"]["cache_n"] >= empty["tokens_evaluated"] - 1


def test_probabilities(server: Any) -> None:
    body = {"prompt": PROMPT, "seed": 3, "n_predict": 5, "n_probs": 3}
    answer = server.post("/completion", **body, return_tokens=True).json()
    entries = answer["completion_probabilities"]
    assert [entry["id"] for entry in entries] == answer["tokens"]
    assert "".join(entry["token"] for entry in entries) == answer["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0
        assert all(set(top) == {"id", "token", "bytes", "logprob"} for top in entry["top_logprobs"])
    probs = server.post("/completion", **body, post_sampling_probs=True).json()
    shown = [made["generation_settings"]["post_sampling_probs"] for made in (answer, probs)]
    assert shown == [False, True]
    for entry in probs["completion_probabilities"]:
        assert 0 < entry["prob"] <= 1 and all(0 < top["prob"] <= 1 for top in entry["top_probs"])
    frames = [frame for frame in stream_of(server, **body) if not frame["stop"]]
    assert [f["completion_probabilities"][0]["id"] for f in frames] == answer["tokens"]


def test_forms_of_logit_bias(server: Any, embedded: Any) -> None:
    """Texts and ids, as pairs or an object; false bans."""
    body = {"prompt": PROMPT, "n_predict": 6, "seed": 2, "temperature": 0, "max_steps": 4}
    (token,) = embedded.tokenizer.encode("e")
    forms = [[[token, False]], [["e", False]], {str(token): False}, {"e": -100}]
    answers = [server.post("/completion", **body, logit_bias=form).json() for form in forms]
    assert len({answer["content"] for answer in answers}) == 1
    settings = answers[0]["generation_settings"]["logit_bias"]
    assert settings == [{"token": token, "bias": None}]
    for wrong in (
        [["a"]],
        [[1.5, 1]],
        {"a": "b"},
        "x",
        [["a" * 300, 1]],
        [[1, True]],
        [[1, 10**400]],
    ):
        error = server.post("/completion", **body, logit_bias=wrong).json()["error"]
        assert error["param"] == "logit_bias"


def test_a_reply_that_is_written_for_too_long_ends_with_what_it_has(server: Any) -> None:
    """Where it has a line break: then it is several suggestions long already."""
    body: dict[str, Any] = {"prompt": PROMPT, "n_predict": 320, "ignore_eos": True, "max_steps": 8}
    body |= {"seed": 1, "logit_bias": [["\n", 100]]}
    limited = body | {"t_max_predict_ms": 1}
    cut = server.post("/completion", **limited).json()
    assert cut["stop_type"] == "limit" and set(cut["content"]) == {"\n"}
    assert 0 < cut["tokens_predicted"] < 320 and cut["generation_settings"]["n_predict"] == 320
    *parts, last = stream_of(server, **limited)
    assert last["stop_type"] == "limit" and last["tokens_predicted"] < 320
    assert sum(len(frame["tokens"]) for frame in parts) == last["tokens_predicted"]
    one_line = limited | {"n_predict": 64, "max_steps": 1, "logit_bias": [["e", 100]]}
    assert server.post("/completion", **one_line).json()["tokens_predicted"] == 64
    wrong = server.post("/completion", **body, t_max_predict_ms=-2).json()["error"]
    assert wrong["param"] == "t_max_predict_ms"


def test_neutral_fields_and_others(server: Any) -> None:
    neutral = {"xtc_probability": 0, "dry_multiplier": 0.0, "samplers": ["top_k"], "lora": []}
    neutral |= {"t_max_predict_ms": -1, "dynatemp_range": 0, "top_n_sigma": -1, "model": "m"}
    assert server.post("/completion", prompt=PROMPT, n_predict=2, **neutral).status_code == 200
    for wrong in ({"xtc_probability": 0.5}, {"lora": [{"id": 0, "scale": 0.5}]}, {"n_probs": 21}):
        error = server.post("/completion", prompt=PROMPT, **wrong).json()["error"]
        assert error["param"] == next(iter(wrong))


def test_slots_as_llama_server_lists_them(server: Any) -> None:
    listed = server.http.get("/slots").json()
    assert [slot["id"] for slot in listed][:4] == [0, 1, 2, 3]
    assert all(type(slot["is_processing"]) is bool for slot in listed)
    assert listed[0]["n_ctx"] == 512 and "params" not in listed[0]
    assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_props_and_metrics_have_llama_servers_names(server: Any) -> None:
    props = server.http.get("/props").json()
    assert props["total_slots"] == 4 and "/" not in props["model_path"]
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 512 and defaults["params"]["seed"] == -1
    answer = server.http.get("/metrics")
    assert int(answer.headers["process-start-time-unix"]) > 0
    for line in ("# TYPE llamacpp:tokens_predicted_total counter",
                 "# TYPE llamacpp:requests_processing gauge"):  # fmt: skip
        assert line in answer.text


def test_the_tokens_of_a_chat_are_counted(server: Any) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    counted = server.post("/chat/completions/input_tokens", messages=messages).json()
    usage = server.chat(messages=messages, max_tokens=1).json()["usage"]
    assert counted == {"input_tokens": usage["prompt_tokens"]}


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/responses"])
def test_progress_of_a_prompt(server: Any, path: str) -> None:
    """What a slot held, then what is encoded, up to all of it; before the text."""
    text = f"one more prompt, which {path} has not seen before. "
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if path == "/completion":
        body = {"prompt": text, "n_predict": 4}
    if path == "/v1/responses":
        body = {"input": text, "max_output_tokens": 4}
    body["max_steps"] = 2
    held = []
    for _ in range(2):
        answer = server.post(path, **body, stream=True, return_progress=True).text
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        frames = [json.loads(line) for line in lines]
        reports = [frame["prompt_progress"] for frame in frames if "prompt_progress" in frame]
        assert reports[0]["processed"] == reports[0]["cache"]
        held.append(reports[0]["cache"])
        counts = [report["processed"] for report in reports]
        assert counts == sorted(set(counts)) and counts[-1] == reports[0]["total"]
        assert frames[-1].get("prompt_progress") is None
    assert held[0] < held[1]


def test_a_prompt_longer_than_a_slot_is_refused_in_llama_servers_words(embedded: Any) -> None:
    """A larger slot is made on the routes of other APIs alone."""
    long = "ab " * 40
    with serving(embedded, context=64) as small:
        count = len(small.post("/tokenize", content=long, add_special=True).json()["tokens"])
        words = f"request ({count} tokens) exceeds the available context size (64 tokens)"
        refused = small.post("/completion", prompt=long, n_predict=1)
        too_long = small.post("/embeddings", input=["a", long])
        streamed = small.post("/completion", prompt=long, n_predict=1, stream=True)
        for answer, beginning in (
            (refused, words),
            (streamed, words),
            (too_long, f"input ({count} tokens) is too large"),
        ):
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"].startswith(beginning)
            assert error["type"] == "exceed_context_size_error"
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (count, 64)
        fits = "ab " * 20
        assert small.post("/completion", prompt=fits, n_predict=1, max_steps=1).is_success
        body = {"prompt": long, "max_tokens": 1, "max_steps": 1}
        assert small.post("/v1/completions", **body).is_success
