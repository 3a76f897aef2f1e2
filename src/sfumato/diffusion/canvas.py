"""The state of one canvas of one row, and how a step's findings change it.

Everything is per row: a batch is a list of canvases that share a forward and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from sfumato.diffusion.checks import check_returned, is_number, is_whole
from sfumato.diffusion.config import HOTTEST, SamplerConfig
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import CanvasView
from sfumato.diffusion.sampler import StepView
from sfumato.diffusion.schedule import MOST
from sfumato.model.head import HeadStats
from sfumato.weights.errors import quoted

COLDEST = 1e-6  # scores over a lower temperature would leave float32's range

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
    top_ids: Tensor  # int64 [length, few]: the likeliest tokens of each position, likeliest first
    top_probs: Tensor  # float32 [length, few]: their probabilities
    decode: Callable[[list[int]], str] | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """`token_ids` as text, special tokens left out; decoded when it is asked for. Raises
        ValueError where the draft is not from a `Model` or an `Engine`: ids alone have no text."""
        if self.decode is None:
            raise ValueError("text: this draft has no tokenizer; drafts of Model.stream have one")
        return self.decode(self.token_ids.tolist())


class Canvas:
    """Tokens, step, noise and pinned positions of a canvas that is being denoised."""

    def __init__(
        self,
        config: SamplerConfig,
        noise: Noise,
        vocab_size: int,
        device: torch.device,
        reply: Sequence[int] = (),
        pinned: dict[int, int] | None = None,
    ) -> None:
        """config: complete, canvas_length included; reply: the tokens of the reply before this
        canvas; pinned: position → token id, for positions whose token is given."""
        assert config.canvas_length and config.max_steps
        self.config, self.noise = config, noise
        self.reply = torch.tensor(reply, dtype=torch.int64, device=device)
        self.vocab_size, self.length = vocab_size, config.canvas_length
        self.step, self.convergence = 0, None  # type: tuple[int, Convergence | None]
        self.pinned = torch.full((self.length,), -1, device=device)
        for position, token in (pinned or {}).items():
            if not (0 <= position < self.length and 0 <= token < vocab_size):
                raise ValueError(f"pinned: position {position}, token {token} is out of range")
            self.pinned[position] = token
        self.tokens = self._with_pinned(noise.tokens(0, self.length, vocab_size).to(device))
        self.soft: Tensor | None = None  # [length, hidden] for the next step's self-conditioning
        # Of one size at every step, so that a step can be captured once and replayed.
        rules = (config.sampler, config.stopping)
        wanted = max(1, *(getattr(rule, "history", 1) for rule in rules))
        self.history = torch.full((min(wanted, config.max_steps), self.length), -1, device=device)

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
        schedule = self.config.schedule
        heat = schedule.temperature(self.step + 1, self.config.max_steps)
        if not (is_number(heat) and 0 < heat <= HOTTEST):
            raise ValueError(
                f"schedule {type(schedule).__name__}: temperature must return a number over 0 and "
                f"at most {HOTTEST:.0e}, got {quoted(heat)} at step {self.step + 1}"
            )
        return max(COLDEST, heat * (self.config.temperature or 1.0))

    def soft_top_k(self) -> int:
        """How many of each position's likeliest tokens count in the step to come; 0: all."""
        chosen = self.config.soft_top_k
        if chosen is None:
            return 0
        assert self.config.max_steps and not isinstance(chosen, int)
        count = chosen.k(self.step + 1, self.config.max_steps)
        if not (is_whole(count) and 1 <= count <= MOST):
            raise ValueError(
                f"soft_top_k {type(chosen).__name__}: k must return a whole number from 1 to "
                f"{MOST}, got {quoted(count)} at step {self.step + 1}"
            )
        return count

    def uniforms(self) -> Tensor:
        """float64 [length]: what the tokens of the step to come are drawn with."""
        return self.noise.uniforms(self.step + 1, self.length)

    def before(self) -> CanvasView:
        """What logit processors see of the step to come."""
        step = self.tokens.new_full((), self.step + 1)
        return CanvasView(step, self.tokens, self.history, self.reply)

    def settle(self, stats: HeadStats) -> Draft:
        """Takes in what the forward found at each position, and gets ready for the next step.

        Raises FloatingPointError where the forward found no numbers, and ValueError where the
        processors left no token or the sampler or stopping rule returned something else than
        it must.
        """
        config = self.config
        assert config.sampler and config.stopping and config.max_steps
        self.step += 1
        view = self._view(stats)
        accepted = config.sampler.accept(view)
        check_returned(accepted, "sampler", config.sampler, "accept", torch.bool, view.pinned.shape)
        accepted = accepted | view.pinned
        fresh = self.noise.tokens(self.step, self.length, self.vocab_size).to(self.tokens.device)
        self.tokens = torch.where(accepted, view.stats.drawn, fresh)
        self.history = torch.cat((self.history[1:], view.stats.argmax[None]))
        self.soft = stats.soft if config.self_conditioning else None
        entropy = view.stats.entropy.cpu()  # from here on the device is waited for
        self._check_law(entropy)
        done = config.stopping.done(view)
        check_returned(done, "stopping rule", config.stopping, "done", torch.bool, ())
        if bool(done):
            self.convergence = "converged"
        elif self.step == config.max_steps:
            self.convergence = "step_cap"
        return Draft(
            self.noise.canvas,
            self.step,
            self.argmax.cpu(),
            entropy,
            accepted.cpu(),
            config.max_steps,
            stats.top_ids.cpu(),
            stats.top_probs.cpu(),
        )

    def _check_law(self, entropy: Tensor) -> None:
        """Refuses a law that is none: entropy float32 [length], on the CPU, is NaN where scores
        were no numbers, and infinite where all tokens were banned (see `score`)."""
        if entropy.isfinite().all():
            return
        where = f"canvas {self.noise.canvas}, step {self.step}"
        processors = ", ".join(type(part).__name__ for part in self.config.processors)
        if entropy.isinf().any():
            raise ValueError(
                f"{where}: the logit processors ({processors}) ban every token of position "
                f"{int(entropy.isinf().nonzero()[0])}; leave it at least one"
            )
        besides = f"; or see that no logit processor ({processors}) makes NaN or infinity of them"
        raise FloatingPointError(
            f"{where}: the model's scores are not finite, as when its activations exceed the "
            "range of float16; load it with dtype='bfloat16' or 'float32'"
            f"{besides if processors else ''}"
        )

    def _view(self, stats: HeadStats) -> StepView:
        pinned, cold = self.pinned >= 0, self.config.temperature == 0
        stats = replace(
            stats,
            argmax=self._with_pinned(stats.argmax),
            drawn=self._with_pinned(stats.argmax if cold else stats.drawn),
            entropy=stats.entropy.masked_fill(pinned, 0.0),
        )
        assert self.config.max_steps
        step = self.tokens.new_full((), self.step)
        return StepView(step, self.config.max_steps, self.tokens, stats, self.history, pinned)

    def _with_pinned(self, tokens: Tensor) -> Tensor:
        return torch.where(self.pinned >= 0, self.pinned, tokens)
