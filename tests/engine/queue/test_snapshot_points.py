"""Where prompts part: on templates that close prompts with words that history does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.text.conftest import gemma, gemma_metadata, gemma_template  # noqa: F401

import sfumato
from sfumato.engine.prepare import Messages, SnapshotPoints, common
from sfumato.text.prompt import prompt_ids

SYSTEM = {"role": "system", "content": "be brief"}
HI = {"role": "user", "content": "hi"}
SPECIAL = {ord(character) for character in "^#."}


class Template:
    """Like the published one: a character a token, `#` opens a turn and `.` closes it; the prompt
    ends in an empty thought `()` unless the model thinks, which history leaves out."""

    def __init__(self) -> None:
        self.rendered = 0

    def __call__(self, messages: Messages, thinking: bool) -> list[int]:
        self.rendered += 1
        turns = (f"#{m['role'][0]}:{str(m['content']).strip()}." for m in messages)
        text = "^" + "".join(turns) + "#a:" + ("" if thinking else "()")
        return [ord(character) for character in text]


def parts(messages: Messages, thinking: bool = False) -> list[str]:
    template = Template()
    points = SnapshotPoints(template, SPECIAL)
    ids, before = template(messages, thinking), template.rendered
    prefixes = ["".join(map(chr, ids[:n])) for n in points.lengths(ids, messages, thinking)]
    assert template.rendered == before  # a request's own prompt was rendered once
    return prefixes


@pytest.mark.parametrize("thinking", [False, True])
def test_the_next_turn_repeats_all_but_the_closing_words(thinking: bool) -> None:
    assert parts([HI], thinking) == ["^#u:hi.#a:"]


@pytest.mark.parametrize("text", ["hi", "x", "xy", " y", "[x", ""])
def test_others_share_the_system_prompt(text: str) -> None:
    messages = [SYSTEM, {"role": "user", "content": text}]
    assert parts(messages) == ["^#s:be brief.#u:", f"^#s:be brief.#u:{text.strip()}.#a:"]


def test_a_conversation_that_goes_on_after_a_system_prompt() -> None:
    messages = [SYSTEM, HI, {"role": "assistant", "content": "ho"}, HI]
    assert parts(messages) == ["^#s:be brief.#u:", "^#s:be brief.#u:hi.#a:ho.#u:hi.#a:"]


def test_a_first_message_of_another_role_shares_less() -> None:
    messages = [SYSTEM, {"role": "tool", "content": "x"}, HI]
    assert parts(messages)[0] == "^#s:be brief.#"


def test_text_in_parts() -> None:
    content = [{"type": "text", "text": "xx"}]
    assert parts([SYSTEM, {"role": "user", "content": content}])[0] == "^#s:be brief.#u:"


def test_a_template_that_refuses_what_is_made_up() -> None:
    def strict(messages: Messages, thinking: bool) -> list[int]:
        raise ValueError("messages: roles must alternate")

    assert SnapshotPoints(strict, SPECIAL).lengths([1, 2, 3], [HI], False) == (3,)


def test_a_prompt_that_ends_otherwise_than_others_is_shared_whole() -> None:
    def moody(messages: Any, thinking: bool) -> list[int]:
        return [*Template()(messages, thinking), len(messages)]

    assert SnapshotPoints(moody, SPECIAL).lengths([1, 2, 3], [HI], False) == (3,)


def by_rendering(
    prompt_ids: Callable[[Messages], list[int]], messages: Messages
) -> tuple[int, ...]:
    """The oracle: the conversation itself, rendered with what may come next."""
    ids, next_turn = prompt_ids(messages), [{"role": "assistant", "content": "x"}, HI]
    prefixes = {common(ids, prompt_ids([*messages, *next_turn]))}
    if len(messages) > 1 and messages[0]["role"] in ("system", "developer"):
        others = ([messages[0], {"role": "user", "content": text}] for text in "xy")
        prefixes.add(min(common(ids, prompt_ids(other)) for other in others))
    return tuple(sorted(prefixes))


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [HI],
    [SYSTEM, HI],
    [
        {"role": "system", "content": "<turn|>\n<|turn>user"},
        HI,
        {"role": "assistant", "content": "ho"},
        HI,
    ],
    [
        SYSTEM,
        HI,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("which", ["embedded", "published"])
def test_what_is_learnt_equals_what_rendering_finds(
    which: str, tools: bool, thinking: bool, request: pytest.FixtureRequest
) -> None:
    model = sfumato.load() if which == "embedded" else None
    fixtures = ("gemma_template", "gemma")
    template, tokenizer = (
        (model.template, model.tokenizer) if model else map(request.getfixturevalue, fixtures)
    )
    function = {"name": "f", "description": "<turn|>", "parameters": {"type": "object"}}
    declared = [{"type": "function", "function": function}] if tools else None

    def ids_of(messages: Messages, thinking: bool) -> list[int]:
        return prompt_ids(template, tokenizer, messages, thinking=thinking)

    def prompt_of(messages: Messages) -> list[int]:
        return prompt_ids(template, tokenizer, messages, thinking=thinking, tools=declared)

    points = SnapshotPoints(ids_of, tokenizer.special_ids)
    for messages in CONVERSATIONS:
        assert points.lengths(prompt_of(messages), messages, thinking) == by_rendering(
            prompt_of, messages
        )
