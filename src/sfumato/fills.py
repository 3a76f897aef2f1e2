"""Fills of one model: where the text of holes and the ids of canvases meet.

`Model.fill` and the engine plan their fills here, and so refuse the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Convergence, Draft
from sfumato.diffusion.constraints.filling import (
    Closing,
    Filled,
    FillOutcome,
    FillPlan,
    make_filled,
    make_template,
)
from sfumato.diffusion.constraints.hole import Hole, Part, check_parts
from sfumato.diffusion.limits import Limits, ReplyPlan, StopReason, plan_reply
from sfumato.diffusion.prediction import PredictedText, Prediction
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import Family
from sfumato.model.network import Network
from sfumato.options import exclusions
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused
from sfumato.tasks.alone import alone
from sfumato.tasks.fill import FillTask, FillText
from sfumato.tasks.works import Prompt
from sfumato.text.prompt import empty_thought_ids, prompt_ids
from sfumato.text.reply import Stop, StopCut, StopGate, StopStrings
from sfumato.text_side import Reply, Settled, TextSide
from sfumato.weights.errors import quoted

EDIT_ROOM = 64  # tokens that an edited text may have beyond twice those that it had


def edit_message(text: str, instruction: str) -> dict[str, str]:
    """The user's message that asks for a text to be changed."""
    content = f"{instruction}\n\nAnswer with the complete changed text and nothing else.\n\n{text}"
    return {"role": "user", "content": content}


