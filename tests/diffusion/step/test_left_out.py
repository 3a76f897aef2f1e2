"""What rows leave out of their soft embeddings, step after step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diffusion.step.test_batch import begin
from tests.diffusion.tiny import calm_oracle
from tests.support.denoise import denoise_step
from tests.support.oracle import network_of
from tests.support.soft_of import soft_of
from torch import Tensor

from sfumato.diffusion.sampler import Never
from sfumato.diffusion.step import Denoiser
from sfumato.model.head import VocabularyPass


def test_what_a_row_leaves_out_depends_on_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, as much as a coarse rounding hides: some positions of some steps are summed of
    their top tokens, some in a second sweep, and a row's canvas and soft embedding are the same
    bits alone and beside others. A row that asks for 0 leaves out nothing."""
    network = network_of(calm_oracle())
    network.head = replace(network.head, rounding=0.3)
    swept: list[int] = []
    real = VocabularyPass._sum_late

    def sum_late(self: VocabularyPass, which: Tensor, *rest: Any) -> None:
        swept.append(len(which))
        real(self, which, *rest)

    monkeypatch.setattr(VocabularyPass, "_sum_late", sum_late)
    kinds: list[dict[str, Any]] = [{}, {"soft_skip": 0.0}, {"soft_skip": 0.5}, {}]
    how: dict[str, Any] = {"stopping": Never(), "max_steps": 6, "canvas_length": 16}
    alone = [begin(network, seed, **how, **kind) for seed, kind in enumerate(kinds)]
    together = [begin(network, seed, **how, **kind) for seed, kind in enumerate(kinds)]
    late, denoiser = 0, Denoiser(network, len(kinds))
    for _ in range(5):
        for canvas, slot in alone:
            before = len(swept)
            denoise_step(network, [canvas], [slot])
            if canvas.config.soft_skip == 0.0:
                assert len(swept) == before
        denoiser.step([c for c, _ in together], [s for _, s in together])
        for (one, _), (other, _) in zip(alone, together, strict=True):
            assert torch.equal(soft_of(one), soft_of(other)) and torch.equal(
                one.tokens, other.tokens
            )
            batch, row = one.place or (None, 0)
            assert batch is not None
            late += int(batch.expected[row].sum())
    assert late and any(swept)
    exact = alone[1][0]
    assert exact.place and not exact.place[0].expected[exact.place[1]].any()
