"""What tasks want of hidden states: the last one, the scores of the next token, a vector of them
all, the scores of a prompt's own tokens, those of a canvas that is committed. Each is gathered
while the prefix is encoded, chunk by chunk. Knows no slots and no threads.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.causal import check_finite, with_following
from sfumato.diffusion.checks import check_setting
from sfumato.diffusion.limits import Stats
from sfumato.model.head import VocabularyHead
from sfumato.model.model_config import NO_BLOCKS, Blocks
from sfumato.model.scores import TokenScores, token_scores
from sfumato.options.settings import POOLINGS
from sfumato.refused import Refused
from sfumato.tasks.works import Claim, Figures, Prompt, Want, prompt_work


class LastState:
    """The hidden state [1, hidden] of the last position."""

    least = 1

    def begin(self, end: int) -> None:
        self._end, self._state = end, None  # type: tuple[int, Tensor | None]

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        if start + len(hidden) == self._end:
            self._state = hidden[-1:].clone()  # the memory of the others is given back

    def result(self) -> Tensor:
        assert self._state is not None
        return self._state


class NextScores(LastState):
    """The softcapped scores float32 [vocabulary] of the token that follows the last position, on
    the host. Raises FloatingPointError where they are no numbers."""

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        if start + len(hidden) == self._end:
            # One row: a product of several positions rounds otherwise than one of each.
            self._state = head.logits(hidden[-1:])[0].cpu()
            check_finite(self._state)


class Together:
    """Several wants of the same positions. The result: a list of theirs."""

    def __init__(self, *wants: Want) -> None:
        self._wants = wants

    @property
    def least(self) -> int:
        return max(want.least for want in self._wants)

    def begin(self, end: int) -> None:
        for want in self._wants:
            want.begin(end)

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        for want in self._wants:
            want.add(head, start, hidden, together)

    def result(self) -> list[Any]:
        return [want.result() for want in self._wants]


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a prompt, after the final norm, become one vector. Raises ValueError
    for another word."""

    kind: str = "mean"  # of POOLINGS

    def __post_init__(self) -> None:
        if self.kind not in POOLINGS:
            words = " or ".join(map(repr, POOLINGS))
            raise Refused("pooling", f"must be {words}, got {self.kind!r}")


class PooledState:
    """The hidden states of a prompt as one vector float32 [hidden] of length 1, on the host. Raises
    FloatingPointError where it is of no numbers."""

    def __init__(self, pooling: Pooling, tokens: int) -> None:
        """tokens: of the prompt."""
        self._kind, self._tokens = pooling.kind, tokens
        self._sum: Tensor | None = None  # float32 [hidden], on the network's device

    @property
    def least(self) -> int:
        return self._tokens if self._kind == "mean" else 1

    def begin(self, end: int) -> None:
        self._sum = None

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        if self._kind == "mean":
            part = hidden.sum(dim=0, dtype=torch.float32)
            self._sum = part if self._sum is None else self._sum + part
        elif start + len(hidden) == self._tokens:
            self._sum = hidden[-1].float()

    def result(self) -> Tensor:
        assert self._sum is not None
        vector = self._sum.cpu()
        if not vector.isfinite().all():
            raise FloatingPointError("the hidden states of the prompt are no finite numbers")
        # The mean's divisor is part of its length.
        return torch.nn.functional.normalize(vector, dim=0)


@dataclass(frozen=True)
class PromptScoring:
    """What is wanted of each token of a prompt, beside its log probability. Raises ValueError for
    more tokens than there may be."""

    top: int = 0  # most probable tokens
    ranks: bool = False  # the token's own rank, which takes a second pass over the vocabulary

    def __post_init__(self) -> None:
        check_setting("top_tokens", self.top, "top")


@dataclass(frozen=True)
class PromptScores:
    """The tokens of a prompt, and the scores of all but the first, which nothing comes before."""

    ids: Sequence[int]
    scores: TokenScores | None  # of ids[1:], on the host; None where these are none


class _Following:
    """The scores of ids while they are encoded: of each, behind those before it. Raises
    FloatingPointError where they are no numbers."""

    def __init__(
        self, ids: Sequence[int], scoring: PromptScoring, state: Tensor | None = None
    ) -> None:
        """state: [1, hidden], of the token before the ids; None: the first is not scored."""
        self._ids, self._scoring, self._before = ids, scoring, state
        self._tokens = torch.tensor(ids, dtype=torch.int64)
        self.least = len(ids)

    def begin(self, end: int) -> None:
        self._start, self._state = end - len(self._ids), self._before
        self._parts: list[TokenScores] = []

    def add(self, head: VocabularyHead, start: int, hidden: Tensor, together: int) -> None:
        at = start - self._start
        if at < 0:  # a prefix that is encoded anew
            hidden, at = hidden[-at:], 0
        if not len(hidden):
            return
        state = None if at else self._before
        before, following = with_following(self._tokens, at, hidden, state)
        if len(following):
            following, top = following.to(hidden.device), self._scoring.top
            scores = token_scores(head, before, following, top, self._scoring.ranks, together)
            check_finite(scores.log_probs)
            self._parts.append(scores.to("cpu"))
        self._state = hidden[-1:].clone()


class TokenScoring(_Following):
    """The `PromptScores` of a prompt."""

    def result(self) -> PromptScores:
        return PromptScores(self._ids, TokenScores.joined(self._parts) if self._parts else None)


class Ranks(_Following):
    """The `TokenScores` of ids, on the host, with ranks, and the hidden state [1, hidden] of the
    last of them."""

    def __init__(self, ids: Sequence[int], state: Tensor) -> None:
        super().__init__(ids, PromptScoring(ranks=True), state)

    def result(self) -> tuple[TokenScores, Tensor]:
        assert self._state is not None
        return TokenScores.joined(self._parts), self._state


class EmbedTask:
    """The outcome: what is wanted of the prompt's hidden states; None where it was stopped."""

    def __init__(
        self,
        prompt: Prompt,
        want: Want,
        family: str = "",
        seed: int = 0,
        blocks: Blocks = NO_BLOCKS,
    ) -> None:
        self._want = want
        self.claim = Claim(prompt, len(prompt.ids), family, fresh=want.least, blocks=blocks)
        self.figures = Figures(seed)
        self.stats = Stats(prompt_tokens=len(prompt.ids))

    def run(self) -> Generator[Any, Any, Any]:
        return (yield prompt_work(self.claim.prompt, self._want))

    def stopped(self) -> None:
        return None
