"""Adapters: low-rank changes of a network's weights, of which several serve beside each other.

An adapter is attached to a network under a number; 0 is the network without one. Which adapter
changes a token is said by the slot of its row, so that rows of different adapters share a forward:
the product with the weight is one for all tokens, and each adapter adds its own to the tokens of
its rows. A row's bits do not depend on the others'. Knows no files: `model/adapter_files.py`
reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.devices import to_device

NONE = 0
"""The number of no adapter."""


class Adapted(NamedTuple):
    """The tokens of a forward that one adapter changes."""

    number: int
    tokens: Tensor | None = None  # bool [tokens, 1]; None: all of them


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight [out, in], or to each of those of experts, stacked:
    `up @ down · scale` (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

    down: Tensor  # [rank, in], or [experts, rank, in]
    up: Tensor  # [out, rank], or [experts, out, rank]
    scale: float

    def added(
        self, y: Tensor, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = ops.linear
    ) -> Tensor:
        """y [..., out], the product of x [..., in] with the weight, with the change, in the dtype
        of y; product: of rows with a matrix, or of the rows of experts with theirs."""
        low = product(x.to(self.down.dtype), self.down)
        return y + (product(low, self.up) * self.scale).to(y.dtype)

    def change(self) -> Tensor:
        """The change itself: float32 [out, in], or [experts, out, in]."""
        return self.up.float() @ self.down.float() * self.scale

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype), self.scale)


Adapter = Mapping[str, LowRank]
"""The changes of an adapter, by the canonical paths of the modules that have the weights, such as
"layers.0.self_attn.q_proj"."""


def chosen_by(tokens: Tensor | None, changed: Tensor, other: Tensor) -> Tensor:
    """What is changed for the tokens bool [tokens, 1] (None: for all), both [..., tokens, any]."""
    return changed if tokens is None else torch.where(tokens, changed, other)


def narrowed(adapted: Sequence[Adapted], only: Tensor | None) -> tuple[Adapted, ...]:
    """What is adapted among the tokens `only`, int64 [n] (None: all)."""
    if only is None:
        return tuple(adapted)
    return tuple(
        Adapted(number, None if tokens is None else tokens.index_select(0, only))
        for number, tokens in adapted
    )


def moved(adapted: Iterable[Adapted], device: torch.device) -> tuple[Adapted, ...]:
    """The same with its tensors on a layer's device."""
    return tuple(
        Adapted(number, None if tokens is None else tokens.to(device)) for number, tokens in adapted
    )


def of_tokens(numbers: Tensor, in_use: Iterable[int]) -> tuple[Adapted, ...]:
    """What is adapted where each token has the number of its adapter, int64 [tokens]; in_use: the
    numbers that may stand there. Reads nothing on the host."""
    return tuple(Adapted(each, (numbers == each)[:, None]) for each in sorted(in_use) if each)


def of_rows(
    numbers: Sequence[int], counts: Sequence[int], device: torch.device
) -> tuple[Adapted, ...]:
    """What is adapted in packed rows of so many tokens, each with the number of its adapter."""
    in_use = set(numbers)
    if len(in_use) == 1:
        (number,) = in_use
        return (Adapted(number),) if number else ()
    each = torch.tensor(list(numbers)).repeat_interleave(torch.tensor(list(counts)))
    return of_tokens(to_device(each, device), in_use)
