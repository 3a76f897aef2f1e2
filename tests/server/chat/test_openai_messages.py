"""A last message of an assistant's is continued."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.answering_model import answering_model

from sfumato.api import Model
from sfumato.server.chat import call as chat_messages

USER = {"role": "user", "content": "Who are you?"}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def user_message(text: Any, **more: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": text, **more}]


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_the_reply_is_what_follows(serve: Any) -> None:
    served = serve(answering_model({"Who are you?": "I am a tale.<turn|>"}))
    assert content(served.chat(messages=[USER])) == "I am a tale."
    for begun in ("I am", "I am a ", "I am a t"):
        assert begun + content(served.chat(messages=user_message(begun))) == "I am a tale."
    assert content(served.chat(messages=user_message("I am a tale."))) == ""  # it was whole
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert content(served.chat(messages=user_message("I am"), **explicit)) == " a tale."
    text = served.chat(messages=user_message("I am"), stream=True).text
    assert '"content":" a"' in text and '"content":" I"' not in text


def test_the_prompt_ends_in_it(server: Any, embedded: Model) -> None:
    made = server.post("/apply-template", messages=user_message("I  am <turn|> ")).json()["prompt"]
    opened = server.post("/apply-template", messages=[USER]).json()["prompt"]
    assert made == opened + "I  am <turn|> "
    used = server.chat(messages=user_message("I  am <turn|> "), max_tokens=4, max_steps=2).json()[
        "usage"
    ]
    text = embedded.tokenizer.encode("I  am <turn|> ", special=False)  # no marker is one
    assert used["prompt_tokens"] == len(embedded.prompt_ids("Who are you?")) + len(text)
    past = server.post("/apply-template", messages=user_message("I"), add_generation_prompt=False)
    assert past.json()["prompt"].endswith("I<turn|>\n")


def test_what_is_answered_all_the_same(server: Any) -> None:
    plain = content(server.chat(messages=[USER], seed=3))
    for messages in (user_message(""), user_message("<|channel>thought\nhm<channel|>")):
        assert content(server.chat(messages=messages, seed=3)) == plain
    assert content(server.chat(messages=[USER], seed=3, add_generation_prompt=True)) == plain
    turn = server.chat(
        messages=user_message("I am"),
        seed=3,
        max_tokens=4,
        max_steps=2,
        continue_final_message=False,
    )
    prompt = server.post(
        "/apply-template", messages=user_message("I am"), continue_final_message=False
    ).json()["prompt"]
    assert prompt.endswith("<|turn>model\n")
    assert turn.json()["usage"]["prompt_tokens"] == len(
        server.post("/tokenize", content=prompt).json()["tokens"]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {
                "messages": user_message("I"),
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (
            {
                "messages": user_message("I"),
                "continue_final_message": False,
                "add_generation_prompt": False,
            },
            "add_generation_prompt",
        ),
        ({"messages": user_message("I"), "reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"messages": user_message("I"), "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
        ),
        ({"messages": user_message("I", tool_calls=CALLS)}, "messages[1].tool_calls"),
        ({"messages": user_message("I")[1:]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "messages[1]"),
    ],
)
def test_what_cannot_be_continued(server: Any, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": [USER]} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_of_the_last_message_lengths_are_looked_at_first(server: Any, monkeypatch: Any) -> None:
    seen: list[int] = []
    clean = chat_messages.check_messages

    def watched(given: Any, *rest: Any) -> Any:
        seen.append(len(given))
        return clean(given, *rest)

    monkeypatch.setattr(chat_messages, "check_messages", watched)
    error = server.chat(messages=user_message("x " * 100_000)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert not seen
    error = server.chat(messages=user_message([{"type": "text", "text": 1}])).json()["error"]
    assert error["message"].startswith("messages[1].content") and seen == [1]
