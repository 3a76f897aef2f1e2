"""What is measured on this machine: a model, its prompts, and the facts that a report gives."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models
from torch import Tensor

from sfumato.api import Model, TextSide
from sfumato.bench.random_weights import random_checkpoint
from sfumato.bench.workload import Prompt
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.engine import EngineConfig, EngineError
from sfumato.engine.memory.estimate import ModelFootprint
from sfumato.engine.memory.guard import check_load
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.loading import config_of, load_network
from sfumato.model.network import Network
from sfumato.model.placement import CACHE_TYPES, pick_device, pick_dtype
from sfumato.model.quantization import quantized_on_load
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.ops.registry import check_off
from sfumato.refused import Refused
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.checkpoint import Checkpoint

SMALLEST = EngineConfig(slots=1, context=512, snapshot_bytes=0)
"""An engine that needs next to nothing beside the weights."""


@dataclass(frozen=True)
class Subject:
    """A model that is ready to run."""

    model: Model
    reads_text: bool  # random weights do not
    load_s: float | None  # None: nothing was loaded
    about: dict[str, Any]

    @property
    def network(self) -> Network:
        return self.model.network

    def prompt_ids(self, prompt: Prompt, seed: int, context: int | None = None) -> Tensor:
        """A prompt as int64 [n]; synthetic tokens are drawn from the whole vocabulary.

        context: fill it up to so many tokens, after the first, which may be a bos. Raises
        ValueError for a longer prompt, and for text where the subject cannot read.
        """
        if isinstance(prompt, int):
            ids = self._synthetic(prompt, seed)
        elif not self.reads_text:
            raise Refused(
                "prompts",
                "random weights have no tokenizer",
                "use --prompt-tokens for synthetic ones",
            )
        else:
            ids = torch.tensor(self.model.prompt_ids(messages=prompt), dtype=torch.int64)
        if context is None:
            return ids
        if len(ids) > context:
            raise Refused("context", f"a prompt of {len(ids)} tokens is more than {context}")
        return torch.cat((ids[:1], self._synthetic(context - len(ids), seed), ids[1:]))

    def _synthetic(self, count: int, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.network.config.vocab_size, (count,), generator=random)


def loaded(model: Model, quantize: str | None = None) -> Subject:
    """A loaded checkpoint, as it is; quantize: what it was loaded with."""
    checkpoint = open_checkpoint(model.path)
    if quantize is not None:
        checkpoint = quantized_on_load(checkpoint, quantize, model.network.device)
    about = {"model": str(model.path), **_about(checkpoint, model.network)}
    return Subject(model, True, model.load_s, about)


def random_subject(
    preset: str,
    format: str = "q4_k_m",
    layers: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    activations: str = "int8",
    seed: int = 0,
    vocab: int | None = None,
    cache_type: str | None = None,
) -> Subject:
    """A network of random weights, made here; its replies end at their longest.

    cache_type: see `cache_dtype`. Raises ValueError, naming the option, for an unknown preset,
    format or kind of cache, and where the weights
    and one slot do not fit the device's memory; nothing has been made then.
    """
    began = time.perf_counter()
    target = pick_device(device)
    checkpoint = random_checkpoint(preset, format, layers, seed, vocab, target)
    kind = pick_dtype(dtype, checkpoint, target)
    footprint = ModelFootprint.of_checkpoint(
        checkpoint, config_of(checkpoint), target, kind, cache_type
    )
    try:
        check_load(footprint, SMALLEST)
    except EngineError as error:
        advice = "take fewer --layers or a smaller --format, or free some memory"
        raise error.about("random_weights").advising(advice) from error
    check_off()
    network = load_network(checkpoint, target, kind, activations=activations, cache_type=cache_type)
    about = {"model": f"random {preset}, {format}", **_about(checkpoint, network)}
    about["made_s"] = time.perf_counter() - began
    text = number_text(network.config.vocab_size)
    model = Model(network, text, REFERENCE, (), Path(f"random-{preset}"), family_of(checkpoint))
    return Subject(model, False, None, about)


def _precision(network: Network) -> str:
    """The dtype of activations, what they are rounded to for products with packed weights, and
    the kind of cache where keys and values are stored otherwise."""
    held = (value for module in network.transformer.modules() for value in vars(module).values())
    formats: dict[str, set[str]] = {}
    for value in held:
        if isinstance(value, PackedTensor):
            formats.setdefault(value.activations, set()).add(value.format.name)
    rounded = [f"{to} with {', '.join(sorted(names))}" for to, names in formats.items()]
    kinds = {dtype: name for name, dtype in CACHE_TYPES.items() if dtype != network.dtype}
    if network.cache_dtype in kinds:
        rounded.append(f"cache {kinds[network.cache_dtype]}")
    return "; ".join([str(network.dtype).removeprefix("torch."), *rounded])


def _about(checkpoint: Checkpoint, network: Network) -> dict[str, Any]:
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        stored[info.format] += info.nbytes
    return {
        "parameters": sum(math.prod(info.shape) for info in checkpoint.tensors.values()),
        "stored_bytes": stored.total(),
        "formats": dict(stored.most_common()),  # bytes of each
        "layers": len(network.config.layers),
        "hidden_size": network.config.hidden_size,
        "vocab_size": network.config.vocab_size,
        "canvas_length": network.config.canvas_length,
        "precision": _precision(network),
        "device": str(network.device),
    }


def number_text(size: int) -> TextSide:
    """A vocabulary of `size` tokens without special ones."""
    vocabulary = {f"{token}▁": token for token in range(size)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TextSide(Tokenizer(inner), ChatTemplate("{{ messages[0].content }}"))
