"""`transformers` as the oracle: random tiny DiffusionGemmas, and the same weights in Sfumato."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
)
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from sfumato.model.cache import Slot
from sfumato.model.families.diffusion_gemma.config import config_from_hf
from sfumato.model.loading import Mover, _converted, place, skeleton
from sfumato.model.network import Network

S, F = "sliding_attention", "full_attention"
ENCODER = "model.encoder.language_model."


def tiny_config(**changes) -> DiffusionGemmaConfig:
    """A configuration with every kind of layer, small enough to run in milliseconds."""
    canvas = changes.pop("canvas_length", 8)
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "layer_types": [S, S, F],
        "max_position_embeddings": 4096,
        "use_bidirectional_attention": "vision",
    }
    text.update(changes)
    text["num_hidden_layers"] = len(text["layer_types"])
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        position_embedding_size=8,
    )
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**text), vision_config=vision, canvas_length=canvas
    )
    config._attn_implementation = "eager"
    return config


def random_oracle(
    config: DiffusionGemmaConfig, seed: int, dtype: torch.dtype = torch.float32
) -> DiffusionGemmaForBlockDiffusion:
    """Random weights in every tensor: norms near 1, another layer scalar in every layer and
    phase, q_norm scaled down so that attention (scale 1) does not blow differences up."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if "vision" in name:
            continue
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.5, 1.5)
        elif "q_norm" in name:
            tensor.uniform_(0.1, 0.3)
        elif tensor.ndim == 1:
            tensor.uniform_(0.7, 1.3)
        elif "embed_tokens" in name:
            tensor.normal_(0, 0.3)
        else:
            tensor.normal_(0, 1 / tensor.shape[-1] ** 0.5)
    return model.to(dtype)


def canonical_state(model: DiffusionGemmaForBlockDiffusion) -> dict[str, torch.Tensor]:
    """The oracle's weights under Sfumato's names."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("model.decoder."):
            state[name.removeprefix("model.decoder.")] = tensor
        elif name.startswith(ENCODER) and name.endswith("layer_scalar"):
            state[name.removeprefix(ENCODER).replace("layer_scalar", "encoder_layer_scalar")] = (
                tensor
            )
    return state


def network_of(model: DiffusionGemmaForBlockDiffusion, dtype: torch.dtype | None = None) -> Network:
    """The same network in Sfumato, through the loader's own conversions but without files."""
    config = config_from_hf(model.config.to_dict())
    transformer, state = skeleton(config), canonical_state(model)
    dtype = dtype or model.dtype
    for name, _ in list(transformer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        value = _converted(state.pop(name), name, Mover(torch.device("cpu")), dtype)
        place(transformer.get_submodule(path), leaf, value)
    assert not state, f"the oracle has weights that Sfumato has not: {sorted(state)}"
    return Network(transformer, torch.device("cpu"), dtype)


def oracle_encode(model: DiffusionGemmaForBlockDiffusion, ids: torch.Tensor, cache=None):
    """Encodes ids [n] of one row; returns the cache."""
    return oracle_encode_logits(model, ids, cache)[1]


def oracle_encode_logits(model: DiffusionGemmaForBlockDiffusion, ids: torch.Tensor, cache=None):
    """Encodes ids [n] of one row; returns the softcapped logits [n, vocab] and the cache.

    The reference has no head on its encoder, but the final norm is there and the head is tied.
    """
    cache = cache or DynamicCache(config=model.config.text_config)
    out = model.model.encoder(input_ids=ids[None], past_key_values=cache)
    cap = model.config.text_config.final_logit_softcapping
    raw = model.lm_head(out.last_hidden_state[0]).float()
    return (raw / cap).tanh() * cap, cache


def oracle_hidden(model: DiffusionGemmaForBlockDiffusion, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [n, hidden] of the encode phase after the final norm, of ids [n]."""
    cache = DynamicCache(config=model.config.text_config)
    return model.model.encoder(input_ids=ids[None], past_key_values=cache).last_hidden_state[0]


def oracle_logits(model, canvas: torch.Tensor, cache, soft_logits=None, soft=None) -> torch.Tensor:
    """Softcapped logits [length, vocab] of one row.

    Self-conditioning comes from processed logits [length, vocab], or from the soft embedding
    [length, hidden] itself, which replaces what the reference would compute.
    """
    logits = None if soft_logits is None else soft_logits[None]
    inject = []
    if soft is not None:
        inject.append(
            model.model.decoder.self_conditioning.register_forward_pre_hook(
                lambda _, inputs: (inputs[0], soft[None].to(inputs[0].dtype))
            )
        )
    try:
        out = model(
            decoder_input_ids=canvas[None], past_key_values=cache, self_conditioning_logits=logits
        )
    finally:
        for hook in inject:
            hook.remove()
    return out.logits[0]


def encode_logits(
    network: Network, rows: Sequence[torch.Tensor], slots: Sequence[Slot]
) -> list[torch.Tensor]:
    """`network.encode` in one chunk; returns every row's softcapped logits [tokens, vocab]."""
    hidden, encode = [], network.transformer.encode

    def recording(*arguments):
        hidden.append(encode(*arguments))
        return hidden[-1]

    network.transformer.encode = recording
    try:
        network.encode(rows, slots, chunk=len(rows) * max(len(ids) for ids in rows))
    finally:
        del network.transformer.encode  # the method is the class's again
    assert len(hidden) == 1, "rows of unequal length must still fit one chunk"
    return list(network.head.logits(hidden[0]).split([len(ids) for ids in rows]))


@contextmanager
def router_gaps(model: DiffusionGemmaForBlockDiffusion) -> Iterator[list[float]]:
    """Collects how near each router call of the reference was to choosing other experts: the
    least difference between the last expert chosen and the first one left out."""
    gaps: list[float] = []
    active = model.config.text_config.top_k_experts

    def record(_, __, output):
        ranked = output[0].sort(dim=-1, descending=True)[0]
        if ranked.shape[-1] > active:
            gaps.append(float((ranked[..., active - 1] - ranked[..., active]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith(".router")]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """max|Δ| / max|reference|."""
    return float((ours.float() - reference.float()).abs().max() / reference.float().abs().max())
