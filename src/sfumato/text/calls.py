"""The syntaxes of tool calls: `call:NAME{key:<quote>text<quote>,n:3,list:[true,null]}`, and JSON.

Models write the first with mistakes, so the reader is lenient where the meaning is plain
(parentheses for braces, `=` for `:`, JSON quotes, words without quotes) and refuses the rest. It
never evaluates anything; time is linear in the length (no pattern here can backtrack over its input
twice) and nesting is bounded. Knows nothing of replies (reply.py finds the calls in them).

The quotes around a text are special tokens. In the text that is read here each of them is `QUOTE`:
half a character, which no decoded text holds, so that an argument may hold the quote's characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sfumato.text.jsonscan import JsonTooLarge, extent, unicode_fault

QUOTE = "\ud800"
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""What a tool may be called, here and in what callers send (messages.py)."""
MAX_DEPTH = 32
"""Levels of lists and objects; deeper calls are refused."""

_SPACE = re.compile(r"\s*")
_HEAD = re.compile(rf"(?:call:\s*)?({TOOL_NAME.pattern})\s*")
_KEY = re.compile(r"[^\s:={}\[\](),<>\"'\ud800]+")
_STRINGS = {  # by the character that opens them
    QUOTE: re.compile(r"\ud800([^\ud800]*)\ud800"),
    '"': re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL),
    "'": re.compile(r"'([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL),
}
_WORD = re.compile(r"[^,{}\[\]()<>\"'\ud800]+")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 4000  # Python itself refuses integers of over 4300 digits
_NAMED = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSER = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asks for: `arguments` holds JSON values only."""

    name: str
    arguments: dict[str, Any]


class CallSyntaxError(ValueError):
    """Text that is no tool call; the message says what was expected and at which character."""


def parse_call(text: str, quote: str) -> ToolCall:
    """Read the text between the markers of a call, with `QUOTE` for each `quote` token.

    `NAME{…}` and `NAME(…)` are read, with `call:` before the name or without. The brackets must be
    present and closed: a call that was cut off is no call. Of a key that occurs twice the last
    value counts, as in JSON.

    Raises:
        CallSyntaxError: the text is none of these, or nests deeper than MAX_DEPTH.
    """
    text = text.strip()
    head = _HEAD.match(text)
    if head is None:
        raise CallSyntaxError("expected call:NAME{…} at character 0")
    reader = _CallReader(text, head.end(), quote)
    if reader.peek() not in ("{", "("):
        raise reader.expected("'{'")
    arguments = reader.members(depth=1)
    reader.passes("")
    if reader.at < len(text):
        raise reader.expected("the end of the call")
    return ToolCall(head[1], arguments)


def parse_json_call(text: str, quote: str = "") -> ToolCall:
    """Read `{"name": "NAME", "arguments": {…}}`. Control characters may stand in texts, the
    arguments may be absent, null or JSON in a text, and other members are left out.

    Raises:
        CallSyntaxError: the text is none of these, or nests deeper than MAX_DEPTH.
    """
    call = _decoded(text)
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        raise CallSyntaxError('expected an object with "name" and "arguments"')
    if not TOOL_NAME.fullmatch(name):
        raise CallSyntaxError(f"{name[:40]!r} is no name of a tool")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict | None):
        raise CallSyntaxError('expected an object at "arguments"')
    return ToolCall(name, arguments or {})


def _decoded(text: str) -> Any:
    """The value of a JSON text. Raises CallSyntaxError."""
    try:
        extent(text.encode(), most_depth=MAX_DEPTH + 1)
        value = _JSON.decode(text)
        fault = unicode_fault(json.dumps(value, ensure_ascii=False))  # "\ud800" is half a character
    except JsonTooLarge:
        raise CallSyntaxError(f"nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise CallSyntaxError(f"expected JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise CallSyntaxError(f"expected Unicode at character {error.start}") from error
    if fault:
        raise CallSyntaxError("expected a text with JSON escapes")
    return value


def as_written(text: str, quote: str) -> str:
    """The text with its quotes as the model wrote them, to be shown."""
    return text.replace(QUOTE, quote)


class _CallReader:
    """A position in the text; each method reads one item at it and moves past the item."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self.text, self.at, self.quote = text, at, quote

    def expected(self, what: str) -> CallSyntaxError:
        at = len(as_written(self.text[: self.at], self.quote))
        return CallSyntaxError(f"expected {what} at character {at}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def passes(self, characters: str) -> bool:
        """Moves past white space, and past the next character if it is one of these."""
        space = _SPACE.match(self.text, self.at)
        assert space is not None  # the pattern matches nothing too
        self.at = space.end()
        is_one = self.at < len(self.text) and self.peek() in characters
        self.at += is_one
        return is_one

    def entries(self, closer: str) -> Iterator[None]:
        """Stops at each entry between brackets, and ends past the closing one; a last comma is
        fine."""
        self.at += 1
        while not self.passes(closer):
            yield
            if not self.passes(",") and self.peek() != closer:
                raise self.expected(f"',' or {closer!r}")

    def members(self, depth: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for _ in self.entries(_CLOSER[self.peek()]):
            quoted = self.string()
            key = self.bare(_KEY, "a key") if quoted is None else quoted
            if not self.passes(":="):
                raise self.expected("':'")
            arguments[key] = self.value(depth)
        return arguments

    def value(self, depth: int) -> Any:
        self.passes("")
        if self.peek() in ("{", "["):
            if depth >= MAX_DEPTH:
                raise CallSyntaxError(f"nested deeper than {MAX_DEPTH} levels")
            if self.peek() == "{":
                return self.members(depth + 1)
            return [self.value(depth + 1) for _ in self.entries("]")]
        quoted = self.string()
        return _scalar(self.bare(_WORD, "a value")) if quoted is None else quoted

    def bare(self, pattern: re.Pattern[str], what: str) -> str:
        """A text without quotes."""
        match = pattern.match(self.text, self.at)
        if match is None or not match[0].strip():
            raise self.expected(what)
        self.at = match.end()
        return match[0].strip()

    def string(self) -> str | None:
        """A text in quotes; None where none opens."""
        opens = self.peek()
        if opens not in _STRINGS:
            return None
        match = _STRINGS[opens].match(self.text, self.at)
        if match is None:
            ending = f"that ends with {self.quote}" if opens == QUOTE else "with its closing quote"
            raise self.expected(f"a text {ending}")
        text = match[1]
        if opens == "'":
            text = text.replace("\\'", "'").replace('"', '\\"')
        if opens != QUOTE:
            try:
                text = json.loads(f'"{text}"', strict=False)
                text.encode()  # "\ud800" is half a character
            except ValueError as error:
                raise self.expected("a text with JSON escapes") from error
        self.at = match.end()
        return text


def _scalar(word: str) -> Any:
    if word in _NAMED:
        return _NAMED[word]
    if len(word) > _LONGEST_NUMBER:
        return word
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    return word  # a text without its quotes: models forget them


# Numbers that no float holds, and NaN, are texts, as they are without quotes in the other syntax.
_JSON = json.JSONDecoder(
    strict=False, parse_float=_scalar, parse_int=_scalar, parse_constant=_scalar
)

PARSERS = {"bare": parse_call, "json": parse_json_call}
"""By `CallStyle.arguments`."""
