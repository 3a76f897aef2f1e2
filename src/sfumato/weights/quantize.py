"""Floats to quantized blocks: the way back from `blocks.py`.

Q4_0, Q5_0, Q5_1 and Q8_0 are rounded as ggml does (`ggml-quants.c`), bit for bit; the K formats
and IQ4_NL search for their scales (`scale_search.py`). Works in chunks, so that temporaries stay
small whatever the tensor's size. Knows no files, and not which format a tensor takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from sfumato.weights.blocks import IQ4_VALUES, BlockFormat, QuantizedTensor
from sfumato.weights.scale_search import fit_affine, fit_linear

# Elements quantized at a time by each thread: enough that torch's work outweighs its calls, few
# enough that a dozen temporaries of 1 MiB hardly leave the cache.
_CHUNK = 1 << 18
_CHUNK_ELSEWHERE = 1 << 24

_HALF_LIMIT = 65520.0
"""From here on a float rounds to an infinite float16."""


def quantize(values: Tensor, block: BlockFormat) -> QuantizedTensor:
    """All of `values`, float [..., n] with n a multiple of the block size, in blocks.

    Raises ValueError if a value is not finite or a scale exceeds float16.
    """
    assert values.shape[-1] % block.block_size == 0, f"{values.shape} in {block.name} blocks"
    width = values.shape[-1] // block.block_size * block.block_bytes
    data = torch.empty(*values.shape[:-1], width, dtype=torch.uint8, device=values.device)
    rows, at = data.view(-1, block.block_bytes), 0
    for chunk in encoded(values, block):
        rows[at : at + len(chunk)] = chunk
        at += len(chunk)
    return QuantizedTensor(data, block, tuple(values.shape))


def encoded(values: Tensor, block: BlockFormat) -> Iterator[Tensor]:
    """The blocks of `quantize` in chunks, as they are computed: uint8 [n, block_bytes] each."""
    encode = _ENCODERS[block.name]
    flat = values.reshape(-1, block.block_size)
    on_cpu = values.device.type == "cpu"
    step = (_CHUNK * torch.get_num_threads() if on_cpu else _CHUNK_ELSEWHERE) // block.block_size
    for start in range(0, len(flat), step):
        yield encode(flat[start : start + step].float())


def _half(values: Tensor) -> Tensor:
    """float32 [n, 1] → float16 [n, 1], all of it finite."""
    if not bool(values.abs().max() < _HALF_LIMIT):  # NaN too is refused
        raise ValueError("a value is not finite, or too large for a block's float16 scale")
    return values.half()


def _bytes(half: Tensor) -> Tensor:
    """float16 [n, 1] → uint8 [n, 2]."""
    return half.view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is not finite: a scale of 0, or next to it."""
    inverse = scale.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0)


def _codes(values: Tensor, levels: int) -> Tensor:
    """The integer part of each value, at most `levels`: float32, from 0 to 127, to uint8."""
    return values.to(torch.int8).clamp_(max=levels).view(torch.uint8)  # to uint8 torch is slow


