"""Lists of the modules that a checkpoint keeps in full precision.

compressed-tensors writes exact names and, after `re:`, regular expressions that match from the
beginning of a name; ModelOpt writes exact names and names with `*`. The lists are of hostile files:
an expression that could take long is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from sfumato.weights.errors import CheckpointError, quoted

MOST_RULES = 20_000
_MOST_LENGTH = 300  # characters of a rule; of a name that expressions are tried on
_MOST_REPEATS = 3  # in an expression: the time is the name's length to this power
_MOST_SECONDS = 10.0  # for all names of a checkpoint
_REPEAT = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")


@dataclass(frozen=True)
class IgnoreList:
    """Which modules stay as they are."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    where: str = ""

    @classmethod
    def of(cls, rules: Any, where: str, wildcards: bool = False) -> IgnoreList:
        """From a list of a file. wildcards: `*` in a name matches any characters. Raises
        CheckpointError, naming the rule, for a list that cannot be used."""
        if not isinstance(rules, list) or len(rules) > MOST_RULES:
            raise CheckpointError(f"{where}: is no list of names, or of more than {MOST_RULES}")
        names, patterns = set(), []
        for rule in rules:
            if not isinstance(rule, str) or len(rule) > _MOST_LENGTH:
                raise CheckpointError(f"{where}: {quoted(rule)} is no name of a module")
            if rule.startswith("re:"):
                patterns.append(_compiled(rule.removeprefix("re:"), where))
            elif wildcards and "*" in rule:
                patterns.append(re.compile(translate(rule)))
            else:
                names.add(rule)
        return cls(frozenset(names), tuple(dict.fromkeys(patterns)), where)

    def matching(self, modules: Iterable[tuple[str, ...]]) -> str | None:
        """The first module that is in the list; each is given by all names that it has. Raises
        CheckpointError where the expressions take too long."""
        started = time.perf_counter()
        for spellings in modules:
            for name in spellings:
                if name in self.names:
                    return name
                if len(name) <= _MOST_LENGTH and any(p.match(name) for p in self.patterns):
                    return name
            if self.patterns and time.perf_counter() - started > _MOST_SECONDS:
                raise CheckpointError(f"{self.where}: takes too long to compare with the tensors")
        return None


def _compiled(text: str, where: str) -> re.Pattern[str]:
    # What follows the beginning of a name matters to no match.
    text = text if text.endswith("\\.*") else text.removesuffix(".*")
    if len(_REPEAT.findall(text)) > _MOST_REPEATS or _REPEATED_GROUP.search(text):
        raise CheckpointError(
            f"{where}: {quoted('re:' + text)} could take too long to match; repeat single "
            f"characters, {_MOST_REPEATS} times at most"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: {quoted('re:' + text)} is no regular expression ({str(error)[:80]})"
        ) from None
