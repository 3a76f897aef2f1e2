"""GGUF and transformers names to canonical ones and back."""

from __future__ import annotations

import pytest
from tests.support.gguf_files import gguf_config, state_shapes

from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.weights.names import TensorPlace

TABLE = DIFFUSION_GEMMA.tensor_names
NAMES = sorted(state_shapes(gguf_config()))

GGUF = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "self_cond_pre_norm.weight": "self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "self_conditioning.gate_proj.weight",
    "self_cond_down.weight": "self_conditioning.down_proj.weight",
    "blk.0.attn_norm.weight": "layers.0.input_layernorm.weight",
    "blk.29.attn_output.weight": "layers.29.self_attn.o_proj.weight",
    "blk.3.attn_q_norm.weight": "layers.3.self_attn.q_norm.weight",
    "blk.3.ffn_norm.weight": "layers.3.pre_feedforward_layernorm.weight",
    "blk.3.post_ffw_norm.weight": "layers.3.post_feedforward_layernorm.weight",
    "blk.3.post_ffw_norm_1.weight": "layers.3.post_feedforward_layernorm_1.weight",
    "blk.3.pre_ffw_norm_2.weight": "layers.3.pre_feedforward_layernorm_2.weight",
    "blk.3.ffn_gate_inp.weight": "layers.3.router.proj.weight",
    "blk.3.ffn_gate_inp.scale": "layers.3.router.scale",
    "blk.3.ffn_down_exps.scale": "layers.3.router.per_expert_scale",
    "blk.3.ffn_down_exps.weight": "layers.3.experts.down_proj",
    "blk.3.ffn_gate_up_exps.weight": "layers.3.experts.gate_up_proj",
    "blk.3.layer_output_scale.weight": "layers.3.layer_scalar",
    "blk.3.enc_layer_output_scale.weight": "layers.3.encoder_layer_scalar",
}


def test_gguf_names() -> None:
    for theirs, ours in GGUF.items():
        assert TABLE.place_gguf(theirs) == TensorPlace("tensor", ours)
        assert TABLE.gguf_name(ours) == theirs


def test_every_tensor_survives_the_way_there_and_back() -> None:
    for name in NAMES:
        place = TensorPlace("tensor", name)
        assert TABLE.place_gguf(TABLE.gguf_name(name)) == place
        assert TABLE.place_transformers(TABLE.transformers_name(name)) == place


def test_gguf_names_are_distinct() -> None:
    assert len({TABLE.gguf_name(name) for name in NAMES}) == len(NAMES)
    with pytest.raises(KeyError):
        TABLE.gguf_name("layers.0.unheard_of.weight")
    with pytest.raises(KeyError):
        TABLE.gguf_name("unheard_of.weight")


def test_gguf_specials() -> None:
    pre_norm = TensorPlace("tensor", "self_conditioning.pre_norm.weight")
    assert TABLE.place_gguf("self_cond_norm.weight") == pre_norm
    assert TABLE.place_gguf("rope_freqs.weight").kind == "constant"
    assert TABLE.place_gguf("v.blk.0.attn_q.weight").kind == "vision"
    assert TABLE.place_gguf("mm.input_projection.weight").kind == "vision"


def test_unknown_gguf_names_stay() -> None:
    odd = ("blk.0.attn_q.bias", "blk.00.attn_q.weight", "blk.-1.attn_q.weight", "x", "norm.weight")
    assert [TABLE.place_gguf(name) for name in odd] == [TensorPlace("unknown", n) for n in odd]


def test_transformers_specials() -> None:
    encoder = "model.encoder.language_model."
    scalar = TABLE.place_transformers(f"{encoder}layers.7.layer_scalar")
    assert scalar == TensorPlace("tensor", "layers.7.encoder_layer_scalar")
    for rest in ("embed_tokens.weight", "norm.weight", "layers.7.router.scale"):
        assert TABLE.place_transformers(encoder + rest) == TensorPlace("alias", rest)
    assert TABLE.place_transformers("lm_head.weight") == TensorPlace("alias", "embed_tokens.weight")
    for name in ("model.encoder.vision_tower.x", "model.encoder.embed_vision.y.weight"):
        assert TABLE.place_transformers(name) == TensorPlace("vision", name)
    assert TABLE.place_transformers("model.layers.0.x") == TensorPlace(
        "unknown", "model.layers.0.x"
    )
