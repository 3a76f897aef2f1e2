"""Keys and values in 8 bits: how a cache stores them, and what attention reads of it.

Two dtypes stand for two formats.  FP8 is a float (e4m3) without a scale: keys and values leave a
norm, so that none exceeds sqrt(head_dim) times the norm's weight, and a float format's relative
error does not depend on a scale.  Q8_0 is bytes: int8 codes of a head's numbers, then a float16
scale for each Q8_0_BLOCK of them; the last block may be shorter.

Everything here is plain torch of fixed shape.  Such caches are a CPU's; knows no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
Q8_0 = torch.uint8
Q8_0_BLOCK = 32
AT_ONCE = 1 << 22
"""Numbers that are converted at a time, which bounds what stands beside them in float32."""
_BESIDE = 4 * torch.float32.itemsize  # bytes of each of them, see `beside_bytes`


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has to be widened before torch attends to it."""
    return dtype in (FP8, Q8_0)


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """How many elements of `dtype` hold the keys or the values of a position and head."""
    return head_dim + 2 * -(-head_dim // Q8_0_BLOCK) if dtype == Q8_0 else head_dim


def beside_bytes(numbers: int, dtype: torch.dtype) -> int:
    """What `stored_as` and `widened` take at most beside their results, of so many numbers."""
    return min(numbers, AT_ONCE) * _BESIDE if is_narrow(dtype) else 0


def as_bytes(stored: Tensor) -> Tensor:
    """The same memory in a dtype that every device moves, index by index: FP8 as bytes."""
    return stored.view(torch.uint8) if stored.dtype == FP8 else stored


def gathered(stored: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """What these slots hold, for attention in `dtype`: stored [slots, kv_heads, size, stored width]
    → [rows, kv_heads, size, d]."""
    rows = as_bytes(stored).index_select(0, slots).view(stored.dtype)
    return widened([rows], dtype)[0].to(dtype)


def stored_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., n, d] as a cache of `dtype` holds them, [..., n, stored_width]. What
    exceeds the largest number of FP8 is clamped: torch 2.11 makes NaN of it, later versions do
    not."""
    if dtype == FP8:
        most = torch.finfo(FP8).max
        return _converted(values, values.shape[-1], dtype, lambda x: x.clamp(-most, most))
    if dtype == Q8_0:
        return _converted(values, stored_width(values.shape[-1], dtype), dtype, _q8_0_bytes)
    return values.to(dtype)


def widened(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Stored keys or values [..., n, stored width] for attention in `dtype`: those of FP8 and Q8_0
    as that, the others as they are."""
    return [_widened(part, dtype) for part in parts]


def _widened(part: Tensor, dtype: torch.dtype) -> Tensor:
    if part.dtype == Q8_0:
        count = -(-part.shape[-1] // (Q8_0_BLOCK + 2))  # of blocks: the width determines it
        return _converted(part, part.shape[-1] - 2 * count, dtype, _q8_0_values)
    if part.dtype != FP8:
        return part
    # Torch converts these numbers on a CPU at a quarter of the speed of a table.
    table = torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype)
    return _converted(
        part,
        part.shape[-1],
        dtype,
        lambda x: table.index_select(0, as_bytes(x).flatten().int()).view(x.shape),
    )


def _converted(
    source: Tensor, width: int, dtype: torch.dtype, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """The function's results of [..., n, any] as one tensor [..., n, width] of `dtype`, some of
    the n at a time where all would be more than AT_ONCE numbers."""
    if source.numel() <= AT_ONCE:
        return function(source).to(dtype)
    out = torch.empty(*source.shape[:-1], width, dtype=dtype, device=source.device)
    each = max(1, AT_ONCE // (source.numel() // source.shape[-2]))
    for part, target in zip(source.split(each, -2), out.split(each, -2), strict=True):
        target.copy_(function(part))
    return out


def _q8_0_bytes(values: Tensor) -> Tensor:
    """Floats [..., d] → bytes [..., stored_width]. The scale is a block's largest number / 127, and
    codes are rounded by the scale as float16 has it. A block with NaN becomes NaN."""
    d = values.shape[-1]
    blocks = F.pad(values.float(), (0, -d % Q8_0_BLOCK)).unflatten(-1, (-1, Q8_0_BLOCK))
    limit = torch.finfo(torch.float16).max  # a scale beyond it would be infinite
    scales = (blocks.abs().amax(-1) / 127).clamp(max=limit).half()
    inverse = scales.float().reciprocal().masked_fill_(scales == 0, 0.0)
    codes = (blocks * inverse[..., None]).nan_to_num_(0.0).round_().clamp_(-127, 127)
    codes = codes.to(torch.int8).flatten(-2)[..., :d]
    return torch.cat((codes.view(Q8_0), scales.contiguous().view(Q8_0)), dim=-1)


def _q8_0_values(stored: Tensor) -> Tensor:
    """Bytes [..., stored_width] → float32 [..., d]."""
    count = -(-stored.shape[-1] // (Q8_0_BLOCK + 2))
    codes, scales = stored.tensor_split((stored.shape[-1] - 2 * count,), dim=-1)
    wide = scales.contiguous().view(torch.float16).float()
    if codes.shape[-1] % Q8_0_BLOCK == 0:
        blocks = codes.view(torch.int8).unflatten(-1, (count, Q8_0_BLOCK))
        return (blocks * wide[..., None]).flatten(-2)
    wide = wide.repeat_interleave(Q8_0_BLOCK, dim=-1)
    return wide[..., : codes.shape[-1]].mul(codes.view(torch.int8))
