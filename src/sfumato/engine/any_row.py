"""What all rows have: a request's place in the queue, its slot, and the prefix that goes into it.

What follows once the slot holds the prefix is the kind's: a reply (row.py) or a decision
(decision_row.py). Knows no batches and no threads.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sfumato.engine.events import Account
from sfumato.engine.handle import AnyHandle
from sfumato.engine.request import AnyRequest, Prompt
from sfumato.engine.slots import CacheKey, Lease
from sfumato.engine.stats import Phase, RowState

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.model.network import Network


class AnyRow:
    """A request from submission to its terminal event. Times are readings of the engine's clock."""

    def __init__(
        self,
        request: AnyRequest,
        handle: AnyHandle,
        prompt: Prompt,
        need: int,
        holds: tuple[str, str | None],
        submitted: float,
        limit_s: float | None,
    ) -> None:
        """need: cache positions; holds: family and adapter of what the slot holds."""
        self.request, self.handle, self.limit_s = request, handle, limit_s
        self.prompt, self.need, self._holds = prompt, need, holds
        self.submitted = submitted
        self.first_in_queue: float | None = None
        self.admitted: float | None = None
        self.leader: AnyRow | None = None  # whose encoding this one waits for, in the queue
        self.shared = 0  # tokens that both prompts begin with
        self.lease: Lease | None = None
        self.cached = 0  # tokens of the prompt that the slot held already
        self.prefix = array("i", prompt.ids)  # all that comes before the canvas
        self.encoded = 0  # how much of it the slot holds
        self.encodes_alone = False  # after its encoding failed together with others

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def cache_key(self) -> CacheKey:
        """What a slot must hold for this row to reuse it."""
        return CacheKey(*self._holds, self.prefix, media=())

    @property
    def pending(self) -> int:
        """Tokens to encode before the next canvas can be denoised."""
        return len(self.prefix) - self.encoded

    @property
    def phase(self) -> Phase:
        raise NotImplementedError

    def leased(self, lease: Lease, now: float) -> None:
        """Takes a slot, which may hold a part of the prefix already."""
        if self.admitted is None:
            self.admitted, self.cached = now, lease.cached
        self.lease, self.encoded = lease, lease.cached

    def took(self, tokens: int) -> None:
        """Tokens of the prefix have been encoded."""
        self.encoded += tokens
        self.encodes_alone = self.encodes_alone and self.pending > 0

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states of what is encoded are wanted; `take_hidden` gets them."""
        return False

    def take_hidden(self, network: Network, start: int, hidden: Tensor) -> None:
        """Takes those of the prefix's positions from `start` on, [n, hidden]."""
        raise NotImplementedError

    def waited(self, seconds: float) -> None:
        """A step's encode work took so long, some of this row's in it."""
        raise NotImplementedError

    def waits_s(self, now: float) -> tuple[float, float]:
        """Seconds from submission to a slot, and the part of these as the first in the queue."""
        began = now if self.admitted is None else self.admitted
        first = began if self.first_in_queue is None else self.first_in_queue
        return began - self.submitted, began - first

    def state(self, now: float) -> RowState:
        """What others see of it, from any thread."""
        raise NotImplementedError

    def account_at(self, now: float) -> Account:
        raise NotImplementedError
