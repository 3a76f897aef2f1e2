"""Which soft embeddings of a step are computed, and what rows may leave out of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diffusion.head_only import CPU, canvas, distribution

from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.scoring import embedded, kind_of, skip_of
from sfumato.model.head import AS_ROUNDED


def test_which_rows_leave_out_what() -> None:
    """A row whose positions have not settled is summed in the pass; 0 and soft_top_k leave out
    nothing; what hides nothing leaves out nothing by default."""
    network, _ = distribution()
    coarse = replace(network.head, rounding=2.0**-8)
    rows = [canvas(16), canvas(16), canvas(16, soft_skip=0.0), canvas(16, soft_skip=0.1)]
    rows.append(canvas(16, soft_top_k=3))
    expected = torch.ones(80, dtype=torch.bool)
    expected[:3] = expected[16] = expected[17] = False  # over and at the limit of an eighth
    skip = skip_of(coarse, rows, expected, CPU)
    assert skip is not None
    shares = [float(part.unique()) for part in skip.share.view(5, 16)]
    assert shares == pytest.approx([AS_ROUNDED, AS_ROUNDED, 0.0, 0.1, 0.0])
    assert [bool(part.any()) for part in skip.waits.view(5, 16)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert skip_of(network.head, rows[:3], expected[:48], CPU) is None
    assert skip_of(coarse, rows[2:3], expected[:16], CPU) is None
    assert skip_of(coarse, rows[:1], expected[:16], torch.device("meta")) is None
    assert [kind_of(row) for row in rows] == [*["plain"] * 4, "approximate"]


class Reading(EntropyBound):
    """A rule that is not built in, and may look at anything."""


@pytest.mark.parametrize(
    ("choices", "reads"),
    [
        ({"max_steps": 2}, True),
        ({"max_steps": 1}, False),
        ({"self_conditioning": False}, False),
        ({"max_steps": 1, "sampler": Reading()}, True),
    ],
)
def test_what_no_step_reads_is_not_computed(choices: dict[str, Any], reads: bool) -> None:
    """At the last step that there may be, and without self-conditioning; row by row, and on a CPU
    alone."""
    row, other = canvas(3, **choices), canvas(2)
    assert embedded([row], CPU) is reads
    assert embedded([row], torch.device("meta")) is True
    both = embedded([other, row], CPU)
    assert both is True if reads else both.tolist() == [True] * 2 + [False] * 3  # type: ignore[union-attr]
