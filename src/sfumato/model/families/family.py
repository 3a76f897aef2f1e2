"""`Family`: all that a family of models has for itself, as one value; and typed access to a
checkpoint's metadata, for the config readers of all families.

Every refusal of a field names the file, the field and what was expected. Knows no family and no
field; each family is a folder beside this file, and `__init__.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from sfumato.model.model_config import ConfigError, ModelConfig
from sfumato.text.markers import ChatMarkers
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import quoted
from sfumato.weights.names import TensorNames

MOST_LAYERS = 512  # building the skeleton of more would take longer than a bad file may
LARGEST_EPS = 0.1  # a norm's epsilon is 1e-5 or 1e-6; one that outweighs the variance is garbage
LARGEST = 1e30  # beyond it a float is garbage, and float32 near its end


class FieldReader:
    """Typed access to one mapping, with errors that say where the field should have been.

    A default replaces an absent field only: a field that is given must be valid, and null is not.
    """

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key, default)
        if value is None and self.prefix + key not in self.values:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is missing; the checkpoint is incomplete"
            )
        return value

    def _refusal(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.prefix}{key} is {shown(value)}, not {wanted}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        # Sizes become allocations: an absurd one must stop here and not in the allocator.
        if type(value) is not int or not 0 < value < 2**31:
            raise self._refusal(key, value, "a positive integer of sane size")
        return value

    def number(self, key: str, default: float | None = None, below: float = LARGEST) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < below:
            raise self._refusal(key, value, f"a number above 0 and below {below:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._refusal(key, value, "true or false")
        return value

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; none where the field is absent or null."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            wanted = f"a token id below the vocab_size of {vocab_size}, or a list of them"
            raise self._refusal(key, value, wanted)
        return tuple(ids)

    def token(self, key: str, vocab_size: int) -> int | None:
        """The one token id, or None where the field is absent or null."""
        ids = self.tokens(key, vocab_size)
        if len(ids) > 1:
            raise self._refusal(key, ids, "one token id")
        return ids[0] if ids else None

    def only(self, key: str, *supported: Any) -> None:
        """Raises ConfigError where a field is none of these, of which the first stands for an
        absent one."""
        value = self.values.get(self.prefix + key, supported[0])
        if value not in supported:
            known = " or ".join(map(shown, supported))
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is {shown(value)}; only {known} is supported"
            )

    def child(self, key: str, default: Mapping[str, Any] | None = None) -> FieldReader:
        """The object under a key."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise self._refusal(key, value, "an object")
        return FieldReader(f"{self.where}.{self.prefix}{key}", value)

    def per_layer(self, key: str, count: int, scalar: bool = True) -> list[int]:
        """One integer or flag a layer; with `scalar`, a single one counts for all layers."""
        value = self._get(key, None)
        if count > MOST_LAYERS:
            raise ConfigError(f"{self.where}: {count} layers; that is no real checkpoint")
        if scalar and isinstance(value, int):
            return [value] * count
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(listed, list) or len(listed) != count:
            raise ConfigError(f"{self.where}: {self.prefix}{key} must list {count} values")
        if not all(isinstance(entry, int) for entry in listed):
            raise self._refusal(key, value, "a list of integers or flags")
        return listed


def shown(value: Any) -> str:
    return "null" if value is None else quoted(value)


def shortest_float(value: float) -> float:
    """The float that people wrote, of one that has been a float32: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class CanvasProcess:
    """How canvases of the family are denoised.

    noise: what a canvas begins with and what rejected positions become; "uniform" draws from the
    whole vocabulary, "mask" is the token `ModelConfig.mask_id`, and a position that is accepted
    keeps its token. self_conditioning: each step reads the soft embedding of the step before it.
    threshold and pace: with masks, the defaults of the settings of these names.
    """

    noise: Literal["uniform", "mask"]
    self_conditioning: bool
    threshold: float = 0.9
    pace: Literal["even", "linear"] = "even"


@dataclass(frozen=True)
class SamplerKeys:
    """Where a checkpoint keeps its sampler's defaults: name of the default → key of the file.

    The names are "max_steps", "bound", "t_min", "t_max", "stability" and "confidence", of a process
    with masks "max_steps" and "threshold"; a default without a key is the family's. `hf_nested`
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
    # What GGUF files hold too, where other networks have the architecture: key → value.
    gguf_keys: Mapping[str, Any] = field(default_factory=dict, repr=False)
    template: str = field(default="", repr=False)  # of checkpoints without one; "": they need one