class Fills:
    """Plans fills, runs them, and reads what they gave."""

    def __init__(
        self,
        network: Network,
        text: TextSide,
        family: Family,
        defaults: SamplerConfig,
        end_ids: tuple[int, ...],
    ) -> None:
        self._network, self._text, self._family = network, text, family
        self._defaults, self._end_ids = defaults, end_ids

    def prompt(self, messages: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Ids of what comes before a text: the prompt that a reply to the messages follows, a
        thought that is empty included; without messages bos, where there is one."""
        tokenizer = self._text.tokenizer
        if messages is None:
            return [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return [*prompt_ids(self._text.template, tokenizer, messages), *self.empty_thought]

    @cached_property
    def empty_thought(self) -> list[int]:
        """Ids that a reply without a thought begins with, where the template does not write them
        itself."""
        marker = self._family.reads.empty_thought
        return empty_thought_ids(self._text.template, self._text.tokenizer, marker)

    @cached_property
    def closing(self) -> Closing | None:
        """What follows a complete reply on its canvas; None where the vocabulary has no such
        tokens."""
        form, config = self._family.reads, self._network.config
        end = self._text.tokenizer.token_id(form.end)
        filler = config.filler_id
        filler = self._text.tokenizer.token_id(form.filler) if filler is None else filler
        return None if end is None or filler is None else Closing(end, filler)

    def plan(
        self,
        prompt: Sequence[int],
        parts: Sequence[Part],
        *,
        is_reply: bool,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        most_steps: int = MOST_STEPS,
        check: Callable[[str, str], None] = lambda text, field: None,
    ) -> FillPlan:
        """All checks of a fill. prompt: ids of what comes before the text; is_reply: whether the
        text is a complete reply, and not a part of a longer text; check: called with each text
        and the name of its field before it is tokenized, and may raise.

        Raises ValueError, naming the argument, for what cannot be done, and TooLarge where the
        model's context does not hold the text."""
        parts = check_parts(parts)
        self._check_choices(parts)
        is_causal = sampler is not None and sampler.mode == "causal"
        exclusions.check(exclusions.PLAN, {"parts": True, "mode=causal": is_causal})
        config = (sampler or SamplerConfig()).over(self._defaults)
        longest = config.canvas_length or self._network.config.canvas_length
        closing = self.closing if is_reply else None

        def encode(text: str, field: str) -> list[int]:
            check(text, field)
            return self._text.tokenizer.encode(text, special=False)

        template = make_template(parts, encode, prompt, closing, longest)
        length = len(template.form({}).ids)
        # The most that a canvas can have; each trial has its own length.
        config = replace(
            config,
            canvas_length=length,
            ignore_eos=False,
            settle_at_end=False,
            min_tokens=0,
            processors=(*config.processors, self._ban),
        )
        limits = Limits(length, self._end_ids)
        tokens = len(template.prefix)
        plan = plan_reply(self._network, tokens, config, limits, seed, most_steps)
        return FillPlan(template, plan.config, seed)

    def _check_choices(self, parts: Sequence[Part]) -> None:
        """Raises ValueError for a choice that the vocabulary cannot write."""
        tokenizer = self._text.tokenizer
        for place, part in enumerate(parts):
            for number, text in enumerate((part.choices or ()) if isinstance(part, Hole) else ()):
                if tokenizer.decode(tokenizer.encode(text, special=False)) != text:
                    raise Refused(
                        f"parts[{place}].choices[{number}]",
                        f"{text[:80]!r} cannot be written with this model's vocabulary",
                    )

    @cached_property
    def _ban(self) -> LogitBias:
        """Markers are no text: none of them may stand in a hole, and no end token or padding."""
        tokenizer, markers = self._text.tokenizer, self._text.template.markers.tokens
        ids = {tokenizer.token_id(marker) for marker in markers}
        ids |= {*self._end_ids, self._network.config.pad_id, tokenizer.bos_id}
        return LogitBias(dict.fromkeys(sorted(i for i in ids if i is not None), float("-inf")))

    def with_prediction(
        self, plan: ReplyPlan, prediction: PredictedText | None, thinking: bool, begun: bool = False
    ) -> ReplyPlan:
        """The plan of a reply with what it is expected to be. thinking: whether a thought comes
        first; begun: whether the prompt ends within the answer. Raises ValueError."""
        if prediction is None:
            return plan
        if not isinstance(prediction, PredictedText):
            raise Refused("prediction", f"must be a PredictedText, got {quoted(prediction)}")
        given = {"prediction": True, "thinking": thinking}
        given["mode=causal"] = plan.config.mode == "causal"
        exclusions.check(exclusions.PLAN, given)
        closing = () if self.closing is None else (self.closing.end_id, self.closing.filler_id)
        opening = () if begun else tuple(self.empty_thought)
        ids = tuple(self._text.tokenizer.encode(prediction.text, special=False))
        predicted = Prediction(opening, ids, closing, prediction.strength)
        return replace(plan, prediction=predicted)

    def stream(self, plan: FillPlan, cancelled: Callable[[], bool]) -> Iterator[Draft | Filled]:
        """Drafts, and at last the filled text. Raises Cancelled where `cancelled` says so, and
        FloatingPointError where the model's scores are no numbers."""
        task = FillTask(plan, self._make, _Drafts(self._text))
        outcome: FillOutcome = yield from alone(self._network, task, cancelled)
        if outcome.cancelled:
            raise Cancelled
        yield self._filled(plan, outcome)

    def task(self, plan: FillPlan, stop: Stop, prompt: Prompt | None = None) -> FillTask:
        """A fill whose outcome is a `Reply`: the text of its holes, up to a stop string."""
        text = _FillReply(self._text, plan, StopStrings(stop), partial(self._filled, plan))
        return FillTask(plan, self._make, text, prompt, self._family.name)

    @property
    def _make(self) -> Callable[..., Canvas]:
        return partial(Canvas.of, network=self._network)

    def _filled(self, plan: FillPlan, outcome: FillOutcome) -> Filled:
        """The text of an outcome."""
        return make_filled(plan.template.parts, outcome, self._text.tokenizer.decode)


class Cancelled(Exception):
    """The caller has ended a fill, which has no result."""


class _Drafts(FillText):
    """A fill whose drafts have a text."""

    def __init__(self, text: TextSide) -> None:
        self._decode = text.tokenizer.decode

    def readable(self, draft: Draft) -> Draft:
        return replace(draft, decode=self._decode)


class _FillReply(_Drafts):
    """A fill that is read as a reply of one canvas."""

    def __init__(
        self,
        text: TextSide,
        plan: FillPlan,
        stops: StopStrings,
        filled: Callable[[FillOutcome], Filled],
    ) -> None:
        super().__init__(text)
        self._plan, self._stops, self._filled = plan, stops, filled
        self._markers = text.template.markers
        self._cut = StopCut(text.tokenizer, stops, self._markers)

    def finish(self, outcome: FillOutcome) -> Reply:
        if outcome.cancelled:
            return Reply("", None, (), [], "cancelled", outcome.stats)
        reply = self._reply(outcome)
        outcome.stats.output_tokens = len(reply.token_ids)
        return reply

    def settled(self, outcome: FillOutcome) -> Sequence[Settled]:
        """What filled the holes, as a canvas that has settled."""
        text, ids = self._reply(outcome).text, list(chain(*outcome.holes))
        last: Convergence = (outcome.stats.convergence or ["converged"])[-1]
        top_ids, top_probs = _top(outcome)
        return [Settled(0, text, "", ids, last, top_ids=top_ids, top_probs=top_probs)]

    def _reply(self, outcome: FillOutcome) -> Reply:
        """The text of all holes before the first stop string that is complete, its tokens, and why
        it ends there: the rule of other replies."""
        filled = self._filled(outcome)
        text, ids = "".join(hole.text for hole in filled.holes), list(chain(*outcome.holes))
        holes = zip(self._plan.template.holes, outcome.holes, strict=True)
        is_full = any(hole.at_most == len(own) > 1 for hole, own in holes)
        reason: StopReason = "max_tokens" if is_full else "eos"
        gate = StopGate(self._stops, self._markers)
        pieces = [piece for piece in (*gate.feed([text]), *gate.flush()) if isinstance(piece, str)]
        if gate.stop is not None:
            text, ids, reason = "".join(pieces), ids[: self._cut([], ids)], "stop"
        stats, notes = outcome.stats, filled.warnings
        return Reply(text, None, (), ids, reason, stats, notes, filled, gate.stop)


def _top(outcome: FillOutcome) -> tuple[Tensor | None, Tensor | None]:
    """The most probable tokens of all holes and their probabilities, [tokens, top]."""
    top = [each for each in outcome.top if each is not None]
    if len(top) < len(outcome.top):
        return None, None
    return torch.cat([ids for ids, _ in top]), torch.cat([probs for _, probs in top])
