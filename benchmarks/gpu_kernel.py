"""Is a kernel right and how fast is it: one operation at real sizes, in a process of its own.

Against a float64 reference, in three runs over poisoned memory, alone against beside other rows,
and in time against torch's own operation and the roofline.  `gpu_first.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu_cases import CASES, Case, Sizes
from benchmarks.gpu_tiles import measured_tiles
from benchmarks.gpu_timing import median_ms, poison
from benchmarks.gpu_torch_codes import peer
from torch import Tensor

from sfumato.bench.step_cost import DeviceLimits, step_time
from sfumato.ops import registry
from sfumato.ops.device_check import mapped, tensors_of
from sfumato.ops.torch_device import keeps_bits, padded_product
from sfumato.ops.triton import self_test, twins
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.weights.formats import KINDS, Stored

Function = Callable[..., Any]

TRITON = "Triton"
RUNS = 3
ERROR = 1.2  # of torch's own error, what a kernel may have
TILE_SECONDS = 0.2  # for each candidate
SETS = 4  # of inputs, in turns, where one would stay in the device's cache


def check_kernel(name: str, sizes: Sizes, limits: DeviceLimits, seconds: float) -> dict[str, Any]:
    """The findings for a case: "passed" says whether all held.

    A result that is wrong is found, not raised; what a kernel raises is the caller's to report.
    """
    case = CASES[name](sizes, 0)
    kernel, served_by = _kernel(case, sizes.device)
    reference = _reference(case.operation)
    with torch.no_grad():
        findings = _right(case, kernel, reference, sizes)
        cases = [case]
        moved = sum(tensor.nbytes for tensor in tensors_of(case.arguments))
        if moved < limits.cache:
            cases += [CASES[name](sizes, seed) for seed in range(1, SETS)]
        ours, torchs = (
            median_ms([_run(function, each) for each in cases], sizes.device, seconds)
            for function in (kernel, reference)
        )
        # One row of several: what a request that is alone needs, with tiles for few tokens.
        row = replace(case, arguments=case.alone(0))
        ours_of_row, torchs_of_row = (
            median_ms([_run(function, row)], sizes.device, seconds / 2)
            for function in (kernel, reference)
        )
        tried = []
        for call in (case, row) if served_by == TRITON else ():
            run = _run(kernel, call)
            tried += measured_tiles(run, _timer(run, sizes.device))
    (kernel_time,) = step_time([case.cost], limits).kernels
    floor_ms, predicted_ms = 1e3 * kernel_time.floor_s, 1e3 * kernel_time.predicted_s
    faster = ours["median_ms"] < torchs["median_ms"]
    return {
        "kernel": name,
        "case": case.operation,
        "served_by": served_by,
        **findings,
        "tiles": tried,
        "time": ours,
        "torch_time": torchs,
        "row_time": ours_of_row,
        "row_torch_time": torchs_of_row,
        "torch_codes_time": _codes_time(case, sizes.device, seconds),
        "library": _library(cases, sizes.device, seconds),
        "faster_than_torch": faster,
        "floor_ms": floor_ms,
        "predicted_ms": predicted_ms,
        "share_of_floor": floor_ms / ours["median_ms"],
        "passed": all(findings[each] for each in ("right", "repeats", "same_alone")),
    }


def _kernel(case: Case, device: torch.device) -> tuple[Function, str]:
    """The kernel of a case; on a device without any, what serves there, as a stand-in."""
    if self_test.usable(device):
        twin = twins((*LAYOUTS, *KINDS)).get(case.twin or case.operation)
        if twin is not None and twin.serves(*case.arguments):
            from sfumato.ops.triton.linear import by_kernel

            return by_kernel if case.operation == "linear" else twin.function, TRITON
    stand_in = registry.choose(case.operation, device, registry.ANY, *case.arguments)
    return stand_in, f"a stand-in: {stand_in.__module__}"


def _reference(operation: str) -> Function:
    with registry.reference_only():
        return registry.choose(operation, torch.device("cpu"), registry.ANY)


def _codes_time(case: Case, device: torch.device, seconds: float) -> dict[str, Any] | None:
    """Of torch's products of codes, where the weights are FP8; or why torch refuses them here."""
    function = peer(case.operation, case.arguments)
    if function is None:
        return None
    try:
        with torch.no_grad():
            return dict(median_ms([_run(function, case)], device, seconds))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"failed": str(error).partition("\n")[0][:200]}


def _library(cases: Sequence[Case], device: torch.device, seconds: float) -> dict[str, Any] | None:
    """Of products with one weight of floats: their shape, whether a row of the vendor's library, in
    products of a fixed shape, keeps its bits, and the medians of all rows and of one."""
    if cases[0].operation != "linear" or isinstance(cases[0].arguments[1], Stored):
        return None
    x, weight, _ = cases[0].arguments
    with torch.no_grad():
        runs = [_run(padded_product, replace(case, arguments=case.arguments[:2])) for case in cases]
        row = [_run(padded_product, replace(case, arguments=case.alone(0)[:2])) for case in cases]
        time, row_time = (median_ms(each, device, seconds)["median_ms"] for each in (runs, row))
        keeps = keeps_bits(device, x.dtype, *weight.shape)
    shape = list(weight.shape)
    return {"shape": shape, "keeps_bits": keeps, "time": time, "row_time": row_time}


def _run(function: Function, case: Case) -> Callable[[], object]:
    return lambda: function(*case.arguments)


def _timer(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    return lambda: float(median_ms([run], device, TILE_SECONDS)["median_ms"])


def _right(case: Case, kernel: Function, reference: Function, sizes: Sizes) -> dict[str, Any]:
    plain = reference(*case.arguments)
    exact = reference(*_widened(case.arguments))
    outs = []
    for _ in range(RUNS):
        poison(sizes.device, tensors_of(plain))
        outs.append(kernel(*case.arguments))
    errors, torch_errors = (relative_errors(out, exact) for out in (outs[0], plain))
    rows = range(min(2, sizes.shape.rows))
    same = all(
        _equal(case.part(outs[0], row), kernel(*case.alone(row)))
        for row in (*rows, sizes.shape.rows - 1)
    )
    return {
        "errors": errors,
        "torch_errors": torch_errors,
        "right": all(
            error <= ERROR * torch_error + slack
            for error, torch_error, slack in zip(
                errors, torch_errors, _slacks(exact, sizes.dtype), strict=True
            )
        ),
        "repeats": all(_equal(outs[0], out) for out in outs[1:]),
        "same_alone": same,
    }


def relative_errors(out: Any, exact: Any) -> list[float]:
    """Of each tensor: ‖out − exact‖ / ‖exact‖, infinity where a number is none; of integers, such
    as chosen tokens, the share of those that differ."""
    errors = []
    for a, b in zip(tensors_of(out), tensors_of(exact), strict=True):
        if not a.is_floating_point():
            errors.append(float((a != b).double().mean()))
            continue
        error = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))
        errors.append(error if error == error else float("inf"))
    return errors


def _slacks(exact: Any, dtype: torch.dtype) -> list[float]:
    """What an error may be where torch's is 0, because the reference has a part in float32 whatever
    its operands: a last place; of integers, a pair that a tie exchanges."""
    place = torch.finfo(dtype).eps
    return [place if t.is_floating_point() else 2 / t.numel() for t in tensors_of(exact)]


def _widened(arguments: Sequence[Any]) -> list[Any]:
    """The arguments with floats as float64; weights, which dequantize to it, stay as they are."""

    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    return [each if isinstance(each, Stored) else mapped(each, wide) for each in arguments]


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
