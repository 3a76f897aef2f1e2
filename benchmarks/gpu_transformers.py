"""A step of `transformers` beside one of Sfumato: on the same device, with the same random weights.

For `gpu_first.py`.  `transformers` runs its own `generate`, with its default settings, and with a
static cache, for which it compiles the step.  Both networks read the same tensors, so that the
memory holds them once; only what Sfumato has in float32 (vectors, routers) is copied.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.gpu_step import FIRST, step_times
from torch import Tensor, nn

from sfumato.bench.subject import random_config
from sfumato.device_trial import network_of
from sfumato.model.devices import is_out_of_memory
from sfumato.model.loading import expected_shapes
from sfumato.model.network import Network

GOALS = {"default": 2.0, "compiled": 1.2}  # times Sfumato's speed
CACHES = {"default": None, "compiled": "static"}  # `generate` compiles where the cache is static
ENCODER = "model.encoder.language_model."


def compare(
    network: Network, preset: str, prefix: int, steps: int, kinds: Sequence[str] = tuple(CACHES)
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step of one canvas of both, and how many times as fast Sfumato is, each
    finding when it is there. Of as many layers as the memory holds: half of them where it ends, and
    so on."""
    layers = of_layers = len(network.config.layers)
    while True:
        part = network if layers == of_layers else network_of(network, range(layers))
        yield {"layers": layers, "of_layers": of_layers}
        try:
            yield from _compared(part, preset, prefix, steps, kinds)
            return
        except Exception as error:
            if layers == 1 or not is_out_of_memory(error):
                raise
            error.__traceback__ = None
        gc.collect()
        torch.accelerator.memory.empty_cache()
        layers //= 2


def _compared(
    network: Network, preset: str, prefix: int, steps: int, kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    import transformers

    ours = step_times(network, 1, prefix, steps)["median_ms"]
    model = their_model(network, preset)
    yield {
        "transformers": transformers.__version__,
        "weights": "the same tensors",
        "experts": getattr(model.config, "_experts_implementation", None),
        "prefix": prefix,
        "steps": steps,
        "sfumato_ms": ours,
    }
    for name in kinds:
        try:
            theirs = statistics.median(their_steps(model, prefix, steps, CACHES[name]))
        except Exception as error:  # where its step cannot be compiled, the other still counts
            if is_out_of_memory(error):
                raise
            yield {name: {"failed": f"{type(error).__name__}: {error}"[:500]}}
            continue
        ratio = theirs / ours
        finding = {"median_ms": theirs, "times_as_fast": ratio, "goal": GOALS[name]}
        yield {name: finding | {"reached": ratio >= GOALS[name]}}


def their_model(network: Network, preset: str) -> Any:
    """The network as a `DiffusionGemmaForBlockDiffusion`, with the network's tensors."""
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
    )
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    known, config = random_config(preset, len(network.config.layers)), network.config
    kinds = {True: "sliding_attention", False: "full_attention"}
    text = DiffusionGemmaTextConfig(
        **known["text_config"],
        layer_types=[kinds[layer.sliding] for layer in config.layers],
        use_bidirectional_attention="vision",
    )
    vision = Gemma4VisionConfig(  # as small as it can be: images are no part of this
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, position_embedding_size=8,
    )  # fmt: skip
    hf_config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=config.canvas_length
    )
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(hf_config).to(network.dtype).eval()
    model.load_state_dict(their_names(network), strict=False, assign=True)
    model.tie_weights()
    _fill_the_rest(model, network.device)
    return model.requires_grad_(False)


def their_names(network: Network) -> dict[str, Tensor]:
    """The network's tensors in its dtype, by the names of `transformers`."""
    state = {}
    for name in expected_shapes(network.config):
        path, _, leaf = name.rpartition(".")
        value = getattr(network.transformer.get_submodule(path), leaf)
        floats = value.data if isinstance(value, Tensor) else value.dequantize(network.dtype)
        is_encoders = leaf == "encoder_layer_scalar"
        theirs = f"{ENCODER}{path}.layer_scalar" if is_encoders else f"model.decoder.{name}"
        state[theirs] = floats.to(network.dtype)
    return state


def _fill_the_rest(model: Any, device: torch.device) -> None:
    """What no checkpoint has (frequencies of RoPE, the scale of the embedding), and zeros for the
    tower of images."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and value.is_meta:
                    new = torch.zeros_like(value, device=device)
                    is_weight = isinstance(value, nn.Parameter)
                    tensors[name] = nn.Parameter(new, False) if is_weight else new
        if type(module).__name__.endswith("TextRotaryEmbedding"):
            model._init_weights(module)
        elif hasattr(module, "scalar_embed_scale"):
            module.embed_scale.fill_(module.scalar_embed_scale)


class DraftTimes:
    """A streamer: notes when each draft has come to the host."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        pass

    def put_draft(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def their_steps(model: Any, prefix: int, steps: int, cache: str | None) -> list[float]:
    """Milliseconds of steps of one canvas, from one draft on the host to the next, the first few
    left out; after a canvas that compiles what there is to compile."""

    def canvas(count: int) -> list[float]:
        streamer = DraftTimes()
        model.generate(
            ids,
            streamer=streamer,
            max_new_tokens=model.config.canvas_length,
            max_denoising_steps=count,
            confidence_threshold=1e-30,  # it never stops by itself
            cache_implementation=cache,
        )
        return [1e3 * (b - a) for a, b in zip(streamer.at, streamer.at[1:], strict=False)]

    vocab = model.config.text_config.vocab_size
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(vocab, (1, prefix), generator=random).to(model.device)
    canvas(FIRST + 1)
    return canvas(steps + FIRST + 1)[FIRST:]
