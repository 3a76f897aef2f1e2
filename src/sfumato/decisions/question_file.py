"""The state that questions are about, as text, and a TOML file of questions with perhaps a template
of their state. Knows no model.

state = "Subject: {subject}\\n{body}"

[questions.team]
type = "choice"
instructions = "Which team owns it?"
options = { billing = "payments", tech = "" }
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from sfumato.decisions.schema import Choice, Kind, Schema, Score, YesNo, schema_of
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


State = str | Sequence[Mapping[str, Any]]
"""The subject of questions: a text, or parts of texts and pictures."""

_GIVEN = ("path", "url", "bytes", "image", "patches")  # the keys of a picture


def state_of(state: Any) -> State:
    """The parts of a list that has a picture among them; what else there is as its text. Raises
    Refused, naming the part that is none."""
    if not isinstance(state, list | tuple) or not any(map(_is_picture, state)):
        return state_text(state)
    for i, part in enumerate(state):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not _is_picture(part) and not (is_text and isinstance(part.get("text"), str)):
            raise Refused(
                f"state[{i}]",
                'must be {"type": "text", "text": "…"} or a picture, as in messages',
                "put the pictures beside the text in one list; a list that is data is sent as "
                "json.dumps(state)",
            )
    return state


def _is_picture(part: Any) -> bool:
    is_image = isinstance(part, Mapping) and part.get("type") == "image"
    return is_image and any(key in part for key in _GIVEN)


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
        for match in _PART.finditer(text):
            if not match[1] and match[0] not in ("{{", "}}"):
                raise Refused(
                    "state",
                    f"{match[0]!r} at character {match.start() + 1} names no column",
                    "write {column}, and {{ or }} for a brace",
                )
        self.text = text
        self.columns = list(dict.fromkeys(m[1] for m in _PART.finditer(text) if m[1]))

    def check(self, columns: Collection[str]) -> None:
        """Raises ValueError where it names a column that is not there."""
        for name in self.columns:
            if name not in columns:
                have = ", ".join(columns)[:200]
                raise Refused("state", f"there is no column {name!r}", f"there are {have}")

    def fill(self, row: Mapping[str, Any]) -> str:
        """The state of a row; what is no text is JSON. Raises ValueError as `check`."""
        self.check(row)
        return _PART.sub(lambda part: _cell(row[part[1]]) if part[1] else part[0][0], self.text)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


LARGEST = 4 << 20  # bytes of a file
_ALIKE = 0.8  # a name and what its user may mean
TYPES = ("yes/no", "bool", "choice", "score")
"""The types of questions; bool is yes/no, as in Python."""
_KEYS = {
    "yes/no": ("type", "instructions", "yes", "no"),
    "choice": ("type", "instructions", "options"),
    "score": ("type", "instructions", "levels"),
}


@dataclass(frozen=True)
class QuestionFile:
    """The questions of a file by name, and the template of their state where it has one."""

    path: Path
    questions: Mapping[str, Kind]
    state: StateTemplate | None

    @cached_property
    def schema(self) -> Schema[dict[str, Any]]:
        return schema_of(self.questions)


def read_questions(path: str | PathLike[str]) -> QuestionFile:
    """Raises OSError where the file cannot be read, and ValueError naming the file and the key."""
    path = Path(path)
    raw = read_toml(path)
    for name, value in raw.items():
        is_question = isinstance(value, dict) or value in TYPES
        if is_question and not get_close_matches(name, ("state", "questions"), 1, _ALIKE):
            why = f"is a question outside of questions; write it as a table [questions.{name:.80}]"
            raise ValueError(f'{path}: {name:.80}: {why} with a type, such as type = "bool"')
    _refuse_others(raw, ("state", "questions"), str(path))
    state = raw.get("state")
    if not isinstance(state, str | None):
        raise ValueError(f'{path}: state must be a text, such as "Subject: {{subject}}"')
    tables = raw.get("questions")
    if not isinstance(tables, dict) or not tables:
        raise ValueError(f"{path}: has no questions; write a table such as [questions.urgent]")
    questions = {}
    for name, table in tables.items():
        try:
            questions[name] = question_of(table)
        except ValueError as error:
            raise ValueError(f"{path}: [questions.{name:.80}]: {error}") from None
    try:
        read = QuestionFile(path, questions, None if state is None else StateTemplate(state))
        _ = read.schema  # its checks
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return read


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. Raises OSError, and ValueError naming the file and the line."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{path}: has more than {LARGEST:,} bytes")
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None


def question_of(table: Any) -> Kind:
    """The question that a table of a file is. Raises ValueError, naming the key."""
    if table in ("yes/no", "bool"):  # which need nothing else
        table = {"type": table}
    if not isinstance(table, dict):
        raise ValueError('must be a table with a type, such as type = "yes/no"')
    kind = table.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"type must be one of {', '.join(TYPES)}, got {kind!r:.80}")
    kind = "yes/no" if kind == "bool" else kind
    _refuse_others(table, _KEYS[kind], "")
    instructions = _text(table, "instructions")
    if kind == "yes/no":
        return YesNo(instructions, yes=_text(table, "yes"), no=_text(table, "no"))
    if kind == "choice":
        options = table.get("options")
        if not isinstance(options, list | dict):
            raise ValueError('options must be a list or a table, such as ["billing", "tech"]')
        return Choice(options, instructions)
    levels = table.get("levels")
    if not isinstance(levels, list):
        raise ValueError('levels must be a list from low to high, such as ["calm", "furious"]')
    return Score(*levels, instructions=instructions)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {value!r:.80}")
    return value


def _refuse_others(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            (best,) = get_close_matches(key, known, 1, 0.0)
            raise ValueError(
                f"{where and f'{where}: '}unknown key {key!r:.80}; the nearest is {best!r}"
            )
