from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sfumato.server.examples import CANNOT, warnings

ANSWER = "I am Sfumato's embedded demo, a tiny diffusion model."


@pytest.mark.parametrize(
    ("text", "stop_reason", "answered"),
    [
        (ANSWER, "eos", True),
        (ANSWER[9:], "eos", True),  # the end of a message that was continued
        (ANSWER[:12], "eos", False),
        (ANSWER[5:12], "max_tokens", True),
        ("1234\n3412\n2143\n4321", "eos", True),
        ("1234\n3412\n2143\n4322", "eos", True),  # a wrong solution is an answer
        ("1234\n34", "max_tokens", True),
        ("1234\n34", "eos", False),
        ('{"name": "Ann", "count": 2}', "eos", True),
        ('{"name": "Ann", "co', "eos", False),
        ("[2]", "eos", False),
        ("", "eos", False),
        ("", "cancelled", True),
        ("a em a tin", "stop", False),
    ],
)
def test_the_embedded_model_has_answered(text: str, stop_reason: str, answered: bool) -> None:
    stats = SimpleNamespace(convergence=["converged"], constraint=None)
    reply: Any = SimpleNamespace(
        text=text, stop_reason=stop_reason, stats=stats, warnings=("odd",), filled=None
    )
    assert warnings(True, reply) == ["odd", *([] if answered else [CANNOT])]
    assert warnings(False, reply) == ["odd"]
    stats.convergence.append("step_cap")
    assert warnings(True, reply) == ["odd", CANNOT]
    stats.constraint = "a schema"  # whose JSON is what it asks for, whatever it is
    assert warnings(True, reply) == ["odd"]
