"""The small parts against `transformers`: rotary tables, the gated MLP, the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from torch import Tensor
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaTextRotaryEmbedding,
)

from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.transformer import GatedMLP, Rotary, Router, rotary_key, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_rotary_tables(dtype: torch.dtype, share: float) -> None:
    """Up to the end of the context, where an angle rounded to half precision means nothing."""
    rope: dict[str, Any] = {
        oracle.S: {"rope_type": "default", "rope_theta": 1e4},
        oracle.F: {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": share,
        },
    }
    theirs = oracle.tiny_config(head_dim=256, global_head_dim=512, rope_parameters=rope)
    config = config_from_hf(theirs.to_dict())
    positions = torch.tensor([0, 1, 2, 255, 1023, 4097, 99_999, 262_143])
    rotary = Rotary(config.layers)
    tables = rotary.tables(positions, dtype)
    assert len(tables) == 2
    embedding = DiffusionGemmaTextRotaryEmbedding(theirs.text_config)
    for index, kind in ((0, oracle.S), (2, oracle.F)):
        expected = embedding(torch.zeros(1, dtype=dtype), positions[None], kind)
        for ours, reference in zip(tables[rotary_key(config.layers[index])], expected, strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours, reference[0, :, : ours.shape[-1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_is_rounded_as_a_tensor_rounds_it(dtype: torch.dtype) -> None:
    values = [size**0.5 for size in range(1, 5000, 7)] + [1.00390625, 1.01171875]  # the last: ties
    assert [rounded(v, dtype) for v in values] == torch.tensor(values, dtype=dtype).tolist()


def test_gated_mlp_uses_the_tanh_gelu() -> None:
    mlp = GatedMLP(4, 4)
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.weight.data = torch.eye(4)
    x = torch.tensor([-3.0, -0.5, 0.7, 2.5])
    torch.testing.assert_close(mlp(x), F.gelu(x, approximate="tanh") * x)
    assert (mlp(x) - F.gelu(x) * x).abs().max() > 1e-5


def routers(dtype: torch.dtype) -> tuple[Router, Any, Tensor]:
    model = oracle.random_oracle(oracle.tiny_config(), 31, dtype)
    network = oracle.network_of(model)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * 4
    return network.transformer.layers[0].router, model.model.decoder.layers[0].router, x.to(dtype)


def test_router() -> None:
    ours, theirs, x = routers(torch.float32)
    chosen, shares = ours(x)
    _, weights, index = theirs(x)
    assert torch.equal(chosen, index)
    torch.testing.assert_close(shares, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_computes_in_float32(dtype: torch.dtype) -> None:
    """Exactly as if the residual had come in float32."""
    router, _, x = routers(dtype)
    for ours, wide in zip(router(x), router(x.float()), strict=True):
        assert ours.dtype == wide.dtype and torch.equal(ours, wide)
