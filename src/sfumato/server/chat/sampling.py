"""How replies are drawn: the sampling fields of every body as fields of a `Request`.

Settings, seeds, stop strings and grammars; and vLLM's fields for a canvas that the client gives. A
read is
one canvas at temperature 1, whose steps all run and whose end tokens count for nothing; what would
change its probabilities is refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.constraints.grammar import (
    GrammarSource,
    Kind,
    choice_source,
    schema_source,
)
from sfumato.diffusion.sampler import (
    LinearTemperature,
    LogitBias,
    Never,
    StableAndConfident,
)
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Request, ServedModel
from sfumato.options import exclusions
from sfumato.options.limits import LONGEST_STOP, MOST_BIASES, MOST_STOPS
from sfumato.refused import Refused
from sfumato.server.schemas import Body, Generation, ResponseFormat, Sampling, VllmXargs
from sfumato.server.service import Service

G = TypeVar("G", bound=Generation)
_DEFAULT = "checkpoint's default"

# Tokens of one answer, alternatives included: about 400 bytes each until they are encoded. 128
# replies of 4,096 tokens pass, and one of 32,768 with 20 alternatives.
MOST_ENTRIES = 2**20
_LEAST_SHARE = 1e-6  # top_p 0 means the most probable token


def request_fields(
    body: Sampling,
    model: ServedModel,
    endpoint: str,
    banned: Iterable[int] = (),
    alternatives: int | None = None,
) -> dict[str, Any]:
    """The fields of a Request that every dialect reads from a body in the same way. alternatives:
    tokens that the log probabilities name at each position. Raises Refused."""
    sampler = replace(sampler_of(body, model, banned), top_tokens=alternatives)
    # A causal reply that ends at once is what the model says.
    retry = body.retry_empty if sampler.mode == "causal" else body.retry_empty is not False
    return {
        "sampler": sampler,
        "stop": stops_of(body.stop) or None,
        "max_thinking_tokens": body.max_thinking_tokens,
        "retry_empty": bool(retry),
        "verify": body.verify,
        "drafts": bool(body.stream and body.stream_drafts),
        "timeout_s": body.timeout,
        "since": body.envelope.since,
        "endpoint": endpoint,
    }


def limited(body: G) -> G:
    """The body with llama-server's `n_predict` as its max_tokens. Raises Refused."""
    if body.n_predict is None:
        return body
    if body.max_tokens not in (None, body.n_predict):
        raise Refused(("max_tokens", "n_predict"), "differ", "send one")
    return body.model_copy(update={"max_tokens": body.n_predict})


def sampler_of(body: Sampling, model: ServedModel, banned: Iterable[int] = ()) -> SamplerConfig:
    """The sampler's settings in a body; `banned` tokens are never drawn. Raises Refused."""
    bias = _bias(body.logit_bias, model.tokenizer.vocab_size)
    bias |= dict.fromkeys(banned, float("-inf"))
    if sum(value == float("-inf") for value in bias.values()) >= model.config.vocab_size:
        raise Refused("logit_bias", "bans every token of this model")
    config = SamplerConfig(processors=(LogitBias(bias),) if bias else ()).options(
        mode=body.mode,
        max_steps=body.max_steps,
        sampler=body.sampler,
        pace=body.pace,
        entropy_bound=body.entropy_bound,
        count=body.count,
        threshold=body.threshold,
        margin=body.margin,
        temperature=body.temperature,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=_LEAST_SHARE if body.top_p == 0 else body.top_p,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        settle_at_end=body.settle_at_end,
        patience=body.patience,
        canvas_length=body.canvas_length,
        self_conditioning=body.self_conditioning,
        soft_skip=body.soft_skip,
        soft_top_k=body.soft_top_k,
    )
    return _with_rules(config, body, model.sampler_defaults)


def _with_rules(config: SamplerConfig, body: Sampling, defaults: SamplerConfig) -> SamplerConfig:
    """Sets the schedule and the stopping rule where the body has a field of either."""
    if given := _given(body, "t_min", "t_max"):
        own = defaults.schedule
        default = own if isinstance(own, LinearTemperature) else LinearTemperature()
        low, high = given.get("t_min", default.t_min), given.get("t_max", default.t_max)
        if low > high and len(given) == 1:
            is_low = "t_min" in given
            bound = f"most t_max, {high:g}" if is_low else f"least t_min, {low:g}"
            why = f"must be at {bound} by the {_DEFAULT}"
            raise Refused("t_min" if is_low else "t_max", why, f"got {low if is_low else high:g}")
        config = replace(config, schedule=LinearTemperature(low, high))
    if given := _given(body, "stability", "confidence"):
        rule = defaults.stopping
        rule = rule if isinstance(rule, StableAndConfident) else StableAndConfident()
        config = replace(config, stopping=replace(rule, **given))
    return config


