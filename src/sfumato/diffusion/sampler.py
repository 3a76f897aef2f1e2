"""The rules of decoding: samplers, stopping rules, and what changes from step to step.

A sampler says which of a step's drawn tokens are accepted; the rest become noise again. A stopping
rule says when a canvas is finished before its last step. A schedule gives the temperature of each
step, `SoftTopK` how many tokens count, and a pace how many mask tokens a step reveals at least.
Each is a small frozen value with one method; samplers and stopping rules are pure tensor functions
of the head's statistics. `docs/samplers.md` shows how to write one.

Logit processors act on the softcapped scores before the temperature: draw, entropy, stop test and
soft embedding all see the result. A processor gets one row's scores a chunk of the vocabulary at a
time, so it must be a function of each token's own score and id, and of the canvas that the scores
are of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sfumato.diffusion.checks import check_setting, is_number, is_whole
from sfumato.model.head import HeadStats
from sfumato.options import default
from sfumato.options.limits import MAX_TEMPERATURE, MOST_COUNTED
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


@dataclass(frozen=True)
class StepView:
    """What samplers and stopping rules see of one row after a denoising forward."""

    step: Tensor  # int64 [], on the device: 1..max_steps
    max_steps: int
    tokens: Tensor  # int64 [length]: the canvas that went in
    stats: HeadStats  # of the row: argmax, drawn, entropy, top_probs, … with leading axis [length]
    history: Tensor  # int64 [rows, length]: earlier argmax canvases, newest last; -1: none yet
    # bool [length]: positions whose token is fixed, as those are that a step before has revealed in
    # place of a mask token; entropy 0, always accepted
    pinned: Tensor
    unchanged: Tensor  # int64 []: so many steps before this one, in a row, had this argmax canvas
    least: Tensor  # int64 []: mask tokens to be revealed by the pace, 1 or more; 0: noise is random


class Sampler(Protocol):
    """Decides which positions keep the token drawn at this step.

    A sampler that cannot do with `HeadStats` sets a class attribute `needs_logits = True` and
    finds float32 [length, vocab] in `view.stats.logits`; one that looks back over more than one
    step sets `history`, the rows of `view.history` that it needs. So does a stopping rule. One that
    only reveals mask tokens sets `needs_masks = True`: models without a mask token refuse it.
    """

    def accept(self, view: StepView) -> Tensor:
        """bool [length]: True where the drawn token stays in the canvas."""
        ...


@dataclass(frozen=True)
class EntropyBound:
    """Accepts the positions of least entropy, while the summed entropy of those before each
    stays within `bound` nats (arXiv 2505.24857; the reference's sampler)."""

    bound: float = default("entropy_bound")

    def __post_init__(self) -> None:
        check_setting("entropy_bound", self.bound)

    def accept(self, view: StepView) -> Tensor:
        # Of equal entropies the lower position comes first, on every device.
        ascending, order = view.stats.entropy.sort(dim=-1, stable=True)
        # Cumulative minus own, as the reference computes it: an exclusive sum rounds otherwise.
        inside = ascending.cumsum(dim=-1) - ascending <= self.bound
        return torch.zeros_like(inside).scatter(-1, order, inside)


@dataclass(frozen=True)
class FixedCount:
    """Accepts the `count` free positions whose first token is most probable, `count` more at
    every step. What has been revealed in place of a mask token is not counted again."""

    count: int = default("count")

    def __post_init__(self) -> None:
        check_setting("count", self.count)

    def accept(self, view: StepView) -> Tensor:
        confidence = view.stats.top_probs[..., 0].masked_fill(view.pinned, -1.0)
        ranks = confidence.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(confidence.shape[-1], device=confidence.device)
        kept = places < self.count * torch.where(view.least > 0, 1, view.step)
        return torch.zeros_like(kept).scatter(-1, ranks, kept)


@dataclass(frozen=True)
class Threshold:
    """Accepts every position whose most probable token has probability `top` or more, or leads the
    runner-up by `margin` or more; and always the most confident free one, so that steps
    progress."""

    top: float = default("threshold")
    margin: float = default("margin")

    def __post_init__(self) -> None:
        check_setting("threshold", self.top, "top")
        check_setting("margin", self.margin)

    def accept(self, view: StepView) -> Tensor:
        first = view.stats.top_probs[..., 0].masked_fill(view.pinned, -1.0)
        sure = (first >= self.top) | (first - view.stats.top_probs[..., 1] >= self.margin)
        return sure | (first == first.amax(dim=-1, keepdim=True)) | view.pinned


@dataclass(frozen=True)
class LowConfidence:
    """Reveals every mask token whose draw has a probability over `threshold`, and the most probable
    ones to as many as the pace asks for. At a threshold of 1 the pace alone decides.

    "low_confidence_dynamic" of SDAR (JetAstra/SDAR, generate.py), and "low_confidence_static" with
    1, which is "low_confidence" of dLLM too (ZHZisZZ/dllm, core/samplers/bd3lm.py). What has been
    revealed stays, also where a step has fewer mask tokens than the pace asks for."""

    needs_masks: ClassVar[bool] = True
    threshold: float = default("threshold")

    def __post_init__(self) -> None:
        check_setting("threshold", self.threshold)

    def accept(self, view: StepView) -> Tensor:
        confidence = view.stats.drawn_probs.masked_fill(view.pinned, -1.0)
        ranks = confidence.argsort(dim=-1, descending=True, stable=True)
        kept = torch.arange(confidence.shape[-1], device=confidence.device) < view.least
        most = torch.zeros_like(kept).scatter(-1, ranks, kept)
        return most | (confidence > self.threshold) | view.pinned


@dataclass(frozen=True)
class Sequential:
    """Reveals the first mask tokens, as many as the pace asks for ("sequential" of SDAR)."""

    needs_masks: ClassVar[bool] = True

    def accept(self, view: StepView) -> Tensor:
        return ((~view.pinned).cumsum(dim=-1) <= view.least) | view.pinned


SAMPLERS: dict[str, type[EntropyBound | FixedCount | Threshold | LowConfidence | Sequential]] = {
    "entropy-bound": EntropyBound,
    "fixed-count": FixedCount,
    "threshold": Threshold,
    "low-confidence": LowConfidence,
    "sequential": Sequential,
}
"""Names by which command line and HTTP know the samplers."""


class Pace(Protocol):
    """How many mask tokens each step reveals at least."""

    def count(self, step: int, max_steps: int, length: int) -> int:
        """step counts 1..max_steps; length: positions of the canvas, pinned ones among them. At
        least one is revealed whatever the result."""
        ...


@dataclass(frozen=True)
class EvenPace:
    """The canvas in equal parts; what is left over by one more in each of the first steps
    (`get_num_transfer_tokens` of SDAR)."""

    def count(self, step: int, max_steps: int, length: int) -> int:
        return length // max_steps + (step <= length % max_steps)


@dataclass(frozen=True)
class LinearPace:
    """What is left of the canvas over the steps that are left, rounded, half to even
    (`get_num_transfer_tokens` of dLLM with its linear schedule, which skips steps of none)."""

    def count(self, step: int, max_steps: int, length: int) -> int:
        left, count = length, 0
        for passed in range(step):
            count = max(1, round(left / (max_steps - passed)))
            left -= min(left, count)
        return count


PACES: dict[str, type[EvenPace | LinearPace]] = {"even": EvenPace, "linear": LinearPace}
"""Names by which command line and HTTP know the paces."""


class Stopping(Protocol):
    """Decides whether a canvas has settled. What it may ask for is said at `Sampler`."""

    def done(self, view: StepView) -> Tensor:
        """bool []: True ends the canvas after this step, as converged."""
        ...


@dataclass(frozen=True)
class StableAndConfident:
    """The argmax canvas equals those of the last `stability` steps, and the mean entropy of its
    free positions is under `confidence` nats (the reference's rule)."""

    stability: int = default("stability")
    confidence: float = default("confidence")

    def __post_init__(self) -> None:
        check_setting("stability", self.stability)
        check_setting("confidence", self.confidence)

    def done(self, view: StepView) -> Tensor:
        free = (~view.pinned).sum(dim=-1).clamp(min=1)
        confident = view.stats.entropy.sum(dim=-1) / free < self.confidence
        return confident & (view.unchanged >= self.stability)


@dataclass(frozen=True)
class SettledToEnd(StableAndConfident):
    """The rule of `StableAndConfident` for the positions up to the first end token that has settled
    alone; of all of them where none has.

    Such an end token is the argmax of a position that is not pinned, was so in the last `stability`
    steps, and has an entropy under `confidence`.  What stands behind it is no part of the reply.
    """

    ends: tuple[int, ...] = ()

    @property
    def history(self) -> int:
        """Earlier argmax canvases that the rule reads."""
        return max(1, self.stability)

    def done(self, view: StepView) -> Tensor:
        argmax, entropy, known = view.stats.argmax, view.stats.entropy, view.history.shape[-2]
        if self.stability > known:  # no canvas has so many steps
            return entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]
        same = (view.history[..., known - self.stability :, :] == argmax).all(dim=-2)
        is_end = torch.zeros_like(view.pinned)
        for end in self.ends:
            is_end = is_end | (argmax == end)
        is_end = is_end & ~view.pinned & same & (entropy < self.confidence)
        tested = is_end.cumsum(dim=-1) - is_end.long() == 0
        free = (tested & ~view.pinned).sum(dim=-1).clamp(min=1)
        mean = entropy.masked_fill(~tested, 0.0).sum(dim=-1) / free
        return (mean < self.confidence) & (same | ~tested).all(dim=-1)


