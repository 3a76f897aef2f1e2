"""The bodies of requests, as pydantic models: names, types, and what the API description says.

A field is honoured, or refused but for the values that ask for nothing (`Only`), or ignored
(`Ignored`). What the description cannot say stands in rules.py. Ranges that depend on the model are
the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from sfumato.diffusion.checks import MOST_SECONDS, MOST_TOKENS
from sfumato.diffusion.config import MOST_TOP
from sfumato.server import described
from sfumato.server.neutral import AtTheEnd, Ignored, Neutral, Only

MOST_ALTERNATIVES = MOST_TOP  # of each token

NoFunctions = Only([], "none", "auto", why="is long deprecated; use tools and tool_choice")


# An error of a list's first item is all that is told: one for each of millions takes gigabytes.
First = Field(fail_fast=True)
Texts = Annotated[list[str], First]
Ids = Annotated[list[int], First]
Objects = Annotated[list[dict[str, Any]], First]


def at_most(count: int) -> BeforeValidator:
    """Refuses an object of more fields before they are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many", f"at most {count} fields")
        return value

    return BeforeValidator(check)


MOST_NAMED = 20  # of unknown fields


class Unknown:
    """Names of unknown fields: the first ones, and how many there are."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.named: list[str] = []
        self.count = 0
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self.count += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(name)

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return ", ".join(self.named) + (f" and {more:,} more" if more else "")


class Body(BaseModel):
    """Strict: no unknown field that is not null, no text for a number, no NaN."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=described.with_ranges,
    )

    _ignored: Unknown = PrivateAttr(default_factory=Unknown)
    _since: float | None = PrivateAttr(None)

    @property
    def ignored(self) -> Unknown:
        """The unknown fields that a lenient server has left out."""
        return self._ignored

    @property
    def since(self) -> float | None:
        """When the body had arrived, by the engine's clock."""
        return self._since

    def leave_out(self, unknown: Unknown) -> None:
        """Sets `ignored`."""
        self._ignored = unknown

    def arrived(self, since: float) -> None:
        """Sets `since`."""
        self._since = since


class Sampling(Neutral, Body):
    """How a reply is drawn and sent; what is null is the checkpoint's own choice."""

    temperature: float | None = Field(None, description="Scales the temperature schedule.")
    top_p: float | None = Field(None, description="Draw from the likeliest share only.")
    top_k: int | None = Field(None, description="Draw from the k likeliest; 0 and -1: all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same seed, same text.")
    stop: Annotated[str | Texts | None, WithJsonSchema(described.STOP)] = Field(
        None, description="Texts that end the reply; an empty one is none."
    )
    logit_bias: Annotated[
        dict[str, float] | None,
        at_most(described.MOST_BIASES),
        WithJsonSchema(described.BIAS),
    ] = Field(None, description="Token id → -100 … 100, added to its score; -100 bans it.")
    min_tokens: int | None = Field(None, description="No end token before so many tokens.")
    ignore_eos: bool | None = Field(None, description="End tokens are banned.")
    max_steps: int | None = Field(None, description="Denoising steps per canvas at most.")
    sampler: Annotated[str | None, WithJsonSchema(described.SAMPLER)] = Field(
        None, description="entropy-bound, fixed-count or threshold."
    )
    entropy_bound: float | None = Field(None, description="Nats; of the entropy-bound sampler.")
    count: int | None = Field(None, description="Positions a step; of the fixed-count sampler.")
    threshold: float | None = Field(None, description="Probability; of the threshold sampler.")
    margin: float | None = Field(None, description="Over the runner-up; of the threshold sampler.")
    t_min: float | None = Field(None, description="Temperature after the last step.")
    t_max: float | None = Field(None, description="Temperature at the first step.")
    stability: int | None = Field(None, description="Steps that a settled canvas stays the same.")
    confidence: float | None = Field(None, description="Mean nats under which it has settled.")
    canvas_length: int | None = Field(None, description="Tokens of a canvas.")
    self_conditioning: bool | None = Field(None, description="False measures what it is worth.")
    soft_skip: float | None = Field(None, description="Mass self-conditioning may leave out.")
    soft_top_k: int | None = Field(None, description="Likeliest tokens that it goes by; all.")
    max_thinking_tokens: int | None = Field(None, ge=0, description="Then the answer begins.")
    retry_empty: bool | None = Field(None, description="Draw an empty answer again (true).")
    timeout: float | None = Field(
        None, gt=0, le=MOST_SECONDS, description="Seconds until the request fails."
    )
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_drafts: bool | None = Field(None, description="Send draft and settled frames too.")


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for what fits")
    return value


