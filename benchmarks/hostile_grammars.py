"""Schemas, grammars and expressions that are meant to do harm, and ordinary ones among them.

`hostile_request(number)` is one request, the same for the same number: chains, rings, nesting,
products, broken texts and random ones, in every field and dialect that takes them.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

from benchmarks.hostile_attacks import NUMBER, rule_chains
from benchmarks.soak_clients import CHAT, TEXT
from tests.support.random_schemas import random_schema

Schema = Any
LONGEST = 2**18

LINKS: tuple[Callable[[Any], Any], ...] = (
    lambda to: {"type": "array", "items": to},
    lambda to: {"type": "array", "prefixItems": [{"type": "null"}, to]},
    lambda to: {"allOf": [to]},
    lambda to: {"allOf": [to, {"title": "x"}]},
    lambda to: {"anyOf": [to, {"type": "integer"}]},
    lambda to: {"oneOf": [to]},
    lambda to: to,
    lambda to: {**to, "minLength": 1},
    lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]},
    lambda to: {"type": "object", "properties": {"a": to, "b": to}},
    lambda to: {"type": "object", "patternProperties": {"^a": to}},
    lambda to: {"type": "object", "additionalProperties": to},
    lambda to: {"type": "object", "properties": {"a": {"allOf": [{"anyOf": [to, to]}]}}},
)


def chain(rng: random.Random) -> Schema:
    """Definitions, each of which refers to the next, by one keyword or by several."""
    length = rng.choice((10, 60, 130, 180, 399, 1000, 1500, 3000))
    links = rng.sample(LINKS, rng.choice((1, 1, 2, 3)))
    ends: tuple[Schema, ...] = ({"type": "null"}, {"$ref": "#"}, {"$ref": "#/$defs/d0"}, {})
    defs: dict[str, Schema] = {
        f"d{i}": rng.choice(links)({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)
    }
    return {"$defs": defs | {f"d{length}": rng.choice(ends)}, "$ref": "#/$defs/d0"}


def web(rng: random.Random) -> Schema:
    """Definitions that refer to one another at random."""
    count, fan = rng.choice((3, 20, 100, 400)), rng.choice((1, 2, 4))
    defs = {}
    for i in range(count):
        to = [{"$ref": f"#/$defs/d{rng.randrange(count)}"} for _ in range(fan)]
        defs[f"d{i}"] = rng.choice(
            (
                {"anyOf": [*to, {"type": "null"}]},
                {"allOf": to},
                {"type": "object", "properties": {f"p{n}": each for n, each in enumerate(to)}},
                {"type": "array", "prefixItems": to, "items": to[0]},
            )
        )
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def nested(rng: random.Random) -> Schema:
    """Schemas in schemas, as deep as a body may be or a little less."""
    schema: Schema = {"type": "null"}
    links = rng.sample(LINKS, 2)
    for _ in range(rng.choice((5, 15, 30, 45))):
        schema = rng.choice(links)(schema)
        if len(json.dumps(schema)) > LONGEST // 8:
            break
    return schema


def product(rng: random.Random) -> Schema:
    """Schemas that have to hold together, each of them a choice."""
    count, ways = rng.choice((2, 4, 8, 16)), rng.choice((2, 3, 9))

    def part(i: int) -> Schema:
        kinds: tuple[Callable[[int], Schema], ...] = (
            lambda n: {"pattern": f"^.*{rng.choice('abc')}.{{{n}}}{i}.*$"},
            lambda n: {"properties": {f"p{n}": {"type": "string", "minLength": i}}},
            lambda n: {"multipleOf": rng.choice((2, 7, 0.01, 9973, 2**40))},
            lambda n: {"items": {"enum": [i, n, "x" * n]}, "minItems": n},
            lambda n: {"minimum": i, "maximum": i + n * 10 ** rng.randrange(20)},
            lambda n: {"additionalProperties": {"maxLength": n}, "patternProperties": {"^x": {}}},
        )
        make = rng.choice(kinds)
        return {"anyOf": [make(n) for n in range(ways)]}

    return {"allOf": [part(i) for i in range(count)]}


def large(rng: random.Random) -> Schema:
    """Much of one thing."""
    n = rng.choice((50, 400, 401, 3000))
    return rng.choice(
        (
            {"enum": ["x" * (i % 400) + str(i) for i in range(n)]},
            {"const": "".join(rng.choices(string.printable, k=20 * n))},
            {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}},
            {"type": "string", "minLength": n, "maxLength": n * 10},
            {"type": "array", "items": {"type": "array", "minItems": n}, "minItems": n},
            {"anyOf": [{"const": i} for i in range(n)]},
            {"required": [f"p{i}" for i in range(n)], "type": "object"},
            {"type": "number", "multipleOf": 1 / n, "minimum": -n, "exclusiveMaximum": 10**15},
            {"anyOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(n)]},
            {"pattern": "(" * (n % 300) + "a" + ")*" * (n % 300)},
        )
    )


def wrong(rng: random.Random) -> Schema:
    """Values where others belong."""
    keywords = ["type", "properties", "items", "anyOf", "enum", "required", "$ref", "pattern"]
    keywords += ["minimum", "multipleOf", "maxLength", "additionalProperties", "format", "$defs"]
    keywords += ["prefixItems", "patternProperties", "const", "not", "x-guidance", "$id"]
    values: tuple[Any, ...] = (None, True, -1, 1e300, "", "string", "(", "#/", [], [1], {}, "\0")
    values += ({"a": 1}, [[]], ["a", "a"], 2**63, "#/$defs/a", {"$ref": "#"}, "\ud7ff", "é" * 99)
    return {key: rng.choice(values) for key in rng.sample(keywords, rng.randint(1, 5))}


SCHEMAS = (chain, chain, web, nested, product, large, wrong)


def schema(rng: random.Random) -> Schema:
    if rng.random() < 0.2:
        return random_schema(rng.randrange(10**6))
    return rng.choice(SCHEMAS)(rng)


def expression(rng: random.Random) -> str:
    """A regular expression."""
    n = rng.choice((3, 30, 120, 260, 2000))
    forms = (
        "(" * n + "a" + ")" * n,
        "(a|" * n + "b" + ")*" * n,
        "|".join(f".*{i}.*x" for i in range(n)),
        f"(.*a.{{{n}}}b){{1,{n}}}",
        "(((a{0,99}){0,99}){0,99}){0," + str(n) + "}",
        "[" + "".join(chr(rng.randrange(32, 0x3000)) for _ in range(n)) + "]+",
        "".join(rng.choices("ab.*+?()[]{}|^$\\d,2-é", k=min(n, 60))),
        "(?s:.*)" * n,
        r"\p{L}+" * n,
        "x" * n,
        "[ab]c{1,3}",
    )
    return rng.choice(forms)


def rules(rng: random.Random) -> str:
    """A grammar, GBNF or Lark."""
    is_lark = rng.random() < 0.5
    colon, first = (":", "start") if is_lark else (" ::=", "root")
    count, chains = rng.choice((5, 50, 300, 1000, 3000)), rng.choice((1, 1, 2, 12))
    count //= chains
    bodies = (
        '"a" {next}',
        '{next} | "b{i}"',
        "{next} {next}",
        '{next}? "c"',
        '({next} "," )* {any}',
        '{any} | "" | {next}',
        "{any} {any} | {next}",
    )
    body = rng.sample(bodies, rng.choice((1, 2)))
    lines = [f"{first}{colon} " + " | ".join(f"c{c}x0" for c in range(chains))]
    for c in range(chains):
        for i in range(count):
            names = {"next": f"c{c}x{i + 1}", "any": f"c{c}x{rng.randrange(count)}", "i": i}
            lines.append(f"c{c}x{i}{colon} " + rng.choice(body).format(**names))
        lines.append(f'c{c}x{count}{colon} "{rng.choice("xyz")}"')
    text = "\n".join(lines)
    return text if rng.random() < 0.8 else broken(rng, text)


def broken(rng: random.Random, text: str) -> str:
    """The text with a part cut out, doubled or replaced."""
    at = rng.randrange(len(text) + 1)
    noise = "".join(rng.choices('()[]{}|*+?"/:=<>%\\#é\n\0', k=rng.randint(0, 8)))
    return text[:at] + noise + text[at + rng.randint(0, 20) :]


def forms(rng: random.Random) -> str:
    """Grammars of other forms."""
    n = rng.choice((3, 28, 60, 120, 2000))
    texts = (
        "start: " + "(" * n + '"a"' + ")*" * n,
        "root ::= " + "(" * n + '"a" | ' + '"b")' * n,
        f'start: ("a" | "b"){{1,{n}}} ("c"{{0,{n}}})*',
        f"start: %json {json.dumps(schema(rng))[: LONGEST // 2]}",
        "start: /" + expression(rng).replace("/", "") + "/",
        "start: T\n"
        + "".join(f"T{i}: T{i + 1} | /a{i}/\n" for i in range(n))
        + f'T{n}: "b"\nT: T0',
        "start: <[1]> | <bos>",
        "root ::= [" + "a-z" * n + "]+",
        'start: "' + "word and " * n + '"',
        'root ::= "\\x4' + rng.choice("19zz") + '" ' + "# comment\n" * n,
        "%llguidance {}\nstart: a\na[max_tokens=5]: /.*/\n" + 'b: "x"\n' * n,
        "start: start | " + " ".join(['""'] * n),
    )
    return rng.choice(texts)[:LONGEST]


def grammar(rng: random.Random) -> str:
    return (rules if rng.random() < 0.6 else forms)(rng)[:LONGEST]


def tool(rng: random.Random, strict: bool = True) -> dict[str, Any]:
    function = {"name": f"f{rng.randrange(100)}", "parameters": schema(rng), "strict": strict}
    return {"type": "function", "function": function}


def hostile_request(number: int, **more: Any) -> tuple[str, bytes]:
    """Where it goes, and its body. more: further fields of it."""
    rng = random.Random(f"hostile {number}")
    named = {"name": "x", "strict": True}
    kinds: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {
            "response_format": {
                "type": "json_schema",
                "json_schema": named | {"schema": schema(rng)},
            }
        },
        lambda: {"json_schema": schema(rng)},
        lambda: {"guided_json": json.dumps(schema(rng))},
        lambda: {"structured_outputs": {"json": schema(rng)}},
        lambda: {"guided_regex": expression(rng)},
        lambda: {"structured_outputs": {"regex": broken(rng, expression(rng))}},
        lambda: {"guided_grammar": grammar(rng)},
        lambda: {"grammar": grammar(rng)},
        lambda: {"guided_choice": [expression(rng) or "a" for _ in range(rng.randint(1, 300))]},
        lambda: {"tools": [tool(rng) for _ in range(rng.randint(1, 4))]},
        lambda: {"tools": [tool(rng, False)], "tool_choice": "required"},
    )
    fields = rng.choice(kinds)() | {"max_tokens": 4, "seed": 1} | more
    path = rng.choice((CHAT, TEXT, "/completion"))
    if path == CHAT or "tools" in fields:
        path, fields = CHAT, fields | {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        fields |= {"prompt": "Hello"}
    return path, json.dumps(fields).encode()


def bomb(number: int) -> bytes:
    """A chat whose grammar takes more than a second of the processor's time, another one for each
    number."""
    return _chat(guided_grammar=rule_chains(36, 300).replace(NUMBER.decode(), str(number)))


def trivial(number: int) -> bytes:
    """A chat with a small expression, another one for each number, and few steps."""
    return _chat(guided_regex=f"[ab]c|{number}", max_steps=4)


def ordinary(seed: int) -> bytes:
    """A chat without a grammar."""
    return _chat(seed=seed)


def _chat(**fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
    return json.dumps(body | fields).encode()
