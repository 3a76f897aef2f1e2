"""Messages to the ids of a prompt, such that no message can write a special token; and the ids
around a user's text in a prompt of one message.

Joins template.py and tokenizer.py; knows nothing of replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import Any

from sfumato.refused import Refused
from sfumato.text.messages import MAX_DEPTH, PictureParts, check_messages, check_tools
from sfumato.text.template import ChatTemplate, Messages, TemplateError
from sfumato.text.tokenizer import Tokenizer

# Private-use characters: no letters, no white space, untouched by trimming and upper-casing.
_PRIVATE = range(0xF0000, 0xFFFFE)
_PRIVATE_USE = re.compile("[\U000f0000-\U000ffffd]")
_MARK = "mark"  # longer than what markers start with
LONG = 1 << 16  # characters of a text whose length is checked before the prompt is rendered


def prompt_ids(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    check: Callable[[str], None] = lambda text: None,
    pictures: PictureParts | None = None,
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

    check: called with each long text before any copy of it is made, and with the rendered prompt
    before any of it is encoded, and may raise. pictures: see `check_messages`; each is what the
    template writes for it.

    Raises:
        Refused: a message or a tool is malformed.
        TemplateError: the template failed on them.
        TokenizerError: the text cannot be encoded.
    """
    check_long_texts([messages, tools], check)
    checked = check_messages(messages, markers=template.markers, pictures=pictures)
    writing = _Writing(template, tokenizer, [checked, check_tools(tools)])
    text = writing.text(checked, tools, thinking, add_generation_prompt)
    check(text)
    return writing.ids(text)


class _Writing:
    """Renders messages with characters in the place of those that markers start with, and encodes
    what was rendered; see `prompt_ids`."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, shown: Any) -> None:
        """shown: all that is going to be rendered, whose private characters are not free."""
        self.template, self.tokenizer = template, tokenizer
        self.special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        starts = {text[0] for text in self.special}
        table = _placeholders({*starts, _MARK}, starts | _private(shown))
        self.mark = table.pop(_MARK)
        """A character that no text has."""
        self.placeholders = table

    def text(
        self,
        checked: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt of what `check_messages` returned."""
        return self.template.render_checked(
            _replaced(checked, self.placeholders),
            thinking=thinking,
            tools=_replaced(check_tools(tools), self.placeholders),
            add_generation_prompt=add_generation_prompt,
        )

    def pieces(self, text: str) -> list[str]:
        """Plain texts, maybe empty ones, and the markers between them."""
        # Longest first: of two markers that start alike, the tokenizer too takes the longer.
        markers = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        return re.split(f"({markers})", text) if markers else [text]

    def shared(self, one: str, other: str) -> int:
        """How many characters both texts begin with, where no marker is cut."""
        count = 0
        for mine, yours in zip(self.pieces(one), self.pieces(other), strict=False):
            if mine != yours:
                is_plain = mine not in self.special and yours not in self.special
                same = takewhile(bool, map(eq, mine, yours))
                return count + sum(same) * is_plain
            count += len(mine)
        return count

    def ids(self, text: str, begins: bool = True) -> list[int]:
        """The ids of a rendered text, with bos exactly once if it begins a prompt, or else none."""
        originals = {new: old for old, new in self.placeholders.items()}
        ids: list[int] = []
        for piece in self.pieces(text):
            if piece in self.special:
                ids.append(self.special[piece])
            elif piece:
                ids += self.tokenizer.encode(_replaced(piece, originals), special=False)
        bos = self.tokenizer.bos_id
        if bos is None:
            return ids
        return [bos] * begins + [i for i in ids if i != bos]


