"""The count of JSON values, held against what a decoder makes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.text import jsonscan
from sfumato.text.jsonscan import Extent, JsonTooLarge, extent, values_of

TEXTS = st.text(st.sampled_from('"\\/[]{},:ab\n\t\x7fé😀\u2028'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int]:
    """Values, with keys, and one more for what is empty; levels."""
    if isinstance(value, dict | list):
        items = list(value.values()) if isinstance(value, dict) else value
        inner = [counted(item) for item in items]
        values = 1 + (len(value) if isinstance(value, dict) else 0) + (not value)
        return values + sum(n for n, _ in inner), 1 + max((depth for _, depth in inner), default=0)
    return 1, 0


@given(VALUES, st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_as_many_as_a_decoder_makes(value: Any, cut: int, indent: int | None, ascii: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonscan, "SLICE", cut)  # strings and escapes are cut everywhere
        counts = extent(body)
    assert (counts.values, counts.deepest) == counted(json.loads(body))
    assert (counts.depth, counts.quoted, counts.escaped) == (0, False, False)
    assert values_of(json.loads(body)) == counts.values
    assert counts == extent(body)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '[{"a": {"b": [], "b": 2}}]', '{"": {}, "": 0}']
)
def test_a_name_that_stands_twice_shows(text: str) -> None:
    assert values_of(json.loads(text)) < extent(text.encode()).values


@given(st.text(st.sampled_from('"\\[]{},:a'), max_size=40), st.integers(1, 9))
def test_what_is_no_json_is_counted_up_to_where_a_decoder_stops(text: str, cut: int) -> None:
    """Up to there the two agree on what is a string."""
    body = text.encode()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        value, end = None, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonscan, "SLICE", cut)
        counts = extent(body)
    assert counts == extent(body)
    if end:
        assert counts.values >= counted(value)[0] and counts.deepest >= counted(value)[1]


@pytest.mark.parametrize("slashes", range(6))
@pytest.mark.parametrize("cut", range(1, 9))
def test_escapes_at_the_borders_of_slices(slashes: int, cut: int) -> None:
    body = b'["' + b"\\" * slashes + b'",[,{,"]'
    counts, parts = extent(body), Extent()
    for start in range(0, len(body), cut):
        parts.add(jsonscan.np.frombuffer(body[start : start + cut], jsonscan.np.uint8))
    assert parts == counts
    assert counts.values == (7 if slashes % 2 == 0 else 2)


def test_it_stops_early() -> None:
    with pytest.raises(JsonTooLarge, match="more than 1,000 values"):
        extent(b"[" + b"[]," * (1 << 20), most_values=1000)
    with pytest.raises(JsonTooLarge, match="nested too deeply: over 100 levels"):
        extent(b"[" * (1 << 20))
    assert extent(b"[" * 100).deepest == 100
    assert extent(b'"' + b"[" * (1 << 20)).values == 1
    assert extent(b"").values == 1
