"""The state of one canvas of one row, and how a step's findings change it.

Everything is per row: a batch is a list of canvases that share a forward and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sfumato.diffusion.checks import check_returned
from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import CanvasView
from sfumato.diffusion.sampler import StepView
from sfumato.diffusion.schedule import COLDEST, count_at, temperature_at
from sfumato.model.head import HeadStats
from sfumato.model.network import Network

if TYPE_CHECKING:
    from sfumato.diffusion.sequence import CanvasPlan

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
    noise: Tensor | None = None  # int64 [length], at step 1: the tokens that the canvas began as
    decode: Callable[[list[int]], str] | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """`token_ids` as text, special tokens left out; decoded when it is asked for. Raises
        ValueError where the draft is not from a `Model` or an `Engine`: ids alone have no text."""
        if self.decode is None:
            raise ValueError("text: this draft has no tokenizer; drafts of Model.stream have one")
        return self.decode(self.token_ids.tolist())


@dataclass(frozen=True)
class Coming:
    """What a step takes from its row alone, before the forward."""

    step: int
    temperature: float
    soft_top_k: int
    uniforms: Tensor


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
        self.begun = noise.tokens(0, self.length, vocab_size)  # stays on the host, to be shown
        self.pinned = torch.full((self.length,), -1, device=device)
        for position, token in (pinned or {}).items():
            if not (0 <= position < self.length and 0 <= token < vocab_size):
                raise ValueError(f"pinned: position {position}, token {token} is out of range")
            self.pinned[position] = self.begun[position] = token
        self.tokens = self.begun.to(device)
        self.soft: Tensor | None = None  # [length, hidden] for the next step's self-conditioning
        # Of one size at every step, so that a step can be captured once and replayed.
        rules = (config.sampler, config.stopping)
        wanted = max(1, *(getattr(rule, "history", 1) for rule in rules))
        self.history = torch.full((min(wanted, config.max_steps), self.length), -1, device=device)
        self.unchanged = torch.zeros((), dtype=torch.int64, device=device)  # as in `StepView`
        self._coming: Coming | None = None

    @classmethod
    def of(cls, plan: CanvasPlan, network: Network) -> Canvas:
        """The canvas of a plan, before its first step."""
        size, device = network.config.vocab_size, network.device
        return cls(plan.config, plan.noise, size, device, plan.reply, dict(plan.pinned))

    @property
    def argmax(self) -> Tensor:
        """int64 [length]: what a commit would commit."""
        return self.history[-1] if self.step else self.tokens

    @property
    def done(self) -> bool:
        return self.convergence is not None

    def coming(self) -> Coming:
        """What the step to come needs of this row, found once. What fails here is the row's own
        fault, so the engine calls this before it puts rows together."""
        step = self.step + 1
        if self._coming is None or self._coming.step != step:
            heat, count = self._temperature(step), self._soft_top_k(step)
            self._coming = Coming(step, heat, count, self.noise.uniforms(step, self.length))
        return self._coming

    def temperature(self) -> float:
        """Of the step to come. At a setting of 0 the distribution keeps the schedule; the draw does
        not."""
        return self.coming().temperature

    def soft_top_k(self) -> int:
        """How many of each position's likeliest tokens count in the step to come; 0: all."""
        return self.coming().soft_top_k

    def uniforms(self) -> Tensor:
        """float64 [length]: what the tokens of the step to come are drawn with."""
        return self.coming().uniforms

    def _temperature(self, step: int) -> float:
        assert self.config.schedule and self.config.max_steps
        heat = temperature_at(self.config.schedule, step, self.config.max_steps)
        return max(COLDEST, heat * (self.config.temperature or 1.0))

    def _soft_top_k(self, step: int) -> int:
        chosen = self.config.soft_top_k
        if chosen is None:
            return 0
        assert self.config.max_steps and not isinstance(chosen, int)
        return count_at(chosen, step, self.config.max_steps)

    def before(self) -> CanvasView:
        """What logit processors see of the step to come."""
        step = self.tokens.new_full((), self.step + 1)
        return CanvasView(step, self.tokens, self.history, self.reply)

    def advance(self, stats: HeadStats) -> Draft:
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
        self.unchanged = view.unchanged
        fresh = self.noise.tokens(self.step, self.length, self.vocab_size).to(self.tokens.device)
        self.tokens = torch.where(accepted, view.stats.drawn, fresh)
        self.history = torch.cat((self.history[1:], view.stats.argmax[None]))
        self.soft = stats.soft if config.self_conditioning else None
        entropy = view.stats.entropy.cpu()  # from here on the device is waited for
        self._check_entropy(entropy)
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
            self.begun if self.step == 1 else None,
        )

    def _check_entropy(self, entropy: Tensor) -> None:
        """Refuses what is no distribution: entropy float32 [length], on the CPU, is NaN where
        scores were no numbers, and infinite where all tokens were banned (see `score`)."""
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
        same = (stats.argmax == self.history[-1]).all()  # of -1 before the first step: equals none
        return StepView(
            step,
            self.config.max_steps,
            self.tokens,
            stats,
            self.history,
            pinned,
            torch.where(same, self.unchanged + 1, 0),
        )

    def _with_pinned(self, tokens: Tensor) -> Tensor:
        return torch.where(self.pinned >= 0, self.pinned, tokens)
