"""The vocabulary pass and the step of canvases whose hidden states or statistics a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.denoise import DENOISERS
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.scoring import Scoring, slices_of, spread
from sfumato.diffusion.scoring import score as score_positions
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.denoiser import ForwardResult
from sfumato.diffusion.step.step import draw
from sfumato.model.head import HeadStats, VocabularyHead


def score(head: VocabularyHead, hidden: Tensor, canvases: Sequence[Canvas]) -> list[HeadStats]:
    """The statistics of each canvas, whose hidden states stand one after another in hidden [all
    positions, hidden]."""
    scoring = Scoring.of(canvases, head.vocab_size, hidden.device)
    temperature = spread(canvases, [c.temperature() for c in canvases]).to(hidden.device)
    uniforms = torch.cat([canvas.uniforms() for canvas in canvases])
    expected = torch.cat([_expected(canvas) for canvas in canvases]).to(hidden.device)
    stats, extra = score_positions(head, hidden, temperature, uniforms, scoring, canvases, expected)
    return [extra.get(i, stats[at]) for i, at in enumerate(slices_of(canvases))]


def _expected(canvas: Canvas) -> Tensor:
    """bool [length]: as the row's state has it."""
    if canvas.place is None:
        return torch.zeros(canvas.length, dtype=torch.bool)
    batch, row = canvas.place
    return batch.expected[row, : canvas.length] > 0


def advance(canvas: Canvas, stats: HeadStats) -> Draft:
    """Moves a canvas alone one step on; stats: the statistics of its positions. Raises what
    fails."""
    if canvas not in DENOISERS:
        vocab, hidden = canvas.vocab_size, stats.soft.shape[1]
        config = SimpleNamespace(canvas_length=canvas.length, vocab_size=vocab, hidden_size=hidden)
        network: Any = SimpleNamespace(
            config=config,
            head=SimpleNamespace(vocab_size=vocab),
            device=canvas.device,
            dtype=stats.soft.dtype,
        )
        DENOISERS[canvas] = Denoiser(network, 1)
    slot: Any = SimpleNamespace(pool=None, index=0, adapter=0)
    denoiser = DENOISERS[canvas]
    layout = denoiser._lay_out([canvas], [slot])
    (batch_rows,) = denoiser._batch_rows.values()
    _, _, fresh = draw(layout.parts, canvas.vocab_size)
    evaluated = stats, {0: stats}, fresh
    result = ForwardResult(evaluated, layout, (canvas,), ((batch_rows, batch_rows.state),))
    (draft,) = denoiser.advance(result)
    if isinstance(draft, Exception):
        raise draft
    return draft
