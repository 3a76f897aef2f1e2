"""The host's handle of one canvas of one row: its settings, its progress, and where its state is.

The state itself is a row of a `StepBatch` once the canvas has taken part in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sfumato.diffusion.checks import is_whole
from sfumato.diffusion.noise import Noise, first_tokens
from sfumato.diffusion.sampler import CanvasView
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.devices import to_device
from sfumato.options.limits import MIN_TEMPERATURE
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

if TYPE_CHECKING:
    from sfumato.model.network import Network


@dataclass(frozen=True)
class GivenCanvas:
    """A canvas that the caller gives: what a reply's first canvas begins as, and what is pinned."""

    tokens: tuple[int, ...] | None = None  # of every position; None: noise
    pinned: tuple[int, ...] = ()  # positions that keep their token, and have no soft embedding
    # The canvas is read and not written: the reply is the argmax of every position once all steps
    # are done, its end tokens included, and nothing is committed.
    read_only: bool = False

    def following(self, ids: Sequence[int]) -> GivenCanvas:
        """The canvas with these tokens pinned before its own."""
        if self.tokens is None or not ids:
            return self
        pinned = (*range(len(ids)), *(len(ids) + at for at in self.pinned))
        return replace(self, tokens=(*ids, *self.tokens), pinned=pinned)

    @property
    def pins(self) -> dict[int, int]:
        """Position → its fixed token."""
        assert self.tokens is not None or not self.pinned
        return {at: self.tokens[at] for at in self.pinned} if self.tokens else {}

    def check(self, length: int, vocab_size: int) -> None:
        """Raises ValueError, naming the field, for what no canvas of `length` positions can be."""
        if self.tokens is not None:
            if len(self.tokens) != length:
                raise Refused(
                    "tokens",
                    f"the canvas has {length} positions, and {len(self.tokens)} tokens were given",
                    "give one for each position, or another canvas length",
                )
            _check_each("tokens", self.tokens, "token ids", vocab_size)
        if self.pinned and self.tokens is None:
            raise Refused("pinned", "needs the canvas's tokens")
        _check_each("pinned", self.pinned, "positions of the canvas", length)


def _check_each(field: str, values: tuple[int, ...], what: str, end: int) -> None:
    for value in values:
        if not (is_whole(value) and 0 <= value < end):
            raise Refused(field, f"must be {what}, from 0 to {end - 1}; got {quoted(value)}")


Convergence = Literal["converged", "step_cap"]

REVEALED = -2
"""Stands among pins for a position that has no token yet, and keeps the one that the step to come
draws: of a canvas of masks, the position at which a grammar leaves only some."""


@dataclass(frozen=True, eq=False)
class Guidance:
    """What a constraint asks of the next denoising step of one canvas, for that step alone."""

    pins: Mapping[int, int]  # position → its fixed token
    masked: int = 0  # the position that `mask` is of
    mask: Tensor | None = None  # bool [tokens], on the host: which may stand there; None: all

    def following(self, ids: Sequence[int]) -> Guidance:
        """The same of a canvas that has these tokens pinned before its own."""
        if not ids:
            return self
        pins = dict(enumerate(ids)) | {len(ids) + at: token for at, token in self.pins.items()}
        return replace(self, pins=pins, masked=len(ids) + self.masked)


@dataclass(frozen=True)
class CanvasPlan:
    """What a canvas begins with."""

    config: SamplerConfig  # complete, canvas_length included
    noise: Noise
    reply: Sequence[int] = ()  # tokens of the reply before this canvas
    pinned: Mapping[int, int] = field(default_factory=dict)  # position → its fixed token
    given: GivenCanvas | None = None  # whose tokens it begins as
    begins: tuple[int, ...] | None = None  # what it begins as, -1 for noise; None: all noise
    guidance: Guidance | None = None  # of its first step, by a constraint
    hard_pins: bool = False  # whether pinned positions have no soft embedding


