"""The write of keys or values of the rows that commit into their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops import phase_reference
from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.operands import elementwise
from sfumato.ops.triton.self_test import KernelTwin, random_like
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


def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the tokens that rows commit; see `ops.write_cache`."""
    rows, length, kv_heads, d = new.shape
    launch(
        WRITE_CACHE,
        (rows, length),
        tile_for("write_cache", new.device),
        new.device,
        stored=stored,
        new=new.contiguous(),
        slots=slots.contiguous(),
        first=first.contiguous(),
        count=count.contiguous(),
        length=length,
        size=stored.shape[2],
        KV_HEADS=kv_heads,
        HEAD=d,
        ELEMENTS=triton.next_power_of_2(kv_heads * d),
    )


def _serves(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> bool:
    return stored.is_contiguous() and new.numel() > 0 and elementwise(stored, new)


def _check(device: torch.device) -> None:
    """Rows that write nothing, a part, and more than a ring holds."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stored, new = random_like(device, dtype, (4, 2, 3, 8), (3, 4, 2, 8))
    numbers = torch.tensor([[0, 3, 1], [2, 5, 7], [0, 3, 4]]).to(device)
    expected = stored.clone()
    write_cache(stored, new, *numbers)
    phase_reference.write_cache(expected, new, *numbers)
    assert torch.equal(stored, expected), "the cache differs"


TWINS = {"write_cache": KernelTwin("write_cache", write_cache, _serves, _check)}
