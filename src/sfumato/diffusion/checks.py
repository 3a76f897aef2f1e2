"""What settings are checked with, and the tensors that callers and their samplers bring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.model.model_config import ModelConfig
from sfumato.options import setting
from sfumato.refused import Refused
from sfumato.weights.errors import quoted


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float; a bool or NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def is_whole(value: object) -> bool:
    """Whether `value` is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_causal(config: ModelConfig, field: str = "mode") -> None:
    """Raises Refused for a network whose tokens see others after them in the encode phase."""
    if config.block is not None:
        raise Refused(
            field,
            "needs a causal mode, and this model has none: it was trained to denoise blocks alone",
            "leave it out, or use a model that has one",
        )


def check_verify(value: object, config: ModelConfig) -> None:
    """Raises Refused for no choice of `verify`, and for a network that has no second reader."""
    if value is not None:
        check_setting("verify", value)
        check_causal(config, "verify")


def check_setting(name: str, value: object, field: str | None = None) -> None:
    """Raises Refused for a value that a setting does not take. field: its name, if that differs."""
    kind = setting(name).kind
    try:
        kind.accept(value)
    except ValueError:
        what = f"{'a ' if hasattr(kind, 'low') else ''}{kind.describe()}"  # a number has ends
        raise Refused(field or name, f"must be {what}, got {quoted(value)}") from None


def check_tensor(
    value: object, must: str, dtype: torch.dtype | None, shape: Sequence[int | str]
) -> None:
    """Raises ValueError, its message beginning with `must`, unless `value` is a tensor of this
    dtype (None: any float) and shape (a name stands for any size)."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{must} {_kind(dtype, shape)}, got {quoted(value)}, which is no tensor")
    right = value.is_floating_point() if dtype is None else value.dtype == dtype
    fits = value.ndim == len(shape) and all(
        isinstance(size, str) or size == actual
        for size, actual in zip(shape, value.shape, strict=True)
    )
    if not (right and fits):
        raise ValueError(f"{must} {_kind(dtype, shape)}, got {_kind(value.dtype, value.shape)}")


def check_returned(
    value: object, role: str, part: object, method: str, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """`check_tensor` of what a method of a sampler, a stopping rule or a processor returned."""
    check_tensor(value, f"{role} {type(part).__name__}: {method} must return", dtype, shape)


def _kind(dtype: torch.dtype | None, shape: Sequence[int | str]) -> str:
    name = "float" if dtype is None else str(dtype).removeprefix("torch.")
    return f"{name} [{', '.join(map(str, shape))}]"
