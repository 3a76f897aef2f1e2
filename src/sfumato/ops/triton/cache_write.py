"""The write of keys or values of the rows that commit into their slots."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.narrow_cache import (
    FP8,
    NUMBERS,
    Q8_0,
    Q8_0_BLOCK,
    as_bytes,
    is_narrow,
    stored_as,
    widened,
)
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.narrow_cache import (
    E4M3,
    cache_of,
    checks_of,
    e4m3_byte,
    q8_0_block,
    takes_narrow,
)
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import (
    KernelTwin,
    assert_close,
    check,
    error_bound,
    random_like,
)
from sfumato.ops.triton.tiles import tile_for


@triton.jit(do_not_specialize=["slots", "first", "count", "length", "size"])
def _write_cache(
    stored: tl.tensor, new: tl.tensor, slots: tl.tensor, first: tl.tensor, count: tl.tensor,
    length: tl.tensor, size: tl.tensor,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ELEMENTS: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The heads of one token.  Grid: (rows, length).

    stored [slots, KV_HEADS, size, HEAD]; new [rows, length, KV_HEADS, HEAD].
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    most = tl.load(count + row)
    # Of more tokens than a ring holds, the last ones stay.
    written = (token < most) & (token >= most - size)
    place = (tl.load(first + row) + token) % size
    element = tl.arange(0, ELEMENTS)
    inside = (element < KV_HEADS * HEAD) & written
    source = (row * length + token) * (KV_HEADS * HEAD) + element
    value = tl.load(new + source, mask=inside, other=0.0)
    head, column = element // HEAD, element % HEAD
    target = (tl.load(slots + row) * KV_HEADS + head) * size + place
    tl.store(stored + target * HEAD + column, value.to(stored.dtype.element_ty), mask=inside)


WRITE_CACHE = register(
    Kernel(
        "write_cache",
        _write_cache,
        {
            "stored": "*bf16:16",
            "new": "*bf16:16",
            "length": "i32",
            "size": "i32",
            **dict.fromkeys(("slots", "first", "count"), "*i64"),
        },
        {"KV_HEADS": 8, "HEAD": 256, "ELEMENTS": 2048},
        shapes={"full": {"KV_HEADS": 2, "HEAD": 512, "ELEMENTS": 1024}},
    )
)


@triton.jit(do_not_specialize=["slots", "first", "count", "length", "size"])
def _write_narrow(
    stored: tl.tensor, new: tl.tensor, slots: tl.tensor, first: tl.tensor, count: tl.tensor,
    length: tl.tensor, size: tl.tensor,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    CACHE: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The heads of one token, in BLOCKS of GROUP numbers.  Grid: (rows, length).

    stored bytes [slots, KV_HEADS, size, a head's width]; new [rows, length, KV_HEADS, HEAD].
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    most = tl.load(count + row)
    # Of more tokens than a ring holds, the last ones stay.
    if (token >= most) | (token < most - size):
        return
    place = (tl.load(first + row) + token) % size
    GROUPS: tl.constexpr = HEAD // GROUP
    block = tl.arange(0, BLOCKS)
    known = block < KV_HEADS * GROUPS
    source = (row * length + token) * (KV_HEADS * HEAD) + block[:, None] * GROUP
    source += tl.arange(0, GROUP)[None, :]
    value = tl.load(new + source, mask=known[:, None], other=0.0).to(tl.float32)
    line = (tl.load(slots + row) * KV_HEADS + block // GROUPS) * size + place
    column = (block % GROUPS * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    if CACHE == E4M3:
        tl.store(stored + line[:, None] * HEAD + column, e4m3_byte(value), mask=known[:, None])
    else:
        WIDTH: tl.constexpr = HEAD + 2 * GROUPS
        codes, scales = q8_0_block(value)
        tl.store(stored + line[:, None] * WIDTH + column, codes, mask=known[:, None])
        halves = stored.to(tl.pointer_type(tl.float16)) + line * (WIDTH // 2) + HEAD // 2
        tl.store(halves + block % GROUPS, scales, mask=known)


WRITE_NARROW = register(
    Kernel(
        "write_cache_narrow",
        _write_narrow,
        {**WRITE_CACHE.types, "stored": "*u8:16"},
        {"KV_HEADS": 8, "HEAD": 256, "BLOCKS": 64, "GROUP": Q8_0_BLOCK, "CACHE": NUMBERS[Q8_0]},
        shapes={
            "fp8": {"CACHE": NUMBERS[FP8]},
            "full": {"KV_HEADS": 2, "HEAD": 512, "BLOCKS": 32},
            "fp8 full": {"KV_HEADS": 2, "HEAD": 512, "BLOCKS": 32, "CACHE": NUMBERS[FP8]},
        },
    )
)


def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the tokens that rows commit; see `ops.write_cache`."""
    rows, length, kv_heads, d = new.shape
    sizes: dict[str, Any] = {"KV_HEADS": kv_heads, "HEAD": d}
    kernel = WRITE_CACHE
    if is_narrow(stored.dtype):
        kernel, group = WRITE_NARROW, min(d, Q8_0_BLOCK)
        sizes |= {"BLOCKS": triton.next_power_of_2(kv_heads * (d // group)), "GROUP": group}
        sizes["CACHE"] = cache_of(stored)
    else:
        sizes["ELEMENTS"] = triton.next_power_of_2(kv_heads * d)
    launch(
        kernel,
        (rows, length),
        tile_for(kernel.name, new.device),
        new.device,
        stored=as_bytes(stored),
        new=new.contiguous(),
        slots=slots.contiguous(),
        first=first.contiguous(),
        count=count.contiguous(),
        length=length,
        size=stored.shape[2],
        **sizes,
    )


def _serves(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> bool:
    if not stored.is_contiguous() or not new.numel():
        return False
    if is_narrow(stored.dtype):
        return elementwise(new) and takes_narrow(stored, new.shape[-1])
    return elementwise(stored, new)


def _check(device: torch.device, kind: torch.dtype | None = None) -> None:
    """Rows that write nothing, a part, and more than a ring holds, in a cache of this kind."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stored, new = random_like(device, dtype, (4, 2, 3, 64), (3, 4, 2, 64))
    stored = stored_as(stored, kind or dtype)
    numbers = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]]).to(device)
    expected = stored.clone()
    write_cache(stored, new, *numbers)
    attention_reference.write_cache.reference(expected, new, *numbers)
    if kind == Q8_0:  # a device may round a scale otherwise, and with it a code
        stored, expected = widened([stored, expected], torch.float32)
        return assert_close(stored, expected, error_bound(torch.bfloat16))
    check(torch.equal(as_bytes(stored), as_bytes(expected)), "the cache differs")


TWINS = {
    name: KernelTwin(name, write_cache, _serves, of_kind)
    for name, of_kind in checks_of("write_cache", _check).items()
}
