"""Request bodies against the table of settings."""

from __future__ import annotations

from sfumato.options import SETTINGS, limits
from sfumato.server import described, schemas


def test_a_request_has_every_setting_that_the_table_says() -> None:
    named = {each.request_field for each in SETTINGS} - {""}
    assert named <= set(schemas.ChatBody.model_fields)
    for name in ("MOST_BIASES", "MOST_STOPS", "LONGEST_STOP"):
        assert getattr(described, name) == getattr(limits, name)
    assert described.MOST_SOFT_TOP_K == limits.MOST_COUNTED_REQUEST
