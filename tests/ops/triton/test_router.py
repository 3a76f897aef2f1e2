"""The router, interpreted, against the module in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.kernels import close, interpreted

from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.transformer import Router

pytestmark = interpreted
LAYER = LayerConfig(sliding=True, kv_heads=1, head_dim=8, rope_theta=1e4, rope_pairs=4)
CONFIG = ModelConfig(
    vocab_size=32, hidden_size=72, intermediate_size=8, num_heads=1, num_experts=20,
    experts_per_token=3, expert_size=8, sliding_window=4, canvas_length=8, context_length=64,
    rms_norm_eps=1e-6, logit_softcap=30.0, layers=(LAYER,),
)  # fmt: skip


def test_choices_are_those_of_the_reference() -> None:
    from sfumato.ops.triton.experts import route

    torch.manual_seed(2)
    router = Router(CONFIG)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(18, router.scale.shape[0])
    x[3] = 0  # all scores are equal: the first experts
    with torch.no_grad():
        expected = router(x)
    weights = router.proj.weight, router.scale, router.per_expert_scale
    chosen, shares = route(x, *(each.detach() for each in weights), router.active, router.eps)
    rows = torch.arange(18) != 3
    assert torch.equal(chosen[rows], expected[0][rows])
    close(shares[rows], expected[1][rows], 1e-5)
    assert chosen[3].tolist() == list(range(router.active))


def upper(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float32 numbers to the nearest that TF32 has, of eleven bits."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(np.float32)


@pytest.mark.parametrize("count", [1, 3])
def test_three_products_of_tf32_pass_the_trial_and_one_does_not(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As matrix units make them, each of eight inputs, whose sums lose what is below float32."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from sfumato.ops.triton.experts import TWINS
    from sfumato.ops.triton.self_test import Trial, why_wrong

    def dot(_: object, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        big, other = upper(a.data), upper(b.data)
        pairs = [(big, upper(b.data - other)), (upper(a.data - big), other), (big, other)]
        total = d.data
        for left, right in pairs[-count:]:
            for at in range(0, left.shape[1], 8):
                exact = left[:, at : at + 8].astype(np.float64) @ right[at : at + 8]
                total = (total + exact).astype(np.float32)
        return TensorHandle(total, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    why = why_wrong(TWINS["route"], Trial(torch.device("cpu")))
    assert ("relative error" in why or "other integers" in why) is (count == 1), why
    assert bool(why) is (count == 1), why
