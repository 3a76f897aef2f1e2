"""Every operation against an independent and slow way to say the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import encode
from torch import Tensor
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as theirs

from sfumato import ops
from sfumato.ops import registry
from sfumato.weights.formats import FORMATS, QuantizedTensor

seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=random, dtype=dtype)


def quantized(name: str, *shape: int, seed: int = 0) -> QuantizedTensor:
    data = torch.from_numpy(encode(normal(generator(seed), *shape), name, seed))
    return QuantizedTensor(data, FORMATS[name], shape)


def test_dense() -> None:
    weight = normal(generator(0), 3, 4)
    assert ops.dense(weight, torch.float32) is weight
    assert ops.dense(weight, torch.bfloat16).dtype == torch.bfloat16
    blocks = quantized("Q8_0", 3, 64)
    assert torch.equal(ops.dense(blocks, torch.float16), blocks.dequantize(torch.float16))


def test_linear() -> None:
    random = generator(1)
    x, weight = normal(random, 2, 3, 8), normal(random, 5, 8)
    expected = torch.tensor(
        [[[sum(x[a, b, i] * weight[o, i] for i in range(8)) for o in range(5)] for b in range(3)]
         for a in range(2)]
    )  # fmt: skip
    torch.testing.assert_close(ops.linear(x, weight), expected)
    assert ops.linear(x.bfloat16(), weight).dtype == torch.bfloat16
    blocks, wide = quantized("Q5_0", 7, 64), normal(random, 4, 64)
    torch.testing.assert_close(ops.linear(wide, blocks), wide @ blocks.dequantize().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, 0, 3], [9, 1, 2]])
    weight, blocks = normal(generator(2), 10, 64), quantized("Q8_0", 10, 64)
    out = ops.embed(ids, weight, dtype)
    assert out.dtype == dtype and torch.equal(out, weight[ids].to(dtype))
    assert torch.equal(ops.embed(ids, blocks, dtype), blocks.dequantize()[ids].to(dtype))


def test_the_router_is_exact_in_float64() -> None:
    """What kernels are compared with has an error of its own where it is float32 inside."""
    random = generator(3)
    x, weight = normal(random, 4, 2816).double(), normal(random, 16, 2816).double()
    ones = torch.ones(2816, dtype=torch.float64)
    with registry.reference_only():
        chosen, shares = ops.route(x, weight, ones, None, 4, 1e-6)
    scores = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() / 2816**0.5 @ weight.T
    best = scores.topk(4)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(shares, best.values.softmax(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [True, False])
def test_rms_norm(dtype: torch.dtype, scaled: bool) -> None:
    random = generator(3)
    x = (normal(random, 4, 5, 16) * 3).to(dtype)
    weight = normal(random, 16).to(dtype) if scaled else None
    with registry.reference_only():
        out = ops.rms_norm(x, weight, 1e-3)
    norm = theirs.DiffusionGemmaRMSNorm(16, eps=1e-3, with_scale=scaled)
    if weight is not None:
        norm.weight.data = weight
    assert out.dtype == dtype and torch.equal(out, norm(x))
    for row, got in zip(x.reshape(-1, 16).double(), out.reshape(-1, 16), strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / 16 + 1e-3)
        expected = row / root * (1 if weight is None else weight.double())
        torch.testing.assert_close(got, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate(dtype: torch.dtype) -> None:
    random = generator(4)
    x = normal(random, 2, 7, 3, 16).to(dtype)
    angles = normal(random, 2, 7, 8) * 5
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    with registry.reference_only():
        out = ops.rotate(x, cos, sin)
    doubled = [torch.cat((t, t), dim=-1) for t in (cos, sin)]
    torch.testing.assert_close(out, theirs.apply_rotary_pos_emb(x, *doubled, unsqueeze_dim=2))
    if dtype == torch.float32:  # a turn of the complex number x[i] + i·x[i + d/2]
        turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(-2)
        torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One row, query by query: q [heads, n, d], k and v [kv_heads, m, d], mask [n, m]."""
    out = torch.zeros_like(q)
    for head in range(len(q)):
        shared = head // (len(q) // len(k))
        for query in range(q.shape[1]):
            scores = torch.stack([q[head, query] @ key for key in k[shared]])
            if mask is not None:
                scores = scores.masked_fill(~mask[query], -torch.inf)
            for weight, value in zip(scores.softmax(0), v[shared], strict=True):
                out[head, query] += weight * value
    return out


