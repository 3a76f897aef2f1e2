"""The fields of request bodies against the table of settings: names, values and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.options import SETTINGS
from sfumato.options.settings import Setting
from sfumato.server.dialects.openai_chat import ChatBody
from sfumato.server.schemas import Grammars, Neutral, Sampling
from sfumato.values import Number

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="comes with schemathesis")

FIELDS = [each for each in SETTINGS if each.request_field]
SCHEMA = ChatBody.model_json_schema()["properties"]

# Values of a kind that a body refuses all the same: 0 tokens are no reply.
REFUSED = [("max_tokens", 0)]


def probes(setting: Setting) -> list[Any]:
    """Values inside and outside of any kind, and those at the ends of this one."""
    values: list[Any] = [True, False, -1, 0, 0.5, 1, 1.5, "x", ["x"], {"5": 1.0}, {"5": 1e9}]
    values += ["entropy-bound", "fixed-count", "threshold"]
    kind = setting.request_kind
    if isinstance(kind, Number):
        ends = [kind.low, kind.low - 1, *([] if kind.high is None else [kind.high, kind.high + 1])]
        values += [end for end in ends if -(2**63) <= end <= 2**64]
    return values


def accepted(setting: Setting, value: Any) -> bool:
    try:
        setting.request_kind.accept(value)
    except ValueError:
        return False
    return (setting.request_field, value) not in REFUSED


@pytest.mark.parametrize("setting", FIELDS, ids=lambda setting: setting.name)
def test_a_body_takes_what_the_table_says(setting: Setting) -> None:
    name = setting.request_field
    assert ChatBody.model_fields[name].default is None  # null: the checkpoint's own choice
    schema = jsonschema_rs.validator_for(SCHEMA[name])
    for value in probes(setting):
        assert schema.is_valid(value) == accepted(setting, value), (name, value, SCHEMA[name])


def test_the_table_has_every_sampling_field() -> None:
    fields = Sampling.model_fields.keys() - Neutral.model_fields.keys()
    fields -= Grammars.model_fields.keys()
    assert fields - {each.request_field for each in FIELDS} == {"stream"}


@pytest.mark.parametrize("setting", FIELDS, ids=lambda setting: setting.name)
def test_a_field_is_described_by_the_table(setting: Setting) -> None:
    description = SCHEMA[setting.request_field]["description"]
    assert description.lower().startswith(f"{setting.help}.".lower())
