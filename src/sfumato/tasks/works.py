"""The works that a task may ask of the network, and what a driver has to know of a task.

A task is a generator: it yields works and gets their results, yields events, which its driver
passes on, and returns its outcome. A task knows no queue, slot, batch, clock, device and fault. Two
drivers run every task: `sfumato.tasks.alone`, one task at a time, and the engine, many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from sfumato.diffusion.canvas import Canvas, CanvasPlan, Convergence
from sfumato.diffusion.constraints.decision_plan import Read
from sfumato.model.model_config import NO_BLOCKS, Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.diffusion.constraints.constrained_reply import ConstraintReport
    from sfumato.diffusion.limits import Times
    from sfumato.media.patches import Patches
    from sfumato.model.head import VocabularyHead


MakeCanvas = Callable[[CanvasPlan], Canvas]
"""A canvas of the network that the task will be run with."""


class Want(Protocol):
    """What a task wants of the hidden states of the positions that it has encoded."""

    @property
    def least(self) -> int:
        """How many of the last positions have to be seen, from 1. No cache holds hidden states, so
        that these positions are encoded although a slot may have their keys and values."""
        ...

    def begin(self, end: int) -> None:
        """The positions come from the first one that is not cached, up to `end`. Called again where
        a driver encodes the prefix anew."""
        ...

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        """Takes the hidden states [n, hidden] of the positions from `start` on; pieces come in
        order. together: positions of a pass over the vocabulary at most."""
        ...

    def result(self) -> Any:
        """What was wanted, once all positions up to `end` were added."""
        ...


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture among ids, whose soft tokens take the place of as many of them."""

    start: int
    patches: Patches

    @property
    def end(self) -> int:
        return self.start + self.patches.soft_tokens


@dataclass(frozen=True, eq=False)
class Encode:
    """Appends tokens to the prefix. The result: that of `want`, or None."""

    ids: Sequence[int]
    want: Want | None = None
    pictures: Sequence[PlacedPicture] = ()  # in order, within `ids`


@dataclass(frozen=True, eq=False)
class Draw:
    """Draws the token of a canvas of one position, by the head alone. The result: a `Draft`.

    state: [1, hidden], which an `Encode` gave, of the token before it."""

    state: Tensor
    canvas: Canvas


@dataclass(frozen=True, eq=False)
class Denoise:
    """One step of canvases behind the prefix. The result: a `Draft` of each, in their order.

    A canvas that is yielded again goes on. ahead: whether the driver may launch the next step
    before the task has seen this one; what the task does not go on with is dropped."""

    canvases: tuple[Canvas, ...]
    ahead: bool = True


@dataclass(frozen=True, eq=False)
class Likelihood:
    """The log-likelihood of ids[first:] behind the prefix and ids[:first], as the causal mode has
    it, or, where there is none, canvases of masks behind each token. The result: a float, in
    nats."""

    ids: Sequence[int]
    first: int


@dataclass(frozen=True, eq=False)
class Rank:
    """How the causal mode ranks ids behind the prefix. The result: the `TokenScores` of each id, on
    the host, with ranks.

    state: [1, hidden], which an `Encode` gave, of the token before them."""

    ids: Sequence[int]
    state: Tensor


@dataclass(frozen=True, eq=False)
class Score:
    """Scores behind the prefix, which stays as it is. The result: that of each item, in order."""

    items: tuple[Read | Likelihood | Rank, ...]


Work = Encode | Draw | Denoise | Score


@dataclass(frozen=True)
class Prompt:
    """What a prompt comes to."""

    ids: list[int]
    marks: tuple[int, ...]  # lengths of it that later ones are likely to share
    pictures: tuple[PlacedPicture, ...] = ()
    origin: Prompt | None = field(default=None, compare=False)  # of which it is the beginning
    notes: tuple[str, ...] = ()  # of how its messages were read, for the reply's warnings

    def followed_by(self, ids: Sequence[int]) -> Prompt:
        """The prompt with more tokens at its end."""
        return replace(self, ids=[*self.ids, *ids])

    def opened(self, blocks: Blocks) -> tuple[Prompt, list[int]]:
        """The prompt up to where its last whole block ends, which is encoded, and the tokens behind
        it, with which its first canvas begins."""
        end = blocks.border(len(self.ids))
        if end == len(self.ids):
            return self, []
        return replace(self, ids=self.ids[:end], origin=self), self.ids[end:]


def prompt_work(prompt: Prompt, want: Want | None = None) -> Encode:
    """The work that encodes a prompt."""
    return Encode(prompt.ids, want, prompt.pictures)


@dataclass(frozen=True)
class Claim:
    """What a task needs of a driver. Fixed before its first work, an `Encode` of the prompt."""

    prompt: Prompt
    positions: int  # of the cache, the prompt's with them
    family: str = ""  # of networks; with the adapter and the tokens, decides what a slot holds
    fresh: int = 0  # of the prompt's last tokens, that have to be encoded although a slot has them
    opened: int = 0  # tokens of the prompt behind its last whole block, which canvases begin with
    beside: int = 0  # tokens of the longest question that is scored behind the prefix
    blocks: Blocks = NO_BLOCKS  # of the prefix, which ends with one at each work but an `Encode`


@dataclass(frozen=True)
class Figures:
    """How far a task has come. Tasks replace it whole, so that any thread may read it."""

    seed: int = 0
    requested_tokens: int = 0
    canvas: int = 0  # under way: 0, 1, …
    step: int = 0  # of it, 1, 2, …
    max_steps: int = 0
    output_tokens: int = 0  # settled
    thought_tokens: int = 0  # of these
    canvas_tokens: int = 0  # positions of settled canvases, those drawn again included
    steps: tuple[int, ...] = ()  # denoising forwards of each canvas
    convergence: tuple[Convergence, ...] = ()
    retries: int = 0  # canvases drawn again
    question_tokens: int = 0  # encoded beside the prefix
    questions: int | None = None  # None: the task asks none
    accepted_prediction: int | None = None  # tokens; None: there was no prediction
    rejected_prediction: int | None = None
    constraint: ConstraintReport | None = field(default=None, compare=False)


class Unfinished(Exception):
    """A task that was ended has nothing to give as it stands. The message is for its caller."""


class Task(Protocol):
    """One request, whatever its kind."""

    claim: Claim
    figures: Figures

    @property
    def stats(self) -> Times | None:
        """Statistics of its outcome, if it has any, in which the driver writes the times."""
        ...

    def run(self) -> Generator[Any, Any, Any]:
        """Yields works and gets their results; yields events; returns the outcome. Called once."""
        ...

    def stopped(self) -> Any:
        """The outcome as it stands, where the task is ended before its end; in the queue too.
        Raises Unfinished where there is none."""
        ...