def exchange_ids(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    prompt: Sequence[Mapping[str, Any]],
    reply: Sequence[Mapping[str, Any]],
    end_ids: Collection[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    pictures: PictureParts | None = None,
) -> tuple[list[int], list[int]]:
    """The ids of a prompt, as `prompt_ids` gives them without thinking, and those of the reply, up
    to the token that ends it. reply: the assistant's message behind the prompt, and those of tools
    behind it; pictures: see `check_messages`, of the prompt.

    What the template writes for the reply is decided by rendering: the conversation without the
    reply and a generation prompt at its end, and the one with the reply, whose text a mark begins
    that no text has, are the same up to where the reply begins. So the header of the model's turn
    and the empty thought of a generation prompt are the prompt's, and the end of a turn, or the
    token that opens a tool's answer, is the reply's.

    Raises as `prompt_ids` does, and TemplateError where the template shows the reply elsewhere.
    """
    before = check_messages(prompt, markers=template.markers, pictures=pictures)
    complete = check_messages([*prompt, *reply], markers=template.markers, pictures=[])
    writing = _Writing(template, tokenizer, [complete, check_tools(tools)])
    if content := complete[len(before)].get("content"):
        complete[len(before)]["content"] = writing.mark + content.lstrip()
    opened = writing.text(before, tools, False, True)
    shown = writing.text(complete, tools, False, False)
    at = writing.shared(opened, shown)
    text, beyond = shown[at:], writing.ids(opened[at:], begins=False)
    ids = writing.ids(text.replace(writing.mark, ""), begins=False)
    ends = [place for place, token in enumerate(ids) if token in end_ids]
    begins = not content or text.startswith((writing.mark, *writing.special))
    if not begins or not ends or any(token not in tokenizer.special_ids for token in beyond[:1]):
        raise TemplateError(
            f"{template.origin}: does not show a reply behind its own generation prompt, up to a "
            "token that ends it, so that no reply can be learnt; get the template again"
        )
    return writing.ids(opened), ids[: ends[0] + 1]


def rewritten(
    template: ChatTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    check: Callable[[str], None] = lambda text: None,
    shows_pictures: bool = False,
) -> tuple[Messages, tuple[str, ...]]:
    """The messages that a prompt of these has to show, and lines for the reply's warnings; see
    `ChatTemplate.rewrite`. check: called with each long text before, and may raise."""
    check_long_texts([messages, tools], check)
    return template.rewrite(messages, shows_pictures)


def check_long_texts(value: Any, check: Callable[[str], None]) -> None:
    """Calls check with each long text in plain data, before any copy of it is made: what a template
    trims of a text, or leaves out as a past thought, is not megabytes."""
    for text in _texts(value):
        if len(text) > LONG:
            check(text)


def _placeholders(starts: set[str], used: set[str]) -> dict[str, str]:
    free = (c for c in map(chr, _PRIVATE) if c not in used)
    chosen = dict(zip(sorted(starts), free, strict=False))
    if len(chosen) < len(starts):
        raise Refused("messages", "use every private-use character", "remove some")
    return chosen


def _private(value: Any) -> set[str]:
    """The private-use characters in all texts."""
    return {match[0] for text in _texts(value) for match in _PRIVATE_USE.finditer(text)}


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Every text in plain data, the keys of objects too; but not below what a check of the messages
    lets pass, and no picture's URL, which may hold the picture."""
    if isinstance(value, str):
        yield value
    elif depth > 2 * MAX_DEPTH:
        return
    elif isinstance(value, dict):
        yield from (key for key in value if isinstance(key, str))
        is_picture = value.get("type") == "image"
        for key, item in value.items():
            if not (is_picture and key == "url"):
                yield from _texts(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, depth + 1)


def _replaced(value: Any, table: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in table.items():  # `translate` is twenty times slower
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {_replaced(k, table): _replaced(item, table) for k, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, table) for item in value]
    return value


_PLACEHOLDER = "\U000f0000"  # a private-use character: untouched by trimming


def user_turn(
    template: ChatTemplate, tokenizer: Tokenizer, thought: str = ""
) -> tuple[list[int], list[int]]:
    """The ids of a prompt up to a user's text, and from its end on to where the model's turn
    begins.

    thought: with markers, what the model's turn begins with when it does not think; it is
    appended where the template knows thinking and does not write it itself.

    Raises TemplateError for a template that does not show a message exactly once.
    """
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    text = template.render(messages)
    head, placeholder, tail = text.partition(_PLACEHOLDER)
    if not placeholder or _PLACEHOLDER in tail:
        raise TemplateError(
            f"{template.origin}: shows a user's message {text.count(_PLACEHOLDER)} times, so that "
            "no question can be put into it; get the template again"
        )
    tail += _missing(template, messages, text, thought)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    head_ids, tail_ids = (
        [token for token in tokenizer.encode(part) if token != tokenizer.bos_id]
        for part in (head, tail)
    )
    return [*first, *head_ids], tail_ids


def empty_thought_ids(template: ChatTemplate, tokenizer: Tokenizer, thought: str) -> list[int]:
    """The ids of what has to follow a prompt for the model not to think: of `thought`, or none
    where the template knows no thinking or writes it itself."""
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    return tokenizer.encode(_missing(template, messages, template.render(messages), thought))


def _missing(
    template: ChatTemplate, messages: Sequence[Mapping[str, str]], text: str, thought: str
) -> str:
    knows_thinking = template.render(messages, thinking=True) != text
    return thought if knows_thinking and not text.endswith(thought) else ""
