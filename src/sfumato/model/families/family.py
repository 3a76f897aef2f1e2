"""`Family`: all that a family of models has for itself, as one value.

Knows no family; each is a folder beside this file, and `__init__.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from sfumato.model.model_config import ModelConfig
from sfumato.text.markers import ChatMarkers
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.names import TensorNames

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class CanvasProcess:
    """How canvases of the family are denoised.

    noise: what a canvas begins with and what rejected positions become; "uniform" draws from the
    whole vocabulary. self_conditioning: each step reads the soft embedding of the step before it.
    """

    noise: Literal["uniform"]
    self_conditioning: bool


@dataclass(frozen=True)
class SamplerKeys:
    """Where a checkpoint keeps its sampler's defaults: name of the default → key of the file.

    The names are "max_steps", "bound", "t_min", "t_max", "stability" and "confidence"; `hf_nested`
    is the object of `generation_config.json` that may hold keys too, `hf_class` its `_cls_name`.
    """

    hf: Mapping[str, str]
    gguf: Mapping[str, str]
    hf_nested: str
    hf_class: str
    nested: tuple[str, ...]  # names of the defaults that are written into `hf_nested`


@dataclass(frozen=True)
class ConfigFormat:
    """A `ModelConfig` as metadata, in both directions. Readers and writers raise ConfigError, which
    names what is missing, is not supported, or cannot be written."""

    from_hf: Callable[[Metadata, Metadata], ModelConfig]  # config.json, generation_config.json
    from_gguf: Callable[[Checkpoint], ModelConfig]
    to_hf: Callable[[ModelConfig, str], dict[str, Any]]  # the config, the dtype to name
    to_gguf: Callable[[ModelConfig], dict[str, Any]]
    # Tensors of a GGUF file that are constants of the config and no weights, by the file's names.
    gguf_constants: Callable[[ModelConfig], dict[str, Tensor]]
    # Tensors that `transformers` asks for whatever the checkpoint, by its names.
    hf_placeholders: Callable[[ModelConfig], dict[str, Tensor]]


@dataclass(frozen=True)
class ReadFormat:
    """How a canvas whose answer is read looks, in texts of special tokens.

    filler: what fills it behind the end, unless the checkpoint names another token
    (`ModelConfig.filler_id`); empty_thought: what a model's turn begins with when it does not
    think.
    """

    end: str
    filler: str
    empty_thought: str


@dataclass(frozen=True)
class Family:
    """A family of models: what its checkpoints look like and how they are meant to be used."""

    name: str
    title: str  # as people write it: what clients of the server read
    model_type: str  # of config.json
    architecture: str  # `general.architecture` of GGUF files
    tensor_names: TensorNames = field(repr=False)
    config: ConfigFormat = field(repr=False)
    canvas: CanvasProcess
    sampler: SamplerKeys = field(repr=False)
    markers: ChatMarkers = field(repr=False)
    reads: ReadFormat = field(repr=False)