@dataclass(frozen=True)
class Draft:
    """A canvas after a denoising step. Every position may still change."""

    canvas: int  # 0, 1, … within the reply
    step: int  # 1, 2, … within the canvas
    token_ids: Tensor  # int64 [length]: the argmax canvas, what would be committed now
    entropy: Tensor  # float32 [length], nats
    accepted: Tensor  # bool [length]: positions that keep their drawn token for the next step
    max_steps: int
    top_ids: Tensor  # int64 [length, top]: the most probable tokens, most probable first
    top_probs: Tensor  # float32 [length, top]: their probabilities
    noise: Tensor | None = None  # int64 [length], at step 1: the tokens that the canvas began as
    decode: Callable[[list[int]], str] | None = field(default=None, compare=False, repr=False)
    # float32 [length, n], where the config has n named tokens: logarithms of their probabilities
    named: Tensor | None = None
    # float32 [length], of the causal mode where most probable tokens are asked for: logarithms of
    # the probabilities of token_ids
    log_probs: Tensor | None = None
    # bool [length], of a text with holes: positions whose token is given
    pinned: Tensor | None = None

    def behind(self, count: int) -> Draft:
        """The draft without its first `count` positions."""
        if not count:
            return self
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        cut: dict[str, Any] = {
            name: each[count:] for name, each in values.items() if isinstance(each, Tensor)
        }
        return replace(self, **cut)

    @property
    def text(self) -> str:
        """`token_ids` as text, special tokens left out; decoded at each access. Raises
        ValueError where the draft is not from a `Model` or an `Engine`: ids alone have no text."""
        if self.decode is None:
            raise Refused("text", "this draft has no tokenizer", "drafts of Model.stream have one")
        return self.decode(self.token_ids.tolist())