@dataclass(frozen=True)
class EachSettled:
    """Every position that is not pinned has settled by itself: its entropy is under `sure` nats, or
    under `calm` nats while its argmax equals those of the last `patience` steps.

    The mean that `StableAndConfident` tests waits for the least sure position, and the equality of
    all argmaxes for two that take turns; here such a position ends the wait once it is calm."""

    patience: int
    sure: float = 0.01
    calm: float = 0.5

    def __post_init__(self) -> None:
        check_setting("patience", self.patience)

    @property
    def history(self) -> int:
        """Earlier argmax canvases that the rule reads."""
        return self.patience

    def done(self, view: StepView) -> Tensor:
        entropy, known = view.stats.entropy, view.history.shape[-2]
        settled = (entropy < self.sure) | view.pinned
        if self.patience <= known:  # no canvas has more steps
            last = view.history[..., known - self.patience :, :]
            same = (last == view.stats.argmax.unsqueeze(-2)).all(dim=-2)
            settled = settled | (same & (entropy < self.calm))
        return settled.all(dim=-1)


@dataclass(frozen=True)
class Never:
    """Runs every canvas to its last step: for benchmarks, where steps must not depend on text."""

    def done(self, view: StepView) -> Tensor:
        return view.stats.entropy.new_zeros((), dtype=bool)  # type: ignore[call-overload]