@settings(max_examples=25)
@given(
    kv_heads=st.sampled_from((1, 2, 3)),
    group=st.sampled_from((1, 2, 4)),
    n=st.integers(1, 6),
    m=st.integers(1, 9),
    masked=st.booleans(),
    batch=st.sampled_from(((), (2,))),
    seed=seeds,
)
def test_attention(
    kv_heads: int, group: int, n: int, m: int, masked: bool, batch: tuple[int, ...], seed: int
) -> None:
    random = generator(seed)
    q = normal(random, *batch, kv_heads * group, n, 4)
    k, v = normal(random, *batch, kv_heads, m, 4), normal(random, *batch, kv_heads, m, 4)
    mask = None
    if masked:
        mask = torch.rand(*batch, n, m, generator=random) < 0.5
        mask[..., 0] = True  # a query that may look nowhere has no answer
    out = ops.attention(q, k, v, mask)
    assert out.shape == q.shape
    rows = [(q, k, v, mask, out)] if not batch else [
        (q[i], k[i], v[i], None if mask is None else mask[i], out[i]) for i in range(2)
    ]  # fmt: skip
    for *inputs, got in rows:
        torch.testing.assert_close(got, naive_attention(*inputs), rtol=1e-4, atol=1e-5)


def expert_inputs(seed: int, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Five experts of width 3 on a hidden size of 8, two for each token."""
    random = generator(seed)
    return {
        "x": normal(random, tokens, 8, dtype=dtype),
        "chosen": torch.stack([torch.randperm(5, generator=random)[:2] for _ in range(tokens)]),
        "shares": torch.rand(tokens, 2, generator=random, dtype=dtype),
        "gate_up": normal(random, 5, 6, 8, dtype=dtype),
        "down": normal(random, 5, 8, 3, dtype=dtype),
    }


def naive_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            both = gate_up[expert] @ x[token]
            size = len(both) // 2
            gate, up = both[:size], both[size:]
            inner = (
                gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            )
            out[token] += share * (down[expert] @ (inner * up))
    return out


@settings(max_examples=25)
@given(tokens=st.integers(1, 20), seed=seeds)
def test_experts(tokens: int, seed: int) -> None:
    inputs = expert_inputs(seed, tokens)
    torch.testing.assert_close(ops.experts(**inputs), naive_experts(**inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantized_experts(name: str) -> None:
    gate_up, down = quantized(name, 4, 64, 32, seed=1), quantized(name, 4, 32, 32, seed=2)
    x = normal(generator(5), 6, 32)
    chosen = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [3, 1], [1, 0]])  # no token chooses 2
    shares = torch.rand(6, 2, generator=generator(6))
    out = ops.experts(x, chosen, shares, gate_up, down)
    plain = ops.experts(x, chosen, shares, gate_up.dequantize(), down.dequantize())
    assert torch.equal(out, plain)


def test_other_tokens_do_not_change_how_a_tokens_experts_are_summed() -> None:
    """Bit for bit."""
    inputs = expert_inputs(7, 12)
    together = ops.experts(**inputs)
    for token in range(12):
        alone = {
            name: value[token : token + 1] if name in ("x", "chosen", "shares") else value
            for name, value in inputs.items()
        }
        assert torch.equal(ops.experts(**alone)[0], together[token])


def test_other_tokens_change_no_more_than_rounding() -> None:
    inputs = expert_inputs(8, 30)
    together = ops.experts(**inputs)
    first = {k: v[:4] if k in ("x", "chosen", "shares") else v for k, v in inputs.items()}
    torch.testing.assert_close(ops.experts(**first), together[:4], rtol=1e-6, atol=1e-6)


def test_gradients_of_experts() -> None:
    inputs = expert_inputs(9, 4, torch.float64)
    chosen = inputs.pop("chosen")
    floats = [value.requires_grad_() for value in inputs.values()]

    def run(x: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return ops.experts(x, chosen, shares, gate_up, down)

    assert torch.autograd.gradcheck(run, floats)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_attention(masked: bool) -> None:
    random = generator(10)
    q, k, v = (
        normal(random, heads, count, 3, dtype=torch.float64).requires_grad_()
        for heads, count in ((4, 3), (2, 5), (2, 5))
    )
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    assert torch.autograd.gradcheck(
        lambda *qkv: ops.attention(*qkv, mask if masked else None), (q, k, v)
    )


def test_gradients_of_the_rest() -> None:
    """Float32 inside, so against the derivative by hand and not by differences."""
    random = generator(11)
    x = normal(random, 3, 8).requires_grad_()
    weight = normal(random, 8).requires_grad_()
    pull = normal(random, 3, 8)
    (ops.rms_norm(x, weight, 1e-6) * pull).sum().backward()
    with torch.no_grad():
        inverse = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        pulled = pull * weight
        slope = inverse * (pulled - x * (pulled * x).mean(-1, keepdim=True) * inverse**2)
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad, slope)
    torch.testing.assert_close(weight.grad, (pull * x.detach() * inverse).sum(0))
    embedding = normal(random, 5, 8).requires_grad_()
    ops.embed(torch.tensor([1, 1, 4]), embedding, torch.float32).sum().backward()
    assert embedding.grad is not None
    assert torch.equal(embedding.grad[:, 0], torch.tensor([0.0, 2, 0, 0, 1]))
    y = normal(random, 2, 3, 8, dtype=torch.float64).requires_grad_()
    angles = normal(random, 2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: ops.rotate(t, angles.cos(), angles.sin()), y)


def test_the_backend_has_a_name() -> None:
    assert ops.backend
    assert ops.reason
    assert all(hasattr(ops, name) for name in ops.__all__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 106), (1024, 1032)])
def test_a_product_rounds_a_row_alike_among_any_others(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    """Bit for bit, and so does GELU; the larger weight is one of those that torch reads in
    another way for more rows."""

    def gelu(x: Tensor) -> Tensor:
        return ops.gated(x, x)

    x, weight = torch.randn(600, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    for factor in (weight, weight.T.contiguous().T):
        all_rows = gelu(ops.linear(x, factor))
        for start, stop in ((0, 1), (3, 20), (17, 81), (100, 356), (5, 600)):
            part = gelu(ops.linear(x[start:stop], factor))
            assert torch.equal(part, all_rows[start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_causal_attention_does_not_depend_on_where_chunks_begin(
    dtype: torch.dtype, window: int | None
) -> None:
    total = 620
    q, k, v = (torch.randn(total, heads, 16).to(dtype) for heads in (4, 2, 2))
    keys, values, positions = k.transpose(0, 1), v.transpose(0, 1), torch.arange(total)

    def attended(start: int, stop: int) -> Tensor:
        seen = ops.Causal.of(positions[start:stop], positions[:stop], window)
        parts = [keys[:, :start], keys[:, start:stop]], [values[:, :start], values[:, start:stop]]
        return ops.attend(q[start:stop], *parts, seen)

    all_rows = attended(0, total)
    for start, stop in ((0, 1), (1, 33), (33, 500), (500, 513), (77, 600)):
        assert torch.equal(attended(start, stop), all_rows[start:stop]), (start, stop)
    mask = positions <= positions[:, None]
    if window is not None:
        mask &= positions > positions[:, None] - window
    exact = ops.attention(*(x.float().transpose(0, 1) for x in (q, k, v)), mask).transpose(0, 1)
    atol = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(all_rows.float(), exact, rtol=0, atol=atol)
