"""Names of DiffusionGemma's tensors: GGUF's and transformers' to the canonical ones and back.

The canonical name is transformers' after `model.decoder.`, and `layers.N.encoder_layer_scalar`
for the one encoder tensor that is not tied to the decoder's. Knows no shapes: what a network needs
is the model's to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ARCHITECTURE = "diffusion-gemma"
"""`general.architecture` of the GGUF files whose names are mapped here."""

_GLOBAL = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "self_cond_pre_norm.weight": "self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "self_conditioning.gate_proj.weight",
    "self_cond_up.weight": "self_conditioning.up_proj.weight",
    "self_cond_down.weight": "self_conditioning.down_proj.weight",
}
_OLDER = {"self_cond_norm.weight": "self_conditioning.pre_norm.weight"}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
    "enc_layer_output_scale.weight": "encoder_layer_scalar",
}
_GLOBAL_BACK = {ours: theirs for theirs, ours in _GLOBAL.items()}
_LAYER_BACK = {ours: theirs for theirs, ours in _LAYER.items()}

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_CANONICAL_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)")

_DECODER = "model.decoder."
_ENCODER = "model.encoder.language_model."
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_GGUF_VISION = ("v.", "mm.")


@dataclass(frozen=True)
class Place:
    """What a file's tensor is to us.

    "tensor": the canonical tensor `name`; "alias": a tied copy of it; "vision": kept aside;
    "rotary": no weight, but the divisors of the full layers' rotary frequencies, which tell the
    config how many pairs turn; "unknown": none of these, `name` as in the file.
    """

    kind: Literal["tensor", "alias", "vision", "rotary", "unknown"]
    name: str


def place_gguf(name: str) -> Place:
    """The place of a tensor of a GGUF file."""
    if name == "rope_freqs.weight":
        return Place("rotary", name)
    if name.startswith(_GGUF_VISION):
        return Place("vision", name)
    found = _GLOBAL.get(name) or _OLDER.get(name)
    layer = _GGUF_LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER:
        found = f"layers.{layer[1]}.{_LAYER[layer[2]]}"
    return Place("tensor", found) if found else Place("unknown", name)


def place_transformers(name: str) -> Place:
    """The place of a tensor of a safetensors file."""
    if name.startswith(_DECODER):
        return Place("tensor", name.removeprefix(_DECODER))
    if name.startswith(_VISION):
        return Place("vision", name)
    if name == "lm_head.weight":
        return Place("alias", "embed_tokens.weight")
    if name.startswith(_ENCODER):
        rest = name.removeprefix(_ENCODER)
        layer = _CANONICAL_LAYER.fullmatch(rest)
        if layer and layer[2] == "layer_scalar":
            return Place("tensor", f"layers.{layer[1]}.encoder_layer_scalar")
        return Place("alias", rest)
    return Place("unknown", name)


def gguf_name(canonical: str) -> str:
    """The GGUF name of a canonical tensor. Raises KeyError if there is none."""
    layer = _CANONICAL_LAYER.fullmatch(canonical)
    if layer:
        return f"blk.{layer[1]}.{_LAYER_BACK[layer[2]]}"
    return _GLOBAL_BACK[canonical]


def transformers_name(canonical: str) -> str:
    """The transformers name of a canonical tensor."""
    layer = _CANONICAL_LAYER.fullmatch(canonical)
    if layer and layer[2] == "encoder_layer_scalar":
        return f"{_ENCODER}layers.{layer[1]}.layer_scalar"
    return _DECODER + canonical