class Schedule(Protocol):
    """A temperature for every step."""

    def temperature(self, step: int, max_steps: int) -> float:
        """step counts 1..max_steps; the result is > 0."""
        ...


@dataclass(frozen=True)
class LinearTemperature:
    """From `t_max` at the first step down towards `t_min`, the reference's schedule."""

    t_min: float = default("t_min")
    t_max: float = default("t_max")

    def __post_init__(self) -> None:
        check_setting("t_min", self.t_min)
        check_setting("t_max", self.t_max)
        if self.t_min > self.t_max:
            raise Refused(
                ("t_min", "t_max"), f"need t_min <= t_max, got {self.t_min!r} and {self.t_max!r}"
            )

    def temperature(self, step: int, max_steps: int) -> float:
        remaining = max_steps + 1 - step
        return self.t_min + (self.t_max - self.t_min) * (remaining / max_steps)


@dataclass(frozen=True)
class SoftTopK:
    """The `first` most probable tokens at the first step, `last` at the last one, and in between as
    many as fall (or rise) by the same factor from step to step; without `last`, `first` always.

    They alone make a position's draw and its soft embedding; the entropy stays that of all.
    """

    first: int
    last: int | None = None

    def __post_init__(self) -> None:
        for value in (self.first, self.first if self.last is None else self.last):
            if not (is_whole(value) and 1 <= value <= MOST_COUNTED):
                raise Refused(
                    "soft_top_k", f"must be whole numbers from 1 to {MOST_COUNTED}, got {value!r}"
                )

    def k(self, step: int, max_steps: int) -> int:
        """step counts 1..max_steps; the result is from 1 to MOST_COUNTED."""
        if self.last is None or max_steps == 1:
            return self.first
        return round(self.first * (self.last / self.first) ** ((step - 1) / (max_steps - 1)))


def temperature_at(schedule: Schedule, step: int, max_steps: int) -> float:
    """What a schedule says of a step. Raises ValueError where that is no temperature."""
    value = _call(f"schedule {type(schedule).__name__}", schedule.temperature, step, max_steps)
    if not (is_number(value) and 0 < value <= MAX_TEMPERATURE):
        raise Refused(
            f"schedule {type(schedule).__name__}",
            f"temperature must return a number over 0 and at most {MAX_TEMPERATURE:.0e}, got "
            f"{quoted(value)} at step {step}",
        )
    return float(value)


