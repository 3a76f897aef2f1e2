"""A settled canvas that a step puts into the cache, as a row beside those that are denoised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sfumato.diffusion.canvas import Canvas, RowStart
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step.batch import width_for
from sfumato.diffusion.stopping import Never
from sfumato.model.network import Network


class Commit(Canvas):
    """Tokens that follow a slot's prefix. Its row is done before the step, which commits it."""

    def __init__(self, ids: Sequence[int], config: SamplerConfig, network: Network) -> None:
        """config: of the canvas that the tokens settled in, as long as they are at least."""
        assert config.canvas_length and 0 < len(ids) <= config.canvas_length
        own = replace(config, canvas_length=len(ids))
        vocab_size, device = network.config.vocab_size, network.device
        super().__init__(own, Noise(0, 0), vocab_size, device)
        # Of the canvas that the tokens settled in, as is the depth of the history.
        self.step_width = width_for(config.canvas_length, network.config.canvas_length)
        # Rules and processors decide nothing in such a row.
        self.config = replace(own, sampler=EntropyBound(), stopping=Never(), processors=())
        self._begun = torch.tensor(ids, dtype=torch.int64)
        self._pinned = self._begun

    def prepare(self) -> RowStart:
        if self._start is None:
            noise = self.noise
            numbers = noise.seed, noise.canvas, noise.attempt
            self._start = RowStart(self._pinned, *numbers, [1.0], True, False, self.length)
        return self._start
