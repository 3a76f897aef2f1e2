"""Configs of Qwen3 networks of blocks: what is refused, defaults, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.model.families import BD3LM, FAMILIES, SDAR, SDAR_MOE, Family, find_family
from sfumato.model.model_config import ConfigError
from sfumato.weights.errors import CheckpointError

DENSE: dict[str, Any] = {
    "model_type": "sdar",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
EXPERTS = DENSE | {
    "model_type": "sdar_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type is 'yarn'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: only"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ({"num_key_value_heads": 7}, "16 query heads cannot share 7"),
    ({"head_dim": 33}, "head_dim 33 is not even"),
    ({"vocab_size": 1000}, "mask_token_id is missing, and a vocabulary of 1000"),
    ({"mask_token_id": 151936}, "mask_token_id is 151936, not a token id"),
    ({"block_size": 0}, "block_size is 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
    ({"model_type": "sdar_moe"}, "num_local_experts is missing"),
    (EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    (EXPERTS | {"mlp_only_layers": [1]}, "mlp_only_layers is"),
    (EXPERTS | {"num_experts_per_tok": 9}, "9 active experts of 8"),
]


def test_what_is_not_supported_is_refused_by_name() -> None:
    for changes, message in REFUSED:
        config = DENSE | changes
        family = find_family("safetensors", {"config": config}, FAMILIES)
        with pytest.raises(ConfigError, match=message):
            family.config.from_hf(config, {})


@pytest.mark.parametrize(
    ("family", "config", "block"), [(SDAR, DENSE, 4), (SDAR_MOE, EXPERTS, 4), (BD3LM, DENSE, 32)]
)
def test_defaults_and_the_way_back(family: Family, config: dict, block: int) -> None:
    read = family.config.from_hf(config, {"eos_token_id": [151645, 151643]})
    assert read.block == block and read.mask_id == 151669 and not read.design.tied_head
    assert read.eos_ids == (151645, 151643) and read.layers[0].head_dim == 128
    written = family.config.to_hf(read, "bfloat16")
    assert written["model_type"] == family.model_type
    assert family.config.from_hf(written, {"eos_token_id": [151645, 151643]}) == read


def test_files_of_one_architecture_are_told_apart_by_their_borders() -> None:
    metadata = {"general.architecture": "qwen3", "diffusion.block_borders": "back"}
    assert find_family("gguf", metadata, FAMILIES) is BD3LM
    metadata["diffusion.block_borders"] = "front"
    assert find_family("gguf", metadata, FAMILIES) is SDAR
    for without in ({}, {"diffusion.block_borders": "middle"}):
        with pytest.raises(
            CheckpointError, match=r"block_borders: is .*'front' \(SDAR\) or .*'back'"
        ):
            find_family("gguf", {"general.architecture": "qwen3", **without}, FAMILIES)