def count_at(counts: SoftTopK, step: int, max_steps: int) -> int:
    """How many tokens count at a step. Raises ValueError where that is no count."""
    count = _call(f"soft_top_k {type(counts).__name__}", counts.k, step, max_steps)
    if not (is_whole(count) and 1 <= count <= MOST_COUNTED):
        raise Refused(
            f"soft_top_k {type(counts).__name__}",
            f"k must return a whole number from 1 to {MOST_COUNTED}, got {quoted(count)} at step "
            f"{step}",
        )
    return int(count)


def counts_of(pace: Pace, max_steps: int, length: int) -> list[int]:
    """How many mask tokens each step of a canvas reveals at least; there are no more such steps
    than positions. Raises ValueError where a pace says what is no count."""
    counts, name = [], f"pace {type(pace).__name__}"
    for step in range(1, min(max_steps, length) + 1):
        count = _call(name, pace.count, step, max_steps, length)
        if not (is_whole(count) and count >= 0):
            why = f"count must return a whole number from 0, got {quoted(count)} at step {step}"
            raise Refused(name, why)
        counts.append(min(max(1, int(count)), length))
    return counts


def _call(what: str, method: Callable[..., Any], step: int, *more: int) -> Any:
    try:
        return method(step, *more)
    except Exception as error:
        raise Refused(
            what,
            f"{method.__name__} raised {type(error).__name__} at step {step}: {str(error)[:200]}",
        ) from error


@dataclass(frozen=True)
class CanvasView:
    """What logit processors see of one row before a step; all tensors on the scores' device."""

    step: Tensor  # int64 []: 1.., of the step to come
    tokens: Tensor  # int64 [length]: the canvas that the forward read
    history: Tensor  # int64 [rows, length]: as in `StepView`
    reply: Tensor  # int64 [n]: the reply's tokens before this canvas


class LogitProcessor(Protocol):
    """Changes one row's scores."""

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        """scores float32 [length, n] of the token ids first_id.. → the same shape; -inf bans."""
        ...


@dataclass(frozen=True)
class Banned:
    """Tokens that may not stand at a canvas's first so many positions."""

    positions: int
    ids: Collection[int]


def banned_by(processor: LogitProcessor, reply: int, length: int) -> Banned | None:
    """What a processor bans on a canvas of `length` positions after `reply` tokens; None where it
    does more than that, or does not say. One that only bans costs next to nothing, and says so by
    a method `banned(reply, length) -> Banned | None`."""
    method = getattr(processor, "banned", None)
    banned: Banned | None = None if method is None else method(reply, length)
    return banned


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the scores of some tokens, everywhere; -inf bans them."""

    bias: Mapping[int, float]

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        in_chunk = {i - first_id: b for i, b in self.bias.items()}
        in_chunk = {i: b for i, b in in_chunk.items() if 0 <= i < scores.shape[-1]}
        if not in_chunk:
            return scores
        ids = torch.tensor(list(in_chunk), device=scores.device)
        values = torch.tensor(list(in_chunk.values()), dtype=scores.dtype, device=scores.device)
        return scores.index_add(-1, ids, values.expand(*scores.shape[:-1], -1))

    def banned(self, reply: int, length: int) -> Banned | None:
        only_bans = all(bias == float("-inf") for bias in self.bias.values())
        return Banned(length, self.bias.keys()) if only_bans else None


@dataclass(frozen=True)
class MinTokens:
    """Bans end tokens at the first `count` positions of the reply."""

    count: int
    end_ids: tuple[int, ...]
    _ban: LogitBias = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ban", LogitBias(dict.fromkeys(self.end_ids, float("-inf"))))

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
        early = self.banned(len(view.reply), scores.shape[-2]).positions
        if early == 0:
            return scores
        banned = self._ban.process(scores[..., :early, :], first_id, view)
        return torch.cat((banned, scores[..., early:, :]), dim=-2)

    def behind(self, tokens: int) -> MinTokens:
        """The same of a first canvas that begins with so many tokens of the prompt."""
        return replace(self, count=self.count + tokens)

    def banned(self, reply: int, length: int) -> Banned:
        return Banned(max(0, min(self.count - reply, length)), self.end_ids)
