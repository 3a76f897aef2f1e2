"""Torch's own means on a GPU, beside kernels: products that never make the host wait, where the
reference's might, those of the vendor's library with sums that depend on no other rows, and two
streams.

`F.grouped_mm` reads the ends of the groups on the host wherever torch has no kernel for the device
and the dtype.  A probe finds that out once; there, each expert multiplies as many rows as there are
tokens, which no data can exceed, since a token chooses an expert at most once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.ops.gpu import is_gpu, side_stream
from sfumato.ops.reference import SLICE, Gating, dense, gated, mixed, multiplied
from sfumato.ops.registry import TORCH, twin
from sfumato.ops.triton import self_test
from sfumato.weights.formats import Weight

log = logging.getLogger(__name__)

_PROBED = 64  # rows and columns of the weights of the probe


@cache
def groups_stay_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups of rows without reading their ends on the host. Where there
    is no such device, as in a trace, it is taken to.

    The probe's mode counts for the whole process. A server probes before it is ready
    (`Engine.warm_up`), so that no other thread uses the device meanwhile."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    x = torch.zeros(2 * _PROBED, _PROBED, dtype=dtype, device=device)
    weights = torch.zeros(2, _PROBED, _PROBED, dtype=dtype, device=device)
    ends = torch.arange(1, 3, dtype=torch.int32, device=device) * _PROBED
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        F.grouped_mm(x, weights, offs=ends)
    except RuntimeError as error:
        log.info(
            "experts in %s: torch's grouped product makes the host wait on %s, so each expert has "
            "a product of fixed size (%s)",
            *(str(dtype).removeprefix("torch."), device, str(error).splitlines()[0][:200]),
        )
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


@twin(
    *("experts", "cuda"),
    serves=lambda x, *_: not groups_stay_on_device(x.device, x.dtype),
    backend=TORCH,
)
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    gating: Gating = "gelu",
) -> Tensor:
    """See `ops.experts`. No token may choose an expert twice.

    Takes as many experts at a time as keep the rows of all of them under SLICE elements.
    """
    tokens, k = chosen.shape
    count, inner, hidden = gate_up.shape
    order = chosen.reshape(-1).argsort(stable=True)
    expert = chosen.reshape(-1).index_select(0, order)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device), right=True)
    starts = F.pad(ends, (1, -1))
    row = torch.arange(tokens, device=x.device)
    place = starts[:, None] + row  # [experts, tokens]: in the order of the experts
    exists = row < (ends - starts)[:, None]
    source = order.index_select(0, place.clamp(max=tokens * k - 1).flatten()) // k
    given = multiplied(x, gate_up)
    # One more row, for what exists in no group.
    parts = x.new_zeros(tokens * k + 1, hidden)
    target = torch.where(exists, place, tokens * k).flatten()
    step = max(1, SLICE // max(1, tokens * max(inner, hidden), math.prod((inner, hidden))))
    for a in range(0, count, step):
        b = min(a + step, count)
        at = slice(a * tokens, b * tokens)
        rows = given.index_select(0, source[at]).view(b - a, tokens, hidden)
        gate, up = torch.bmm(rows, dense(gate_up[a:b], x.dtype).transpose(1, 2)).chunk(2, dim=-1)
        inner_rows = multiplied(gated.reference(gate, up, gating), down)
        out = torch.bmm(inner_rows, dense(down[a:b], x.dtype).transpose(1, 2))
        parts.index_copy_(0, target[at], out.flatten(0, 1))
    return mixed(parts, order, torch.arange(len(order), device=x.device), shares)


PADDED = 256
"""Rows of every product of the vendor's library, as many as a canvas has."""
ALIGNED = 256
"""Bytes of which each operand's address is a multiple: a library may choose its sums by it."""


def padded_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] @ weight.T, of floats [out, in], by the vendor's library → [..., out].

    The library chooses its sums by the shape. So it gets PADDED rows at a time, the last ones
    beside zeros: see `keeps_bits`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    count = len(rows)
    if count % PADDED or rows.data_ptr() % ALIGNED:
        rows = F.pad(rows, (0, 0, 0, -count % PADDED))
    out = rows.new_empty(len(rows), len(weight))
    for given, made in zip(rows.split(PADDED), out.split(PADDED), strict=True):
        torch.mm(given, weight.T, out=made)
    return out[:count].view(*x.shape[:-1], len(weight))


@cache
def keeps_bits(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Whether `padded_product` with a weight of this shape gives a row the same bits at each of the
    PADDED places and beside any rows: probed once, on random numbers."""
    random = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(rows, inputs, generator=random, device=device, dtype=dtype)
        for rows in (PADDED, outputs)
    )
    beside_others = padded_product(x, weight)
    is_same = all(
        torch.equal(padded_product(x[at].expand_as(x), weight), beside_others[[at] * PADDED])
        for at in (0, 100, PADDED - 1)
    )
    who = "the vendor's library" if is_same else "our kernel, since a library's bits vary by place,"
    log.info("products %d × %d on %s: %s makes them", outputs, inputs, device, who)
    return is_same


BESIDE = 512
"""Up to this many tokens, products of two streams run beside each other: more fill a device."""
one_stream: dict[torch.device, str] = {}
"""Devices on which all work has one stream, and why."""


@twin(
    *("beside", "cuda"),
    # Where kernels serve, layers are compared with torch when a model is loaded.
    serves=lambda x, *_: (
        is_gpu(x.device)
        and x.numel() <= BESIDE * x.shape[-1]
        and not torch.is_grad_enabled()
        and x.device not in one_stream
        and bool(self_test.prepared(x.device))
    ),
    backend=TORCH,
    refusal=lambda device: one_stream.get(device, ""),
    note=f"two streams, up to {BESIDE} tokens, where kernels serve",
)
def beside(
    x: Tensor, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """See `ops.beside`: the first function's work is on a side stream, which waits for all that the
    current stream has been given (the fork), and for which the current one waits (the join). In a
    capture both are edges of the graph.

    Memory that Python has freed goes back to the stream on which it was allocated. What the side
    stream reads of the current one's memory is kept by the functions until the join. What it makes
    is read by the current stream behind the join; once that is freed, the side stream alone gets
    its memory, and is given no work but by the same thread, behind a fork of the same current
    stream, which waits for those reads. So nothing needs `record_stream`, by which a capture would
    use no memory twice.
    """
    main = torch.accelerator.current_stream(x.device)
    side = side_stream(main)
    side.wait_stream(main)
    try:
        with side:
            made = first()
        other = second()
    except BaseException:
        with suppress(Exception):  # where a capture is invalid, the first error says why
            main.wait_stream(side)
        raise
    main.wait_stream(side)
    return made, other
