"""Attention and cache writes of rows of both phases, in plain torch: the executable specification.

A row of a step either denoises its canvas or commits tokens.  Which of the two is a number on the
device, so that one call serves all rows and its shapes depend on none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.narrow_cache import as_bytes, gathered, stored_as
from sfumato.ops.reference import KEYS, attention
from sfumato.ops.registry import reference


@reference("phase_attention")
def phase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    width: Tensor,
    commits: Tensor,
    window: int | None,
) -> Tensor:
    """Attention of rows of both phases; see `ops.phase_attention`."""
    rows, length = q.shape[:2]
    kv_heads, size = keys.shape[1:3]
    last = first[:, None] - 1
    stored = torch.arange(size, device=q.device)
    # In a ring, place i holds the last position p < first with p mod size = i: negative for none.
    old = last - torch.remainder(last - stored, size)  # [rows, size]
    own = torch.arange(length, device=q.device)
    in_row = own < width[:, None]  # [rows, length]
    query = torch.minimum(own, width[:, None] - 1)  # those after the width see what the last sees
    position = first[:, None] + query
    causal = (commits > 0)[:, None, None]
    sees_old = old[:, None] >= 0
    sees_own = own <= query[..., None]
    if window is not None:
        near = old[:, None] > position[..., None] - window
        sees_old = sees_old & (near | ~causal)
        sees_own = sees_own & (own > query[..., None] - window)
    sees_own = in_row[:, None] & (sees_own | ~causal)
    padding = -(size + length) % KEYS
    nothing = sees_own.new_zeros(1, 1, 1).expand(rows, length, padding)
    seen = torch.cat((sees_old.expand(-1, length, -1), sees_own, nothing), dim=2)

    def all_of(held: Tensor, new: Tensor) -> Tensor:
        old_part = gathered(held, slots, q.dtype)
        # What an earlier request left in the slot may be NaN or infinite, and 0 · NaN is NaN.
        old_part = old_part.masked_fill((old < 0)[:, None, :, None], 0.0)
        new_part = new.transpose(1, 2).masked_fill(~in_row[:, None, :, None], 0.0)
        zeros = new.new_zeros(1, 1, 1, 1).expand(rows, kv_heads, padding, q.shape[-1])
        return torch.cat((old_part, new_part, zeros), dim=2)

    out = attention(q.transpose(1, 2), all_of(keys, k), all_of(values, v), seen)
    return out.transpose(1, 2)


@reference("write_cache")
def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the tokens that rows commit; see `ops.write_cache`.

    Every row writes as many entries.  Those for which it has no token repeat one that is written
    anyway, or what the slot holds there: entries of equal places then have equal values.
    """
    rows, length = new.shape[:2]
    size = stored.shape[2]
    own = torch.arange(length, device=new.device)
    # Of more tokens than a ring holds, the last ones stay.
    lowest, highest = (count - size).clamp(min=0), (count - 1).clamp(min=0)
    token = torch.minimum(torch.maximum(own, lowest[:, None]), highest[:, None])  # [rows, length]
    place = torch.remainder(first[:, None] + token, size)
    index = token[..., None, None].expand_as(new)
    entries = as_bytes(stored_as(new.gather(1, index), stored.dtype))
    at = slots[:, None].expand(rows, length), place
    held = as_bytes(stored).transpose(1, 2)  # [slots, size, kv_heads, d]
    held[at] = torch.where((count > 0)[:, None, None, None], entries, held[at])
