"""A tiny random network behind the scripted model's text side: it writes nonsense of bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.support.scripted_model import END_IDS, MARKERS, PIECES, TEMPLATE, tokenizer

from sfumato.api import Model, TextSide
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.model_config import LayerConfig
from sfumato.model.network import Network
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.train.recipe import EMBEDDED, initialised

THINKING = TEMPLATE + "{% if enable_thinking %}{# it thinks #}<|think|>{% endif %}"
_LAYERS = (LayerConfig(True, 1, 8, 1e4, 4), LayerConfig(False, 1, 8, 1e6, 2))


def random_model(
    canvas_length: int = 32,
    seed: int = 0,
    text: Tokenizer | None = None,
    defaults: SamplerConfig = replace(REFERENCE, max_steps=4),  # noqa: B008  (frozen)
    template: str = TEMPLATE,
    end_ids: tuple[int, ...] = END_IDS,
) -> Model:
    """text: the tokenizer; None: one of markers, bytes and ASCII characters."""
    config = replace(
        EMBEDDED,
        vocab_size=len(PIECES) if text is None else text.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        num_experts=2,
        experts_per_token=1,
        expert_size=8,
        canvas_length=canvas_length,
        context_length=4096,
        layers=_LAYERS,
    )
    transformer = initialised(config, torch.Generator().manual_seed(seed)).requires_grad_(False)
    with torch.no_grad():
        transformer.embed_tokens.weight.mul_(40)  # or each token would be as likely as any other
    network = Network(transformer, torch.device("cpu"), torch.float32)
    side = TextSide(text or tokenizer(), ChatTemplate(template, markers=MARKERS))
    return Model(network, side, defaults, end_ids, Path("random"), DIFFUSION_GEMMA)
