"""Products of FP8 codes by torch's own kernels: the baseline of ours, for `gpu_kernel.py`.

`F.scaled_mm` and `F.scaled_grouped_mm` with a scale for each row of both operands, activations
rounded to codes as the reference rounds them. The gated GELU between the experts' products, and the
sum of a token's parts, are plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.reference import gated
from sfumato.weights.formats import ScaledTensor, round_rows


def linear(x: Tensor, weight: ScaledTensor, bias: Tensor | None = None) -> Tensor:
    """See `ops.linear`; weight: FP8."""
    by_row, codes = F.ScalingType.RowWise, round_rows(x, "FP8")
    out: Tensor = F.scaled_mm(
        codes.codes, weight.codes.t(), codes.scales[:, None], by_row, weight.scales[None], by_row,
        output_dtype=x.dtype,
    )  # fmt: skip
    return out if bias is None else out + bias


def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: ScaledTensor, down: ScaledTensor
) -> Tensor:
    """See `ops.experts`; gate_up and down: FP8."""
    order = chosen.reshape(-1).argsort(stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=gate_up.shape[0])
    ends = counts.cumsum(0).int()
    tokens = round_rows(x, "FP8")
    rows = order // chosen.shape[-1]
    grouped = ScaledTensor(tokens.codes[rows], tokens.scales[rows])
    gate, up = _grouped(grouped, gate_up, ends, x.dtype).chunk(2, dim=-1)
    parts = _grouped(round_rows(gated(gate, up, "gelu"), "FP8"), down, ends, x.dtype)
    back = torch.empty_like(parts).index_copy_(0, order, parts).view(*chosen.shape, -1)
    return (back * shares.unsqueeze(-1).to(x.dtype)).sum(1)


def _grouped(x: ScaledTensor, weight: ScaledTensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    by_row = F.ScalingType.RowWise
    out: Tensor = F.scaled_grouped_mm(
        x.codes, weight.codes.transpose(1, 2), x.scales, by_row, weight.scales, by_row,
        offs=ends, output_dtype=dtype,
    )  # fmt: skip
    return out


PEERS: dict[str, Callable[..., Tensor]] = {"linear": linear, "experts": experts}
"""By operation."""


def peer(operation: str, arguments: tuple[object, ...]) -> Callable[..., Tensor] | None:
    """What torch has for a call with weights of FP8; None for other weights."""
    weights = [each for each in arguments if isinstance(each, ScaledTensor)]
    fits = bool(weights) and all(each.kind == "FP8" for each in weights)
    return PEERS.get(operation) if fits else None
