"""Typed access to a checkpoint's metadata, for the config readers of all families.

Every refusal names the file, the field and what was expected. Knows no field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sfumato.model.model_config import ConfigError
from sfumato.weights.errors import quoted

MOST_LAYERS = 512  # building the skeleton of more would take longer than a bad file may
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
