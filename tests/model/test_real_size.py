"""Two layers at the published model's size: parity, and the head's pass over 262144 tokens.

Slow: about 9 GB of random float32 weights, which the oracle and ours share.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.oracle import (
    F,
    S,
    encode_logits,
    network_of,
    oracle_encode_logits,
    oracle_logits,
    relative,
    tiny_config,
)
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.initialization import no_init_weights

from sfumato.model.network import Network

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "layer_types": [S, F],
    "canvas_length": 16,
    "max_position_embeddings": 262144,
}


def real_oracle() -> DiffusionGemmaForBlockDiffusion:
    """Random weights in every tensor. Memory that is never written is never used, so nothing is
    written before the encoder's copies are tied to the decoder's."""
    with no_init_weights():
        model = DiffusionGemmaForBlockDiffusion(tiny_config(**SIZES)).eval().requires_grad_(False)
    model.tie_weights()
    assert sum(weight.numel() for weight in model.parameters()) < 2.4e9
    torch.manual_seed(0)
    scalars = (pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar"))
    for name, tensor in (*model.named_parameters(), *scalars):
        if "vision" in name:
            continue
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.5, 1.5)
        elif "q_norm" in name:
            tensor.uniform_(0.05, 0.1)
        elif tensor.ndim == 1:
            tensor.uniform_(0.7, 1.3)
        else:
            # Of deviation 1 / sqrt(inputs), the head's three times that: scores spread by 3.
            reach = 3**0.5 * (3 if "embed_tokens" in name else 1) / tensor.shape[-1] ** 0.5
            tensor.uniform_(-reach, reach)
    return model


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[DiffusionGemmaForBlockDiffusion, Network]]:
    oracle = real_oracle()
    yield oracle, network_of(oracle)
    del oracle
    gc.collect()


def test_logits_and_statistics(
    pair: tuple[DiffusionGemmaForBlockDiffusion, Network], note: Callable[[str], None]
) -> None:
    oracle, network = pair
    random = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 262144, (19,), generator=random)
    canvas = torch.randint(0, 262144, (16,), generator=random)
    slot = network.new_slot(64)
    ours = encode_logits(network, [prompt], [slot])[0]
    theirs, cache = oracle_encode_logits(oracle, prompt)
    differences = [relative(ours, theirs)]
    first = oracle_logits(oracle, canvas, cache)
    hidden = network.denoise([canvas], [slot])
    differences.append(relative(network.head.logits(hidden), first))
    temperature = torch.full((16,), 0.6)
    uniform = torch.rand(16, generator=random, dtype=torch.float64)
    stats = network.head(hidden, temperature, uniform)
    logits = network.head.logits(hidden).double() / 0.6
    probs = logits.softmax(dim=1)
    assert torch.equal(stats.argmax, logits.argmax(dim=1))
    assert torch.equal(logits.gather(1, stats.top_ids), logits.topk(8, dim=1)[0])
    torch.testing.assert_close(
        stats.top_probs.double(), probs.gather(1, stats.top_ids), rtol=1e-4, atol=0
    )
    entropy = -torch.special.xlogy(probs, probs).sum(dim=1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    cumulated = probs.cumsum(dim=1)
    ends = cumulated.gather(1, stats.drawn[:, None])[:, 0]
    starts = ends - probs.gather(1, stats.drawn[:, None])[:, 0]
    assert (uniform < ends + 1e-6).all() and (uniform >= starts - 1e-6).all()
    embedding = network.transformer.embed_tokens.weight
    soft = probs.float() @ embedding * 2816**0.5
    assert relative(stats.soft, soft) <= 1e-4
    second = oracle_logits(oracle, canvas, cache, soft_logits=first / 0.6)
    hidden = network.denoise([canvas], [slot], [stats.soft])
    differences.append(relative(network.head.logits(hidden), second))
    assert relative(first, second) > 1e-2  # self-conditioning has an effect
    note(f"real size, largest differences by phase: {[f'{d:.1e}' for d in differences]}")
    assert max(differences) <= 1e-4
