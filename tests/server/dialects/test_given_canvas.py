"""vLLM's fields for a canvas that the client gives, on both of OpenAI's routes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from sfumato.api import Model
from sfumato.ops.online_softmax import TOP

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "<|turn>user\nWho are you?<turn|>\n<|turn>model\n"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
WIDTH = 16
CANVAS = [40 + at for at in range(WIDTH)]
NAMED = [50, 7, 90, 50]


def read(canvas: list[int] = CANVAS, **xargs: Any) -> dict[str, Any]:
    """The fields of a read, as vLLM's clients send them."""
    return {
        "max_tokens": len(canvas),
        "temperature": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprob_token_ids": NAMED,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {
            "diffusion_seed_canvas": canvas,
            "diffusion_canvas_length": len(canvas),
            "diffusion_max_steps": 1,
            "diffusion_read_only": True,
        }
        | xargs,
    }


def chat(server: Any, fields: dict[str, Any], top: int = 1) -> list[dict[str, Any]]:
    """The entries of a read's positions."""
    answer = server.chat(logprobs=True, top_logprobs=top, **fields)
    assert answer.status_code == 200, answer.text
    content: list[dict[str, Any]] = answer.json()["choices"][0]["logprobs"]["content"]
    return content


def by_token(entry: dict[str, Any]) -> dict[int, float]:
    """Token → log probability, as vLLM's clients read them."""
    parts = [(top["token"].split(":"), top["logprob"]) for top in entry["top_logprobs"]]
    assert all(name == "token_id" for (name, _), _ in parts)
    assert len({token for (_, token), _ in parts}) == len(parts)
    return {int(token): log for (_, token), log in parts}


@pytest.fixture(scope="module")
def expected(embedded: Model) -> torch.Tensor:
    """Log probabilities float32 [WIDTH, vocabulary]: one forward of the canvas, temperature 1."""
    network = embedded.network
    ids = embedded.prompt_ids("Who are you?")
    slot = network.new_slot(len(ids))
    network.encode([torch.tensor(ids)], [slot])
    hidden = network.denoise([torch.tensor(CANVAS)], [slot])
    return network.head.logits(hidden).log_softmax(dim=-1)


def test_a_read_has_the_log_probabilities_of_one_step(server: Any, expected: torch.Tensor) -> None:
    entries = chat(server, read(), top=3)
    assert len(entries) == WIDTH
    for entry, logs in zip(entries, expected, strict=True):
        best = logs.topk(3).indices.tolist()
        assert list(by_token(entry))[:3] == best
        assert list(by_token(entry))[3:] == [i for i in (50, 7, 90) if i not in best]
        assert entry["token"] == f"token_id:{int(logs.argmax())}"
        for token, log in by_token(entry).items():
            assert log == pytest.approx(float(logs[token]), abs=1e-4)


def test_a_read_changes_nothing(server: Any) -> None:
    before = server.chat(seed=3).json()["choices"]
    first, again = chat(server, read()), chat(server, read() | {"temperature": 0, "seed": 9})
    assert first == again
    assert server.chat(seed=3).json()["choices"] == before


def test_text_completions_and_streams_have_the_same(server: Any) -> None:
    plain = chat(server, read())
    answer = server.post(TEXT, prompt=PROMPT, logprobs=1, **read()).json()["choices"][0]
    logs = answer["logprobs"]
    assert logs["tokens"] == [entry["token"] for entry in plain]
    assert logs["top_logprobs"] == [
        {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in plain
    ]
    assert (logs["text_offset"], answer["finish_reason"]) == ([0] * WIDTH, "length")
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "stream": True, **read()}
    lines = server.http.post(CHAT, json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    logged = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in logged for entry in part["content"]] == plain


def test_pins_hold_the_other_positions_over_steps(server: Any, expected: torch.Tensor) -> None:
    pinned = [at for at in range(WIDTH) if at != 2]
    steps = read(diffusion_pinned=pinned, diffusion_max_steps=4) | {"seed": 1}
    entries = chat(server, steps)
    assert entries == chat(server, steps)
    # Pinned tokens are inputs: the output there is the model's own.
    assert entries != chat(server, read())
    assert entries[5]["token"] != f"token_id:{CANVAS[5]}"
    one_step = chat(server, read(diffusion_pinned=pinned))
    assert by_token(one_step[2])[7] == pytest.approx(float(expected[2, 7]), abs=1e-4)
    answer = server.chat(logprobs=True, **steps).json()
    assert answer["timings"]["diffusion"]["steps"] == 4
    assert answer["usage"]["completion_tokens"] == WIDTH


