"""DiffusionGemma: block diffusion with uniform noise and self-conditioning, over Gemma 4's text.

Its special tokens and their roles; and the names of its tensors in GGUF and safetensors files.  The
canonical name of a tensor is transformers' after `model.decoder.`, and
`layers.N.encoder_layer_scalar` for the one encoder tensor that is not tied to the decoder's.
"""

from __future__ import annotations

from sfumato.model.families.diffusion_gemma.config import (
    ARCHITECTURE,
    config_from_hf,
    config_of_gguf,
    gguf_config,
    gguf_constants,
    hf_config,
    vision_tensors,
)
from sfumato.model.families.family import (
    CanvasProcess,
    ConfigFormat,
    Family,
    ReadFormat,
    SamplerKeys,
)
from sfumato.text.markers import ChatMarkers
from sfumato.weights.names import Stack, TensorNames

MARKERS = ChatMarkers(
    turn_open="<|turn>",
    turn_close="<turn|>",
    thought_open="<|channel>",
    thought_close="<channel|>",
    thought_header="thought\n",
    call_open="<|tool_call>",
    call_close="<tool_call|>",
    quote='<|"|>',
    picture="<|image|>",
    picture_open="<|image>",
    picture_close="<image|>",
    ends=("<turn|>", "<eos>", "<|tool_response>"),
    end_tokens=("<turn|>", "<|tool_response>"),
    visible=(
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    ),
    tokens=(
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", '<|"|>'),
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
    ),
)

_GGUF = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "self_cond_pre_norm.weight": "self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "self_conditioning.gate_proj.weight",
    "self_cond_up.weight": "self_conditioning.up_proj.weight",
    "self_cond_down.weight": "self_conditioning.down_proj.weight",
}
_GGUF_OLDER = {"self_cond_norm.weight": "self_conditioning.pre_norm.weight"}
_GGUF_LAYER = {
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

TENSOR_NAMES = TensorNames(
    gguf=_GGUF,
    gguf_layer=_GGUF_LAYER,
    gguf_older=_GGUF_OLDER,
    # No weight, but the divisors of the full layers' rotary frequencies: the config reads them.
    gguf_constants=("rope_freqs.weight",),
    gguf_vision=("v.", "mm."),
    prefix="model.decoder.",
    tied_prefix="model.encoder.language_model.",
    tied_layer={"layer_scalar": "encoder_layer_scalar"},
    aliases={"lm_head.weight": "embed_tokens.weight"},
    vision=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
    stacks=(
        Stack(
            "experts.gate_up_proj",
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
        ),
        Stack("experts.down_proj", ("experts.{}.down_proj.weight",)),
    ),
    stack_count=("text_config", "num_experts"),
    # A router's choice is discrete, and rows of the embedding are read one by one.
    exact=("router.proj.weight", "embed_tokens.weight"),
)

DIFFUSION_GEMMA = Family(
    name="diffusion_gemma",
    title="DiffusionGemma",
    model_type="diffusion_gemma",
    architecture=ARCHITECTURE,
    tensor_names=TENSOR_NAMES,
    config=ConfigFormat(
        from_hf=config_from_hf,
        from_gguf=config_of_gguf,
        to_hf=hf_config,
        to_gguf=gguf_config,
        gguf_constants=gguf_constants,
        hf_placeholders=vision_tensors,
    ),
    canvas=CanvasProcess(noise="uniform", self_conditioning=True),
    sampler=SamplerKeys(
        hf={
            "max_steps": "max_denoising_steps",
            "bound": "entropy_bound",
            "t_min": "t_min",
            "t_max": "t_max",
            "stability": "stability_threshold",
            "confidence": "confidence_threshold",
        },
        gguf={
            "max_steps": "diffusion.eb_max_steps",
            "bound": "diffusion.eb_entropy_bound",
            "t_min": "diffusion.eb_t_min",
            "t_max": "diffusion.eb_t_max",
            "stability": "diffusion.eb_stability_threshold",
            "confidence": "diffusion.eb_confidence_threshold",
        },
        hf_nested="sampler_config",
        hf_class="EntropyBoundSamplerConfig",
        nested=("bound",),
    ),
    markers=MARKERS,
    reads=ReadFormat(
        end=MARKERS.turn_close,
        filler="<pad>",
        empty_thought=MARKERS.thought_open + MARKERS.thought_header + MARKERS.thought_close,
    ),
)
