"""Compiled operations: every format, mode and instruction set against the same in plain torch.

Twice: against float32, within the errors that are promised; and against the very arithmetic that
they are to do (activations rounded as they round them), within float32's own rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cpu.forced import (
    FORMATS,
    RUNNING,
    blocks,
    compiled,
    forced,
    normal,
    relative,
    runs,
    threads,
    weights,
)
from torch import Tensor

from sfumato.ops import reference
from sfumato.ops.cpu import kernels
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.weights import formats
from sfumato.weights.formats import of_files

# Relative L2 error against float32 on normally distributed numbers. Experts round twice, and the
# product of gate and up has the errors of both.
LINEAR = {"int8": 6.5e-3, "bf16": 3e-3}
EXPERTS = {"int8": 1.5e-2, "bf16": 5e-3}

each_format = pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product(sorted(of_files("blocks")), ("int8", "bf16")), ("BF16", "bf16")],
)
seeds = st.integers(0, 2**31)


def rounded(x: Tensor, mode: str) -> Tensor:
    """Activations as a kernel rounds them, in float64."""
    if mode == "bf16":
        return x.bfloat16().double()
    padded = F.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    peak = padded.abs().amax(dim=-1, keepdim=True)
    codes = (padded * torch.where(peak > 0, 127 / peak, 0.0)).round()
    return (codes.double() * (peak / 127).double()).flatten(-2)[..., : x.shape[-1]]


def product(x: Tensor, weight: Tensor, mode: str) -> Tensor:
    """[tokens, in] by [out, in], in float64, of the rounded factors."""
    return rounded(x, mode) @ (weight.bfloat16() if mode == "bf16" else weight).double().T


def on_edge(x: Tensor) -> Tensor:
    """The rows, bool [tokens], in which a number lies so near the middle between two codes of int8
    that float32 may round it to either."""
    padded = F.pad(x.double(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    peak = padded.abs().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    return ((padded * 127 / peak % 1 - 0.5).abs() < 1e-4).flatten(-2).any(-1)


def check(got: Tensor, x: Tensor, weight: Tensor, mode: str) -> None:
    """A product is that of rounded activations, within float32's rounding of what it could be at
    most; but where an activation may be rounded to either side, or a weight to bfloat16."""
    scale = x.double().norm(dim=-1)[..., None] * weight.double().norm(dim=-1)
    loose = on_edge(x) if mode == "int8" else torch.ones(x.shape[:-1], dtype=torch.bool)
    limit = torch.where(loose, 2e-3, 1e-5)[..., None]
    error = (got.double() - product(x, weight, mode)).abs()
    assert (error <= limit * scale + 1e-30).all()


@compiled
@each_format
def test_linear(name: str, mode: str) -> None:
    packed, stored = weights(name, mode, 80, 512)
    plain = packed.dequantize()
    for isa, dtype in itertools.product(RUNNING, (torch.float32, torch.bfloat16)):
        x = normal(1, 2, 25, 512).to(dtype)
        with forced(isa):
            out = kernels.linear(x, packed)
            assert out.dtype == dtype and out.shape == (2, 25, 80)
            rounding = 2e-3 if dtype == torch.bfloat16 else 0  # the result's own rounding
            assert relative(out, x.float() @ stored.T) < LINEAR[mode] + rounding
            if dtype == torch.float32:
                check(out, x, plain, mode)


@compiled
@settings(max_examples=20)
@given(
    form=st.sampled_from([*itertools.product(sorted(of_files("blocks")), ("int8", "bf16"))]),
    rows=st.integers(1, 70),
    columns=st.integers(1, 9),
    tokens=st.integers(0, 40),
    deviation=st.sampled_from((1e-20, 1e-3, 1.0, 1e4)),
    seed=seeds,
)
def test_linear_of_any_shape(
    form: tuple[str, str],
    rows: int,
    columns: int,
    tokens: int,
    deviation: float,
    seed: int,
) -> None:
    name, mode = form
    packed, _ = weights(name, mode, rows, columns * formats.FORMATS[name].block_size, seed=seed)
    x = normal(seed + 1, tokens, packed.shape[1]) * deviation
    x[:, : x.shape[1] // 2] *= (normal(seed + 2, tokens, 1) > 0).float()  # some blocks of zeros
    plain = packed.dequantize()
    for isa in RUNNING:
        with forced(isa):
            check(kernels.linear(x, packed), x, plain, mode)


@compiled
@settings(max_examples=10)
@given(rows=st.integers(1, 70), columns=st.integers(1, 130), tokens=st.integers(0, 40), seed=seeds)
def test_bfloat16_of_any_shape(rows: int, columns: int, tokens: int, seed: int) -> None:
    packed, stored = weights("BF16", "bf16", rows, columns, seed=seed)
    x = normal(seed + 1, tokens, columns)
    for isa in RUNNING:
        with forced(isa):
            check(kernels.linear(x, packed), x, stored, "bf16")


@compiled
@each_format
def test_neighbours_and_threads_do_not_matter(name: str, mode: str) -> None:
    """Bit for bit: a row alone, in any batch, on any number of threads; and on the two levels with
    256 bits, which sum the same integers in other ways."""
    packed, _ = weights(name, mode, 50, 256)
    x, results = normal(3, 70, 256), {}
    for isa in RUNNING:
        with forced(isa):
            together = results[isa] = kernels.linear(x, packed)
            for count in (1, 2, 3, 12, 13, 64):
                some = slice(5, 5 + count)
                assert torch.equal(kernels.linear(x[some], packed), together[some])
            for workers in (2, 3, 5):
                with threads(workers):
                    assert torch.equal(kernels.linear(x, packed), together)
    if runs("avx2") and runs("avx_vnni"):
        assert torch.equal(results["avx2"], results["avx_vnni"])


def expert_inputs(
    name: str,
    mode: str,
    tokens: int,
    count: int = 6,
    sizes: tuple[int, int] = (256, 256),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, PackedTensor, PackedTensor]:
    """x, chosen, shares, gate_up and down for experts of these sizes (hidden, inner)."""
    hidden, inner = sizes
    random = torch.Generator().manual_seed(seed)
    gate_up, _ = weights(name, mode, count, 2 * inner, hidden, seed=seed)
    down, _ = weights(name, mode, count, hidden, inner, seed=seed + 1)
    picks = [torch.randperm(count, generator=random)[:2] for _ in range(tokens)]
    shares = torch.rand(tokens, 2, generator=random)
    # So that gelu and up act on numbers of about 1.
    x = normal(seed + 2, tokens, hidden) * hidden**-0.5
    return x, torch.stack(picks), shares, gate_up, down


@compiled
@each_format
def test_experts(name: str, mode: str) -> None:
    x, chosen, shares, gate_up, down = expert_inputs(name, mode, 40)
    plain = gate_up.dequantize(), down.dequantize()
    for dtype, gating, rounding in ((torch.float32, "gelu", 0), (torch.bfloat16, "silu", 2e-3)):
        x = x.to(dtype)
        expected = reference.experts.reference(x.float(), chosen, shares, *plain, gating)
        for isa in RUNNING:
            with forced(isa):
                out = kernels.experts(x, chosen, shares, gate_up, down, gating)
                assert out.dtype == dtype and out.shape == x.shape
                assert relative(out, expected) < EXPERTS[mode] + rounding


def emulated(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, mode: str, gating: str
) -> Tensor:
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for token, (row, ids) in enumerate(zip(x, chosen.tolist(), strict=True)):
        for expert, share in zip(ids, shares[token].double(), strict=True):
            gate, up = product(row[None], gate_up[expert], mode).chunk(2, dim=-1)
            inner = reference.gated.reference(gate, up, gating).float()
            out[token] += share * product(inner, down[expert], mode)[0]
    return out


@compiled
@settings(max_examples=12)
@given(
    forms=st.tuples(*[st.sampled_from(FORMATS)] * 2),
    mode=st.sampled_from(("int8", "bf16")),
    hidden=st.integers(1, 3),
    inner=st.integers(1, 3),
    tokens=st.sampled_from((0, 1, 2, 7, 33)),
    count=st.integers(1, 9),
    everybody=st.booleans(),
    gating=st.sampled_from(("gelu", "silu")),
    seed=seeds,
)
def test_experts_of_any_shape(
    forms: tuple[str, str],
    mode: str,
    hidden: int,
    inner: int,
    tokens: int,
    count: int,
    everybody: bool,
    gating: str,
    seed: int,
) -> None:
    """Two formats, uneven experts; with `everybody`, the last expert has all tokens, and twice."""
    if "BF16" in forms:
        mode = "bf16"
    sizes = [formats.FORMATS[name].block_size if name != "BF16" else 32 for name in forms]
    hidden, inner = hidden * sizes[0], inner * sizes[1]
    gate_up, _ = weights(forms[0], mode, count, 2 * inner, hidden, seed=seed)
    down, _ = weights(forms[1], mode, count, hidden, inner, seed=seed + 1)
    random = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(tokens, 2, generator=random) ** 2 * count).long()
    if everybody:
        chosen[:] = count - 1
    shares = torch.rand(tokens, 2, generator=random)
    x = normal(seed + 2, tokens, hidden) * hidden**-0.5
    plain = gate_up.dequantize(), down.dequantize()
    expected = emulated(x, chosen, shares, *plain, mode, gating)
    # An inner number next to a rounding's edge may fall to either side; with bfloat16 weights may
    # be rounded, too, and the sizes are so small that it hardly averages out.
    limit = 4e-3 if mode == "int8" else 1.2e-2
    for isa in RUNNING:
        with forced(isa):
            out = kernels.experts(x, chosen, shares, gate_up, down, gating)
            assert out.shape == x.shape and (not tokens or relative(out, expected) < limit)


@compiled
@pytest.mark.parametrize(("name", "mode"), [("Q4_K", "int8"), ("Q8_0", "bf16"), ("BF16", "bf16")])
def test_other_tokens_and_threads_do_not_matter(name: str, mode: str) -> None:
    """Bit for bit; 150 tokens are more than one expert gets at a time."""
    x, chosen, shares, gate_up, down = expert_inputs(name, mode, 150, count=3)

    def run(some: slice) -> Tensor:
        return kernels.experts(x[some], chosen[some], shares[some], gate_up, down)

    for isa in RUNNING:
        with forced(isa):
            together = run(slice(None))
            for some in (slice(0, 1), slice(149, 150), slice(20, 90)):
                assert torch.equal(run(some), together[some])
            for workers in (2, 3, 5):
                with threads(workers):
                    assert torch.equal(run(slice(None)), together)


@compiled
def test_choices_that_are_refused() -> None:
    """Experts that there are not, and another type than int64."""
    x, chosen, shares, gate_up, down = expert_inputs("Q8_0", "int8", 3)
    with pytest.raises(AssertionError, match=r"int64, not torch\.int32"):
        kernels.experts(x, chosen.int(), shares, gate_up, down)
    refused = pytest.raises(ValueError, match="sf_experts: the compiled library refuses")
    for isa, wrong in itertools.product(RUNNING, (-1, 6, 1 << 40)):
        chosen[1, 1] = wrong
        with forced(isa), refused:
            kernels.experts(x, chosen, shares, gate_up, down)


@compiled
def test_inputs_that_do_not_lie_as_they_are_read() -> None:
    """Every second row, transposed choices, float16 and float64."""
    x, chosen, shares, gate_up, down = expert_inputs("Q8_0", "int8", 8)
    strided = x.repeat_interleave(2, dim=0)[::2], chosen.T.contiguous().T, shares.double()
    for isa in RUNNING:
        with forced(isa):
            expected = kernels.experts(x, chosen, shares, gate_up, down)
            assert torch.equal(kernels.experts(*strided, gate_up, down), expected)
            linear = kernels.linear(x, down[0])
            assert torch.equal(kernels.linear(x.T.contiguous().T, down[0]), linear)
            assert torch.equal(kernels.linear(x.double(), down[0]), linear.double())
            half = kernels.linear(x.half(), down[0])
            assert half.dtype == torch.float16
            torch.testing.assert_close(half.float(), linear, rtol=0.02, atol=0.02)


@compiled
@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_what_is_no_number_stays_in_its_row(mode: str) -> None:
    packed, _ = weights("Q4_K", mode, 40, 256)
    clear = normal(4, 9, 256)
    others = torch.arange(9) != 3
    for isa, bad in itertools.product(RUNNING, (torch.nan, torch.inf)):
        x = clear.clone()
        x[3, 7] = bad
        with forced(isa):
            clean, out = kernels.linear(clear, packed), kernels.linear(x, packed)
            assert not out[3].isfinite().any()
            assert torch.equal(out[others], clean[others])


@compiled
@pytest.mark.parametrize("name", sorted(of_files("blocks")))
def test_dequantize(name: str) -> None:
    """Bit for bit, from any byte on."""
    weight = blocks(name, 3, 70, 512)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = weight[1:].dequantize(dtype)
        for isa, workers in itertools.product(RUNNING, (1, 3)):
            with forced(isa), threads(workers):
                out = kernels.dequantize(weight[1:], dtype)
                assert out.dtype == dtype and torch.equal(out, expected)


@compiled
@given(name=st.sampled_from(sorted(of_files("blocks"))), seed=seeds)
def test_any_bytes_dequantize_alike(name: str, seed: int) -> None:
    """Infinite and NaN scales included."""
    weight = blocks(name, 5, 256)
    random = torch.Generator().manual_seed(seed)
    weight.data.random_(0, 256, generator=random)
    for dtype in (torch.float32, torch.bfloat16):
        expected = weight.dequantize(dtype)
        for isa in RUNNING:
            with forced(isa):
                got = kernels.dequantize(weight, dtype)
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow  # 25 s: the same limits hold at small sizes above
@compiled
@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_the_errors_at_real_sizes_are_told(mode: str, note: Callable[[str], None]) -> None:
    worst = {"linear": 0.0, "experts": 0.0}
    for name, block in of_files("blocks").items():
        packed, stored = weights(name, mode, 64, 2816)
        x = normal(1, 16, 2816)
        error = relative(kernels.linear(x, packed), x @ stored.T)
        worst["linear"] = max(worst["linear"], error)
        inner = 704 if block.block_size == 32 else 768
        *inputs, gate_up, down = expert_inputs(name, mode, 16, count=2, sizes=(2816, inner))
        expected = reference.experts.reference(*inputs, gate_up.dequantize(), down.dequantize())
        error = relative(kernels.experts(*inputs, gate_up, down), expected)
        worst["experts"] = max(worst["experts"], error)
    assert worst["linear"] < LINEAR[mode] and worst["experts"] < EXPERTS[mode]
    figures = ", ".join(f"{what} {error:.1e}" for what, error in worst.items())
    note(f"compiled operations with {mode} activations: relative L2 error at most {figures}")
