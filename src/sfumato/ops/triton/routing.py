"""Which token goes to which expert: the order of assignments by expert, made on the device.

An assignment is one of the k experts of a token; its number is token · k + place.  Nothing here
has a shape that depends on the choice: a product over groups of tokens gets as many programs as
the worst choice needs, and those beyond the last group leave early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.tiles import tile_for


@triton.jit(do_not_specialize=["count"])
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    count: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One program an expert. order int32 [count]: the numbers of the assignments by expert, those
    of one expert rising; starts int32 [EXPERTS + 1]: where each expert's begin, and the end.

    Each program reads all choices twice, from the L2 cache: 128 programs of 2,048 choices read
    4 MB, and none waits for another, as the steps of one radix sort would. The order is that of a
    stable sort, without atomics, so that it is the same in every run.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, count, BLOCK):
        numbers = tl.load(chosen + at + places, mask=at + places < count, other=EXPERTS)
        below += (numbers < expert).to(tl.int32)
    position = tl.sum(below)
    tl.store(starts + expert, position)
    for at in range(0, count, BLOCK):
        numbers = tl.load(chosen + at + places, mask=at + places < count, other=EXPERTS)
        mine = (numbers == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - 1
        tl.store(order + position + rank, at + places, mask=mine != 0)
        position += tl.sum(mine)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, position)


SORT = register(
    Kernel(
        "experts_sort",
        _sort,
        {"chosen": "*i64:16", "order": "*i32:16", "starts": "*i32:16", "count": "i32"},
        {"EXPERTS": 128},
    )
)


@triton.jit
def group_of(
    starts: tl.tensor,
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """The expert of a tile of at most TOKENS assignments, where the tile begins in the order, and
    where its expert's assignments end; the expert is at least EXPERTS beyond the last tile.

    EXPERTS_PADDED: EXPERTS up to a power of two. Each program finds this out by itself, which
    takes it under a microsecond of the twenty in which it reads its block of the weight, and saves
    a launch that writes a table of tiles.
    """
    numbers = tl.arange(0, EXPERTS_PADDED)
    inside = numbers < EXPERTS
    first = tl.load(starts + numbers, mask=inside, other=0)
    end = tl.load(starts + numbers + 1, mask=inside, other=0)
    tiles = (end - first + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32))
    mine = numbers == expert
    earlier = tl.sum(tl.where(mine, ends - tiles, 0))
    start = tl.sum(tl.where(mine, first, 0)) + (tile - earlier) * TOKENS
    return expert, start, tl.sum(tl.where(mine, end, 0))


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen int64 [tokens, k], contiguous → `order` and `starts` as `_sort` has them."""
    count = chosen.numel()
    order = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    launch(
        SORT,
        (experts,),
        tile_for("experts_sort", chosen.device),
        chosen.device,
        chosen=chosen,
        order=order,
        starts=starts,
        count=count,
        EXPERTS=experts,
    )
    return order, starts


def most_tiles(count: int, experts: int, tile: int) -> int:
    """How many tiles of at most `tile` assignments the worst choice makes of `count`: each expert
    that is chosen at all may have one that is not full."""
    used = min(count, experts)
    return (count + used * (tile - 1)) // tile