def _given(body: Sampling, *names: str) -> dict[str, Any]:
    """The values of the fields that are not null, by name."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _bias(biases: Mapping[str, float] | None, vocabulary: int) -> dict[int, float]:
    biases = biases or {}
    if len(biases) > MOST_BIASES:
        raise Refused("logit_bias", f"at most {MOST_BIASES} tokens")
    bias: dict[int, float] = {}
    for key, value in biases.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
        if not 0 <= token < vocabulary:
            raise Refused(
                "logit_bias", f"{key[:40]!r} is no token id of this model (0 to {vocabulary - 1})"
            )
        if not -100 <= value <= 100:
            raise Refused("logit_bias", f"{value} is not from -100 to 100")
        bias[token] = float("-inf") if value == -100 else value
    return bias


def check_size(
    model: ServedModel, limits: Iterable[int], alternatives: int | None, *fields: str
) -> None:
    """Bounds the entries of one answer. limits: tokens of each reply; what exceeds the model's
    context is refused elsewhere. Raises Refused."""
    tokens = sum(min(limit, model.config.context_length) for limit in limits)
    entries = tokens * (1 + (alternatives or 0))
    if entries > MOST_ENTRIES:
        raise Refused(
            fields,
            f"come to {entries:,} tokens and alternatives, and one answer has at most "
            f"{MOST_ENTRIES:,}",
            "ask for less, in several requests",
        )


def seeds_of(seed: int | None, count: int) -> list[int]:
    """The seeds of `count` replies, each one more than the last; the first is random where the body
    has none.

    OpenAI's API has negative seeds too; the engine counts from 0 to 2⁶⁴-1. Random seeds have 48
    bits: a client that reads JSON numbers as floats keeps every digit.
    """
    first = secrets.randbits(48) if seed is None else seed
    return [(first + i) % 2**64 for i in range(count)]


def stops_of(stop: str | list[str] | None) -> list[str]:
    """Raises Refused."""
    stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
    if len(stops) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in stops):
        raise Refused(
            "stop", f"at most {MOST_STOPS} texts, each of at most {LONGEST_STOP} characters"
        )
    return stops


_NEUTRAL = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_tokens": (0,)}
"""Numbers that ask for nothing."""


def given_in(body: Body) -> dict[str, object]:
    """What a body asks for, as the table of exclusions names it."""
    given: dict[str, object] = {name: _asks(name, value) for name, value in body}
    if isinstance(body, Sampling):
        given |= {f"mode={body.mode}": True, "canvas": gives_canvas(body)}
        given["grammar"] = grammar_of(body) is not None
    return given


def _asks(name: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    return value not in ("", [], {}, *_NEUTRAL.get(name, ()))


_NAMES = {
    "tokens": "vllm_xargs.diffusion_seed_canvas",
    "pinned": "vllm_xargs.diffusion_pinned",
}


def canvas_fields(
    body: Sampling,
    service: Service,
    sampler: SamplerConfig,
    has_logprobs: bool,
    begins_with_call: bool,
) -> dict[str, Any]:
    """The fields `sampler` and `canvas` of a Request. sampler: of the body's other fields;
    begins_with_call: whether the reply has to. Raises Refused."""
    xargs = body.vllm_xargs or VllmXargs.model_validate({})
    named = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    is_read = bool(xargs.diffusion_read_only)
    given = given_in(body) | {
        "mode=causal": sampler.mode == "causal",
        "vllm_xargs": xargs.model_fields_set,
        "diffusion_read_only": is_read,
        "tool_choice": begins_with_call,
    }
    exclusions.check(exclusions.GIVEN_CANVAS, given)
    if is_read:
        sampler = replace(
            sampler,
            temperature=1.0,
            top_k=None,
            top_p=1.0,
            ignore_eos=False,
            processors=(),
            schedule=LinearTemperature(1.0, 1.0),
            stopping=Never(),
        )
    sampler = _with_lengths(sampler, xargs, service)
    sampler = _with_named(sampler, named, service, has_logprobs)
    length = sampler.canvas_length or service.model.config.canvas_length
    seeds = xargs.diffusion_seed_canvas
    if not gives_canvas(body):
        return {"sampler": sampler, "canvas": None}
    canvas = GivenCanvas(
        None if seeds is None else tuple(seeds), tuple(xargs.diffusion_pinned or ()), is_read
    )
    try:
        if (
            service.model.config.design.borders != "front"
        ):  # else the engine, which knows the prompt
            canvas.check(length, service.model.config.vocab_size)
    except Refused as error:
        raise error.renamed(_NAMES) from None
    return {"sampler": sampler, "canvas": canvas}


def gives_canvas(body: Sampling) -> bool:
    """Whether the client says what the first canvas begins as, or has it read."""
    xargs: VllmXargs | None = body.vllm_xargs or None
    if xargs is None:
        return False
    begins = xargs.diffusion_seed_canvas is not None or bool(xargs.diffusion_pinned)
    return begins or bool(xargs.diffusion_read_only)


def reads(request: Request) -> bool:
    """Whether a canvas is read and no reply written."""
    return request.canvas is not None and request.canvas.read_only


def longest(request: Request, length: int, service: Service) -> int:
    """Tokens of a reply at most, `length` being what its body asks for: a read is one canvas."""
    if not reads(request):
        return length
    assert request.sampler
    return min(length, request.sampler.canvas_length or service.model.config.canvas_length)


def _with_lengths(sampler: SamplerConfig, xargs: VllmXargs, service: Service) -> SamplerConfig:
    """Sets the length of the canvas and the steps. Raises Refused."""
    length, steps = xargs.diffusion_canvas_length, xargs.diffusion_max_steps
    if length is not None:
        longest = service.model.config.canvas_length
        if length > longest:
            raise _wrong("diffusion_canvas_length", f"at most {longest} here, got {length}")
        if sampler.canvas_length not in (None, length):
            raise _wrong("diffusion_canvas_length", "differs from canvas_length; send one")
        sampler = replace(sampler, canvas_length=length)
    if steps is not None:
        if sampler.max_steps not in (None, steps):
            raise _wrong("diffusion_max_steps", "differs from max_steps; send one")
        sampler = replace(sampler, max_steps=min(steps, service.engine.config.max_steps))
    return sampler


def _with_named(
    sampler: SamplerConfig, named: tuple[int, ...], service: Service, has_logprobs: bool
) -> SamplerConfig:
    """Sets the tokens whose log probabilities are wanted. Raises Refused."""
    field, vocab_size = "logprob_token_ids", service.model.config.vocab_size
    if not named:
        return sampler
    if not has_logprobs:
        raise Refused(field, "needs logprobs")
    if max(named) >= vocab_size:
        raise Refused(field, f"must lie in 0..{vocab_size - 1}, got {max(named)}")
    try:
        return replace(sampler, named_tokens=named)
    except ValueError:
        raise Refused(
            field,
            "log probabilities of chosen tokens are the model's own",
            "leave out top_k, top_p and logit_bias",
        ) from None


def _wrong(field: str, message: str) -> Refused:
    return Refused(f"vllm_xargs.{field}", message)


_OBJECT = {"type": "object"}


def grammar_of(body: Sampling, more: Iterable[GrammarSource] = ()) -> GrammarSource | None:
    """The one grammar that a body asks for; None where it asks for none. more: what a dialect's
    own fields ask for, which may raise ValueError. Raises Refused."""
    sources = [*more, *_sources(body)]
    if len(sources) > 1:
        raise Refused(tuple(source.field for source in sources), "give at most one of them")
    return sources[0] if sources else None


def _sources(body: Sampling) -> Iterator[GrammarSource]:
    """Raises ValueError."""
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    outputs = body.structured_outputs
    if outputs is not None:
        at = "structured_outputs."
        if outputs.json_object:
            yield schema_source(_OBJECT, f"{at}json_object")
        given = (outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        yield from _of_vllm(at, *given)
    given = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _of_vllm("guided_", *given)
    if body.json_schema is not None:
        yield schema_source(body.json_schema, "json_schema")
    if body.grammar:
        yield GrammarSource("grammar", body.grammar, "grammar")


def _of_format(given: ResponseFormat) -> Iterator[GrammarSource]:
    if given.type == "json_object":
        own = _OBJECT if given.schema_ is None else given.schema_
        yield schema_source(own, "response_format.schema")
    elif given.type == "json_schema":
        named = given.json_schema
        if named is None and given.schema_ is None:
            raise Refused("response_format.json_schema", "is missing", "put the schema there")
        schema = given.schema_ if named is None else named.schema_
        at = "response_format.json_schema.schema"
        yield schema_source(_OBJECT if schema is None else schema, at)


def _of_vllm(
    at: str, schema: Any, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Iterator[GrammarSource]:
    if schema is not None:
        yield schema_source(_decoded(schema, f"{at}json"), f"{at}json")
    if choice is not None:
        yield choice_source(choice, f"{at}choice")
    texts: tuple[tuple[Kind, str | None], ...] = (("regex", regex), ("grammar", grammar))
    for kind, text in texts:
        if text is not None:
            yield GrammarSource(kind, text, f"{at}{kind}")


def _decoded(schema: Any, field: str) -> Any:
    """A schema that may have come as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise Refused(field, "is no JSON schema, nor the text of one") from None
