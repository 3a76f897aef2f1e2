"""Random vocabulary heads, and an eye on the size of the tensors that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.model.head import Adjust, VocabularyHead

CAP = 30.0


def random_head(vocab: int, hidden: int, chunk: int, spread: float = 1.0, seed: int = 0):
    """A head and a source of randomness; spread is about the deviation of the raw scores."""
    random = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, hidden, generator=random) * spread * hidden**-0.5
    return VocabularyHead(embedding, CAP, chunk), random


def ban(*tokens: int) -> Adjust:
    """Bans tokens, with -inf as processors do."""

    def adjust(scores: Tensor, start: int) -> Tensor:
        ids = torch.arange(start, start + scores.shape[1])
        return scores.masked_fill(torch.isin(ids, torch.tensor(tokens)), -torch.inf)

    return adjust


class Largest(TorchDispatchMode):
    """Records the most numbers in any tensor that an operation gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    with Largest() as mode:
        yield mode
