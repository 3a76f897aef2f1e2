"""How a block of a weight becomes numbers: the one place that knows how weights are stored.

Every matrix product of this package reads its weight through `weight_block`.  Another format is
another `FORMAT` here and another descriptor beside it; the products do not change.
"""

from __future__ import annotations

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
"""Numbers as they are, in the weight's dtype."""


@triton.jit
def weight_block(
    weight: tl.tensor, row: tl.tensor, column: tl.tensor, FORMAT: tl.constexpr
) -> tl.tensor:
    """A block of the weight's rows and columns, from `row` and `column` on, in the dtype that is
    multiplied; zeros beyond the weight.

    weight: a tensor descriptor. On sm_90 the copy engine fills shared memory from it, with no
    registers and one instruction a block; elsewhere it becomes ordinary loads.
    """
    tl.static_assert(FORMAT == BF16, "no such format of weights")
    return weight.load([row, column])


@triton.jit
def as_descriptor(
    matrix: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
) -> tl.tensor:
    """A matrix [rows, COLUMNS] as a descriptor of blocks: as it is where DESCRIPTORS is set, else
    made of its address.

    GPUs without a copy engine load by addresses either way. From an address of known alignment and
    a constant row they load 16 bytes a thread, past registers; from a descriptor that the host
    made, 2 bytes, since a compiler knows nothing of its strides.
    """
    if DESCRIPTORS:
        return matrix
    else:
        return tl.make_tensor_descriptor(
            matrix, [rows, COLUMNS], [COLUMNS, 1], [BLOCK_ROWS, BLOCK_COLUMNS]
        )


@triton.jit
def product(a: tl.tensor, b: tl.tensor, accumulator: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """accumulator + a @ b in float32: of bfloat16, or of float32 where UPCAST is set."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
