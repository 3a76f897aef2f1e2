"""Attention of reads in shapes that no data changes, in plain torch: the executable
specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.ops.narrow_cache import as_bytes, gathered, widened
from sfumato.ops.reads import Prefixes, Questions
from sfumato.ops.reference import KEYS, over_seen
from sfumato.ops.registry import reference


@reference("read_attention")
def read_attention(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, questions: Questions
) -> Tensor:
    """Attention of canvases behind questions; see `ops.read_attention`."""
    rows, length, _, d = q.shape
    kv_heads, size = prefixes.keys.shape[1:3]
    longest, window = questions.longest, prefixes.window
    first, counts = prefixes.first[:, None], questions.counts[:, None]
    stored = torch.arange(size, device=q.device)
    # In a ring, place i holds the last position p < first with p mod size = i: negative for none.
    old = first - 1 - torch.remainder(first - 1 - stored, size)  # [rows, size]
    own = torch.arange(longest, device=q.device)
    sees_old, sees_own = old >= 0, own < counts
    if window is not None:
        # All positions of a canvas count as its first, which stands at first + counts.
        sees_old = sees_old & (old > first + counts - window)
        sees_own = sees_own & (own > counts - window)
    in_canvas = sees_own.new_ones(1, 1).expand(rows, length)
    padding = -(size + longest + length) % KEYS
    nothing = sees_own.new_zeros(1, 1).expand(rows, padding)
    seen = torch.cat((sees_old, sees_own, in_canvas, nothing), dim=1)  # [rows, keys]
    places = questions.starts[:, None] + own
    places = places.clamp(max=questions.keys.shape[1] - 1).flatten()

    def all_of(held: Tensor, beside: Tensor, new: Tensor) -> Tensor:
        own_part = as_bytes(beside).index_select(1, places).view(beside.dtype)
        own_part = widened([own_part], q.dtype)[0].unflatten(1, (rows, longest)).transpose(0, 1)
        old_part = gathered(held, prefixes.slots, q.dtype)
        zeros = new.new_zeros(1, 1, 1, 1).expand(rows, kv_heads, padding, d)
        parts = old_part, own_part.to(q.dtype), new.transpose(1, 2), zeros
        # What earlier requests left may be NaN or infinite, and 0 · NaN is NaN.
        return torch.cat(parts, dim=2).masked_fill_(~seen[:, None, :, None], 0.0)

    keys = all_of(prefixes.keys, questions.keys, k)
    values = all_of(prefixes.values, questions.values, v)
    return over_seen(q, keys, values, seen)
