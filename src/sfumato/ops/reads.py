"""The operation of a read's attention: canvases behind questions, whose keys stand beside the slots
in tensors of fixed address.  All that differs between reads is a number on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from sfumato.ops.registry import ANY, call


@dataclass(frozen=True)
class Prefixes:
    """What the slots of rows hold of one layer."""

    keys: Tensor  # [slots, kv_heads, size, d], position p at p mod size
    values: Tensor
    slots: Tensor  # int64 [rows]
    first: Tensor  # int64 [rows]: how many positions each slot holds
    window: int | None
    """Of what comes before a canvas it sees the last `window - 1` positions; None: all."""


@dataclass(frozen=True)
class Questions:
    """Keys of one layer that follow the prefixes of rows and stand beside their slots."""

    keys: Tensor  # [kv_heads, places, d], of all questions
    values: Tensor
    starts: Tensor  # int64 [rows]: the first place of each row's question
    counts: Tensor  # int64 [rows]: how many it has; 0 for none
    longest: int  # no count is higher


def read_attention(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, questions: Questions
) -> Tensor:
    """Softmax attention of canvases that follow questions, one a row, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d] → like q.  Each position sees all of its
    own canvas, and of what comes before the canvas what the window shows: first the slot's
    positions and then the question's.
    """
    arguments = (q, k, v, prefixes, questions)
    return cast(Tensor, call("read_attention", q.device, ANY, *arguments))
