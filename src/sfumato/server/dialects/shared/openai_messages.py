"""OpenAI's messages as the engine takes them, with errors that name the field.

The text side checks messages of every API afterwards; the checks here are of OpenAI's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.shared.unknown_fields import check_fields, leaves_out
from sfumato.server.schemas.body import Unknown
from sfumato.server.schemas.fill import FillBody
from sfumato.server.schemas.llama_cpp import TemplateBody
from sfumato.server.schemas.openai import ChatBody
from sfumato.server.settings import ServerSettings
from sfumato.text.markers import ChatMarkers
from sfumato.text.messages import check_messages
from sfumato.text.prompt import check_long_texts

_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        *("role", "content", "name", "tool_calls", "refusal", "annotations", "audio"),
        *("function_call", "reasoning_content", "reasoning"),
    },
    "tool": {"role", "content", "name", "tool_call_id"},
}
UNSUPPORTED = {
    "image_url": "images are not supported yet",
    "input_image": "images are not supported yet",
    "input_audio": "audio is not supported",
    "file": "files are not supported",
    "input_file": "files are not supported",
    "video_url": "videos are not supported",
}


def conversation(
    body: ChatBody | TemplateBody | FillBody, settings: ServerSettings
) -> list[dict[str, Any]]:
    """The messages in the four roles of the chat template. The body records what a lenient server
    ignores of the messages. Raises Refused."""
    messages, most = body.messages or [], settings.max_messages
    if len(messages) > most:
        raise Refused(
            "messages",
            f"{len(messages)} of them, and this server takes {most}",
            "leave out old ones, or raise --max-messages",
        )
    ignored = leaves_out(body, settings)
    return [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def continuation(
    messages: list[dict[str, Any]],
    wanted: bool | None,
    opened: bool | None,
    check: Callable[[str, str], None],
    markers: ChatMarkers,
) -> tuple[list[dict[str, Any]], str | None]:
    """The messages that the prompt shows complete, and the text of the last one where the reply
    continues that message: an assistant's.

    wanted, opened: the body's continue_final_message and add_generation_prompt; check: raises for a
    text that is too long for any context, and a field; markers: of the chat format. Raises
    Refused.
    """
    is_assistant = messages[-1]["role"] == "assistant"
    if wanted and opened:
        raise Refused(
            "continue_final_message",
            "a message is continued, or the model's turn is opened",
            "set add_generation_prompt to false",
        )
    if wanted and not is_assistant:
        raise Refused("continue_final_message", "the last message must be an assistant's")
    if opened is False and (not is_assistant or wanted is False):
        raise Refused(
            "add_generation_prompt", "must be true where no assistant's message is continued"
        )
    if not is_assistant or wanted is False:
        return messages, None
    where = f"messages[{len(messages) - 1}]"
    if messages[-1].get("tool_calls"):
        raise Refused(
            f"{where}.tool_calls", "cannot be continued", "send the tools' answers after them"
        )
    if len(messages) == 1:
        raise Refused("messages", "an assistant's message can only be continued after a user's")
    check_long_texts(messages[-1], lambda text: check(text, "messages"))
    text: str = check_messages(messages[-1:], len(messages) - 1, markers)[0]["content"]
    return messages[:-1], text or None


def _message(message: Mapping[str, Any], where: str, ignored: Unknown | None) -> dict[str, Any]:
    """ignored: None where unknown fields are refused."""
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role == "function":
        raise Refused(f"{where}.role", "function is deprecated", "use tool")
    keys = _KEYS.get(role) if isinstance(role, str) else None
    if keys is None:
        raise Refused(f"{where}.role", "must be one of system, developer, user, assistant, tool")
    check_fields(message, keys, where, ignored)
    for key in ("audio", "function_call"):
        if message.get(key) is not None and key in keys:
            raise Refused(f"{where}.{key}", "is not supported")
    clean = {key: value for key, value in message.items() if key in keys} | {"role": role}
    if not isinstance(clean.get("refusal"), str | None):
        raise Refused(f"{where}.refusal", "must be text")
    if role == "assistant" and clean.get("content") is None and not clean.get("tool_calls"):
        clean["content"] = clean.get("refusal") or ""
    if isinstance(clean.get("content"), list):
        clean["content"] = _parts(clean["content"], f"{where}.content")
    return clean


def _parts(parts: Sequence[Any], where: str) -> list[Any]:
    checked = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        here = f"{where}[{i}]"
        if isinstance(kind, str) and kind in UNSUPPORTED:
            raise Refused(here, UNSUPPORTED[kind], code="unsupported")
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        checked.append(part)
    return checked
