"""The state that questions are about, as text; and templates that make one of a table's row."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from sfumato.refused import Refused

MOST_TEMPLATE = 1 << 20  # characters
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def state_text(state: Any) -> str:
    """A text as it is; a dict, a list or a pydantic model as JSON. Raises ValueError."""
    if isinstance(state, str):
        return state
    if hasattr(state, "model_dump") and not isinstance(state, type):
        state = state.model_dump(mode="json")
    if not isinstance(state, dict | list | tuple):
        raise Refused("state", f"must be a text, a dict or a list, got {state!r:.80}")
    return json_text(state)


def json_text(value: Any) -> str:
    """JSON with all characters as they are. Raises ValueError for what JSON has no form for."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused("state", f"cannot be written as JSON: {error}") from None


class StateTemplate:
    """A text with the names of columns in braces; {{ and }} stand for braces."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for braces that do not belong together."""
        if len(text) > MOST_TEMPLATE:
            raise Refused("state", f"a template has {MOST_TEMPLATE:,} characters at most")
        self.text = text
        self._parts: list[tuple[str, str | None]] = []  # text, and the column after it
        end, plain = 0, ""
        for match in _PART.finditer(text):
            plain += text[end : match.start()]
            end = match.end()
            if match[1]:
                self._parts.append((plain, match[1]))
                plain = ""
            elif match[0] in ("{{", "}}"):
                plain += match[0][0]
            else:
                raise Refused(
                    "state",
                    f"{match[0]!r} at character {match.start() + 1} names no column",
                    "write {column}, and {{ or }} for a brace",
                )
        self._parts.append((plain + text[end:], None))

    @property
    def columns(self) -> list[str]:
        """The columns that it names, each once."""
        return list(dict.fromkeys(name for _, name in self._parts if name is not None))

    def check(self, columns: Collection[str]) -> None:
        """Raises ValueError where it names a column that is not there."""
        for name in self.columns:
            if name not in columns:
                have = ", ".join(columns)[:200]
                raise Refused("state", f"there is no column {name!r}", f"there are {have}")

    def fill(self, row: Mapping[str, Any]) -> str:
        """The state of a row; what is no text is JSON. Raises ValueError as `check`."""
        self.check(row)
        return "".join(
            plain + ("" if name is None else _cell(row[name])) for plain, name in self._parts
        )


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)
