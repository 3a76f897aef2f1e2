"""Prompts as llama-server takes them: texts, token ids, both in one list, and objects with a text.

Knows no route: embeddings and completions read the same forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.server.http.errors import bad_request

MixedPrompt = str | list[int | str]
"""One prompt: a text, or token ids and texts in their order."""

_FORMS = "a text, a list of token ids and texts, or an object with prompt_string"


def prompts_in(value: Any, field: str, most: int) -> tuple[list[MixedPrompt], bool]:
    """The prompts of a body's field, at most so many, and whether the field is one by itself and no
    list of them. A list in which there is an id is one prompt. Raises ApiError."""
    if not isinstance(value, list):
        return [_prompt(value, field)], True
    if not value:
        raise bad_request(f"{field}: is empty", field)
    if any(type(item) is int for item in value):
        return [_prompt(value, field)], True
    if len(value) > most:
        raise bad_request(
            f"{field}: at most {most:,} prompts, and {len(value):,} are given; send them in parts",
            field,
        )
    return [_prompt(item, f"{field}[{i}]") for i, item in enumerate(value)], False


def _prompt(value: Any, where: str) -> MixedPrompt:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text_of(value, where)
    if not isinstance(value, list):
        raise bad_request(f"{where}: must be {_FORMS}", where)
    for i, item in enumerate(value):
        if type(item) is not int and not isinstance(item, str):
            raise bad_request(f"{where}[{i}]: must be a token id or a text", f"{where}[{i}]")
    return value


def _text_of(value: Mapping[str, Any], where: str) -> str:
    """The text of {"prompt_string": …}, or of {"content": [{"type": "text", "text": …}]}."""
    if value.get("multimodal_data"):
        name = f"{where}.multimodal_data"
        raise bad_request(f"{name}: images are not supported yet", name)
    for name in value:
        if name not in ("prompt_string", "content", "multimodal_data"):
            raise bad_request(f"{where}.{name[:100]}: unknown; a prompt is {_FORMS}", where)
    text = value.get("prompt_string")
    if isinstance(text, str) and "content" not in value:
        return text
    content = value.get("content")
    if not isinstance(content, list) or "prompt_string" in value:
        raise bad_request(f"{where}: must be {_FORMS}", where)
    return "".join(_content_texts(content, f"{where}.content"))


def _content_texts(content: Sequence[Any], where: str) -> list[str]:
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image_url", "input_audio", "input_video"):
            raise bad_request(f"{where}[{i}]: images are not supported yet; send text", where)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f'{where}[{i}]: must be {{"type": "text", "text": …}}', where)
        texts.append(part["text"])
    return texts
