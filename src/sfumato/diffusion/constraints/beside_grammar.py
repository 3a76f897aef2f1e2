"""What does not go together with a grammar, which alone says what a reply holds."""

from __future__ import annotations

from sfumato.diffusion.sampler_config import SamplerConfig


def check_beside_grammar(sampler: SamplerConfig | None, **given: object) -> None:
    """Raises ValueError, naming the field, where one of the given values asks for something, or a
    setting of the sampler does."""
    if sampler is not None:
        if sampler.mode == "causal":
            raise ValueError(
                "mode: a schema or grammar is held on canvases, and not in the mode causal; leave "
                "one of them out"
            )
        given |= {"ignore_eos": sampler.ignore_eos, "named_tokens": sampler.named_tokens}
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{name}: does not go together with a schema or grammar, which alone says what "
                "the reply holds and where it ends; leave one of them out"
            )


def goes_with_grammar(sampler: SamplerConfig | None, **given: object) -> bool:
    """Whether `check_beside_grammar` lets all of it pass."""
    try:
        check_beside_grammar(sampler, **given)
    except ValueError:
        return False
    return True
