"""What hostile clients send, for `hostile_clients`: each attack is one kind of request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_clients import CHAT, TEXT

SIZE = 8 << 20  # the default of --max-body
NUMBER = b"@N@"  # in a body: each request has another number there
MANY = 24  # attackers of "many clients", whatever --clients says
HELLO = b'"messages":[{"role":"user","content":"Hello"}]'


def filled(before: bytes, item: bytes, after: bytes, most: int = SIZE) -> bytes:
    return before + item * ((most - len(before) - len(after)) // len(item)) + after


@dataclass(frozen=True)
class Attack:
    """A request that is sent over and over."""

    about: str
    path: str
    make: Callable[[], bytes]
    clients: int | None = None  # None: as --clients says


def schema_chain(length: int) -> dict[str, Any]:
    """Definitions, each of which refers to the next; another schema for each request."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    definitions[f"d{length}"] = {"const": NUMBER.decode()}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def rule_chains(chains: int, length: int) -> str:
    """Rules, each of which refers to the next; another grammar for each request."""
    lines = ["root ::= " + " | ".join(f"c{c}x0" for c in range(chains))]
    for c in range(chains):
        lines += [f'c{c}x{i} ::= c{c}x{i + 1} "{NUMBER.decode()}"' for i in range(length)]
        lines.append(f'c{c}x{length} ::= "x"')
    return "\n".join(lines)


def fields(**values: Any) -> Callable[[], bytes]:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64} | values
    return lambda: json.dumps(body).encode()


ATTACKS: dict[str, Attack] = {
    "plain": Attack(
        "no attack: requests like the innocent one, for the other rows to be compared with",
        CHAT,
        fields(max_steps=24, confidence=1e-9, ignore_eos=True),
    ),
    "allowed": Attack(
        "every costly setting at the largest value that is allowed",
        CHAT,
        fields(
            max_steps=256,
            stability=64,
            confidence=1e-9,
            ignore_eos=True,
            top_k=1024,
            top_p=0.99999,
            soft_top_k=256,
            timeout=2.0,
            logit_bias={str(token): 0.5 for token in range(5, 100)},
        ),
    ),
    "replies": Attack(
        "128 replies at once with 20 alternatives for each token",
        CHAT,
        fields(n=128, logprobs=True, top_logprobs=20, max_tokens=32, ignore_eos=True, timeout=4.0),
    ),
    "steps": Attack(
        "max_steps and stability of 2,000,000",
        CHAT,
        fields(max_steps=2_000_000, stability=2_000_000, timeout=2.0),
    ),
    "t_max": Attack("a temperature of 1e300", CHAT, fields(t_max=1e300)),
    "top_k": Attack("top_k of 100,000", CHAT, fields(top_k=100_000, max_steps=8)),
    "messages": Attack(
        '{"messages":[1,1,…]} of 8 MiB', CHAT, lambda: filled(b'{"messages":[1', b",1", b"]}")
    ),
    "keys": Attack(
        "800,000 unknown keys",
        CHAT,
        lambda: b"{%b}" % b",".join(b'"k%d":1' % i for i in range(800_000))[: SIZE - 2],
    ),
    "fewer-keys": Attack(
        "as many unknown keys as are counted",
        CHAT,
        lambda: b"{%b}" % b",".join(b'"k%d":1' % i for i in range(65_000)),
    ),
    "ids": Attack("a prompt of ids, 8 MiB", TEXT, lambda: filled(b'{"prompt":[1', b",1", b"]}")),
    "fewer-ids": Attack(
        "as many ids as are counted",
        TEXT,
        lambda: filled(b'{"prompt":[1', b",1", b"]}", 2 * 130_000),
    ),
    "detokenize": Attack(
        "2.8 million ids", "/detokenize", lambda: filled(b'{"tokens":[1', b",17", b"]}")
    ),
    "lists": Attack("8 MiB of [],", CHAT, lambda: filled(b'{"messages":[[]', b",[]", b"]}")),
    "nesting": Attack("8 MiB of [", CHAT, lambda: b"[" * SIZE),
    "escapes": Attack(
        "a text of 8 MiB of escapes",
        "/tokenize",
        lambda: filled(b'{"content":"', rb"\u00e9", b'"}'),
    ),
    "wide": Attack(
        "a text of 8 MiB with one emoji",
        CHAT,
        lambda: filled(
            b'{"messages":[{"role":"user","content":"' + "😀".encode(), b"word ", b'"}]}'
        ),
    ),
    "tools": Attack(
        "tools with as many values as are counted",
        CHAT,
        lambda: (
            b'{%b,"tools":[{"type":"function","function":{"name":"f","parameters":{"x":[1%b]}}}]}'
            % (HELLO, b",1" * 130_000)
        ),
    ),
    "schema-chain": Attack(
        "schemas of 1,500 references, each of which leads to the next",
        CHAT,
        fields(json_schema=schema_chain(1500)),
    ),
    "rule-chain": Attack(
        "grammars of 4,000 rules, each of which leads to the next",
        CHAT,
        fields(guided_grammar=rule_chains(1, 4000)),
    ),
    "bombs": Attack(
        "grammars that compile for longer than they may",
        CHAT,
        fields(guided_grammar=rule_chains(32, 300)),
    ),
    "expressions": Attack(
        "new small expressions, whose replies are small too",
        CHAT,
        fields(guided_regex=f"[ab]c|{NUMBER.decode()}", max_tokens=4, max_steps=4),
    ),
    "many": Attack(
        f"{MANY} clients with bodies of 60 KiB",
        CHAT,
        lambda: filled(b'{"messages":[[]', b",[]", b"]}", 60 << 10),
        clients=MANY,
    ),
}