def test_a_canvas_may_be_given_to_a_reply(server: Any, embedded: Model) -> None:
    text = "I am Sfumato and "
    ids = embedded.tokenizer.encode(text, special=False)
    width = embedded.config.canvas_length
    canvas = [*ids, *[40] * (width - len(ids))]
    fields = {
        "max_tokens": width,
        "vllm_xargs": {
            "diffusion_seed_canvas": canvas,
            "diffusion_pinned": list(range(len(ids))),
            "diffusion_max_steps": 10**6,
        },
    }
    answer = server.chat(seed=3, **fields).json()
    assert answer["choices"][0]["message"]["content"].startswith(text.rstrip())
    assert answer["timings"]["diffusion"]["retries"] == 0
    given = {"diffusion_seed_canvas": canvas}
    seeded = server.chat(seed=3, max_tokens=4, max_steps=4, vllm_xargs=given)
    assert seeded.status_code == 200


def test_named_tokens_of_a_reply(server: Any) -> None:
    plain = server.chat(seed=3, logprobs=True).json()["choices"][0]
    named = server.chat(seed=3, logprobs=True, logprob_token_ids=NAMED).json()["choices"][0]
    assert named["message"] == plain["message"]
    for one, other in zip(plain["logprobs"]["content"], named["logprobs"]["content"], strict=True):
        assert (one["token"], one["logprob"]) == (other["token"], other["logprob"])
        assert len(other["top_logprobs"]) == 3
    total = server.chat(
        seed=3, logprobs=True, top_logprobs=TOP, logprob_token_ids=list(range(100)), max_tokens=1
    ).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert math.fsum(math.exp(each["logprob"]) for each in total) <= 1 + 1e-5


XARGS = "vllm_xargs.diffusion_"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"vllm_xargs": {"diffusion_seed_canvas": CANVAS}}, XARGS + "seed_canvas"),
    "token": (read([*CANVAS[:-1], 10**6]), XARGS + "seed_canvas"),
    "huge token": (read([*CANVAS[:-1], 10**30]), XARGS + "seed_canvas[15]"),
    "negative token": (read([-1, *CANVAS[1:]]), XARGS + "seed_canvas[0]"),
    "text": (read([*CANVAS[:-1], "5"]), XARGS + "seed_canvas[15]"),  # type: ignore[list-item]
    "huge canvas": (read([5] * 5000), XARGS + "seed_canvas"),
    "pins alone": ({"vllm_xargs": {"diffusion_pinned": [0]}}, XARGS + "pinned"),
    "pin outside": (read(diffusion_pinned=[WIDTH]), XARGS + "pinned"),
    "long": ({"vllm_xargs": {"diffusion_canvas_length": 4000}}, XARGS + "canvas_length"),
    "two lengths": (read() | {"canvas_length": 32}, XARGS + "canvas_length"),
    "no steps": (read(diffusion_max_steps=0), XARGS + "max_steps"),
    "two steps": (read() | {"max_steps": 2}, XARGS + "max_steps"),
    "read only": (read(diffusion_read_only=2), XARGS + "read_only"),
    "constrained": (read(diffusion_constrained=True), XARGS + "constrained"),
    "unknown": (read(diffusion_samples=4), "vllm_xargs.diffusion_samples"),
    "warm": (read() | {"temperature": 0.5}, "temperature"),
    "bias": (read() | {"logit_bias": {"5": 1}}, "logit_bias"),
    "stop": (read() | {"stop": "x"}, "stop"),
    "many named": ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    "no such token": ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    "named and cut": ({"logprob_token_ids": [5], "top_p": 0.5}, "logprob_token_ids"),
    "no object": ({"vllm_xargs": [1]}, "vllm_xargs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals(server: Any, case: str) -> None:
    fields, param = WRONG[case]
    for route, base in (
        (CHAT, {"messages": MESSAGES, "logprobs": True}),
        (TEXT, {"prompt": PROMPT, "logprobs": 1}),
    ):
        answer = server.post(route, **base | fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param or param in error["message"]
        assert error["message"].startswith(param.partition(".")[0])


def test_named_tokens_need_logprobs(server: Any) -> None:
    for route, base in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": PROMPT})):
        error = server.post(route, **base, logprob_token_ids=[5]).json()["error"]
        assert error["param"] == "logprob_token_ids"
