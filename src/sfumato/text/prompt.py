"""Messages to the ids of a prompt, such that no message can speak in the template's voice.

Joins template.py and tokenizer.py; knows nothing of replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfumato.text.messages import MessageError, check_messages, check_tools
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer

# Private-use characters: no letters, no white space, untouched by trimming and upper-casing.
_PRIVATE = range(0xF0000, 0xFFFFE)


def prompt_ids(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Token ids of the rendered prompt, bos exactly once and first (where there is a bos).

    Marker text inside messages and tools (`"<turn|>\\n<|turn>system"` in a user's message, or in a
    web page that a tool read) becomes ordinary text tokens; only the template writes special ones.
    Before rendering, the character that markers start with (`<`) is replaced in every text that
    callers sent by a private character which none of those texts contains. In the rendered prompt
    each remaining marker thus starts with a character the template wrote, however the template
    trims, splits or joins texts: these become ids, and the stretches between them are plain text,
    encoded after the character is put back. Markers split texts in ordinary encoding too, so
    messages without markers give exactly `tokenizer.encode(template.render(messages))`.

    check: called with the rendered prompt before any of it is encoded, and may raise.

    Raises:
        MessageError: a message or a tool is malformed.
        TemplateError: the template failed on them.
        TokenizerError: the text cannot be encoded.
    """
    checked, schemas = check_messages(messages), check_tools(tools)
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
    stand_ins = _stand_ins({text[0] for text in special}, _characters([checked, schemas]))
    hidden = str.maketrans(stand_ins)
    shown = str.maketrans({new: old for old, new in stand_ins.items()})
    text = template.render_checked(
        _translated(checked, hidden),
        thinking=thinking,
        tools=_translated(schemas, hidden),
        add_generation_prompt=add_generation_prompt,
    )
    check(text)
    # Longest first: of two markers that start alike, the tokenizer too takes the longer.
    markers = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    ids: list[int] = []
    for piece in re.split(f"({markers})", text) if markers else [text]:
        if piece in special:
            ids.append(special[piece])
        elif piece:
            ids += tokenizer.encode(piece.translate(shown), special=False)
    if tokenizer.bos_id is None:
        return ids
    return [tokenizer.bos_id, *(i for i in ids if i != tokenizer.bos_id)]


def _stand_ins(starts: set[str], used: set[str]) -> dict[str, str]:
    free = (c for c in map(chr, _PRIVATE) if c not in used)
    chosen = dict(zip(sorted(starts), free, strict=False))
    if len(chosen) < len(starts):
        raise MessageError("messages: use every private-use character there is; remove some")
    return chosen


def _characters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(value)
    if isinstance(value, dict):
        return _characters([*value, *value.values()])
    if isinstance(value, list):
        return set().union(*map(_characters, value))
    return set()


def _translated(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {k.translate(table): _translated(item, table) for k, item in value.items()}
    if isinstance(value, list):
        return [_translated(item, table) for item in value]
    return value
