"""The scores of given tokens and the mass of all: what a decision asks of the vocabulary.

The pass over the vocabulary leaves out the draw and the soft embedding, and so the second product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sfumato.ops.triton.head import vocabulary_head
from sfumato.ops.triton.listed import own_scores
from sfumato.ops.triton.operands import multiplied, takes_planes
from sfumato.ops.triton.planes import PlaneTensor, plane_names
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    check,
    random_like,
    random_planes,
    sizes_for,
    whole_blocks,
)
from sfumato.ops.triton.workspaces import CHUNK


def vocabulary_mass(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `vocabulary_mass`. Both products are summed in float32 and not rounded, so that the
    mass of all tokens is 1."""
    ones = torch.ones(len(hidden), device=hidden.device)
    out = vocabulary_head(hidden, weight, ones, ones.double(), softcap, masses=False)
    scores = own_scores(hidden.float(), weight, ids)
    return (scores / softcap).tanh() * softcap, out.peak, out.total, out.argmax


def _serves(
    hidden: Tensor,
    weight: Tensor | PlaneTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: object,
) -> bool:
    if isinstance(weight, PlaneTensor):
        return packed is None and takes_planes(weight) and multiplied(hidden)
    return packed is None and weight.is_contiguous() and multiplied(hidden, weight)


def _check(device: torch.device) -> None:
    """The right numbers by float64."""
    for vocab in sizes_for(device, [200], [CHUNK + 200]):
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        _check_vocabulary(*random_like(device, dtype, (2, 72), (vocab, 72)))


def _check_planes(format: str, device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for vocab in sizes_for(device, [200], [CHUNK + 200]):
        size = whole_blocks(format, 72)
        (hidden,) = random_like(device, dtype, (2, size))
        _check_vocabulary(hidden * 3, random_planes(device, format, vocab, size))


def _check_vocabulary(hidden: Tensor, weight: Tensor | PlaneTensor) -> None:
    device = hidden.device
    ids = torch.tensor([[3, 199], [64, 0]], device=device)
    scores, peak, total, argmax = vocabulary_mass(hidden, weight, ids, 30.0, 0, None)
    if isinstance(weight, PlaneTensor):
        weight = weight.dequantize(hidden.dtype)
    expected = (hidden.double() @ weight.double().T / 30).tanh() * 30
    is_argmax = torch.equal(argmax, expected.argmax(dim=1))
    check(is_argmax, "another token is the most probable")
    assert_close(scores, expected.gather(1, ids), 1e-4)
    assert_close(peak + total.log(), expected.logsumexp(dim=1), 1e-4)


TWINS = {
    "vocabulary_mass": KernelTwin("vocabulary_mass", vocabulary_mass, _serves, _check),
    **{
        name: KernelTwin(name, vocabulary_mass, _serves, partial(_check_planes, format))
        for format, name in plane_names("vocabulary_mass").items()
    },
}
