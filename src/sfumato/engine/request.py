"""A request for a reply, or for a text with holes: its fields, their checks, and its prompt's ids.

Knows no slots and no threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sfumato.api import Messages, Model
from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.checks import MOST_SECONDS, MOST_TOKENS, is_number, is_whole
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.hole import Part
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler_config import SamplerConfig, check_sampler
from sfumato.engine.decision import DecisionRequest
from sfumato.engine.queue.snapshot_points import SnapshotPoints
from sfumato.options import exclusions
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.wants import Pooling, PromptScoring
from sfumato.tasks.works import Prompt
from sfumato.text.prompt import prompt_ids
from sfumato.text.reply import Stop
from sfumato.weights.errors import quoted


def new_id() -> str:
    return f"req-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Request:
    """A request for one reply. Exactly one of prompt, messages and ids; `Model.stream` says what
    the fields mean that it has too."""

    prompt: str | None = None
    messages: Messages | None = None
    ids: Sequence[int] | None = None  # the prompt's tokens as they are, without a chat template
    made: Prompt | None = None  # from `Engine.prompt`, if it was called
    max_tokens: int = 256
    seed: int | None = None  # None: drawn at random; the account has it
    sampler: SamplerConfig | None = None
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    stop: Stop = None
    continued: str | None = None  # the reply's beginning, which the prompt ends in
    opening: str | None = None  # text, markers included, that the reply begins with
    max_thinking_tokens: int | None = None  # None: what leaves room for an answer
    retry_empty: bool = True  # an answer that settles as nothing is drawn again
    grammar: Source | None = None  # what the answer, or its calls, have to match
    canvas: GivenCanvas | None = None  # what the first canvas begins as; instead of an opening
    parts: Sequence[Part] | None = None  # of a text with holes, which follows the prompt
    prediction: PredictedText | None = None  # what the reply is expected to be
    drafts: bool = False  # whether Draft events are wanted
    # Whether the prompt's tokens are scored, in causal mode; max_tokens may then be 0.
    scoring: PromptScoring | None = None
    pooling: Pooling | None = None  # of the prompt's hidden states; max_tokens is then 0
    timeout_s: float | None = None  # from `since`; None: the engine's own
    since: float | None = None  # when the client sent it, by `Engine.now`; None: at its submission
    id: str = field(default_factory=new_id)
    endpoint: str = "api"  # where it came in, for the audit
    user: str | None = None  # whose it is, for the audit

    def texts(self) -> dict[str, Any]:
        """What it asks, as plain values, for the audit."""
        texts = {
            "prompt": self.prompt,
            "messages": None if self.messages is None else list(self.messages),
            "ids": None if self.ids is None else list(self.ids),
            "continued": self.continued,
            "opening": self.opening,
            "parts": None if self.parts is None else [_part(part) for part in self.parts],
            "prediction": None if self.prediction is None else self.prediction.text,
        }
        return {name: value for name, value in texts.items() if value is not None}


def _part(part: Part) -> str | dict[str, Any]:
    """A text, or what a hole has."""
    if isinstance(part, str):
        return part
    return {name: value for name, value in asdict(part).items() if value is not None}


@dataclass(frozen=True)
class TaskRequest:
    """A request for a task that its caller has made, of any kind."""

    seed: int = 0  # for the audit, as the next four
    max_tokens: int = 0
    id: str = field(default_factory=new_id)
    endpoint: str = "api"
    user: str | None = None
    timeout_s: float | None = None  # from `since`; None: the engine's own
    since: float | None = None  # by `Engine.now`; None: at its submission

    def texts(self) -> dict[str, Any]:
        """Nothing: the task knows what it asks."""
        return {}


AnyRequest = Request | DecisionRequest | TaskRequest


def check_request(request: Request, most_steps: int) -> None:
    """Raises ValueError for fields that are wrong by themselves."""
    check_sampler(request.sampler)
    given = {each.name: getattr(request, each.name) for each in fields(request)}
    exclusions.check(exclusions.GRAMMAR, given)
    given = {name: value is not None for name, value in given.items()}
    exclusions.check(exclusions.REQUEST, given | {"thinking": request.thinking})
    steps = request.sampler.max_steps if request.sampler else None
    if steps is not None and steps > most_steps:
        raise Refused(
            "max_steps",
            f"must be at most {most_steps}, got {steps}",
            "ask for fewer, or raise --max-steps",
        )
    if not isinstance(request.continued, str | None):
        raise Refused("continued", f"must be text, got {request.continued!r}")
    if not isinstance(request.opening, str | None):
        raise Refused("opening", f"must be text, got {request.opening!r}")
    limit = request.max_thinking_tokens
    if limit is not None and not (is_whole(limit) and 0 <= limit <= MOST_TOKENS):
        raise Refused(
            "max_thinking_tokens",
            f"must be a whole number from 0 to {MOST_TOKENS}, got {quoted(limit)}",
        )
    if not isinstance(request.scoring, PromptScoring | None):
        raise Refused("scoring", f"must be a PromptScoring, got {quoted(request.scoring)}")
    check_pooling(request)
    check_timeout(request.timeout_s)


def check_pooling(request: Request) -> None:
    """Raises ValueError where a vector does not go with what else is wanted."""
    if request.pooling is None:
        return
    if not isinstance(request.pooling, Pooling):
        raise Refused("pooling", f"must be a Pooling, got {quoted(request.pooling)}")
    if request.max_tokens != 0:
        raise Refused("pooling", "nothing is written beside a vector", "set max_tokens to 0")


def check_timeout(timeout: object) -> None:
    """Raises ValueError for what is no time limit."""
    if timeout is not None and not (
        isinstance(timeout, int | float) and is_number(timeout) and 0 < timeout <= MOST_SECONDS
    ):
        raise Refused(
            "timeout_s",
            f"must be over 0 and at most {MOST_SECONDS:.0e} seconds, got {quoted(timeout)}",
        )


def make_prompt(model: Model, request: Request, longest: int, points: SnapshotPoints) -> Prompt:
    """The prompt's tokens. Its text is rendered and tokenized once. Raises as `prepare` does."""
    given = [x for x in (request.prompt, request.messages, request.ids) if x is not None]
    if len(given) != 1:
        raise Refused(("prompt", "messages", "ids"), "give exactly one of them")
    if request.ids is not None:
        ids = _checked_ids(model, request.ids)
        return Prompt(ids, (len(ids),))
    messages = request.messages
    if messages is None:
        messages = [{"role": "user", "content": request.prompt}]
    ids = prompt_ids(
        model.template,
        model.tokenizer,
        messages,
        thinking=request.thinking,
        tools=request.tools,
        check=lambda text: check_length(model, text, longest, "prompt"),
    )
    marks = points.lengths(ids, messages, request.thinking)
    if request.grammar is not None and not request.thinking and request.opening is None:
        ids = [*ids, *model.fills.empty_thought]
    if request.continued is not None:
        # By itself, as the model wrote it: a cut inside a word stays one, and markers are text.
        check_length(model, request.continued, longest, "prompt")
        ids = [*ids, *model.tokenizer.encode(request.continued, special=False)]
    return Prompt(ids, marks)


def check_length(model: Model, text: str, longest: int, field: str) -> None:
    """Raises TooLarge for a text that has more tokens than `longest` however it is cut. Tokenizing
    it to count them would take seconds and hundreds of megabytes."""
    least = -(-len(text) // model.tokenizer.longest_token)
    if least > longest:
        hint = "" if longest >= model.config.context_length else ", or change --context or --slots"
        raise TooLarge(
            field,
            f"{len(text):,} characters are {least:,} tokens or more, and the longest "
            f"context here has {longest:,}",
            f"shorten it{hint}",
            least,
            longest,
        )


def _checked_ids(model: Model, given: Sequence[int]) -> list[int]:
    ids = list(given)
    if not ids or not all(is_whole(token) for token in ids):
        raise Refused("ids", "must be at least one token id, all of them whole numbers")
    vocabulary = model.config.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused("ids", f"must lie in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")
    return ids
