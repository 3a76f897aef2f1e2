"""The prompts of a benchmark, and its settings. Knows no model and no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sfumato.refused import Refused
from sfumato.text.messages import check_messages
from sfumato.weights.errors import quoted

Messages = list[dict[str, Any]]
Prompt = Messages | int
"""A conversation, or a number of synthetic tokens."""

QUESTIONS = (
    "What is the capital of France?",
    "Name the planets of the solar system.",
    "Why is the sky blue?",
)
"""The prompts where the user names none and the model reads text."""


@dataclass(frozen=True)
class Work:
    """The requests of a case: every prompt `repeats` times, after `warmup` uncounted requests.
    Repeat r draws with `seed` + r."""

    prompts: Sequence[Prompt]
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def warmups(self) -> list[tuple[Prompt, int]]:
        """The prompt and the seed of each request that does not count."""
        return [(self.prompts[i % len(self.prompts)], self.seed) for i in range(self.warmup)]

    def requests(self) -> list[tuple[Prompt, int]]:
        """The prompt and the seed of each request that does."""
        return [(p, self.seed + r) for r in range(self.repeats) for p in self.prompts]


@dataclass(frozen=True)
class Case:
    """One setting of what a benchmark varies; None leaves it as it is."""

    max_tokens: int
    threads: int | None = None
    context: int | None = None  # tokens that every prompt is filled up to
    concurrency: int | None = None  # requests at a time


def cases(
    max_tokens: Iterable[int],
    threads: Iterable[int] | None = None,
    context: Iterable[int] | None = None,
    concurrency: Iterable[int] | None = None,
) -> list[Case]:
    """Every combination, the last named varying fastest."""
    absent = (None,)
    every = product(max_tokens, threads or absent, context or absent, concurrency or absent)
    return [Case(*values) for values in every]


def conversation(text: str) -> Messages:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: one a line, or JSON objects, one a line, with `messages` or a `text`.

    Empty lines do not count; a file whose first line begins with { is read as JSON. Raises
    OSError where the file cannot be read, and ValueError naming the line.
    """
    try:
        # Not splitlines(): other separators, as U+2028, may be part of a prompt.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: has no prompts; write one a line")
    if not numbered[0][1].lstrip().startswith("{"):
        return [conversation(line.strip()) for _, line in numbered]
    return [_from_json(line, f"{path}:{number}") for number, line in numbered]


def _from_json(line: str, where: str) -> Messages:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(where, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(where, "must be an object with messages or a text")
    if isinstance(value.get("text"), str):
        return conversation(value["text"])
    if "messages" not in value:
        raise Refused(where, f"has {quoted(sorted(value))}, but no messages and no text")
    messages: Messages = value["messages"]
    try:
        check_messages(messages)
    except ValueError as error:
        raise Refused(where, str(error)) from None
    return messages
