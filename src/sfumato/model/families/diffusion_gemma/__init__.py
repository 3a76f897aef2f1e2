"""DiffusionGemma: block diffusion with uniform noise and self-conditioning, over Gemma 4's text."""

from __future__ import annotations

from sfumato.model.families.diffusion_gemma.markers import MARKERS
from sfumato.model.families.diffusion_gemma.names import TENSOR_NAMES
from sfumato.model.families.diffusion_gemma.read_config import (
    ARCHITECTURE,
    config_from_hf,
    config_of_gguf,
)
from sfumato.model.families.diffusion_gemma.write_config import (
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
