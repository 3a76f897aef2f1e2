"""The subject of measurements on this machine: a model, its prompts, and facts for a report.

Random weights make checkpoints that exist in memory only, with real proportions and formats, which
go through the same loading as real ones and have no tokenizer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models
from torch import Tensor

from sfumato.api import Model, TextSide
from sfumato.bench.report import Prompt
from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults
from sfumato.engine import EngineConfig, EngineError
from sfumato.engine.memory.estimate import ModelFootprint
from sfumato.engine.memory.guard import check_load
from sfumato.model.families import (
    BD3LM,
    DIFFUSION_GEMMA,
    FAMILIES,
    SDAR,
    family_of,
    find_family,
    open_checkpoint,
)
from sfumato.model.loading import config_of, expected_shapes, load_network, output_name
from sfumato.model.model_config import ConfigError
from sfumato.model.network import Network
from sfumato.model.placement import CACHE_TYPES, pick_device, pick_dtype
from sfumato.model.quantization import TARGETS, formats, quantized_on_load, takes_codes, takes_int4
from sfumato.ops.cpu.panels import PackedTensor
from sfumato.ops.registry import check_off
from sfumato.refused import Refused
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.checkpoint import Checkpoint, TensorInfo
from sfumato.weights.files.tensorfile import Files
from sfumato.weights.formats import (
    BLOCKS,
    FORMATS,
    QuantizedTensor,
    Stored,
    float_dtype,
    quantize,
    round_rows,
)
from sfumato.weights.formats import KINDS as CODED

_FULL = {
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "max_position_embeddings": 262144,
}
_180M = _FULL | {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 1,
    "head_dim": 128,
    "global_head_dim": 256,
    "moe_intermediate_size": 128,
}
_TINY = _180M | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "num_experts": 24,
    "moe_intermediate_size": 32,
}
_QWEN3_600M = {
    "model_type": BD3LM.model_type,
    "block_size": 32,
    "mask_token_id": 151669,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
_SDAR_1_7B = _QWEN3_600M | {
    "model_type": SDAR.model_type,
    "block_size": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
_TINY_QWEN3 = _SDAR_1_7B | {
    "mask_token_id": 511,
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def _gemma(sizes: Mapping[str, int], canvas: int) -> dict[str, Any]:
    """Every 6th layer is full, and the last."""
    return {
        "model_type": DIFFUSION_GEMMA.model_type,
        "canvas_length": canvas,
        "text_config": sizes,
    }


PRESETS: dict[str, Mapping[str, Any]] = {
    "26b-a4b": _gemma(_FULL, 256),
    "180m": _gemma(_180M, 256),
    "tiny": _gemma(_TINY, 32),
    "qwen3-0.6b": _QWEN3_600M,
    "sdar-1.7b": _SDAR_1_7B,
    "tiny-qwen3": _TINY_QWEN3,
}
"""The config.json of each.

Even the tiny ones have rows of 256, so that every format is itself there, and down projections that
do not divide into blocks of 256, as the 26B-A4B's do not."""

PUBLISHED = {**{name.lower(): name for name in CODED}, "int4": "INT4", "nvfp4": "NVFP4"}
"""What the matrices of published formats become on a GPU, by the name of the option."""

CPU = torch.device("cpu")

# But for the embedding a tile of random numbers is repeated, for drawing 25 billion of them would
# take minutes. A prime length keeps the rows of a matrix different: they begin at different places
# of the tile.
_TILE, _BLOCK_TILE = 1048583, 8191  # numbers; blocks

QUERY_NORM = 0.2  # attention has scale 1: larger random queries would see one key each
# The deviation of a router's scores. Where all experts chosen weigh the same, rounding that decides
# a near tie for the last place replaces an eighth of the mixture; here it is about a hundredth.
ROUTER_SPREAD = 3.0
VECTOR_SPREAD = 0.1  # no norm and no scalar passes for another


def random_config(
    preset: str, layers: int | None = None, vocab: int | None = None
) -> dict[str, Any]:
    """The config.json of a preset, with another number of layers or tokens if one is given.

    Raises ValueError, naming the option, for an unknown preset.
    """
    if preset not in PRESETS:
        raise Refused("random_weights", f"{preset!r} is none of {', '.join(PRESETS)}")
    config = dict(PRESETS[preset])
    mask = None if vocab is None or "mask_token_id" not in config else vocab - 1
    wanted = {"num_hidden_layers": layers, "vocab_size": vocab, "mask_token_id": mask}
    changed = {name: value for name, value in wanted.items() if value is not None}
    if "text_config" in config:  # has the sizes
        return config | {"text_config": config["text_config"] | changed}
    return config | changed


