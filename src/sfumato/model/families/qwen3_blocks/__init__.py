"""Qwen3 networks that denoise blocks of mask tokens: the SDAR models, dense and with experts, and
the BD3LM conversions of dLLM.

SDAR's blocks begin at the first token (JetAstra/SDAR, generate.py), those of BD3LM end with the
prompt (ZHZisZZ/dllm, dllm/core/samplers/bd3lm.py). The canonical name of a tensor is transformers'
after `model.`, but for a router and experts, which have the names of the network's modules.
"""

from __future__ import annotations

from typing import Literal

from sfumato.model.families.family import (
    CanvasProcess,
    ConfigFormat,
    Family,
    SamplerKeys,
)
from sfumato.model.families.qwen3_blocks.config import Kind
from sfumato.model.families.qwen3_blocks.text import MARKERS, READS, TEMPLATE
from sfumato.weights.names import Stack, TensorNames

_GGUF = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}

TENSOR_NAMES = TensorNames(
    gguf=_GGUF,
    gguf_layer=_GGUF_LAYER,
    prefix="model.",
    beside={"lm_head.weight": "lm_head.weight"},
    layer={
        "mlp.gate.weight": "router.proj.weight",
        "mlp.experts.gate_up_proj": "experts.gate_up_proj",
        "mlp.experts.down_proj": "experts.down_proj",
    },
    stacks=(
        Stack(
            "experts.gate_up_proj",
            ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
            in_parts=True,
            ranges=("experts.gate_proj", "experts.up_proj"),
        ),
        Stack("experts.down_proj", ("mlp.experts.{}.down_proj.weight",), in_parts=True),
    ),
    stack_count=("num_experts",),
    # A router's choice is discrete, and rows of an embedding are read one by one.
    exact=("router.proj.weight", "embed_tokens.weight", "lm_head.weight"),
)


SAMPLER = SamplerKeys(
    # The arguments of SDAR's generate.py; the published files name neither.
    hf={"max_steps": "denoising_steps", "threshold": "confidence_threshold"},
    gguf={
        "max_steps": "diffusion.denoising_steps",
        "threshold": "diffusion.confidence_threshold",
    },
    hf_nested="",
    hf_class="",
    nested=(),
)


def _family(
    name: str, title: str, kind: Kind, threshold: float, pace: Literal["even", "linear"]
) -> Family:
    """threshold and pace: the defaults of the project's own sampler."""
    return Family(
        name=name,
        title=title,
        model_type=kind.model_type,
        architecture=kind.architecture,
        tensor_names=TENSOR_NAMES,
        gguf_keys=kind.gguf_keys,
        config=ConfigFormat(
            from_hf=kind.from_hf,
            from_gguf=kind.from_gguf,
            to_hf=kind.to_hf,
            to_gguf=kind.to_gguf,
            gguf_constants=lambda config: {},
            hf_placeholders=lambda config: {},
        ),
        canvas=CanvasProcess("mask", False, threshold, pace),
        sampler=SAMPLER,
        markers=MARKERS,
        reads=READS,
        template=TEMPLATE,
    )


SDAR = _family(
    *("sdar", "SDAR"),
    Kind("sdar", "SDARForCausalLM", "qwen3", "front", block=4),
    threshold=0.85,
    pace="even",
)
SDAR_MOE = _family(
    *("sdar_moe", "SDAR-MoE"),
    Kind("sdar_moe", "SDARMoeForCausalLM", "qwen3moe", "front", 4, experts=True),
    threshold=0.85,
    pace="even",
)
BD3LM = _family(
    *("bd3lm", "BD3LM"),
    Kind("a2d-qwen3", "A2DQwen3LMHeadModel", "qwen3", "back", block=32),
    threshold=1.0,
    pace="linear",
)
