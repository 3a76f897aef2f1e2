"""Which function serves a call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry
from sfumato.ops.registry import ANY, COMPILED, FLOAT, TORCH

CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.ones(2)


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An operation `double` that says who served it."""
    monkeypatch.setattr(registry, "_references", {})
    monkeypatch.setattr(registry, "_twins", {})
    registry.reference("double")(lambda x: "reference")
    return


def served(x: Tensor = X, device: torch.device = CPU, form: str = ANY) -> object:
    return registry.call("double", device, form, x)


@pytest.mark.parametrize("kinds", [(TORCH, COMPILED), (COMPILED, TORCH)])
def test_compiled_twins_go_first_in_whatever_order_they_were_registered(
    kinds: tuple[int, int],
) -> None:
    for kind in kinds:
        serves = (lambda x: len(x) < 9) if kind == COMPILED else None
        registry.twin("double", "cpu", serves=serves, backend=kind)(lambda x, kind=kind: kind)
    assert served() == COMPILED
    assert served(torch.ones(10)) == TORCH
    assert served(device=META) == "reference"
    with pytest.raises(AssertionError):
        registry.twin("double", "cpu")(lambda x: x)


def test_a_twin_for_one_form_goes_before_those_for_any() -> None:
    registry.twin("double", "cpu")(lambda x: "any")
    registry.twin("double", "cpu", FLOAT, backend=TORCH)(lambda x: "float")
    assert [served(form=form) for form in (ANY, FLOAT, "blocks")] == ["any", "float", "any"]
    assert registry.form_of(X, X) == FLOAT
    assert registry.form_of(X, None) == FLOAT


def test_the_reference_serves_gradients_and_where_it_is_forced() -> None:
    registry.twin("double", "cpu")(lambda x: "twin")
    wanted = torch.ones(2, requires_grad=True)
    assert served(wanted) == "reference"
    with torch.no_grad():
        assert served(wanted) == "twin"
    with registry.reference_only():
        assert served() == "reference"
    assert served() == "twin"


def test_calls_are_counted() -> None:
    with registry.counted() as outer:
        served()
        with registry.counted() as inner:
            served()
        served()
    served()
    assert (outer["double"], inner["double"]) == (3, 1)


def test_every_operation_has_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for operation in ("linear", "embed", "experts", "canvas_attention", "update_softmax"):
        assert operation in registry._references
        assert callable(getattr(ops, operation))
