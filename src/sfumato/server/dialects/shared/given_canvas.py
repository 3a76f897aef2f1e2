"""vLLM's fields for a canvas that the client gives, as fields of a `Request`.

A read is one canvas at temperature 1, whose steps all run and whose end tokens count for nothing;
what would change its probabilities is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sfumato.diffusion.given_canvas import GivenCanvas
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.schedule import LinearTemperature
from sfumato.diffusion.stopping import Never
from sfumato.engine import Request
from sfumato.options import exclusions
from sfumato.refused import Refused
from sfumato.server.schemas.generation import Generation
from sfumato.server.schemas.vllm import VllmXargs
from sfumato.server.service import Service

_CHANGES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False, True),
    "stop": ("", []),
    "t_min": (),
    "t_max": (),
    "stability": (),
    "confidence": (),
    "settle_at_end": (False,),
}
"""Fields that a read has no use of, and their values that ask for nothing."""
_NAMES = {
    "tokens": "vllm_xargs.diffusion_seed_canvas",
    "pinned": "vllm_xargs.diffusion_pinned",
}


def canvas_fields(
    body: Generation, service: Service, sampler: SamplerConfig, has_logprobs: bool
) -> dict[str, Any]:
    """The fields `sampler` and `canvas` of a Request. sampler: of the body's other fields. Raises
    Refused."""
    xargs = body.vllm_xargs or VllmXargs.model_validate({})
    named = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    is_read = bool(xargs.diffusion_read_only)
    given: dict[str, object] = {
        "mode=causal": sampler.mode == "causal",
        "vllm_xargs": xargs.model_fields_set,
        "diffusion_read_only": is_read,
    }
    for field, neutral in _CHANGES.items():
        value = getattr(body, field)
        given[field] = value is not None and value not in neutral
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
    if not is_read and seeds is None and not xargs.diffusion_pinned:
        return {"sampler": sampler, "canvas": None}
    canvas = GivenCanvas(
        None if seeds is None else tuple(seeds), tuple(xargs.diffusion_pinned or ()), is_read
    )
    try:
        canvas.check(length, service.model.config.vocab_size)
    except Refused as error:
        raise error.renamed(_NAMES) from None
    return {"sampler": sampler, "canvas": canvas}


def reads(request: Request) -> bool:
    """Whether a canvas is read and no reply written."""
    return request.canvas is not None and request.canvas.read_only


def longest(request: Request, length: int, service: Service) -> int:
    """Tokens of a reply at most, `length` being what its body asks for: a read is one canvas."""
    if not reads(request):
        return length
    assert request.sampler
    return min(length, request.sampler.canvas_length or service.model.config.canvas_length)


def names(body: Generation) -> int:
    """Tokens beside the most probable ones that the log probabilities name at each position."""
    return len(body.logprob_token_ids or ())


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
