"""Where prompts part: on a template that closes prompts with words that history does not show."""

from __future__ import annotations

import pytest

from sfumato.engine.prefix import Messages, reusable_lengths

SYSTEM = {"role": "system", "content": "be brief"}


def prompt_ids(messages: Messages) -> list[int]:
    """Like the published template: a character a token, `#` opens a turn and `.` closes it; the
    prompt ends in an empty thought `()`, which history leaves out."""
    text = "^" + "".join(f"#{m['role'][0]}:{str(m['content']).strip()}." for m in messages)
    return [ord(character) for character in text + "#a:()"]


def parts(messages: Messages) -> list[str]:
    ids = prompt_ids(messages)
    return ["".join(map(chr, ids[:n])) for n in reusable_lengths(prompt_ids, messages, ids)]


def test_the_next_turn_repeats_all_but_the_closing_words() -> None:
    assert parts([{"role": "user", "content": "hi"}]) == ["^#u:hi.#a:"]


@pytest.mark.parametrize("text", ["hi", "x", "xy", " y", "[x"])
def test_others_share_the_system_prompt(text: str) -> None:
    messages = [SYSTEM, {"role": "user", "content": text}]
    assert parts(messages) == ["^#s:be brief.#u:", f"^#s:be brief.#u:{text.strip()}.#a:"]


def test_text_in_parts() -> None:
    content = [{"type": "text", "text": "xx"}]
    assert parts([SYSTEM, {"role": "user", "content": content}])[0] == "^#s:be brief.#u:"


def test_a_template_that_refuses_what_is_made_up() -> None:
    def strict(messages: Messages) -> list[int]:
        raise ValueError("messages: roles must alternate")

    assert reusable_lengths(strict, [SYSTEM], [1, 2, 3]) == (3,)
