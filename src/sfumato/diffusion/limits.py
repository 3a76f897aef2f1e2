"""The limits of a reply, what is refused before it begins, and what it gives in the end, as ids.

`Model.stream` and the engine plan their replies here, and so refuse the same requests. Knows no
texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sfumato.diffusion.canvas import Convergence, Draft, GivenCanvas
from sfumato.diffusion.checks import check_causal
from sfumato.diffusion.constraints.constrained_reply import Constraint, ConstraintReport
from sfumato.diffusion.prediction import Prediction
from sfumato.diffusion.sampler import (
    EachSettled,
    EvenPace,
    LinearTemperature,
    LogitBias,
    LogitProcessor,
    MinTokens,
    SettledToEnd,
    StableAndConfident,
)
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.verification import CanvasVerification
from sfumato.model.model_config import NO_BLOCKS, Blocks
from sfumato.model.network import Network
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused, TooLarge

StopReason = Literal["eos", "max_tokens", "stop", "cancelled"]


Verify = Literal["report", "abstain"]
"""What the causal mode is asked of the canvases of a reply: how probable their tokens are; and
whether an answer that it doubts is undecided."""


@dataclass(frozen=True)
class Limits:
    """When a reply ends."""

    max_tokens: int
    end_ids: tuple[int, ...]
    # Of a reply and what a canvas adds: how many ids come before a stop string, if there is one.
    cut: Callable[[list[int], list[int]], int | None] = lambda reply, added: None
    cancelled: Callable[[], bool] = lambda: False  # called before each step and chunk of a prefill


@dataclass(frozen=True)
class ReplyPlan:
    """A reply that can be done, from `plan_reply`."""

    prompt_tokens: int
    config: SamplerConfig  # complete, canvas_length and bans of end tokens included
    limits: Limits
    seed: int
    canvases: int  # at most, unless thoughts are ended early
    context: int  # positions that the model was made for
    given: GivenCanvas | None = None  # the first canvas, where the caller gives it
    prediction: Prediction | None = None  # what the reply is expected to be
    constraint: Constraint | None = None  # what the reply must satisfy
    blocks: Blocks = NO_BLOCKS  # of prompt and reply
    verify: Verify | None = None  # what a second reader does; None: there is none

    @property
    def opened(self) -> int:
        """How many of the prompt's last tokens stand in the first canvas."""
        return self.prompt_tokens - self.blocks.border(self.prompt_tokens)


def plan_reply(
    network: Network,
    prompt_tokens: int,
    config: SamplerConfig,
    limits: Limits,
    seed: int,
    most_steps: int = MOST_STEPS,
    divides: bool = False,
) -> ReplyPlan:
    """All checks of a reply before it begins. config: without None, see `SamplerConfig.over`;
    most_steps: per canvas, which bounds the checkpoint's own choice too; divides: whether its one
    canvas may be less than a block. Raises ValueError, and TooLarge where the model's context does
    not hold prompt and reply."""
    check_seed(seed)
    if config.mode == "causal":
        check_causal(network.config)
        if prompt_tokens < 1:
            raise Refused("prompt", "has no token, which the causal mode could go on from")
        config = of_tokens(config)
    assert config.max_steps
    config = replace(config, max_steps=min(config.max_steps, most_steps))
    config = resolve(network, config, limits)
    if network.config.block not in (None, config.canvas_length) and not divides:
        raise Refused(
            "canvas_length",
            f"{config.canvas_length} is less than the blocks of {network.config.block} that this "
            "model was trained for",
            "leave it out",
        )
    blocks = network.config.blocks(prompt_tokens)
    canvases = check_context(network, prompt_tokens, config, limits, blocks)
    context = network.config.context_length
    return ReplyPlan(prompt_tokens, config, limits, seed, canvases, context, blocks=blocks)


def of_tokens(config: SamplerConfig) -> SamplerConfig:
    """The config of the causal mode: a canvas for each token, of one step, at the temperature of
    the config itself."""
    return replace(
        config,
        mode="causal",
        canvas_length=1,
        max_steps=1,
        schedule=LinearTemperature(1.0, 1.0),
        soft_skip=None,
        soft_top_k=None,
    )


def check_seed(seed: object) -> None:
    """Raises ValueError for what is no seed."""
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise Refused("seed", f"must be a whole number from 0 to 2**64 - 1, got {seed!r}")


def resolve(network: Network, config: SamplerConfig, limits: Limits) -> SamplerConfig:
    """The config with a canvas length, and with the processors that keep `min_tokens` and
    `ignore_eos`. They ban padding too, which fills a canvas behind its end: it is no text. With
    `settle_at_end` the stopping rule becomes one that knows the end tokens, with `patience` one of
    each position by itself.

    Raises ValueError for canvases longer than this network's, for a schedule that some step of it
    would fail with, for `settle_at_end` or `patience` beside another stopping rule, and as
    `of_process`."""
    longest = network.config.canvas_length
    length = config.canvas_length or longest
    if length > longest:
        raise Refused(
            "canvas_length",
            f"{length} is longer than the {longest} that this checkpoint was trained for",
            "use that or less",
        )
    config.by_step()  # refuses what some step could not use
    vocab_size = network.config.vocab_size
    if config.named_tokens and max(config.named_tokens) >= vocab_size:
        raise Refused(
            "named_tokens", f"must lie in 0..{vocab_size - 1}, got {max(config.named_tokens)}"
        )
    config = of_process(replace(config, canvas_length=length), network.config.mask_id)
    if config.patience is not None:
        _of_default_rule(config, "patience")
        config = replace(config, stopping=EachSettled(config.patience), patience=None)
    if not limits.end_ids:
        return config
    pad = network.config.pad_id
    ends = tuple(dict.fromkeys((*limits.end_ids, *(() if pad is None else (pad,)))))
    bans: list[LogitProcessor] = []
    if config.settle_at_end and not config.ignore_eos:
        config = replace(config, stopping=_settled_to_end(config, limits.end_ids))
    if config.ignore_eos:
        bans.append(LogitBias(dict.fromkeys(ends, float("-inf"))))
    elif config.min_tokens:
        bans.append(MinTokens(config.min_tokens, ends))
    return replace(config, processors=(*config.processors, *bans))


