"""Chains of references and nesting have bounds, which are checked without recursion.

Nothing here calls llguidance: where a bound fails, a test fails, and the process goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from sfumato.diffusion.constraints.grammar import GrammarSource
from sfumato.diffusion.constraints.schema_limits import (
    MOST_CHAINED,
    MOST_NESTED,
    check_depth,
    check_groups,
    check_rules,
    check_schema,
    longest_chain,
)

LINKS: dict[str, Callable[[Any], Any]] = {
    "items": lambda to: {"type": "array", "items": to},
    "prefixItems": lambda to: {"type": "array", "prefixItems": [{"type": "null"}, to]},
    "allOf": lambda to: {"allOf": [to]},
    "anyOf": lambda to: {"anyOf": [{"type": "integer"}, to]},
    "oneOf": lambda to: {"oneOf": [to]},
    "not": lambda to: {"not": to},
    "reference": lambda to: to,
    "reference beside keywords": lambda to: {**to, "type": "null"},
    "required": lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]},
    "optional": lambda to: {"type": "object", "properties": {"a": to}},
    "a property with a keyword's name": lambda to: {"properties": {"const": to}},
    "patternProperties": lambda to: {"type": "object", "patternProperties": {"^a": to}},
    "additionalProperties": lambda to: {"type": "object", "additionalProperties": to},
    "a keyword that is unknown": lambda to: {"someday": to},
}


def chain(length: int, link: Callable[[Any], Any], name: str = "#/$defs/d{}") -> dict[str, Any]:
    """A schema of so many definitions, each of which refers to the next."""
    definitions = {f"d{i}": link({"$ref": name.format(i + 1)}) for i in range(length)}
    return {
        "$defs": {**definitions, f"d{length}": {"type": "null"}},
        "$ref": name.format(0),
    }


@pytest.mark.parametrize("name", LINKS)
def test_a_chain_of_references_has_a_bound(name: str) -> None:
    check_schema(chain(100, LINKS[name]), "schema")
    with pytest.raises(ValueError, match=r"^json_schema: has a chain of [\d,]+ schemas"):
        check_schema(chain(MOST_CHAINED, LINKS[name]), "json_schema")


@pytest.mark.parametrize(
    "name", ["d{}", "#d{}", "http://localhost/s#/$defs/d{}", "#/%24defs/d{}", "#/x~1y/0/d{}"]
)
def test_references_of_every_form_are_followed(name: str) -> None:
    schema = chain(MOST_CHAINED, LINKS["items"], name)
    for key, part in schema["$defs"].items():
        part |= {"$id": key, "$anchor": key}
    schema |= {"$id": "http://localhost/s", "x/y": [schema["$defs"]]}
    with pytest.raises(ValueError, match="has a chain of"):
        check_depth(schema, "schema")


def test_recursion_and_many_uses_of_one_schema_are_no_chain() -> None:
    length = MOST_CHAINED // 3
    schema = chain(length, LINKS["items"])
    schema["$defs"][f"d{length}"] = {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/d0"}]}
    check_depth(schema, "schema")
    many = {f"p{i}": {"$ref": "#/$defs/node"} for i in range(5 * MOST_CHAINED)}
    check_depth({"$defs": {"node": {"items": {"$ref": "#"}}}, "properties": many}, "schema")
    check_depth({"$ref": "#"}, "schema")
    check_depth({"$ref": "#/nowhere/0", "items": {"$ref": "#/$defs"}, "$defs": [1]}, "schema")
    check_depth(True, "schema")


def test_values_are_no_schemas() -> None:
    deep: Any = 1
    for _ in range(MOST_NESTED - 2):
        deep = [deep]
    check_depth({"enum": [deep], "default": {"$ref": "#"}}, "schema")
    with pytest.raises(ValueError, match=r"^schema: is nested 103 levels deep"):
        check_depth({"const": [[[[deep]]]]}, "schema")


def rules(length: int, form: str, begin: str) -> str:
    return begin + "".join(form.format(i, i + 1) for i in range(length))


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        ('r{} ::= "a" r{} | [x"(]\n', "root ::= r0\n"),
        ('r{} ::=\n "a" (\nr{})* # r9 ::= r8\n', "root ::= r0\n"),
        ('r{}: "a" r{}\n', "start: r0\n"),
        ('R{}: "a: b" R{} | /[(:]/ // start: r1\n', "start: R0\n"),
        ('  ?r{}[max_tokens=3]:\n  | "a"\n | r{}\n', "start: r0\n"),
        ('_r{}.2: %json {{"const": "x: y"}}\n  | _r{}\n', "start: _r0\n"),
    ],
)
def test_a_chain_of_rules_has_a_bound(form: str, begin: str) -> None:
    for length, refused in ((100, False), (4000, True)):
        text = rules(length, form, begin) + form.split("{}")[0] + str(length)
        text += ' ::= "b"' if "::=" in form else ': "b"'
        source = GrammarSource("grammar", text, "guided_grammar")
        if refused:
            with pytest.raises(ValueError, match=r"^guided_grammar: has a chain of 4,00\d rules"):
                source.compiled()
        else:
            source.compiled()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(" * 200 + "a" + ")*" * 200),
        ("schema", '{"pattern": "%s"}' % ("(a|" * 200 + "b" + ")" * 200)),
        ("schema", '{"patternProperties": {"%s": {}}}' % ("(" * 200 + "b" + ")" * 200)),
        ("grammar", "start: /" + "(" * 200 + "a" + ")" * 200 + "/"),
        ("grammar", "start: " + "(" * 200 + '"a"' + ")" * 200),
        ("grammar", "root ::= " + "(" * 200 + '"a"' + ")" * 200),
        ("grammar", 'start: %json {"pattern": "%s"}'.replace("%s", "(" * 200 + ")" * 200)),
    ],
)
def test_groups_in_groups_have_a_bound(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^schema: is nested 200 levels deep"):
        GrammarSource(kind, text).compiled()


def test_brackets_that_open_no_group_do_not_count() -> None:
    check_groups(r"\(" * 200 + "[(]" * 200 + "[](]" * 200 + r"[\](]" * 200 + "(a)" * 200, "regex")
    GrammarSource("grammar", "root ::= " + '"("' * 200 + " [(]" * 200).compiled()


def test_the_longest_chain_of_random_graphs() -> None:
    """Of graphs without rings, against the plain recursion."""
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 12)
        graph = {
            i: rng.sample(range(i + 1, count + 1), rng.randint(0, count - i)) for i in range(count)
        }

        def plain(node: int, graph: dict[int, list[int]] = graph) -> int:
            return 1 + max((plain(each) for each in graph[node] if each in graph), default=0)

        assert longest_chain(graph, [0]) == plain(0)
        assert longest_chain(graph, graph) == max(map(plain, graph))


def test_hostile_texts_take_no_time() -> None:
    """Each of these would take minutes if any search went back."""
    texts = ("a" * 2**18, "a " * 2**17, "a" + " " * 2**18, "a:\n" * 80_000, "a ::= a\n" * 30_000)
    began = time.process_time()
    for text in texts:
        for is_lark in (False, True):
            check_rules(text, is_lark, "grammar")
    for pattern in ("[" * 2**18, "\\" * 2**18, "()" * 2**17, "[^" * 2**17):
        check_groups(pattern, "regex")
    assert time.process_time() - began < 20
