"""The scores of given tokens and the mass of all: what a decision asks of the vocabulary.

The pass over the vocabulary leaves out the draw and the soft embedding, and so the second product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.triton.head import vocabulary_head
from sfumato.ops.triton.listed import own_scores
from sfumato.ops.triton.operands import multiplied
from sfumato.ops.triton.self_test import KernelTwin, assert_close, check, random_like, sizes_for
from sfumato.ops.triton.workspaces import CHUNK


def vocabulary_mass(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float, chunk: int, packed: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.vocabulary_mass`. Both products are summed in float32 and not rounded, so that the
    mass of all tokens is 1."""
    ones = torch.ones(len(hidden), device=hidden.device)
    out = vocabulary_head(hidden, weight, ones, ones.double(), softcap, masses=False)
    scores = own_scores(hidden.float(), weight, ids)
    return (scores / softcap).tanh() * softcap, out.peak, out.total, out.argmax


def _serves(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float, chunk: int, packed: object
) -> bool:
    return packed is None and weight.is_contiguous() and multiplied(hidden, weight)


def _check(device: torch.device) -> None:
    """The right numbers by float64."""
    for vocab in sizes_for(device, [200], [CHUNK + 200]):
        _check_vocabulary(vocab, device)


def _check_vocabulary(vocab: int, device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden, weight = random_like(device, dtype, (2, 72), (vocab, 72))
    ids = torch.tensor([[3, 199], [64, 0]], device=device)
    scores, peak, total, argmax = vocabulary_mass(hidden, weight, ids, 30.0, 0, None)
    expected = (hidden.double() @ weight.double().T / 30).tanh() * 30
    is_argmax = torch.equal(argmax, expected.argmax(dim=1))
    check(is_argmax, "another token is the most probable")
    assert_close(scores, expected.gather(1, ids), 1e-4)
    assert_close(peak + total.log(), expected.logsumexp(dim=1), 1e-4)


TWINS = {"vocabulary_mass": KernelTwin("vocabulary_mass", vocabulary_mass, _serves, _check)}
