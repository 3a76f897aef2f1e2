"""The compiled attention and law against their plain twins."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.forced import compiled, each_isa, forced, normal

from sfumato.ops import law, reference
from sfumato.ops.cpu import library, twins
from sfumato.ops.law import Law
from sfumato.ops.reference import Causal

bf16 = pytest.mark.skipif(
    library.kernels is None or not library.kernels.bf16, reason="needs AVX512-BF16"
)


@bf16
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(5, 4, 2, 32, 7), (100, 16, 8, 256, 1279), (33, 16, 2, 512, 777)]
)
def test_attend(sizes: tuple[int, ...], causal: bool, window: int | None) -> None:
    tokens, heads, kv_heads, d, held = sizes
    q = normal(0, tokens, heads, d) * 0.1
    keys = normal(1, kv_heads, held, d).bfloat16(), normal(2, tokens, kv_heads, d).transpose(0, 1)
    values = normal(3, kv_heads, held, d).bfloat16(), normal(4, tokens, kv_heads, d).transpose(0, 1)
    positions = torch.arange(held + tokens)
    who = Causal(positions[held:], positions, window) if causal else None
    out = twins.attend(q, keys, values, who)
    expected = reference.attend(q, keys, values, who)
    assert (out - expected).norm() < 1e-2 * expected.norm()  # of products rounded to bfloat16
    alone = Causal(positions[held : held + 1], positions, window) if causal else None
    assert torch.equal(twins.attend(q[:1], keys, values, alone)[0], out[0])


@compiled
@each_isa
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_absorb(isa: str, softcap: float | None) -> None:
    """Chunk after chunk, one of them with bans and one with a ragged end."""
    heat = torch.rand(9) + 0.4
    ours, plain = (Law.empty(9, torch.device("cpu")) for _ in range(2))
    for index, count in enumerate((700, 512, 33)):
        raw = normal(index, 9, count) * 20
        if softcap is None and index == 1:
            raw[:, ::3] = -torch.inf
        with forced(isa):
            got = twins.absorb(ours, raw.clone(), 700 * index, heat, softcap, torch.float32)
        wanted = law.absorb(plain, raw.clone(), 700 * index, heat, softcap, torch.float32)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name in ("peak", "total", "moment", "top"):
        one, other = getattr(ours, name), getattr(plain, name)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax, plain.argmax) and torch.equal(ours.top_ids, plain.top_ids)