@dataclass(frozen=True)
class RandomTensor(TensorInfo):
    """A tensor that is made when it is read, the same for the same seed, on the device where it is
    wanted: 50 GB need not pass through the host. middle: what a vector's values lie around;
    is_output: whether it is the matrix of the scores."""

    seed: int = 0
    device: torch.device = field(default=CPU, repr=False)
    middle: float = 1.0
    is_output: bool = False

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return ()

    def read(self, files: Files) -> Tensor | Stored:
        random = torch.Generator().manual_seed(self.seed)
        deviation = self.shape[-1] ** -0.5
        if self.is_output:
            deviation *= 3  # scores of deviation 3: a distribution that is neither flat nor certain
        if len(self.shape) == 1:
            vector = torch.randn(self.shape, generator=random).mul_(VECTOR_SPREAD).add_(1)
            return vector.mul_(self.middle)
        format = FORMATS[self.format]
        is_blocks = format.form == BLOCKS
        floats = float_dtype(self.format) or torch.bfloat16  # codes are rounded from these
        size = format.block_size
        count = math.prod(self.shape) // size

        def piece(length: int) -> Tensor:
            """So many numbers, or blocks of them."""
            if self.format == "NVFP4":
                return _random_nvfp4(length, deviation, random).to(self.device)
            numbers = torch.randn(length * size, generator=random).mul_(deviation)
            if not is_blocks:
                return numbers.to(self.device, floats)
            return quantize(numbers.view(length, size), format).data.to(self.device)

        # Tokens with the same row would share the probability of one.
        data = _filled(piece, count, _BLOCK_TILE if is_blocks else _TILE, self.is_output)
        if is_blocks:
            return QuantizedTensor(data.view(*self.shape[:-1], -1), format, self.shape)
        data = data.view(self.shape)
        return round_rows(data, CODED[self.format]) if self.format in CODED else data


def random_checkpoint(
    preset: str,
    format: str = "q4_k_m",
    layers: int | None = None,
    seed: int = 0,
    vocab: int | None = None,
    device: torch.device = CPU,
) -> Checkpoint:
    """A checkpoint of random weights, by name, format and number of layers and of tokens; device:
    where they are made.

    Raises ValueError, naming the option, for an unknown preset or format.
    """
    published = PUBLISHED.get(format)
    if format not in TARGETS and published is None:
        known = ", ".join((*TARGETS, *PUBLISHED))
        raise Refused("format", f"{format!r} is none of {known}")
    config = random_config(preset, layers, vocab)
    metadata: Mapping[str, Any] = {"config": config, "generation_config": {}}
    try:
        network = find_family("safetensors", metadata, FAMILIES).config.from_hf(config, {})
    except ConfigError as error:
        raise Refused("layers", f"{layers} make no network ({error})") from None
    path, shapes = Path(f"random-{preset}"), expected_shapes(network)
    kinds = formats(shapes, TARGETS["bf16" if published else format])
    if published:
        narrow = (name for name, shape in shapes.items() if _narrows(format, name, shape))
        kinds |= dict.fromkeys(narrow, published)
    queries = 1.0 if network.design.scaled_queries else QUERY_NORM
    output, tensors = output_name(kinds), dict[str, TensorInfo]()
    for number, (name, kind) in enumerate(kinds.items(), seed * len(kinds)):
        shape = shapes[name]
        middle = queries if "q_norm" in name else _middle(name, shape[0])
        file = name, shape, kind, FORMATS[kind].nbytes(shape), path, 0
        tensors[name] = RandomTensor(*file, number, device, middle, name == output)
    return Checkpoint(path, "safetensors", tensors, {}, metadata, {})


def _narrows(format: str, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a published checkpoint has a tensor in its narrow format. Rows that do not divide
    into its blocks stay as they are."""
    divides = FORMATS[PUBLISHED[format]].divides(shape[-1])
    return divides and (takes_int4 if format == "int4" else takes_codes)(name, shape)


def _random_nvfp4(length: int, deviation: float, random: torch.Generator) -> Tensor:
    """So many blocks of any codes, with scales of groups from 0.5 to 1.875: uint8 [length, bytes].
    The deviation of such a product is about 3.5."""
    blocks = torch.randint(256, (length, 40), generator=random, dtype=torch.uint8)
    blocks[:, 4:8] = 0x30 + blocks[:, 4:8] % 16
    blocks[:, :4] = torch.tensor([deviation / 3.5]).view(torch.uint8)
    return blocks


def _middle(name: str, size: int) -> float:
    """What the values of a vector lie around."""
    # A router divides by the root of its width, and its rows have length 1.
    return ROUTER_SPREAD * size**0.5 if name.endswith("router.scale") else 1.0


def _filled(piece: Callable[[int], Tensor], count: int, length: int, new: bool) -> Tensor:
    """`count` entries in pieces of `length`, contiguous; new: each piece is another one."""
    tile = piece(min(count, length))
    filled = torch.empty(count, *tile.shape[1:], dtype=tile.dtype, device=tile.device)
    for start in range(0, count, len(tile)):
        part = filled[start : start + len(tile)]
        part.copy_(piece(len(part)) if new and start else tile[: len(part)])
    return filled


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
    defaults, family = checkpoint_defaults(checkpoint), family_of(checkpoint)
    model = Model(network, text, defaults, (), Path(f"random-{preset}"), family)
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