def of_process(config: SamplerConfig, mask_id: int | None) -> SamplerConfig:
    """The config, complete, as canvases of this noise need it: mask_id is the token that is the
    noise; None: it is random. Where there is one it is never drawn, since it reveals nothing.

    Raises ValueError for a sampler or a pace of the other process, or one that fails."""
    length = config.canvas_length
    assert length
    if mask_id is None:
        for name, part in (("sampler", config.sampler), ("pace", config.pace)):
            if part is not None and (name == "pace" or getattr(part, "needs_masks", False)):
                why = "reveals mask tokens, and canvases of this model begin as random tokens"
                raise Refused(name, f"{type(part).__name__} {why}", "leave it out")
        return config
    config = replace(config, pace=config.pace or EvenPace(), self_conditioning=False)
    if config.mode != "causal":
        config.counts(length)  # refuses what some step could not use
    ban = LogitBias({mask_id: float("-inf")})
    return replace(config, processors=(*config.processors, ban))


def _settled_to_end(config: SamplerConfig, ends: Sequence[int]) -> SettledToEnd:
    rule = _of_default_rule(config, "settle_at_end")
    return SettledToEnd(rule.stability, rule.confidence, tuple(ends))


def _of_default_rule(config: SamplerConfig, field: str) -> StableAndConfident:
    """The stopping rule, which a field changes. Raises Refused, naming it, for another rule."""
    rule = config.stopping
    if type(rule) not in (StableAndConfident, SettledToEnd):
        raise Refused(
            field,
            "belongs to the stopping rule StableAndConfident, and this request has "
            f"{type(rule).__name__}",
            "leave one of them out",
        )
    assert isinstance(rule, StableAndConfident)
    return rule


def check_context(
    network: Network, prompt: int, config: SamplerConfig, limits: Limits, blocks: Blocks
) -> int:
    """How many canvases a reply to `prompt` tokens has at most.

    config: complete; blocks: of the prompt.  Raises TooLarge where the model's context does not
    hold them all, and ValueError for what is no number of tokens."""
    assert config.canvas_length
    if type(limits.max_tokens) is not int or limits.max_tokens < 1:
        raise Refused("max_tokens", f"must be a whole number from 1, got {limits.max_tokens!r}")
    length, longest = config.canvas_length, network.config.context_length
    encoded = blocks.border(prompt)
    if encoded + length > longest:
        raise TooLarge(
            "prompt",
            f"the prompt is {prompt} tokens and the context holds {longest}, of which a "
            f"canvas takes {length}",
            "shorten it",
            prompt,
            longest,
        )
    canvases = -(-(prompt - encoded + limits.max_tokens) // length)
    if encoded + canvases * length > longest:
        raise TooLarge(
            "max_tokens",
            f"a prompt of {prompt} tokens and {canvases} canvases of {length} exceed this "
            f"model's context of {longest}",
            "shorten the prompt or lower max_tokens",
            prompt,
            longest,
        )
    return canvases


@dataclass(kw_only=True)
class Times:
    """Seconds of a task, as its driver stamps them; set-up (loading) is not in them."""

    prefill_s: float = 0.0
    denoise_s: float = 0.0  # draws and scores with it
    commit_s: float = 0.0
    first_draft_s: float | None = None  # since the beginning
    total_s: float = 0.0  # from first to last event, with what the consumer did in between


@dataclass
class Stats(Times):
    """Tokens, steps and times of a reply."""

    prompt_tokens: int
    output_tokens: int = 0
    canvases: int = 0
    steps: list[int] = field(default_factory=list)  # denoising forwards of each canvas
    convergence: list[Convergence] = field(default_factory=list)
    accepted_prediction: int | None = None  # tokens of it in the reply; None: there was none
    dropped_predictions: int = 0  # canvases that were drawn again without it
    constraint: ConstraintReport | None = None  # None: the reply had no constraint

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens over denoising forwards."""
        return self.output_tokens / max(1, sum(self.steps))


@dataclass(frozen=True)
class SettledCanvas:
    """A canvas that has finished: what it adds to the reply."""

    canvas: int
    token_ids: list[int]  # without an end token and all after it
    convergence: Convergence
    stop_reason: StopReason | None  # None: another canvas follows
    end_id: int | None = field(default=None, compare=False)  # the end token after token_ids
    verification: CanvasVerification | None = None  # of these tokens, where it was wanted


@dataclass(frozen=True)
class Outcome:
    """How a reply ended, as ids."""

    token_ids: list[int]
    stop_reason: StopReason
    stats: Stats
    warnings: tuple[str, ...]
    other: list[int] | None = None  # what the causal mode answers, where it doubts the answer


class ReplyText:
    """What the caller of a reply reads: by itself, ids. decode: gives drafts a text."""

    def __init__(self, decode: Callable[[list[int]], str] | None = None) -> None:
        self._decode = decode

    def readable(self, draft: Draft) -> Draft:
        """The draft with its text."""
        return draft if self._decode is None else replace(draft, decode=self._decode)

    def add(self, settled: SettledCanvas, last: Draft) -> Any:
        """The event of a settled canvas; last: the draft of its last step."""
        return settled

    def finish(self, outcome: Any) -> Any:
        """The outcome of the task, of an `Outcome`; called once."""
        return outcome
