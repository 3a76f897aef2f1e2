"""The router, interpreted, against the module in plain torch."""

from __future__ import annotations

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
