"""Fills of one model: where the text of holes and the ids of canvases meet.

`Model.fill` and the engine plan their fills here, and so refuse the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.constraints.fill import fill
from sfumato.diffusion.constraints.fill_plan import Closing, Encode, FillPlan, make_template
from sfumato.diffusion.constraints.fill_progress import FillOutcome
from sfumato.diffusion.constraints.filled import Filled, make_filled
from sfumato.diffusion.constraints.hole import Hole, Part, check_parts
from sfumato.diffusion.limits import Limits, ReplyPlan, plan_reply
from sfumato.diffusion.prediction import PredictedText, Prediction
from sfumato.diffusion.processors import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import Family
from sfumato.model.network import Network
from sfumato.options.limits import MOST_STEPS
from sfumato.text.prompt import prompt_ids
from sfumato.text.user_turn import empty_thought_ids
from sfumato.text_side import TextSide
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
        if sampler is not None and sampler.mode == "causal":
            raise ValueError("mode: a text with holes is filled on a canvas; leave the mode out")
        config = (sampler or SamplerConfig()).over(self._defaults)
        longest = config.canvas_length or self._network.config.canvas_length
        closing = self.closing if is_reply else None
        template = make_template(parts, self._encode(check), prompt, closing, longest)
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
                    raise ValueError(
                        f"parts[{place}].choices[{number}]: {text[:80]!r} cannot be written with "
                        "this model's vocabulary"
                    )

    @cached_property
    def _ban(self) -> LogitBias:
        """Markers are no text: none of them may stand in a hole, and no end token or padding."""
        tokenizer, markers = self._text.tokenizer, self._text.template.markers.tokens
        ids = {tokenizer.token_id(marker) for marker in markers}
        ids |= {*self._end_ids, self._network.config.pad_id, tokenizer.bos_id}
        return LogitBias(dict.fromkeys(sorted(i for i in ids if i is not None), float("-inf")))

    def _encode(self, check: Callable[[str, str], None]) -> Encode:
        def encode(text: str, field: str) -> list[int]:
            check(text, field)
            return self._text.tokenizer.encode(text, special=False)

        return encode

    def with_prediction(
        self, plan: ReplyPlan, prediction: PredictedText | None, thinking: bool, begun: bool = False
    ) -> ReplyPlan:
        """The plan of a reply with what it is expected to be. thinking: whether a thought comes
        first; begun: whether the prompt ends within the answer. Raises ValueError."""
        if prediction is None:
            return plan
        if not isinstance(prediction, PredictedText):
            raise ValueError(f"prediction: must be a PredictedText, got {quoted(prediction)}")
        if plan.config.mode == "causal":
            raise ValueError("prediction: causal replies have no canvas; leave one of them out")
        if thinking:
            raise ValueError(
                "prediction: says nothing of a thought, and the model thinks first here; ask for "
                "no thinking, or leave the prediction out"
            )
        closing = () if self.closing is None else (self.closing.end_id, self.closing.filler_id)
        opening = () if begun else tuple(self.empty_thought)
        ids = tuple(self._text.tokenizer.encode(prediction.text, special=False))
        predicted = Prediction(opening, ids, closing, prediction.strength)
        return replace(plan, prediction=predicted)

    def stream(self, plan: FillPlan, cancelled: Callable[[], bool]) -> Iterator[Draft | Filled]:
        """Drafts, and at last the filled text. Raises as `fill` does."""
        run = fill(self._network, plan, cancelled)
        while True:
            try:
                draft = next(run)
            except StopIteration as end:
                yield self.filled(plan, end.value)
                return
            yield self.readable(draft)

    def readable(self, draft: Draft) -> Draft:
        """The draft with its text."""
        return replace(draft, decode=self._text.tokenizer.decode)

    def filled(self, plan: FillPlan, outcome: FillOutcome) -> Filled:
        """The text of an outcome."""
        return make_filled(plan.template.parts, outcome, self._text.tokenizer.decode)
