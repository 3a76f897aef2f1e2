"""The table of what does not go together: its names exist, and its rows refuse."""

from __future__ import annotations

from dataclasses import fields

import pytest

from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import DecisionRequest, Request
from sfumato.options import exclusions
from sfumato.options.exclusions import EXCLUSIONS, Exclusion
from sfumato.options.table import OPTIONS
from sfumato.refused import Refused
from sfumato.server.dialects.fill import FillBody
from sfumato.server.dialects.ollama import OllamaGenerateBody
from sfumato.server.dialects.openai_chat import ChatBody
from sfumato.server.dialects.openai_completions import CompletionBody
from sfumato.server.schemas import VllmXargs

ROWS = [row for rows in EXCLUSIONS.values() for row in rows]
NAMES = {
    "pictures",  # of a state
    "calibration",  # of `Model.decide`
    *(f.name for kind in (Request, DecisionRequest, SamplerConfig) for f in fields(kind)),
    *(
        name
        for body in (ChatBody, CompletionBody, FillBody, OllamaGenerateBody, VllmXargs)
        for name in body.model_fields
    ),
    *(name for option in OPTIONS for name in (option.flag, f"-{option.short}")),
}


def id_of(row: Exclusion) -> str:
    return f"{row.one}-{row.others[0]}"


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_row_has_names_that_there_are(row: Exclusion) -> None:
    names = {name.split("=")[0] for name in (row.one, *row.others)}
    assert names <= NAMES, names - NAMES


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_row_refuses_each_of_its_pairs_and_nothing_else(row: Exclusion) -> None:
    for other in row.others:
        assert row.refusal({row.one: True, other: False}) is None
        assert row.refusal({other: True}) is None
        with pytest.raises(Refused) as caught:
            exclusions.check([row], {row.one: True, other: True})
        named = {name.split("=")[0] for name in (row.one, other)}
        assert set(caught.value.fields) <= named and "{" not in str(caught.value)


def test_all_that_is_wrong_is_named() -> None:
    refused = exclusions.refusal(
        exclusions.CAUSAL, {"mode=causal": True, "max_steps": True, "soft_skip": True}
    )
    assert refused is not None and refused.field == "mode"
    assert str(refused).endswith("; leave out max_steps, soft_skip")


def test_every_table_is_on_the_page() -> None:
    tables = [value for value in vars(exclusions).values() if isinstance(value, tuple)]
    rows = [row for table in tables for row in table if isinstance(row, Exclusion)]
    assert sorted(map(id_of, rows)) == sorted(map(id_of, ROWS))