MaxTokens = Annotated[
    int | None,
    Field(ge=-1, le=MOST_TOKENS),
    AfterValidator(_not_zero),
    WithJsonSchema(described.MAX_TOKENS),
]
Messages = Annotated[Objects, WithJsonSchema(described.MESSAGES)]
Tools = Annotated[Objects | None, WithJsonSchema(described.TOOLS)]
Continue = Annotated[
    bool | None,
    Field(description="Continue the last message, an assistant's; null: where it is one."),
]
AddPrompt = Annotated[
    bool | None, Field(description="False: only where the last message is continued.")
]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send usage in a chunk of its own.")
    include_obfuscation: Ignored = None
    continuous_usage_stats: AtTheEnd = None


class TemplateKwargs(Body):
    enable_thinking: bool | None = Field(None, description="Let the model think first.")


class Generation(Sampling):
    """What chat and text completions share."""

    model: Annotated[str | None, Field(description="Ignored: one model is loaded.")] = None
    max_tokens: MaxTokens = Field(None, description="Visible tokens at most; -1: what fits.")
    n: int | None = Field(None, ge=1, description="Replies; the i-th has the seed plus i.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Told in the audit log.")


class ChatBody(Generation):
    messages: Messages = Field(min_length=1)
    add_generation_prompt: AddPrompt = None
    continue_final_message: Continue = None
    max_completion_tokens: MaxTokens = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Of the step that settled each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: Tools = None
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(described.TOOL_CHOICE)] = (
        Field(
            None,
            description='none, auto, required, or {"type": "function", "function": {"name": …}}.',
        )
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    reasoning_effort: Annotated[str | None, WithJsonSchema(described.EFFORT)] = Field(
        None, description="none and minimal: no thinking; low, medium, high, xhigh, max: thinking."
    )
    chat_template_kwargs: TemplateKwargs | None = None
    response_format: Annotated[
        Any, Only({"type": "text"}, why="JSON output by schema is not supported yet; ask for text")
    ] = None
    audio: Annotated[Any, Only(why="audio is not supported")] = None
    modalities: Annotated[Any, Only(["text"], why="only text is supported")] = None
    functions: Annotated[Any, NoFunctions] = None
    function_call: Annotated[Any, NoFunctions] = None
    store: Annotated[Any, Only(False, why="nothing is stored here")] = None
    web_search_options: Annotated[Any, Only(why="there is no web search here")] = None
    moderation: Annotated[Any, Only(why="there is no moderation here")] = None
    verbosity: Annotated[
        Any, Only("medium", why="cannot be set; say in a message how long the answer should be")
    ] = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None


class CompletionBody(Generation):
    prompt: Annotated[
        str | Texts | Ids | Annotated[list[Ids], First], WithJsonSchema(described.PROMPTS)
    ]
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES, description="Alternatives.")
    echo: Annotated[Any, Only(False, why="is not supported; the prompt is known to the client")] = (
        None
    )
    suffix: Annotated[Any, Only("", why="filling in before a suffix is not supported yet")] = None


class LlamaBody(Sampling):
    """llama-server's own completion. What it has and we have not is refused unless neutral."""

    prompt: Annotated[str | Ids, WithJsonSchema(described.PROMPT)]
    n_predict: MaxTokens = Field(None, description="Tokens at most; -1: what fits.")
    id_slot: Ignored = None
    n_keep: Ignored = None
    typical_p: Annotated[Any, Only(1, why="is not supported; use top_p")] = None
    repeat_penalty: Annotated[Any, Only(1, why="penalties are not supported")] = None
    repeat_last_n: Ignored = None
    mirostat: Annotated[Any, Only(0, why="is not supported")] = None
    grammar: Annotated[Any, Only("", why="grammars are not supported")] = None
    json_schema: Annotated[Any, Only({}, why="JSON schemas are not supported yet")] = None
    n_probs: Annotated[Any, Only(0, why="use /v1/completions with logprobs")] = None


class TokenizeBody(Body):
    """llama-server's, with a content, or vLLM's, with a prompt."""

    content: str | None = None
    prompt: str | None = Field(None, description="The same as content.")
    add_special: bool | None = Field(None, description="Put bos in front (false).")
    add_special_tokens: bool | None = Field(None, description="The same as add_special.")
    parse_special: bool | None = Field(None, description="Read markers as their tokens (true).")
    with_pieces: bool | None = Field(None, description="Answer objects with id and piece (false).")
    model: Ignored = None


class DetokenizeBody(Body):
    tokens: Annotated[Ids, WithJsonSchema(described.IDS)]
    model: Ignored = None


class TemplateBody(Body):
    messages: Messages = Field(min_length=1)
    tools: Tools = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="Open the model's turn (true).")
    continue_final_message: Continue = None
