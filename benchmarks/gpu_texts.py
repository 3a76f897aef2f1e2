"""The embedded trained model on a device against the same model on the CPU: the same texts?

For `gpu_first.py`.  Both denoise side by side, from the same noise.  A text may go apart where a
number of the CPU lies within the stated error of an edge: a uniform next to an edge of the
distribution's CDF, two tokens of like probability, an entropy next to the bound of the sampler or
of the stopping rule.  Anything else is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.support.soft_of import soft_of
from torch import Tensor

import sfumato
from sfumato import Model
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import EntropyBound, StableAndConfident
from sfumato.diffusion.step import Denoiser
from sfumato.model.cache import Slot

PROMPTS = (
    "What is the capital of France?",
    "Who are you?",
    "Name a color.",
    "What is 3 + 4?",
    "the sea and its ships",
    "Hello!",
)
CANVASES = 2  # of a text at most
ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Of probabilities, and of entropies in nats, what both may differ by after a few steps, each of
which passes its own on in the soft embedding. On a CPU, bfloat16 was up to 0.11 from float32."""


class Side:
    """One of the two."""

    model: Model
    canvas: Canvas
    slot: Slot
    denoiser: Denoiser

    def __init__(self, model: Model) -> None:
        self.model = model

    def begin(self, ids: Sequence[int]) -> None:
        network = self.model.network
        self.slot = network.new_slot(len(ids) + CANVASES * network.config.canvas_length)
        self.denoiser = Denoiser(network, 1)
        self.commit(ids)

    def commit(self, ids: Sequence[int]) -> None:
        self.model.network.encode([torch.tensor(ids)], [self.slot])

    def open(self, seed: int, number: int) -> None:
        network, noise = self.model.network, Noise(seed, number)
        config = replace(self.model.sampler_defaults, canvas_length=network.config.canvas_length)
        self.canvas = Canvas(config, noise, network.config.vocab_size, network.device)

    def step(self) -> tuple[Draft, list[int], bool]:
        """The draft, the tokens that the next step reads, and whether the canvas has settled."""
        (draft,) = self.denoiser.step([self.canvas], [self.slot])
        return draft, self.canvas.tokens.tolist(), self.canvas.done


def compare_texts(
    device: str, dtype: torch.dtype, prompts: Sequence[str] = PROMPTS
) -> dict[str, Any]:
    """How many texts are the same; of each that is not, the step and why."""
    name = str(dtype).removeprefix("torch.")
    sides = [Side(sfumato.load(device=each, dtype=name)) for each in ("cpu", device)]
    same, apart = 0, []
    for seed, prompt in enumerate(prompts):
        difference = _first_difference(*sides, prompt, seed)
        if difference is None:
            same += 1
        else:
            apart.append({"prompt": prompt, "seed": seed, **difference})
    return {
        "dtype": name,
        "texts": len(prompts),
        "same": same,
        "error": ERROR[dtype],
        "apart": apart,
        "wrong": sum(each["distance"] > ERROR[dtype] for each in apart),
    }


def _first_difference(ours: Side, other: Side, prompt: str, seed: int) -> dict[str, Any] | None:
    """Where a text on the other side goes apart, and how far from an edge that is."""
    ids = ours.model.prompt_ids(messages=[{"role": "user", "content": prompt}])
    for side in (ours, other):
        side.begin(ids)
    for number in range(CANVASES):
        for side in (ours, other):
            side.open(seed, number)
        settled = False
        while not settled:
            before = Before.of(ours.canvas)
            (draft, tokens, settled), (theirs, their_tokens, their_end) = ours.step(), other.step()
            same = all(map(torch.equal, _visible(draft), _visible(theirs)))
            if same and (tokens, settled) == (their_tokens, their_end):
                continue
            distance, edge = _distance(ours, before, (draft, tokens), (theirs, their_tokens))
            return {"canvas": number, "step": draft.step, "edge": edge, "distance": distance}
        ids = draft.token_ids.tolist()
        if set(ids) & set(ours.model.end_ids):
            return None
        for side in (ours, other):
            side.commit(ids)
    return None


@dataclass(frozen=True)
class Before:
    """What a step begins with on the CPU."""

    tokens: Tensor
    soft: Tensor | None
    temperature: float
    uniforms: Tensor

    @classmethod
    def of(cls, canvas: Canvas) -> Before:
        return cls(
            canvas.tokens,
            soft_of(canvas) if canvas.step else None,
            canvas.temperature(),
            canvas.uniforms(),
        )


def _distance(
    side: Side,
    before: Before,
    ours: tuple[Draft, list[int]],
    theirs: tuple[Draft, list[int]],
) -> tuple[float, str]:
    """Of all that differs the largest distance from its edge on the CPU, and the edge's name. A
    position that follows from another one counts with it."""
    (draft, tokens), (other, other_tokens) = ours, theirs
    config, network = side.canvas.config, side.model.network
    hidden = network.denoise([before.tokens], [side.slot], [before.soft])
    masses = (network.head.logits(hidden).double() / before.temperature).softmax(dim=1)
    distances: list[tuple[float, str]] = []
    if differ := _places(draft.token_ids.tolist(), other.token_ids.tolist()):
        first, second = masses[differ].topk(2, dim=1).values.unbind(1)
        distances.append((float((first - second).max()), "two tokens of like probability"))
    if differ := _places(draft.accepted.tolist(), other.accepted.tolist()):
        # The first of them, by entropy; those after it follow from it.
        assert isinstance(config.sampler, EntropyBound)
        ascending, order = draft.entropy.sort(stable=True)
        room = (ascending.cumsum(0) - ascending - config.sampler.bound).abs()
        places = [order.tolist().index(place) for place in differ]
        distances.append((float(room[places].min()), "the bound of the sampler"))
    both = (draft.accepted & other.accepted).tolist()
    if differ := [place for place in _places(tokens, other_tokens) if both[place]]:
        uniform = before.uniforms[differ]
        ends = masses[differ].cumsum(dim=1)
        edges = (ends / ends[:, -1:] - uniform[:, None]).abs().amin(dim=1)
        distances.append((float(edges.max()), "an edge of the CDF"))
    neither = (~(draft.accepted | other.accepted)).tolist()
    if any(neither[place] for place in _places(tokens, other_tokens)):
        distances.append((math.inf, "none: the noise differs"))
    if not distances:  # one has settled
        assert isinstance(config.stopping, StableAndConfident)
        room = (draft.entropy.mean() - config.stopping.confidence).abs()
        distances.append((float(room), "the confidence at which a canvas settles"))
    return max(distances)


def _visible(draft: Draft) -> tuple[Tensor, Tensor]:
    return draft.token_ids, draft.accepted


def _places(a: Sequence[Any], b: Sequence[Any]) -> list[int]:
    return [place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
