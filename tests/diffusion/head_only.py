"""A network of nothing but a head: what a step takes from scores, without a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from tests.diffusion.tiny import inverse_cdf
from tests.support import one_row
from torch import Tensor

from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.head import HeadStats, VocabularyHead

LENGTH, VOCABULARY = 12, 40
TEMPERATURE = 0.8  # of the reference's first step
CPU = torch.device("cpu")


def distribution(temperature: float = TEMPERATURE, sharpness: float = 4.0) -> tuple[Any, Tensor]:
    """A network of nothing but a head, and the scores that it will find, before temperature."""
    torch.manual_seed(0)
    head = VocabularyHead(torch.randn(VOCABULARY, 16), 30.0, chunk=9)
    hidden = torch.randn(LENGTH, 16) * sharpness / 4
    return SimpleNamespace(head=head, hidden=hidden), head.logits(hidden)


def score(network: Any, hidden: Tensor, rows: Sequence[Canvas]) -> HeadStats:
    """What `one_row.score` returns, of all rows together."""
    by_row = one_row.score(network.head, hidden, rows)
    parts = ([getattr(stats, part.name) for stats in by_row] for part in fields(HeadStats))
    return HeadStats(*(None if part[0] is None else torch.cat(part) for part in parts))


def canvas(length: int = LENGTH, reply: Sequence[int] = (), **choices: Any) -> Canvas:
    config = SamplerConfig(canvas_length=length, **choices).over(REFERENCE)
    return Canvas(config, Noise(7, 0), VOCABULARY, CPU, reply)


def check(network: Any, row: Canvas, processed: Tensor) -> HeadStats:
    """That the head found what the distribution `processed` [length, vocabulary] says. Nothing
    reads the soft embedding of a step that is certainly the last."""
    stats = score(network, network.hidden, [row])
    probs = processed.softmax(-1)
    entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-4, rtol=1e-4)
    assert torch.equal(stats.argmax, processed.argmax(-1))
    assert torch.equal(stats.drawn, inverse_cdf(probs, row.uniforms()))
    soft = probs @ network.head.embedding * 4.0
    if not row.is_at_last_step:
        torch.testing.assert_close(stats.soft, soft, atol=1e-3, rtol=1e-3)
    return stats
