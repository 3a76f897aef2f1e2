"""An operation that is declared in a test: its dispatcher, and which function serves a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from tests.support.counted_calls import counted_calls
from torch import Tensor

from sfumato.ops import registry
from sfumato.ops.paths import Path, paths, table
from sfumato.ops.registry import COMPILED, TORCH, Operation
from sfumato.weights.formats import BLOCKS, FLOAT, FORMATS, QuantizedTensor, Weight

CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.ones(2)
Double = Operation[[Tensor, Weight | None, int], object]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """An operation that says who served it."""
    monkeypatch.setattr(registry, "_operations", {})
    monkeypatch.setattr(registry, "_twins", {})

    @registry.operation
    def double(x: Tensor, weight: Weight | None = None, times: int = 2) -> object:
        """Says who served it.  In a second sentence, nothing."""
        return "reference"

    return double


def says(who: object) -> registry.Function:
    def twin(x: Tensor, weight: Weight | None = None, times: int = 2) -> object:
        return who

    return twin


def long(x: Tensor, *rest: object) -> bool:
    return len(x) > 9


@pytest.mark.parametrize("kinds", [(TORCH, COMPILED), (COMPILED, TORCH)])
def test_compiled_twins_go_first_in_whatever_order_they_were_registered(
    kinds: tuple[int, int], double: Double
) -> None:
    for kind in kinds:
        serves = (lambda x, *_: len(x) < 9) if kind == COMPILED else None
        registry.twin("double", "cpu", serves=serves, backend=kind)(says(kind))
    assert double(X) == COMPILED
    assert double(torch.ones(10)) == TORCH
    assert double(X.to(META)) == "reference" == double.reference(X)
    with pytest.raises(AssertionError):
        registry.twin("double", "cpu")(says("another"))


def test_a_twin_for_one_form_goes_before_those_for_any(double: Double) -> None:
    registry.twin("double", "cpu")(says("any"))
    registry.twin("double", "cpu", FLOAT, backend=TORCH)(says("float"))
    block = FORMATS["Q8_0"]
    blocks = QuantizedTensor(torch.zeros(1, block.block_bytes, dtype=torch.uint8), block, (1, 32))
    assert [double(X), double(X, X), double(X, weight=blocks)] == ["float", "float", "any"]
    assert registry.form_of(X, X) == FLOAT and registry.form_of(blocks) == BLOCKS
    assert registry.form_of(X, blocks) == registry.ANY


def test_the_reference_serves_gradients_and_where_it_is_forced(double: Double) -> None:
    registry.twin("double", "cpu")(says("twin"))
    wanted = torch.ones(2, requires_grad=True)
    assert double(wanted) == "reference"
    with torch.no_grad():
        assert double(wanted) == "twin"
    with registry.reference_only():
        assert double(X) == "reference"
    assert double(X) == "twin"


def test_calls_are_counted(double: Double) -> None:
    with counted_calls() as outer:
        double(X)
        with counted_calls() as inner:
            double(X)
        double(X)
    double(X)
    assert (outer["double"], inner["double"]) == (3, 1)


def test_a_twin_gets_all_arguments_in_their_order(double: Double) -> None:
    seen: list[tuple[object, ...]] = []

    def twin(*arguments: object) -> None:
        seen.append(arguments)

    registry.twin("double", "cpu")(twin)
    double(X)
    double(X, X)
    double(times=3, x=X)
    double(X, times=3, weight=X)
    double(X, X, 3)
    assert [len(each) for each in seen] == [3] * 5
    assert all(each[0] is X for each in seen)
    assert [each[1] is X for each in seen] == [False, True, False, True, True]
    assert [each[2] for each in seen] == [2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("given", "named", "why"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((X, X, 3, 4), {}, "too many positional arguments"),
        ((X, X), {"weight": X}, "multiple values for argument 'weight'"),
        ((X,), {"time": 3}, "unexpected keyword argument 'time'"),
    ],
)
def test_wrong_arguments_are_errors(
    given: tuple[object, ...], named: dict[str, object], why: str, double: Double
) -> None:
    with pytest.raises(TypeError, match=why):
        double(*given, **named)  # type: ignore[arg-type]


def test_a_twin_of_another_signature_is_refused(double: Double) -> None:
    def other_name(x: Tensor, weights: Weight | None = None, times: int = 2) -> object: ...
    def other_default(x: Tensor, weight: Weight | None = None, times: int = 3) -> object: ...
    def no_default(x: Tensor, weight: Weight | None, times: int = 2) -> object: ...
    def fewer(x: Tensor, weight: Weight | None = None) -> object: ...

    for function in (other_name, other_default, no_default, fewer):
        why = rf"double: the twin .*\.{function.__name__} takes \(x, .*\), its reference \(x, weig"
        with pytest.raises(TypeError, match=why):
            registry.twin("double", "cpu")(function)
    assert double(X) == "reference"


def test_a_twin_may_be_registered_before_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the kernels of operations whose references other packages have."""
    monkeypatch.setattr(registry, "_operations", {})
    monkeypatch.setattr(registry, "_twins", {})

    def triple(x: Tensor) -> Tensor:
        return 3 * x

    registry.twin("triple", "cpu")(lambda *arguments: "twin")
    assert registry.operation(triple)(X) == "twin"


def test_an_operation_has_the_name_the_docs_and_the_signature_of_its_reference(
    double: Double,
) -> None:
    assert double.name == "double" and list(registry.operations()) == ["double"]
    assert double.__doc__ == double.reference.__doc__
    assert list(inspect.signature(double).parameters) == ["x", "weight", "times"]


def test_an_operation_can_be_turned_off(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.twin("double", "cpu")(says("twin"))
    monkeypatch.setattr(registry, "_off", registry.names_in(" double ,"))
    registry.check_off()
    assert double(X) == "reference"
    assert paths(CPU) == [Path("double", "torch", "SFUMATO_OFF asks for it")]
    monkeypatch.setattr(registry, "_off", registry.names_in("double,twice"))
    with pytest.raises(ValueError, match="SFUMATO_OFF: 'twice' is none of double"):
        registry.check_off()


def test_an_operation_has_a_row_in_the_table_of_the_docs(double: Double) -> None:
    (row,) = table()
    assert row.startswith("| `double` | Says who served it |")
