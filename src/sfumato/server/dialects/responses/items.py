"""The items of a response's input: checked, and in the one shape in which they are also kept.

Messages, function calls and their outputs stay; thoughts go, since no past thought returns to the
model; references become what they refer to. Knows no chat template.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfumato.refused import Refused
from sfumato.server.dialects.shared.openai_messages import UNSUPPORTED
from sfumato.server.dialects.shared.unknown_fields import check_fields
from sfumato.server.response_store import Item, Missing
from sfumato.server.schemas.body import Unknown
from sfumato.server.schemas.responses import LONGEST_ID
from sfumato.text.messages import tool_name

Find = Callable[[str], Item]
"""An item by its id; raises Missing."""

_ROLES = ("user", "assistant", "system", "developer")
_COMMON = {"type", "id", "status", "phase"}
_ORIGIN = {"namespace", "caller", "created_by"}  # what hosted tools add to calls
_KEYS = {
    "message": _COMMON | {"role", "content"},
    "function_call": _COMMON | _ORIGIN | {"call_id", "name", "arguments", "async"},
    "function_call_output": _COMMON | _ORIGIN | {"call_id", "output", "name"},
    "item_reference": {"type", "id"},
}
_TEXTS = ("input_text", "output_text", "text", "summary_text")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
_REASONING = "rs_"  # what ids of reasoning items begin with


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def items_of(
    given: str | Sequence[Mapping[str, Any]], find: Find, ignored: Unknown | None
) -> list[tuple[str, Item]]:
    """Each with its place. find: looks up references; ignored: gets the names of unknown fields;
    None where they are refused. Raises Refused."""
    if isinstance(given, str):
        return [("input", _message("user", [_input(given)], new_id("msg")))]
    if not given:
        raise Refused("input", "is empty", "send a text or at least one item")
    places = ((f"input[{i}]", item) for i, item in enumerate(given))
    checked = ((where, _item(item, where, find, ignored)) for where, item in places)
    return [(where, item) for where, item in checked if item is not None]


def _item(item: Mapping[str, Any], where: str, find: Find, ignored: Unknown | None) -> Item | None:
    """None for a thought."""
    kind = item.get("type")
    if "type" not in item:
        kind = "message" if item.get("role") is not None else "item_reference"
    if kind == "reasoning":
        return None
    if not isinstance(kind, str) or kind not in _KEYS:
        kinds = ", ".join((*_KEYS, "reasoning"))
        raise _refused(f"{where}.type", f"must be one of {kinds}", "unsupported")
    check_fields(item, _KEYS[kind], where, ignored)
    if kind == "item_reference":
        return _referred(item, where, find)
    own = item.get("id") if item.get("id") is not None else new_id(_PREFIXES[kind])
    if not isinstance(own, str) or not 0 < len(own) <= LONGEST_ID:
        raise _refused(f"{where}.id", f"must be a text of 1 to {LONGEST_ID} characters")
    if kind == "message":
        return _checked_message(item, own, where)
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= LONGEST_ID:
        raise _refused(f"{where}.call_id", f"must be a text of 1 to {LONGEST_ID} characters")
    head = {"id": own, "type": kind, "status": "completed", "call_id": call_id}
    if kind == "function_call_output":
        return head | {"output": _joined(item.get("output"), f"{where}.output")}
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise _refused(f"{where}.arguments", "must be a text of JSON")
    name = tool_name(item.get("name"), f"{where}.name")
    return head | {"name": name, "arguments": arguments}


def _referred(item: Mapping[str, Any], where: str, find: Find) -> Item | None:
    name = item.get("id")
    if not isinstance(name, str):
        raise _refused(f"{where}.id", "must be the id of an item")
    try:
        referred = find(name)
    except Missing:
        if name.startswith(_REASONING):
            return None
        raise _refused(
            f"{where}.id",
            f"there is no item {name[:LONGEST_ID]!r} here; send the item itself, or keep the "
            "response that it is of (store, --response-store)",
            "item_not_found",
        ) from None
    return None if referred["type"] == "reasoning" else referred


def _checked_message(item: Mapping[str, Any], own: str, where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _refused(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    texts = _texts(item.get("content"), f"{where}.content")
    made = _output if role == "assistant" else _input
    return _message(role, [made(text) for text in texts], own)


def _message(role: str, content: list[Item], own: str) -> Item:
    return {"id": own, "type": "message", "status": "completed", "role": role, "content": content}


def _input(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": []}


def _joined(content: Any, where: str) -> str:
    return "".join(_texts(content, where))


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a content: a text, or parts. Raises Refused."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _refused(where, "must be text or a list of parts")
    return [_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise _refused(where, UNSUPPORTED[kind], "unsupported")
    if kind != "refusal" and kind not in _TEXTS:
        raise _refused(f"{where}.type", "must be input_text, output_text or refusal")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _refused(f"{where}.text", "must be text")
    return text


def _refused(where: str, message: str, code: str | None = None) -> Refused:
    return Refused(where, message, code=code)
