"""One compilation of a source, however many threads ask for it, and a memory of refusals."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.diffusion.constraints.test_grammar import TOKENS

from sfumato.diffusion.constraints import trials
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.diffusion.constraints.trials import GrammarCache


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"not": {}}])
def test_a_source_is_compiled_once(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, compiled = [], GrammarSource.compile

    def slow(source: Any, tokens: Any) -> Any:
        calls.append(source)
        time.sleep(0.05)
        return compiled(source, tokens)

    monkeypatch.setattr(GrammarSource, "compile", slow)
    cache = GrammarCache(TOKENS)

    def ask(_: int) -> Any:
        try:
            return cache.grammar(schema_source(schema))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(ask, range(8)))
    assert len(results) == 1 and len(calls) == 1
    refused = schema_source({"not": {}}, "guided_json")
    with pytest.raises(ValueError, match=r"^guided_json: "):  # another field has another message
        cache.grammar(refused)


def test_few_refusals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "KEPT_REFUSALS", 2)
    cache = GrammarCache(TOKENS)
    for number in range(5):
        with pytest.raises(ValueError, match="not supported"):
            cache.grammar(schema_source({"not": {}, "title": str(number)}))
    assert len(cache._known) == 2 and not cache._going
