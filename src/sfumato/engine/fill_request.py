"""A request for a text with holes, as the engine prepares it before it waits in the queue."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from sfumato.api import Model
from sfumato.diffusion.constraints.fill_plan import FillPlan
from sfumato.engine.request import Prompt, Request, check_length, check_request, make_prompt
from sfumato.engine.snapshot_points import SnapshotPoints

_OTHERS = (
    "tools",
    "opening",
    "continued",
    "canvas",
    "prediction",
    "scoring",
    "pooling",
    "grammar",
)


@dataclass(frozen=True)
class PreparedFill:
    """A fill that can be done."""

    plan: FillPlan
    family: str  # with the tokens, decides what a slot holds

    @property
    def prompt(self) -> Prompt:
        """All that comes before the canvas; later fills are likely to share most of it."""
        prefix = self.plan.template.prefix
        return Prompt(prefix, (len(prefix),))


def prepare_fill(
    model: Model, request: Request, longest: int, points: SnapshotPoints, most_steps: int
) -> PreparedFill:
    """As `sfumato.engine.request.prepare`, of a request that has parts."""
    check_request(request, most_steps)
    for name in _OTHERS:
        if getattr(request, name) is not None:
            raise ValueError(f"{name}, parts: give at most one of them; a fill has no {name}")
    if request.thinking:
        raise ValueError("thinking, parts: a text with holes is filled without a thought")
    assert request.parts is not None
    prompt = (request.made or make_prompt(model, request, longest, points)).ids
    is_reply = request.ids is None
    if is_reply:
        prompt = [*prompt, *model.fills.empty_thought]
    sampler = request.sampler
    if sampler is not None:  # of a reply's own end, which a fill has not
        sampler = replace(sampler, min_tokens=0, ignore_eos=False, settle_at_end=False)
    plan = model.fills.plan(
        prompt,
        request.parts,
        is_reply=is_reply,
        seed=secrets.randbits(53) if request.seed is None else request.seed,
        sampler=sampler,
        most_steps=most_steps,
        check=lambda text, field: check_length(model, text, longest, field),
    )
    return PreparedFill(plan, model.family.name)
