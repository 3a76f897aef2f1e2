"""What an operation is, and which function serves a call of it, by device and form of weight.

`@operation` declares an operation: it makes a dispatcher of the reference, which is in plain torch.
A twin is a faster function of the same signature, registered for one kind of device and one form of
weight.  A twin has no gradient, so where one is asked for the reference serves, or what
`differentiable` put in its place, or for a weight that is no tensor of floats what `frozen` did.
The environment variable SFUMATO_OFF names operations whose
references serve everywhere: for finding out which faster form makes a wrong result, and for a
device on which one does.  This module knows no operation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import (
    Any,
    Generic,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from sfumato.weights.formats.format import BLOCKS as BLOCKS
from sfumato.weights.formats.format import FLOAT as FLOAT
from sfumato.weights.formats.format import SCALED as SCALED
from sfumato.weights.formats.format import Stored
from sfumato.weights.formats.format import form_of as _form_of

log = logging.getLogger(__name__)

VARIABLE = "SFUMATO_OFF"

ANY, PANELS, PLANES = "any", "panels", "planes"
"""Forms of a weight beside FLOAT, BLOCKS and SCALED: any (or an operation without one), what the
compiled CPU kernels packed, and what the kernels of GPUs read blocks from."""

TORCH, TRITON, COMPILED = 0, 1, 2
"""Backends of twins: where several could serve, the higher one does."""

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
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


class Operation(Generic[P, R]):
    """An operation; a call of it goes to the function that serves its arguments.

    The device is that of the first argument whose type is a Tensor, else of the first.  The form is
    that of the weights: the arguments, side by side, that may be a Tensor or something else, but
    None.  A twin gets all arguments in the order of the parameters.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        update_wrapper(self, reference)
        self.name, self.reference = reference.__name__, reference
        parameters = signature(reference).parameters
        self._count = len(parameters)
        self._defaults = tuple(each.default for each in parameters.values())
        self._least = self._defaults.count(Parameter.empty)
        hints = get_type_hints(reference)
        kinds = [hints[name] for name in parameters]
        self._device = kinds.index(Tensor) if Tensor in kinds else 0
        weights = [at for at, kind in enumerate(kinds) if _is_weight(kind)]
        self._weights = slice(weights[0], weights[-1] + 1) if weights else None
        assert all(map(_is_weight, kinds[self._weights] if self._weights else ())), "side by side"

    def __call__(self, *given: P.args, **named: P.kwargs) -> R:
        arguments: tuple[Any, ...] = given
        if named or len(arguments) != self._count:
            short = not named and self._least <= len(arguments) < self._count
            more = self._defaults[len(arguments) :]
            arguments = arguments + more if short else self._bound(arguments, named)
        form = form_of(*arguments[self._weights]) if self._weights else ANY
        for watch in _watchers:
            watch(self.name, form, arguments)
        device = getattr(arguments[self._device], "device", _CPU)
        result: R = choose(self.name, device, form, *arguments)(*arguments)
        return result

    def _bound(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments of a call in the order of the parameters. Raises TypeError as a call of the
        reference would."""
        bound = signature(self.reference).bind(*given, **named)
        bound.apply_defaults()
        return bound.args


def _is_weight(kind: object) -> bool:
    """Whether the type of a parameter is that of a weight."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return Tensor in options and bool(set(options) - {Tensor, NoneType})


def names_in(wanted: str) -> frozenset[str]:
    """The names in a list with commas."""
    return frozenset(name.strip() for name in wanted.split(",") if name.strip())


_operations: dict[str, Operation[..., Any]] = {}
_differentiable: dict[str, Function] = {}
_frozen: dict[str, Function] = {}
_twins: dict[tuple[str, str, str], list[Twin]] = {}
_watchers: list[Watcher] = []
_seen_as: dict[str, str] = {}
_replaced: dict[tuple[str, str], tuple[Function, str]] = {}
_off = names_in(os.environ.get(VARIABLE, ""))
_forced = 0  # how many `reference_only` are open
_CPU = torch.device("cpu")

if _off:
    log.warning("%s: torch serves, since %s asks for it", ", ".join(sorted(_off)), VARIABLE)


def operation(reference: Callable[P, R]) -> Operation[P, R]:
    """Declares the operation of the decorated function's name, whose specification it is."""
    name = reference.__name__
    assert name not in _operations, f"{name}: has a reference already"
    _operations[name] = declared = Operation(reference)
    return declared


def operations() -> Mapping[str, Operation[..., Any]]:
    """All operations that are declared, by name."""
    return _operations


def check_signature(operation: str, function: Function) -> None:
    """Raises TypeError where a twin has other parameters or defaults than the reference. One that
    takes `*arguments` alone passes a call on as it is, and may come before its operation."""
    theirs, known = _parameters(function), _operations.get(operation)
    if known is not None and theirs not in ("*", ours := _parameters(known.reference)):
        where = f"{function.__module__}.{function.__qualname__}"
        raise TypeError(f"{operation}: the twin {where} takes ({theirs}), its reference ({ours})")


def _parameters(function: Function) -> str:
    """The parameters of a function with their defaults; "*" where it takes any."""
    parameters = signature(function).parameters.values()
    if [each.kind for each in parameters] == [Parameter.VAR_POSITIONAL]:
        return "*"
    return ", ".join(str(each.replace(annotation=Parameter.empty)) for each in parameters)


def twin(
    operation: str,
    device: str,
    form: str = ANY,
    serves: Callable[..., bool] | None = None,
    backend: int = COMPILED,
    refusal: Refusal = lambda device: "",
    note: str = "",
) -> Callable[[F], F]:
    """Registers the decorated function for a kind of device and a form of weight.

    serves: takes the arguments of a call; False leaves the call to the next twin, and at last to
    the reference.  A twin for one form goes before those for any.  refusal and note: see `Twin`;
    for people, the calls do not ask them.  See `check_signature` for what is raised.
    """

    def register(function: F) -> F:
        check_signature(operation, function)
        entries = _twins.setdefault((operation, device, form), [])
        assert all(entry.backend != backend for entry in entries), (
            f"{operation}: has a twin of this backend"
        )
        entries.append(Twin(function, serves or (lambda *arguments: True), backend, refusal, note))
        entries.sort(key=lambda entry: -entry.backend)
        return function

    return register


def form_of(*weights: object) -> str:
    """The form of a weight, or of several where they share it, else ANY; None counts as a float
    beside no other weight."""
    forms = {_form_of(weight) for weight in weights if weight is not None} or {FLOAT}
    return forms.pop() if len(forms) == 1 else ANY


def choose(
    operation: str, device: torch.device, form: str, *arguments: Any, below: int = COMPILED + 1
) -> Function:
    """The function that serves these arguments, of the backends below one."""
    if _forced:
        return _operations[operation].reference
    if _wants_gradient(arguments):
        if operation in _frozen and any(isinstance(each, Stored) for each in arguments):
            return _frozen[operation]
        return _differentiable.get(operation) or _operations[operation].reference
    if operation not in _off:
        kind = kind_of(device)
        if _replaced and (operation, kind) in _replaced:
            return _replaced[operation, kind][0]
        for key in (form, ANY) if form != ANY else (ANY,):
            for entry in _twins.get((operation, kind, key), ()):
                if entry.backend < below and entry.serves(*arguments):
                    return entry.function
    return _operations[operation].reference


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


def replace(operation: str, kind: str, function: Function, why: str) -> None:
    """Lets a function serve an operation on a kind of device, in place of twins and reference."""
    _replaced[operation, kind] = function, why


def why_replaced(operation: str, device: torch.device) -> str:
    """Why `replace` was called for an operation; empty where it was not."""
    return _replaced.get((operation, kind_of(device)), (None, ""))[1]


def is_off(operation: str) -> bool:
    """Whether SFUMATO_OFF names an operation."""
    return operation in _off


def check_off() -> None:
    """Raises ValueError where SFUMATO_OFF names what is no operation; call it once all of them are
    declared, as they are where the model and its steps are imported."""
    for name in sorted(_off - _operations.keys()):
        raise ValueError(f"{VARIABLE}: {name!r} is none of {', '.join(sorted(_operations))}")


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
def differentiable(functions: Mapping[str, Function]) -> Iterator[None]:
    """Lets functions, by operation, serve in place of the references where a gradient is asked for,
    in every thread. For training."""
    before = dict(_differentiable)
    _differentiable.update(functions)
    try:
        yield
    finally:
        _differentiable.clear()
        _differentiable.update(before)


def frozen(operation: str) -> Callable[[F], F]:
    """Registers the decorated function for where a gradient is asked for and a weight is `Stored`:
    on every device, with a gradient to the other arguments alone. See `check_signature`."""

    def register(function: F) -> F:
        check_signature(operation, function)
        _frozen[operation] = function
        return function

    return register


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
def watched(watch: Watcher) -> Iterator[None]:
    """Calls `watch` before every call of an operation in every thread."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers[:] = [other for other in _watchers if other is not watch]
