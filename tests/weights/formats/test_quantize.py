from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from sfumato.model.quantization import TARGETS
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize
from sfumato.weights.formats import format as module

SIMPLE = ("Q4_0", "Q5_0", "Q5_1", "Q8_0")
# What ggml's own quantizers (without an importance matrix) reach on 2 million normal numbers:
# root mean square error over standard deviation.
GGML = {"Q4_K": 0.0714, "Q5_K": 0.0361, "Q6_K": 0.01776, "IQ4_NL": 0.0761}
WRITTEN = (*SIMPLE, *GGML)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def _heavy(*shape: int, seed: int = 0) -> Tensor:
    """Student's t with 4 degrees of freedom: outliers, as weights have them."""
    torch.manual_seed(seed)
    return torch.distributions.StudentT(4.0).sample(shape) * 0.02


def _odd() -> Tensor:
    """Blocks at the edges: zeros, constants, ties, lone outliers, numbers next to nothing."""
    rows = torch.zeros(16, 256)
    rows[1], rows[2] = 0.7, -0.7
    rows[3, 5] = 3.0
    rows[4, 5] = -3.0
    rows[5] = torch.tensor([1.0, -1.0]).repeat(128)  # two of the greatest magnitude
    rows[6] = torch.arange(256) - 127.0  # halves after scaling
    rows[7] = torch.arange(256) * 1e-9
    rows[8] = torch.linspace(1, 2, 256)
    rows[9] = -torch.linspace(1, 2, 256)
    rows[10] = torch.arange(256) * 1e-41
    rows[11] = torch.arange(256) % 15 - 7.5
    rows[12] = 1000 * _normal(256)
    rows[13, :32] = _normal(32)
    rows[14] = torch.arange(256) * 1e-6
    rows[15] = 1e-30
    return rows


def _error(values: Tensor, coded: QuantizedTensor) -> float:
    return float(
        (coded.dequantize() - values).square().mean().sqrt() / values.square().mean().sqrt()
    )


@pytest.mark.parametrize("make", [_normal, _heavy])
@pytest.mark.parametrize("name", SIMPLE)
def test_the_simple_formats_round_as_ggml(name: str, make: Callable[..., Tensor]) -> None:
    values = make(64, 704)
    expected = gguf.quantize(values.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(quantize(values, FORMATS[name]).data.numpy(), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the oracle divides by next to nothing
@pytest.mark.parametrize("name", SIMPLE)
def test_the_simple_formats_round_odd_blocks_as_ggml(name: str) -> None:
    values = _odd()
    usable = torch.arange(16) != 10  # there the oracle's 1/d is infinite
    expected = gguf.quantize(values.numpy(), GGMLQuantizationType[name])
    ours = quantize(values, FORMATS[name]).data
    assert np.array_equal(ours[usable].numpy(), expected[usable.numpy()])


@pytest.mark.parametrize("name", GGML)
def test_the_search_comes_close_to_ggml(name: str, note: Callable[[str], None]) -> None:
    values = _normal(512, 4096)
    error = _error(values, quantize(values, FORMATS[name]))
    note(f"quantize: {name} on normal numbers: error {error:.5f} (ggml {GGML[name]})")
    assert error <= 1.01 * GGML[name]


def _affine(values: Tensor, levels: int, group: int) -> Tensor:
    """Round to nearest between a group's minimum (0 at most) and maximum, scales kept as floats."""
    groups = values.view(-1, group)
    low = groups.amin(1, keepdim=True).clamp(max=0)
    scale = (groups.amax(1, keepdim=True) - low) / levels
    return (((groups - low) / scale).round() * scale + low).view_as(values)


def _linear(values: Tensor, group: int) -> Tensor:
    groups = values.view(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / 31
    return ((groups / scale).round() * scale).view_as(values)


@pytest.mark.parametrize("make", [_normal, _heavy])
@pytest.mark.parametrize(
    ("name", "naive"),
    [
        ("Q4_K", lambda x: _affine(x, 15, 32)),
        ("Q5_K", lambda x: _affine(x, 31, 32)),
        ("Q6_K", lambda x: _linear(x, 16)),
        ("IQ4_NL", lambda x: quantize(x, FORMATS["Q4_0"]).dequantize()),
    ],
)
def test_the_search_beats_the_obvious_scale(
    name: str, naive: Callable[[Tensor], Tensor], make: Callable[..., Tensor]
) -> None:
    values = make(64, 2816)
    error = (naive(values) - values).square().mean().sqrt() / values.square().mean().sqrt()
    assert _error(values, quantize(values, FORMATS[name])) < error


@pytest.mark.parametrize("name", WRITTEN)
def test_odd_blocks_keep_their_range(name: str) -> None:
    """No value leaves its block's range by more than the width of a code, and zeros stay zeros."""
    values = _odd()
    coded = quantize(values, FORMATS[name])
    back = coded.dequantize()
    assert back.isfinite().all()
    assert (back[0] == 0).all()
    peak = values.abs().amax(1, keepdim=True)
    rough = 0.25 if name in ("Q4_0", "IQ4_NL") else 0.15
    assert ((back - values).abs() <= rough * peak + 1e-6).all()
    assert np.array_equal(
        gguf.dequantize(coded.data.numpy(), GGMLQuantizationType[name]), back.numpy()
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_a_row_does_not_depend_on_what_is_quantized_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _heavy(3, 7, 512)
    blocks = quantize(values, FORMATS[name])
    assert blocks.shape == (3, 7, 512)
    monkeypatch.setattr(module, "_ENCODED", 1024)
    assert torch.equal(quantize(values, FORMATS[name]).data, blocks.data)
    assert torch.equal(quantize(values[1], FORMATS[name]).data, blocks.data[1])


@pytest.mark.parametrize(
    "name",
    [n if n in ("Q8_0", "Q6_K") else pytest.param(n, marks=pytest.mark.slow) for n in WRITTEN],
)
def test_threads_change_nothing(name: str) -> None:
    values, threads = _heavy(300, 2816), torch.get_num_threads()
    alone = quantize(values, FORMATS[name]).data
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(quantize(values, FORMATS[name]).data, alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_other_floats_are_taken_as_they_are(name: str, dtype: torch.dtype) -> None:
    values = _normal(4, 256).to(dtype)
    expected = quantize(values.float(), FORMATS[name])
    assert torch.equal(quantize(values, FORMATS[name]).data, expected.data)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_block_cannot_hold_is_refused(name: str, bad: float) -> None:
    values = _normal(3, 256)
    values[1, 100] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize(values, FORMATS[name])


def test_every_target_can_be_written() -> None:
    bases = {target.base for target in TARGETS.values()} - {"F32", "F16", "BF16"}
    assert bases <= set(WRITTEN)
