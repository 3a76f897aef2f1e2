"""What routers ask of a prompt before they choose a replica: the exchanges of llm-d's router,
written by hand after its source, since it does not run here."""

from __future__ import annotations

import json
from typing import Any

import pytest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def read(answer: Any) -> dict[str, Any]:
    """One object as the router decodes it: unsigned ids, and features or null."""
    assert answer["request_id"] and all(0 <= token < 2**32 for token in answer["token_ids"])
    assert answer["features"] is None or set(answer["features"]) == {"mm_hashes", "mm_placeholders"}
    return dict(answer)


def test_a_chat_is_rendered_as_it_would_be_answered(server: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "n": 2, "model": "sfumato"}
    answer = server.post("/v1/chat/completions/render", **body)
    rendered = read(answer.json())
    assert answer.headers["content-type"] == "application/json"
    text = server.post("/apply-template", messages=MESSAGES).json()["prompt"]
    assert server.post("/detokenize", tokens=rendered["token_ids"]).json()["content"] == text
    usage = server.chat(messages=MESSAGES, max_tokens=1, seed=1).json()["usage"]
    assert usage["prompt_tokens"] == len(rendered["token_ids"])
    # The same tokens after the same beginning, by which replicas are compared.
    longer = [*MESSAGES, {"role": "assistant", "content": "A."}, {"role": "user", "content": "B?"}]
    ids = read(server.post("/v1/chat/completions/render", messages=longer).json())["token_ids"]
    assert ids[: len(rendered["token_ids"])] == rendered["token_ids"]


@pytest.mark.parametrize(
    ("prompt", "count"), [("Who?", 1), (["Who?", "Where?"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)]
)
def test_completions_are_an_array_with_an_object_for_each_prompt(
    server: Any, prompt: Any, count: int
) -> None:
    answer = server.post("/v1/completions/render", prompt=prompt, n=2, max_tokens=4)
    rendered = [read(each) for each in answer.json()]
    assert len(rendered) == count == len({each["request_id"] for each in rendered})
    if prompt == [[5], [6, 7]]:
        assert [each["token_ids"] for each in rendered] == prompt


# As version 0.1.17 of vLLM's router sends a chat on, recorded, behind the fields of the client.
FROM_VLLMS_ROUTER: dict[str, Any] = {"model": "model", "messages": MESSAGES, "max_tokens": 4}
FROM_VLLMS_ROUTER |= json.loads(
    '{"stream":false,"logprobs":false,"no_stop_trim":false,"ignore_eos":false,'
    '"continue_final_message":false,"skip_special_tokens":true,"separate_reasoning":true,'
    '"stream_reasoning":true,"return_hidden_states":false,"include_reasoning":true}'
)


def test_the_fields_that_vllms_router_adds_change_nothing(server: Any) -> None:
    plain = server.chat(messages=MESSAGES, max_tokens=4, seed=1).json()
    routed = server.chat(**FROM_VLLMS_ROUTER, seed=1)
    assert routed.json()["choices"] == plain["choices"]
    completion = {"prompt": "Hi", "max_tokens": 1, "echo": False, "no_stop_trim": False}
    completion |= {"return_hidden_states": False, "ignore_eos": False, "skip_special_tokens": True}
    assert server.post("/v1/completions", **completion).status_code == 200
    refused = server.chat(**FROM_VLLMS_ROUTER | {"return_hidden_states": True})
    assert refused.json()["error"]["param"] == "return_hidden_states"


def test_what_cannot_be_answered_is_not_rendered(server: Any) -> None:
    for path, body in (
        ("/v1/chat/completions/render", {"messages": MESSAGES, "n": 1000}),
        ("/v1/completions/render", {"prompt": "x" * 10**6}),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
