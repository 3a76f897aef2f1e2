"""A check for schemathesis: what the API description allows is refused for listed rules alone."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode
from tests.support.rules import error_of, is_of_a_rule


@schemathesis.check
def refused_by_a_rule(ctx: Any, response: Any, case: Any) -> None:
    """The 400 to a body of the description is about a rule that it cannot state."""
    if response.status_code not in (400, 413, 422) or case.meta is None:
        return
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        error = error_of(response.json())
        assert is_of_a_rule(error), f"of no rule: {error}"
