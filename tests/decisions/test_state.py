from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from sfumato.decisions.question_file import StateTemplate, state_text


class Order(BaseModel):
    """A state that is a pydantic model."""

    item: str


def test_a_state_is_a_text_or_json() -> None:
    assert state_text(" as it is ") == " as it is "
    assert state_text({"naïve": [1, None]}) == '{"naïve": [1, null]}'
    assert state_text(["a"]) == '["a"]'
    assert state_text(Order(item="tea")) == '{"item": "tea"}'


@pytest.mark.parametrize("state", [3, None, {"a": object()}, {"a": float("nan")}])
def test_other_states_are_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"^state: "):
        state_text(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ValueError, match=r"^state: cannot be written as JSON"):
        state_text(state)


def test_a_template_is_filled_with_columns() -> None:
    template = StateTemplate("{{Subject}}: {subject}\n{body}{subject}")
    assert template.columns == ["subject", "body"]
    assert template.fill({"subject": "{body}", "body": 3}) == "{Subject}: {body}\n3{body}"
    with pytest.raises(ValueError, match="there is no column 'body'; there are subject"):
        template.fill({"subject": "x"})


@pytest.mark.parametrize("text", ["{", "a}", "{}", "{a{b}}"])
def test_braces_that_do_not_belong_together(text: str) -> None:
    with pytest.raises(ValueError, match="names no column"):
        StateTemplate(text)
