"""The function that serves an operation, by its name, the device and the form of the weight.

Every operation has a reference in plain torch.  A twin is a faster function of the same signature,
registered for one kind of device and one form of weight in a file of its own.  A twin has no
gradient, so where one is asked for the reference serves, or what `differentiable` put in its
place.  This module knows no operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ANY, FLOAT, BLOCKS, PANELS, PLANES = "any", "float", "blocks", "panels", "planes"
SCALED = "scaled"
"""Forms of a weight: any (or an operation without one), a float tensor, quantized blocks, what the
compiled CPU kernels packed, what the kernels of GPUs read blocks from, and codes with a scale
for each row."""

TORCH, TRITON, COMPILED = 0, 1, 2
"""Backends of twins: where several could serve, the higher one does."""

Function = Callable[..., Any]
Refusal = Callable[[torch.device], str]
"""Why a twin never serves on a device; empty where it may."""
Watcher = Callable[[str, str, tuple[Any, ...]], None]
"""Takes the operation, the form of its weight and the arguments of a call."""


@dataclass(frozen=True)
class Twin:
    """A faster function, and for which arguments it serves; note: for which, in words."""

    function: Function
    serves: Callable[..., bool]
    backend: int
    refusal: Refusal
    note: str


_references: dict[str, Function] = {}
_differentiable: dict[str, Function] = {}
_twins: dict[tuple[str, str, str], list[Twin]] = {}
_forms: dict[type, str] = {}
_watchers: list[Watcher] = []
_seen_as: dict[str, str] = {}
_replaced: dict[tuple[str, str], tuple[Function, str]] = {}
_off: set[str] = set()
_forced = 0  # how many `reference_only` are open


def reference(operation: str) -> Callable[[Function], Function]:
    """Registers the decorated function as the specification of an operation."""

    def register(function: Function) -> Function:
        assert operation not in _references, f"{operation}: has a reference already"
        _references[operation] = function
        return function

    return register


def twin(
    operation: str,
    device: str,
    form: str = ANY,
    serves: Callable[..., bool] | None = None,
    backend: int = COMPILED,
    refusal: Refusal = lambda device: "",
    note: str = "",
) -> Callable[[Function], Function]:
    """Registers the decorated function for a kind of device and a form of weight.

    serves: takes the arguments of a call; False leaves the call to the next twin, and at last to
    the reference.  A twin for one form goes before those for any.  refusal and note: see `Twin`;
    for people, the calls do not ask them.
    """

    def register(function: Function) -> Function:
        entries = _twins.setdefault((operation, device, form), [])
        assert all(entry.backend != backend for entry in entries), (
            f"{operation}: has a twin of this backend"
        )
        entries.append(Twin(function, serves or (lambda *arguments: True), backend, refusal, note))
        entries.sort(key=lambda entry: -entry.backend)
        return function

    return register


def register_form(kind: type, form: str) -> None:
    """Weights of this class have this form; those of no registered class are float tensors."""
    _forms[kind] = form


def form_of(*weights: object) -> str:
    """The form of a weight, or of several where they share it, else ANY."""
    forms = {_forms.get(type(weight), FLOAT) for weight in weights}
    return forms.pop() if len(forms) == 1 else ANY


def call(operation: str, device: torch.device, form: str, *arguments: Any) -> Any:
    """Calls an operation: what the public functions of `ops` do."""
    for watch in _watchers:
        watch(operation, form, arguments)
    return choose(operation, device, form, *arguments)(*arguments)


def choose(
    operation: str, device: torch.device, form: str, *arguments: Any, below: int = COMPILED + 1
) -> Function:
    """The function that serves these arguments, of the backends below one."""
    if not _forced and _wants_gradient(arguments):
        return _differentiable.get(operation) or _references[operation]
    if not _forced and operation not in _off:
        kind = kind_of(device)
        if (operation, kind) in _replaced:
            return _replaced[operation, kind][0]
        for key in (form, ANY) if form != ANY else (ANY,):
            for entry in _twins.get((operation, kind, key), ()):
                if entry.backend < below and entry.serves(*arguments):
                    return entry.function
    return _references[operation]


def twins_of(operation: str, device: torch.device) -> list[Twin]:
    """The twins of an operation for a device, of all forms of weight, the best backend first."""
    kind = kind_of(device)
    entries = [
        entry
        for (name, of, _), each in _twins.items()
        if (name, of) == (operation, kind)
        for entry in each
    ]
    return sorted(entries, key=lambda entry: -entry.backend)


def has_twins(device: torch.device) -> bool:
    """Whether any operation has a faster function for this kind of device."""
    return any(kind == kind_of(device) for _, kind, _ in _twins)


def references() -> Mapping[str, Function]:
    """The specification of every operation that is registered, by name."""
    return _references


def replace(operation: str, kind: str, function: Function, why: str) -> None:
    """Lets a function serve an operation on a kind of device, in place of twins and reference."""
    _replaced[operation, kind] = function, why


def why_replaced(operation: str, device: torch.device) -> str:
    """Why `replace` was called for an operation; empty where it was not."""
    return _replaced.get((operation, kind_of(device)), (None, ""))[1]


def turn_off(operations: Iterable[str]) -> None:
    """Lets the references serve these operations everywhere, whatever twins there are."""
    _off.update(operations)


def is_off(operation: str) -> bool:
    """Whether `turn_off` was called for an operation."""
    return operation in _off


def _wants_gradient(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(
        x.requires_grad for x in arguments if isinstance(x, Tensor)
    )


def kind_of(device: torch.device) -> str:
    """The kind of device whose twins serve a device."""
    return _seen_as.get(device.type, device.type)


def device_of(arguments: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor among the arguments of a call."""
    return next(x.device for x in arguments if isinstance(x, Tensor))


@contextmanager
def seen_as(kind: str, other: str) -> Iterator[None]:
    """Tensors of one kind of device are served by the twins for another, in every thread. For
    tests of a GPU's twins on a CPU."""
    before = dict(_seen_as)
    _seen_as[kind] = other
    try:
        yield
    finally:
        _seen_as.clear()
        _seen_as.update(before)


@contextmanager
def reference_only() -> Iterator[None]:
    """The references serve every call of every thread. For tests."""
    global _forced
    _forced += 1
    try:
        yield
    finally:
        _forced -= 1


@contextmanager
def differentiable(functions: Mapping[str, Function]) -> Iterator[None]:
    """These functions, by operation, serve in place of the references where a gradient is asked
    for, in every thread. For training."""
    before = dict(_differentiable)
    _differentiable.update(functions)
    try:
        yield
    finally:
        _differentiable.clear()
        _differentiable.update(before)


@contextmanager
def watched(watch: Watcher) -> Iterator[None]:
    """Calls `watch` before every call of an operation in every thread."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers[:] = [other for other in _watchers if other is not watch]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of every operation in every thread, not those inside of twins. For tests."""
    counter: Counter[str] = Counter()

    def count(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        counter[operation] += 1

    with watched(count):
        yield counter
