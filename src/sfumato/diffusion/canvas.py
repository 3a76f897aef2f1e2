"""The state of one canvas of one row, and how a step's findings change it.

Everything is per row: a batch is a list of canvases that share a forward and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import StepView
from sfumato.model.head import HeadStats

Convergence = Literal["converged", "step_cap"]


@dataclass(frozen=True)
class Draft:
    """A canvas after a denoising step. Every position may still change."""

    canvas: int  # 0, 1, … within the reply
    step: int  # 1, 2, … within the canvas
    token_ids: Tensor  # int64 [length]: the argmax canvas, what would be committed now
    entropy: Tensor  # float32 [length], nats
    accepted: Tensor  # bool [length]: positions that keep their drawn token for the next step
    max_steps: int


class Canvas:
    """Tokens, step, noise and pinned positions of a canvas that is being denoised."""

    def __init__(
        self,
        config: SamplerConfig,
        noise: Noise,
        vocab_size: int,
        device: torch.device,
        offset: int = 0,
        pinned: dict[int, int] | None = None,
    ) -> None:
        """config: complete, canvas_length included; offset: tokens of the reply before this
        canvas; pinned: position → token id, for positions whose token is given."""
        assert config.canvas_length and config.max_steps
        self.config, self.noise, self.offset = config, noise, offset
        self.vocab_size, self.length = vocab_size, config.canvas_length
        self.step, self.convergence = 0, None  # type: tuple[int, Convergence | None]
        self.pinned = torch.full((self.length,), -1, device=device)
        for position, token in (pinned or {}).items():
            if not (0 <= position < self.length and 0 <= token < vocab_size):
                raise ValueError(f"pinned: position {position}, token {token} is out of range")
            self.pinned[position] = token
        self.tokens = self._with_pinned(noise.tokens(0, self.length, vocab_size).to(device))
        self.soft: Tensor | None = None  # [length, hidden] for the next step's self-conditioning
        self.history = torch.empty((0, self.length), dtype=torch.int64, device=device)

    @property
    def argmax(self) -> Tensor:
        """int64 [length]: what a commit would commit."""
        return self.history[-1] if self.step else self.tokens

    @property
    def done(self) -> bool:
        return self.convergence is not None

    def temperature(self) -> float:
        """Of the step to come. At a setting of 0 the law keeps the schedule; the draw does not."""
        assert self.config.schedule and self.config.max_steps
        heat = self.config.schedule.temperature(self.step + 1, self.config.max_steps)
        return heat * (self.config.temperature or 1.0)

    def uniforms(self) -> Tensor:
        """float64 [length]: what the tokens of the step to come are drawn with."""
        return self.noise.uniforms(self.step + 1, self.length)

    def settle(self, stats: HeadStats) -> Draft:
        """Takes in what the forward found at each position, and gets ready for the next step."""
        config = self.config
        assert config.sampler and config.stopping and config.max_steps
        self.step += 1
        view = self._view(stats)
        accepted = config.sampler.accept(view) | view.pinned
        fresh = self.noise.tokens(self.step, self.length, self.vocab_size).to(self.tokens.device)
        drawn = stats.argmax if config.temperature == 0 else stats.drawn
        if bool(config.stopping.done(view)):
            self.convergence = "converged"
        elif self.step == config.max_steps:
            self.convergence = "step_cap"
        self.tokens = self._with_pinned(torch.where(accepted, drawn, fresh))
        self.history = torch.cat((self.history, view.stats.argmax[None]))
        self.soft = stats.soft if config.self_conditioning else None
        return Draft(
            self.noise.canvas,
            self.step,
            self.argmax.cpu(),
            view.stats.entropy.cpu(),
            accepted.cpu(),
            config.max_steps,
        )

    def _view(self, stats: HeadStats) -> StepView:
        pinned = self.pinned >= 0
        stats = replace(
            stats,
            argmax=self._with_pinned(stats.argmax),
            entropy=stats.entropy.masked_fill(pinned, 0.0),
        )
        assert self.config.max_steps
        return StepView(self.step, self.config.max_steps, self.tokens, stats, self.history, pinned)

    def _with_pinned(self, tokens: Tensor) -> Tensor:
        return torch.where(self.pinned >= 0, self.pinned, tokens)
