"""Errors carry their field, and no code reads a message to find it."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pytest

from sfumato.refused import Refused, TooLarge

SRC = Path(__file__).parents[1] / "src" / "sfumato"
READS = {
    *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find"),
    *("removeprefix", "removesuffix", "index", "match", "search", "fullmatch", "sub"),
}

# Messages of others, which have no field: file -> whose.
FOREIGN = {"cli/__init__.py": "torch's on a CPU, where memory lacks: a plain RuntimeError"}
LINES = ([], ["\n"])  # arguments of what only makes one line of a message


def test_the_message_is_made_of_the_parts() -> None:
    error = Refused(("soft_skip", "soft_top_k"), "give at most one", "leave one out", "both")
    assert str(error) == "soft_skip, soft_top_k: give at most one; leave one out"
    assert (error.field, error.reason, error.code) == (
        "soft_skip",
        "give at most one; leave one out",
        "both",
    )
    assert str(Refused(None, "is empty")) == "is empty" and Refused(None, "").field is None
    assert str(error.advising("")) == "soft_skip, soft_top_k: give at most one"


@pytest.mark.parametrize(
    ("field", "renamed"),
    [
        ("messages[2].role", "input[2].role"),
        ("messages", "input"),
        ("messages_of", "messages_of"),
        ("tools[7].function.parameters.type", "tools[7].input_schema.type"),
        ("tools[7].function.name", "tools[7].name"),
        ("tools[7].functions", "tools[7].functions"),
        ("seed", "seed"),
    ],
)
def test_a_field_gets_the_name_that_it_has_elsewhere(field: str, renamed: str) -> None:
    names = {
        "messages": "input",
        "tools[].function": "tools[]",
        "tools[].function.parameters": "tools[].input_schema",
    }
    error = Refused(field, "is wrong").renamed(names)
    assert (error.field, str(error)) == (renamed, f"{renamed}: is wrong")


def test_copies_are_whole() -> None:
    error = TooLarge("prompt", "is long", "shorten it", 9, 5).renamed({"prompt": "input"})
    error.recorded = "req-1"
    for other in (copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is TooLarge and vars(other) == vars(error)
        assert str(other) == "input: is long; shorten it" and other.context == 5


def test_no_code_reads_the_message_of_an_error() -> None:
    reading = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for _ in _readings(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert reading == set(FOREIGN), "raise Refused, which carries its field, and read that"


def test_what_reads_a_message_is_found() -> None:
    for line in (
        "field, _, why = str(error).partition(': ')",
        "if 'context' in str(error): raise",
        "match = re.match('[a-z]+: ', error.message)",
        "if not str(error).startswith(field): raise",
    ):
        code = f"try:\n    pass\nexcept ValueError as error:\n    {line}\n"
        assert list(_readings(ast.parse(code))), line


def _readings(tree: ast.AST) -> Iterator[ast.AST]:
    """Where the message of a caught error, or any `.message`, is taken apart."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            yield from (node for node in ast.walk(handler) if _reads(node, handler.name))
    yield from (node for node in ast.walk(tree) if _reads(node, "error"))


def _reads(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return _is_message(node.comparators[0], name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        texts = (node.func.value, *node.args)
        if [getattr(arg, "value", None) for arg in node.args] in LINES:
            return False
        return node.func.attr in READS and any(_is_message(text, name) for text in texts)
    return False


def _is_message(node: ast.AST, name: str) -> bool:
    """Whether an expression is str(name), or its `message`, `why`, `reason` or `advice`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == name
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("message", "why", "reason", "advice")
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    )
