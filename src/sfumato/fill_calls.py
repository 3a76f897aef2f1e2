"""The calls of a `Model` that write into a given text: `fill`, `stream_fill` and `edit`.

They are apart from api.py because that file has the calls that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.constraints.filled import Filled
from sfumato.diffusion.constraints.hole import Part
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler_config import SamplerConfig, check_sampler
from sfumato.fills import Fills
from sfumato.model.families import Family
from sfumato.model.network import Network
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.text_side import TextSide
from sfumato.transcript import Reply
from sfumato.weights.errors import quoted

EDIT_ROOM = 64  # tokens that an edited text may have beyond twice those that it had


def edit_message(text: str, instruction: str) -> dict[str, str]:
    """The user's message that asks for a text to be changed."""
    content = f"{instruction}\n\nAnswer with the complete changed text and nothing else.\n\n{text}"
    return {"role": "user", "content": content}


class FillCalls:
    """What `Model` is, among other things."""

    network: Network
    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family
    sampler_defaults: SamplerConfig
    end_ids: tuple[int, ...]

    def fill(
        self,
        parts: Sequence[Part],
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Filled:
        """The text with its holes filled: `model.fill(["I am ", Hole(6), "."])`.

        parts: texts and holes. messages: a conversation that the text is the complete reply to;
        None: the text stands by itself, and may be a part of a longer one. The given texts come
        back unchanged. End tokens and markers never stand in a hole. What comes after the last
        hole is cut where it does not fit the canvas, which a warning says. cancelled: called
        before every step; True raises `sfumato.diffusion.constraints.fill.Cancelled`.
        Raises ValueError, naming the argument, for what cannot be done.
        """
        for event in self.stream_fill(
            parts, messages=messages, seed=seed, sampler=sampler, cancelled=cancelled
        ):
            if isinstance(event, Filled):
                return event
        raise AssertionError("a fill ends with Filled")

    def stream_fill(
        self,
        parts: Sequence[Part],
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Draft | Filled]:
        """The same with a draft at every denoising step before the filled text. Where several
        lengths are tried, the drafts are those of the longest; `Draft.canvas` counts rounds."""
        check_sampler(sampler)
        prompt = self.fills.prompt(messages)
        plan = self.fills.plan(
            prompt, parts, is_reply=messages is not None, seed=seed, sampler=sampler
        )
        return self.fills.stream(plan, cancelled)

    def edit(
        self, text: str, instruction: str, *, strength: float | None = None, **options: Any
    ) -> Reply:
        """The reply that has the text as the instruction changes it. Its canvases begin as the
        text; strength: the share of their positions that begins as noise instead, by default 0.5.
        options: those of `stream`; max_tokens is by default twice the text's tokens, and 64 more.
        Raises ValueError, naming the argument."""
        for name, value in (("text", text), ("instruction", instruction)):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}: must be text that is not empty, got {quoted(value)}")
        if "max_tokens" not in options:
            tokens = len(self.tokenizer.encode(text, special=False))
            options["max_tokens"] = 2 * tokens + EDIT_ROOM
        prediction = PredictedText(text) if strength is None else PredictedText(text, strength)
        messages = [edit_message(text, instruction)]
        return self.generate(messages=messages, prediction=prediction, **options)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Reply:
        raise NotImplementedError

    @cached_property
    def fills(self) -> Fills:
        """What plans and reads fills, for the engine too."""
        text = TextSide(self.tokenizer, self.template)
        return Fills(self.network, text, self.family, self.sampler_defaults, self.end_ids)
