"""A forward over a narrow cache has the bits of one over keys that torch widens first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.cpu.forced import each_isa, forced
from torch import Tensor

from sfumato import ops
from sfumato.bench.subject import random_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.segments import Suffix
from sfumato.ops.narrow_cache import is_narrow, widened

CPU = torch.device("cpu")


@contextmanager
def widening() -> Iterator[list[int]]:
    """Operations get keys and values that are widened; yields of how many tensors it was."""
    attend, padded = ops.attend, ops.attend_padded
    count: list[int] = []

    def wide(q: Tensor, parts: Any) -> list[Tensor]:
        count.append(sum(is_narrow(part.dtype) for part in parts))
        return widened(parts, q.dtype)

    def both(q: Tensor, held: Any) -> dict[str, list[Tensor]]:
        return {"keys": wide(q, held.keys), "values": wide(q, held.values)}

    def wide_attend(q: Tensor, k: Any, v: Any, causal: Any, own: Any) -> Tensor:
        own = [replace(row, **both(q, row)) for row in own]
        return attend(q, wide(q, k), wide(q, v), causal, own)

    def wide_padded(q: Tensor, k: Tensor, v: Tensor, rows: Any) -> Tensor:
        keys, values = wide(q, (rows.keys, rows.values))
        return padded(q, k, v, replace(rows, keys=keys, values=values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attend", wide_attend)
        patch.setattr(ops, "attend_padded", wide_padded)
        yield count


def outcomes(model: Network) -> list[Tensor]:
    """Hidden states of prompts, canvases and reads: slots of different lengths, one of which was
    taken back by a snapshot, with windows of 15 that have turned and one that has not."""
    ids, canvas = torch.arange(60) % model.config.vocab_size, torch.arange(8)
    slots = model.new_slots(3, 64)
    states = model.encode_hidden([ids[:37], ids[3:12]], slots[:2])
    kept = slots[0].snapshot()
    states += model.encode_hidden([ids[40:53], ids[:21]], slots[::2])
    states.append(model.denoise([canvas, canvas + 5, canvas[:3]], slots))
    slots[0].restore(slots[0], 37, kept)
    states += model.encode_hidden([ids[5:9], ids[9:10]], slots[:2])
    states.append(model.denoise([canvas, canvas], slots[:2]))
    suffixes = [Suffix(slots[0]), Suffix(slots[0]), Suffix(slots[2])]
    for first in (0, 9):  # the second ones see the first, as they are stored
        states += model.encode_beside_hidden([ids[first:][:n] for n in (9, 2, 20)], suffixes)
    states.append(model.denoise_beside([canvas[:4]] * 3, suffixes, [[0, 3]] * 3))
    return states


@each_isa
@pytest.mark.parametrize(
    ("cache", "dtype"),
    [
        ("fp8", torch.bfloat16),
        ("q8_0", torch.float32),
        pytest.param("fp8", torch.float32, marks=pytest.mark.slow),
        pytest.param("q8_0", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_forwards_have_the_bits_of_widened_keys(isa: str, cache: str, dtype: torch.dtype) -> None:
    with forced(isa):
        model = load_network(random_checkpoint("tiny", "f32"), CPU, dtype, cache_type=cache)
        got = outcomes(model)
        with widening() as count:
            expected = outcomes(model)
    assert sum(count) > 40  # keys and values of two layers
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