def _join(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes, lowest bits first: uint8 [n, groups, 8 / bits, width] to [n, groups, width].

    The reverse of `_fields` in `blocks.py`.
    """
    out = codes[:, :, 0].clone()
    for index in range(1, 8 // bits):
        out |= codes[:, :, index] << (bits * index)
    return out


def _extreme(x: Tensor) -> Tensor:
    """The value of greatest magnitude in each row, the first of equals: [n, width] to [n, 1]."""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    # Halves round away from zero; adding 0.5 would also lift the float just below a half.
    codes = scaled.to(torch.int8)
    codes += scaled.sub_(codes).mul_(2).to(torch.int8)
    return torch.cat((_bytes(_half(scale)), codes.view(torch.uint8)), dim=1)


def _signed_codes(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale bytes and codes 0..levels of the formats whose extreme value is code 0."""
    middle = (levels + 1) // 2
    scale = _extreme(x) / -middle
    return _bytes(_half(scale)), _codes((x * _inverse(scale)).add_(middle + 0.5), levels)


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [n, 32] → the low four bits of each, uint8 [n, 16]."""
    return _join((codes & 15).view(-1, 1, 2, 16), 4)[:, 0]


def _fifth_bits(codes: Tensor) -> Tensor:
    """uint8 [n, 32] → bit 4 of each, uint8 [n, 4]."""
    return _join((codes >> 4).view(-1, 4, 8, 1), 1)[:, :, 0]


def _q4_0(x: Tensor) -> Tensor:
    scale, codes = _signed_codes(x, 15)
    return torch.cat((scale, _nibbles(codes)), dim=1)


def _q5_0(x: Tensor) -> Tensor:
    scale, codes = _signed_codes(x, 31)
    return torch.cat((scale, _fifth_bits(codes), _nibbles(codes)), dim=1)


def _q5_1(x: Tensor) -> Tensor:
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / 31
    codes = _codes((x - low).mul_(_inverse(scale)).add_(0.5), 31)
    halves = _bytes(_half(scale)), _bytes(_half(low))
    return torch.cat((*halves, _fifth_bits(codes), _nibbles(codes)), dim=1)


def _columns(x: Tensor, width: int) -> Tensor:
    """Blocks [n, block size] as groups along columns: [width, groups]."""
    return x.view(-1, width).t().contiguous()


def _super_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Group scales ≥ 0, float32 [n, 8], in six bits: their float16 scale [n, 1], and the codes."""
    scale = values.amax(1, keepdim=True) / 63
    return _half(scale), (values * _inverse(scale)).round_().clamp_(0, 63)


def _k_codes(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of a Q4_K or Q5_K block, and its codes, uint8 [n, 8, 32]."""
    scales, offsets = fit_affine(_columns(x, 32), levels)
    scale, scale_codes = _super_scale(scales.view(-1, 8))
    offset, offset_codes = _super_scale(offsets.view(-1, 8))
    step = (scale.float() * scale_codes)[:, :, None]
    codes = x.view(-1, 8, 32) + (offset.float() * offset_codes)[:, :, None]
    codes = _codes(codes.mul_(_inverse(step)).round_().clamp_(0, levels), levels)
    s, o = _codes(scale_codes, 63), _codes(offset_codes, 63)
    packed = (
        s[:, :4] | (s[:, 4:] >> 4 << 6),
        o[:, :4] | (o[:, 4:] >> 4 << 6),
        (s[:, 4:] & 15) | ((o[:, 4:] & 15) << 4),
    )
    return torch.cat((_bytes(scale), _bytes(offset), *packed), dim=1), codes


def _k_nibbles(codes: Tensor) -> Tensor:
    return _join(codes.view(-1, 4, 2, 32), 4).view(-1, 128)


def _q4_k(x: Tensor) -> Tensor:
    head, codes = _k_codes(x, 15)
    return torch.cat((head, _k_nibbles(codes)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    head, codes = _k_codes(x, 31)
    top = _join((codes >> 4).view(-1, 1, 8, 32), 1)[:, 0]
    return torch.cat((head, top, _k_nibbles(codes & 15)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    groups = fit_linear(_columns(x, 16), 32, 1, lambda v: v.round_().clamp_(-32, 31)).view(-1, 16)
    scale = _extreme(groups) / -128
    group_codes = (groups * _inverse(scale)).round_().clamp_(-128, 127)
    scale = _half(scale)
    step = (scale.float() * group_codes)[:, :, None]
    codes = _codes((x.view(-1, 16, 16) * _inverse(step)).round_().clamp_(-32, 31).add_(32), 63)
    low = _join((codes & 15).view(-1, 2, 2, 64), 4).view(-1, 128)
    high = _join((codes >> 4).view(-1, 2, 4, 32), 2).view(-1, 64)
    return torch.cat((low, high, group_codes.to(torch.int8).view(torch.uint8), _bytes(scale)), 1)


@lru_cache
def _iq4_cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """The nearest of IQ4's values, float32, and its code, uint8, for each half-open cell of width
    ½ from -127 up to 113.5: no edge between two values lies within a cell."""
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    edges = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(torch.arange(-254, 228) / 2, edges, right=True)
    return values[codes].to(device), codes.to(device, torch.uint8)


def _iq4_nl(x: Tensor) -> Tensor:
    values, codes = _iq4_cells(x.device)

    def look_up(table: Tensor, scaled: Tensor) -> Tensor:
        cells = scaled.mul_(2).floor_().int().clamp_(-254, 227).add_(254)
        return table.index_select(0, cells.view(-1)).view_as(scaled)

    scale = fit_linear(_columns(x, 32), 127, 10, lambda v: look_up(values, v))[:, None]
    picked = look_up(codes, x * _inverse(scale))
    return torch.cat((_bytes(_half(scale)), _nibbles(picked)), dim=1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
WRITTEN = tuple(_ENCODERS)
"""The formats that `quantize` makes."""