class Canvas:
    """Settings and progress of a canvas that is being denoised. Where its noise is a mask token, a
    position with any other token is revealed, and no step changes it."""

    def __init__(
        self,
        config: SamplerConfig,
        noise: Noise,
        vocab_size: int,
        device: torch.device,
        reply: Sequence[int] = (),
        pinned: Mapping[int, int] | None = None,
        given: GivenCanvas | None = None,
        begins: Sequence[int] | None = None,
        hard_pins: bool = False,
        mask_id: int | None = None,
    ) -> None:
        """config: complete, canvas_length included; reply: the tokens of the reply before this
        canvas; pinned: position → token id, for positions whose token is given; given: what the
        canvas begins as, checked; begins: the same where nothing is pinned for it, a token of the
        vocabulary for each position, or -1 for noise; hard_pins: whether pinned positions have no
        soft embedding, as those of a canvas that is given never have; mask_id: the token that is
        the noise, where there is one."""
        assert config.canvas_length and config.max_steps
        self.config, self.noise, self.device = config, noise, device
        self.reply = to_device(torch.tensor(reply, dtype=torch.int64), device)
        self.vocab_size, self.length, self.mask_id = vocab_size, config.canvas_length, mask_id
        self.step, self.convergence = 0, None  # type: tuple[int, Convergence | None]
        self.launched = 0  # steps that have begun, of some of which the host may know nothing
        self._begun: Tensor | None = None  # drawn late, together with those of other canvases
        if given is not None and given.tokens is not None:
            self._begun = torch.tensor(given.tokens)
        self._seeds = None if begins is None else torch.tensor(begins, dtype=torch.int64)
        self.hard_pins = hard_pins or given is not None
        # int64 [length], on the host: the token of a pinned position, REVEALED, or -1 elsewhere
        self.pinned = self._pins(pinned or {})
        self.guidance: Guidance | None = None  # of the step to come
        self.has_new_pins = False  # that its row does not have yet
        # Of one size at every step, so that a step can be captured once and replayed.
        rules = (config.sampler, config.stopping)
        depth = max(1, *(getattr(rule, "history", 1) for rule in rules))
        self.history_rows = min(depth, config.max_steps)
        # A `StepBatch` and a row of it, where the state is; None before a step.
        self.place: tuple[Any, int] | None = None
        self.commits = 0  # tokens that the row puts into the cache in place of being denoised
        self.temperatures: list[float] = []  # of each step, once it is prepared
        self.pace: list[int] = []  # of a canvas of masks: what each step reveals at least
        self._soft_top_k: list[int] = []

    @classmethod
    def of(cls, plan: CanvasPlan, network: Network) -> Canvas:
        """The canvas of a plan on a network."""
        start = plan.reply, plan.pinned, plan.given, plan.begins, plan.hard_pins
        model, device = network.config, network.device
        canvas = cls(
            plan.config, plan.noise, model.vocab_size, device, *start, mask_id=model.mask_id
        )
        if plan.guidance is not None:
            canvas.guide(plan.guidance)
        return canvas

    @property
    def done(self) -> bool:
        return self.convergence is not None

    @property
    def begun(self) -> Tensor:
        """int64 [length], on the host: the tokens that the canvas begins as."""
        if self._begun is None:
            draw_first([self])
        assert self._begun is not None
        return self._begun

    # The state, as copies: it is written in place.

    @property
    def tokens(self) -> Tensor:
        """int64 [length]: what the next step reads."""
        if self.place is None:
            return self.begun.to(self.device, copy=True)
        batch, row = self.place
        return batch.tokens[row, : self.length].clone()

    @property
    def history(self) -> Tensor:
        """int64 [rows, length]: argmax canvases, the newest last; -1: none yet."""
        if self.place is None:
            return torch.full((self.history_rows, self.length), -1, device=self.device)
        batch, row = self.place
        return batch.history[row, :, : self.length].clone()

    def guide(self, guidance: Guidance) -> None:
        """Sets what a constraint asks of the step to come; its pins replace all others."""
        pinned = self._pins(guidance.pins)
        if self.mask_id is not None and guidance.mask is not None:
            pinned[guidance.masked] = REVEALED
        # With masks, pinning hides again what the last step revealed elsewhere: a state that a step
        # has not changed would come back. A canvas without a row begins with its pins.
        if self.place is not None and not torch.equal(pinned, self.pinned):
            self.has_new_pins = True
        self.guidance, self.pinned = guidance, pinned

    def _pins(self, pinned: Mapping[int, int]) -> Tensor:
        pins = [-1] * self.length
        for position, token in pinned.items():
            if not (0 <= position < self.length and 0 <= token < self.vocab_size):
                raise Refused("pinned", f"position {position}, token {token} is out of range")
            pins[position] = token
        return torch.tensor(pins)

    # What a step needs of the row alone.

    def prepare(self) -> None:
        """Tabulates temperature, soft_top_k and pace, once. What fails here is the row's own fault,
        so the engine calls this before it puts rows together."""
        if self.temperatures:
            return
        temperatures, self._soft_top_k = self.config.by_step()
        scale = self.config.temperature or 1.0  # at 0 the distribution keeps the schedule
        if self.mask_id is not None:
            self.pace = self.config.counts(self.length)
        self.temperatures = [max(MIN_TEMPERATURE, each * scale) for each in temperatures]

    def temperature(self) -> float:
        """The temperature of the step to come. At a setting of 0 the distribution keeps the
        schedule; the draw does not."""
        self.prepare()
        return self.temperatures[min(self.step, len(self.temperatures) - 1)]

    def soft_top_k(self) -> int:
        """How many of each position's most probable tokens count in the step to come; 0: all."""
        self.prepare()
        counts = self._soft_top_k
        return counts[min(self.step, len(counts) - 1)] if counts else 0

    @property
    def is_at_last_step(self) -> bool:
        """Whether the step to come is the last one that there may be; False where the host cannot
        tell yet."""
        return self.config.max_steps is not None and self.step + 1 >= self.config.max_steps

    def uniforms(self) -> Tensor:
        """float64 [length], on the host: what the tokens of the step to come are drawn with."""
        return self.noise.uniforms(self.step + 1, self.length)

    def before(self) -> CanvasView:
        """What logit processors see of the step to come."""
        step = self.reply.new_full((), self.step + 1)
        return CanvasView(step, self.tokens, self.history, self.reply)

    def finish(self) -> None:
        """Ends the canvas, of which no position is wanted that is not accepted."""
        self.convergence = "converged"

    def learn(self, step: int, converged: bool, done: bool) -> None:
        """Takes in what the host learns of a step."""
        self.step = step
        if done:
            self.convergence = "converged" if converged else "step_cap"

    def check_entropy(self, entropy: Tensor, step: int) -> None:
        """Refuses what is no distribution: entropy float32 [length], on the CPU, is NaN where
        scores were no numbers, and infinite where all tokens were banned (see `score`)."""
        if entropy.isfinite().all():
            return
        where = f"canvas {self.noise.canvas}, step {step}"
        processors = ", ".join(type(part).__name__ for part in self.config.processors)
        if entropy.isinf().any():
            raise Refused(
                where,
                f"the logit processors ({processors}) ban every token of position "
                f"{int(entropy.isinf().nonzero()[0])}",
                "leave it at least one",
            )
        processor_hint = (
            f"; or see that no logit processor ({processors}) makes NaN or infinity of them"
        )
        raise FloatingPointError(
            f"{where}: the model's scores are not finite, as when its activations exceed the "
            "range of float16; load it with dtype='bfloat16' or 'float32'"
            f"{processor_hint if processors else ''}"
        )


def draw_first(canvases: Sequence[Canvas]) -> None:
    """Draws the tokens that canvases of one network begin as, all at once; those of a canvas that
    has them already stay."""
    new = [canvas for canvas in canvases if canvas._begun is None]
    if not new:
        return
    longest, mask = max(canvas.length for canvas in new), new[0].mask_id
    if mask is None:
        drawn = first_tokens([canvas.noise for canvas in new], longest, new[0].vocab_size)
    else:
        drawn = torch.full((len(new), longest), mask)
    for canvas, row in zip(new, drawn.unbind(), strict=True):
        # A copy: a draft that is kept must not keep what others began as.
        canvas._begun = row[: canvas.length].clone()
        for tokens in (canvas._seeds, canvas.pinned):
            if tokens is not None:
                canvas._begun = torch.where(tokens >= 0, tokens, canvas._begun)
