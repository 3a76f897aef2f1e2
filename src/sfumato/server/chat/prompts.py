"""Prompts that are no conversation: texts, token ids, both in one list, and text before a suffix.

Knows no route: embeddings, completions and infills read the same forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.diffusion.constraints.hole import Hole
from sfumato.engine import Request
from sfumato.options import exclusions
from sfumato.refused import Refused, TooLarge
from sfumato.server.chat.grammars import grammar_of
from sfumato.server.http.errors import ApiError
from sfumato.server.schemas.generation import Sampling
from sfumato.server.service import Service

MixedPrompt = str | list[int | str]
"""One prompt: a text, or token ids and texts in their order."""

_FORMS = "a text, a list of token ids and texts, or an object with prompt_string"


def prompts_in(value: Any, field: str, most: int) -> tuple[list[MixedPrompt], bool]:
    """The prompts of a body's field, at most so many, and whether the field is one by itself and no
    list of them. A list in which there is an id is one prompt. Raises Refused."""
    if not isinstance(value, list):
        return [_prompt(value, field)], True
    if not value:
        raise Refused(field, "is empty")
    if any(type(item) is int for item in value):
        return [_prompt(value, field)], True
    if len(value) > most:
        raise Refused(
            field, f"at most {most:,} prompts, and {len(value):,} are given", "send them in parts"
        )
    return [_prompt(item, f"{field}[{i}]") for i, item in enumerate(value)], False


def _prompt(value: Any, where: str) -> MixedPrompt:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text_of(value, where)
    if not isinstance(value, list):
        raise Refused(where, f"must be {_FORMS}")
    for i, item in enumerate(value):
        if type(item) is not int and not isinstance(item, str):
            raise Refused(f"{where}[{i}]", "must be a token id or a text")
    return value


def _text_of(value: Mapping[str, Any], where: str) -> str:
    """The text of {"prompt_string": …}, or of {"content": [{"type": "text", "text": …}]}."""
    if value.get("multimodal_data"):
        name = f"{where}.multimodal_data"
        raise Refused(name, "images are not supported yet")
    for name in value:
        if name not in ("prompt_string", "content", "multimodal_data"):
            raise Refused(f"{where}.{name[:100]}", "unknown", f"a prompt is {_FORMS}")
    text = value.get("prompt_string")
    if isinstance(text, str) and "content" not in value:
        return text
    content = value.get("content")
    if not isinstance(content, list) or "prompt_string" in value:
        raise Refused(where, f"must be {_FORMS}")
    return "".join(_content_texts(content, f"{where}.content"))


def _content_texts(content: Sequence[Any], where: str) -> list[str]:
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image_url", "input_audio", "input_video"):
            raise Refused(f"{where}[{i}]", "images are not supported yet", "send text")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{where}[{i}]", 'must be {"type": "text", "text": …}')
        texts.append(part["text"])
    return texts


_OF_REPLIES = {
    "min_tokens": 0,
    "ignore_eos": False,
    "settle_at_end": False,
    "max_thinking_tokens": None,
}


def insertion(
    service: Service, body: Sampling, suffix: str, limit: int | None, field: str, endpoint: str
) -> dict[str, Any]:
    """Fields of a Request. limit: tokens of the hole at most; None and -1: what the canvas leaves
    beside the suffix, or half of it where the suffix is longer. field: the suffix's name. Raises
    Refused."""
    given = {name: getattr(body, name) not in (None, no) for name, no in _OF_REPLIES.items()}
    given |= {"suffix": True, "grammar": grammar_of(body) is not None}
    if (refused := exclusions.refusal(exclusions.SUFFIX, given)) is not None:
        raise refused.renamed({"suffix": field})
    request = Request(suffix, endpoint=endpoint)
    with service.engine.refusals(request):
        tokens = len(service.encode(suffix, field, special=False))
    longest = body.canvas_length or service.model.config.canvas_length
    room = longest - 1 - min(tokens, longest // 2)  # the token before the hole is on the canvas too
    if room < 1:
        raise Refused(
            "canvas_length",
            f"a canvas of {longest} has no room for text before a suffix",
            "ask for 3 or more",
        )
    most = room if limit in (None, -1) else min(limit or 1, room)
    return {"parts": (Hole(at_most=most), suffix), "max_tokens": most}


LONG_PROMPT = "request ({tokens} tokens) exceeds the available context size ({context} tokens)"
LONG_INPUT = "input ({tokens} tokens) is too large for a slot ({context} tokens)"


def check_slot(service: Service, tokens: int, words: str, field: str) -> None:
    """Raises ApiError for a prompt of more tokens than a slot that is made at start."""
    if tokens > service.context:
        text = words.format(tokens=tokens, context=service.context)
        message = f"{text}, try increasing it with --context"
        answer = ApiError.of(TooLarge(None, message, "", tokens, service.context))
        answer.param = field
        raise answer
