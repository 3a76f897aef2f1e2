"""Attention of a prompt's tokens, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted, seen_as
from torch import Tensor

from sfumato.ops import attention_reference
from sfumato.ops.attention_reference import NOWHERE, Causal, Own

pytestmark = interpreted


@dataclass(frozen=True)
class Chunk:
    """New tokens from position `first` on, after `held` keys behind `gap` zeros at no position."""

    tokens: int = 40
    first: int = 90
    held: int = 90
    gap: int = 0
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    window: int | None = None

    def floats(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        torch.manual_seed(1)
        q = torch.randn(self.tokens, self.heads, self.d) * self.d**-0.5
        counts = self.held, self.tokens
        zeros = torch.zeros(self.kv_heads, self.gap, self.d)
        keys, values = (
            [zeros, *(torch.randn(self.kv_heads, n, self.d) for n in counts)] for _ in range(2)
        )
        return q, keys, values

    def causal(self) -> Causal:
        queries = torch.arange(self.first, self.first + self.tokens)
        old = torch.arange(self.first - self.held, self.first)
        return Causal.of(queries, torch.cat((old.new_full((self.gap,), NOWHERE), old, queries)),
                      self.window)  # fmt: skip


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], causal: Causal) -> Tensor:
    from sfumato.ops.triton.attention import attend as kernel

    return kernel(q, keys, values, causal)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(),
        Chunk(tokens=70, first=300, held=149, gap=151, window=150),
        Chunk(tokens=150, first=0, held=0, window=9),
        Chunk(tokens=1, heads=6, d=32),
        Chunk(heads=16, tokens=20, d=512, kv_heads=1, held=33, first=33),
    ],
)
def test_it_is_the_reference(chunk: Chunk) -> None:
    q, keys, values = chunk.floats()
    causal = chunk.causal()
    wide = q.double(), [x.double() for x in keys], [x.double() for x in values]
    close(attend(q, keys, values, causal), attention_reference.attend.reference(*wide, causal))


def test_tokens_that_see_any_interval() -> None:
    """Ahead of them too, as soft tokens of a picture do, and none at all."""
    chunk = Chunk(tokens=70, first=300, held=149, gap=151)
    q, keys, values = chunk.floats()
    random = torch.Generator().manual_seed(5)
    first = torch.randint(140, 369, (70,), generator=random)
    last = first + torch.randint(-2, 90, (70,), generator=random)
    first[:2], last[:2] = torch.tensor([160, 160]), torch.tensor([159, 160])  # none, and one key
    seen = replace(chunk.causal(), first=first, last=last)
    out = attend(q, keys, values, seen)
    wide = q.double(), [x.double() for x in keys], [x.double() for x in values]
    close(out, attention_reference.attend.reference(*wide, seen).nan_to_num())
    assert not out[0].any() and out[1].any()


def test_a_token_has_the_same_result_beside_others() -> None:
    """Of a chunk alone, and in chunks that begin elsewhere."""
    chunk = Chunk(tokens=200, first=0, held=0, window=40)
    q, keys, values = chunk.floats()
    causal = chunk.causal()
    together = attend(q, keys, values, causal)
    for first, last in ((0, 1), (1, 130), (130, 200)):
        some = slice(first, last)
        old = [[x[:, :first], x[:, some]] for x in (keys[-1], values[-1])]
        alone = Causal(causal.first[some], causal.last[some], causal.keys[:last])
        assert torch.equal(attend(q[some], *old, alone), together[some])


def test_rows_after_one_prefix_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by the kernel, as it is alone."""
    from sfumato import ops
    from sfumato.ops.triton import self_test

    chunk = Chunk(tokens=12)
    q, keys, values = chunk.floats()
    shared, new = torch.arange(90), torch.arange(90, 96)
    own = [Own([keys[-1][:, at]], [values[-1][:, at]]) for at in (slice(0, 6), slice(6, 12))]
    seen = Causal.of(torch.cat((new, new)), torch.cat((shared, new, new)), None, [(6, 6), (6, 6)])
    monkeypatch.setattr(self_test, "_passed", {torch.device("cpu"): frozenset(("attend",))})
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        out = ops.attend(q, keys[:-1], values[:-1], seen, own)
    assert launches["prefill_256"] == 2
    second = [[*x[:-1], x[-1][:, 6:]] for x in (keys, values)]
    alone = attend(q[6:], *second, Causal.of(new, torch.cat((shared, new))))
    assert torch.equal(out[6:], alone)


def test_what_it_does_not_take_is_left_to_torch() -> None:
    from sfumato.ops.triton.attention import TWINS

    chunk = Chunk()
    q, keys, values = chunk.floats()
    serves, causal = TWINS["attend"].serves, chunk.causal()
    assert serves(q, keys, values, causal)
    assert not serves(q, keys, values, None)
    assert not serves(q, [x.bfloat16() for x in keys], values, causal)
    assert not serves(*(replace(chunk, d=12).floats()), causal)


def test_a_token_that_sees_no_key_gets_zeros() -> None:
    chunk = Chunk(tokens=3, held=0)
    q, keys, values = chunk.floats()
    nothing = Causal.of(torch.arange(3), torch.full((3,), NOWHERE))
    assert not attend(q, keys, values, nothing).any()
    assert attend(q[:0], keys, values, nothing).shape == (0, 4, 16)
