"""Which operations the kernels of this package serve on a device: those that passed a test on it.

`prepare` tests each operation once on a device, on small random tensors against its reference, and
switches off, with one log line for each reason, what fails and what the table of tiles says is
slower than torch.  Before `prepare`, no kernel serves: a test waits for the device, which a
captured graph and a step must not.  Knows no operation by name.

What has passed on a device is kept from start to start, in a note: a file in the folder of Triton's
cache, which goes with it.  The note holds for one text of the kernels and of their references, one
version of Triton, torch and the driver, and one kind of device; where any of these changes, the
tests run again.  No note is an error: without one the tests run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sfumato.ops.device_check import mapped, tensors_of
from sfumato.ops.triton.kernel import installed, interpreting
from sfumato.ops.triton.planes import (
    ALIGNMENT,
    LAYOUTS,
    OPERATIONS,
    PlaneTensor,
    multiplies_codes,
    to_planes,
    twin_name,
)
from sfumato.ops.triton.tiles import architecture, own_architecture, slower
from sfumato.weights.formats import FORMATS, KINDS, QuantizedTensor, ScaledTensor, round_rows

log = logging.getLogger(__name__)
T = TypeVar("T")

LOSS = "; a row's bits then depend on the other rows"
"""What an operation loses where torch's products serve it, which choose their sums by the shape."""


@dataclass(frozen=True)
class KernelTwin:
    """An operation that kernels serve.

    function: of the signature of the operation's reference.  serves: whether it takes these
    arguments; reads no number of a tensor.  check: runs the function on a device against the
    reference; raises AssertionError, or what Triton raises, where it is wrong.
    """

    operation: str
    function: Callable[..., Any]
    serves: Callable[..., bool]
    check: Callable[[torch.device], None]


def twins_of(
    operation: str,
    function: Callable[..., Any],
    serves: Callable[..., bool],
    check: Callable[[str, torch.device], None],
) -> dict[str, KernelTwin]:
    """An operation with weights of floats and of each format that its kernels take, by the name of
    the twin. check: of the format, "" for floats, and the device."""
    names = {format: twin_name(operation, format) for format in ("", *OPERATIONS[operation])}
    return {
        name: KernelTwin(name, function, serves, partial(check, format))
        for format, name in names.items()
    }


_passed: dict[torch.device, frozenset[str]] = {}
_failed: dict[torch.device, dict[str, str]] = {}  # why, by operation


def serves(operation: str, device: torch.device) -> bool:
    """Whether the kernels of an operation passed their test on a device."""
    return operation in _passed.get(_indexed(device), ())


def prepared(device: torch.device) -> frozenset[str] | None:
    """The operations that kernels serve on a device; None where it has not been tested yet."""
    return _passed.get(_indexed(device))


def serve_only(device: torch.device, operations: frozenset[str]) -> None:
    """Lets kernels serve these operations on a device and no others, tested or not. For benchmarks;
    graphs that were captured before keep their kernels."""
    _passed[_indexed(device)] = operations


def switch_off(operation: str, device: torch.device, error: Exception) -> None:
    """Torch serves an operation on a device from now on, since its kernels do not run there."""
    device = _indexed(device)
    if serves(operation, device):
        _passed[device] -= {operation}
        _failed.setdefault(device, {})[operation] = f"a kernel did not run ({_line(error)})"
        _keep(device)  # the next start tests it again
        why = _line(error) + LOSS
        log.warning("%s: torch serves it on %s from now on (%s)", operation, device, why)


def prepare(device: torch.device, twins: dict[str, KernelTwin]) -> frozenset[str]:
    """Tests the twins, by operation, on a device, each once; the operations that serve from now on.

    What passed at an earlier start is not tested again: see `kept`. Compiles kernels and
    waits for the device: call it before a graph is captured. Gives the memory of the tests back.
    """
    device = _indexed(device)
    if new := undecided(device, twins):
        before = kept(device)
        reasons = {name: _why_not(twins[name], device, name not in before) for name in new}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            names = ", ".join(name for name, each in reasons.items() if each == reason)
            log.warning("%s: torch serves on %s, since %s%s", names, device, reason, LOSS)
        failed = {name: reason for name, reason in reasons.items() if reason}
        _failed[device] = _failed.get(device, {}) | failed
        _passed[device] = _passed.get(device, frozenset()) | (reasons.keys() - failed.keys())
        if not _passed[device] <= before:
            _keep(device)
        if device.type == "cuda":  # the tests' hundreds of megabytes, before the weights come
            torch.cuda.empty_cache()
    return _passed[device]


def _keep(device: torch.device) -> None:
    """Notes what passed, here and at earlier starts with weights of other formats."""
    earlier = kept(device) - _failed.get(device, {}).keys()
    keep(device, _passed[device] | earlier)


def undecided(device: torch.device, names: Iterable[str]) -> list[str]:
    """Which of these operations this process has not prepared on a device."""
    device = _indexed(device)
    known = _passed.get(device, frozenset())
    if device in _passed:
        known |= _failed.get(device, {}).keys()
    return [name for name in names if name not in known]


def failures(device: torch.device) -> dict[str, str]:
    """Why torch serves what was tested on a device and failed, or is slower there, by operation."""
    return dict(_failed.get(_indexed(device), {}))


def refusal(operation: str, device: torch.device) -> str:
    """Why no kernel serves an operation on a device; empty where one does."""
    if not usable(device):
        return why_unusable(device)
    device = _indexed(device)
    if serves(operation, device):
        return ""
    return _failed.get(device, {}).get(operation, "its kernels have not been tested yet")


def usable(device: torch.device) -> bool:
    """Whether kernels can run on a device at all."""
    if device.type == "cpu":
        return installed() and interpreting()
    return device.type == "cuda" and torch.cuda.is_available() and not why_unusable(device)


def why_unusable(device: torch.device) -> str:
    """Why no kernel can run on a GPU; empty where kernels can."""
    if not installed():
        return "Triton is not installed"
    if architecture(_indexed(device)) is None:
        return "the table of tiles has none for this GPU"
    return ""


def _why_not(twin: KernelTwin, device: torch.device, tests: bool) -> str:
    """Why torch serves an operation; empty where the kernels do. tests: whether it is tested."""
    if slower(twin.operation, device):
        return "kernels are slower there, or left out"
    if not tests:
        return ""
    try:
        twin.check(device)
    except Exception as error:  # Triton's compilers raise errors of many classes
        return f"the self-test of kernels failed ({_line(error)})"
    return ""


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def assert_close(out: Tensor, expected: Tensor, bound: float) -> None:
    """Raises AssertionError unless ‖out − expected‖ ≤ bound · ‖expected‖ and all is finite.

    The norm of a whole tensor shows a wrong tile, and does not trip over single roundings.
    """
    wide, right = out.double(), expected.double()
    assert wide.isfinite().all(), "the result is not finite"
    error = float((wide - right).norm() / right.norm())
    assert error <= bound, f"the relative error is {error:.2e}, and {bound:.0e} is allowed"


def compare(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Sequence[Any],
    bound: float | None = None,
    part: Callable[[Tensor], Tensor] = lambda out: out,
) -> None:
    """Raises AssertionError unless the results of a function are those of a reference, which gets
    the arguments in float64: integers equal, floats within a bound, by default `error_bound` of
    their dtype. part: what is compared of each result."""
    wide = mapped(tuple(arguments), lambda x: x.double() if x.is_floating_point() else x)
    results = tensors_of(function(*arguments)), tensors_of(reference(*wide))
    for out, right in zip(*results, strict=True):
        if right.is_floating_point():
            assert_close(part(out), part(right), bound or error_bound(out.dtype))
        else:
            assert torch.equal(part(out), part(right)), "other integers"


def random_like(device: torch.device, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors of normal numbers, the same in every process; torch's own generator keeps its state.
    They are in the dtype that matrix products multiply: bfloat16, or float32 where kernels are
    interpreted."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    random = torch.Generator().manual_seed(len(shapes))
    return tuple(torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)


def random_weight(
    device: torch.device, format: str, *shape: int
) -> Tensor | PlaneTensor | ScaledTensor:
    """A weight of a format, "" for floats, whose numbers are about columns^-½."""
    if format in LAYOUTS:
        return random_planes(device, format, *shape)
    (floats,) = random_like(device, shape)
    floats = floats * shape[-1] ** -0.5
    return round_rows(floats, KINDS[format]) if format else floats


def exact(weight: Tensor | PlaneTensor | ScaledTensor, dtype: torch.dtype) -> Tensor | ScaledTensor:
    """What a product with a weight is compared with: its numbers in float64, which a kernel rounds
    to `dtype`, or codes where the device multiplies such."""
    if isinstance(weight, ScaledTensor):
        as_codes = multiplies_codes(weight.kind, weight.device)
        return weight if as_codes else weight.dequantize(torch.float64)
    return weight.to(dtype).double()


def random_planes(device: torch.device, format: str, *shape: int) -> PlaneTensor:
    """A weight in planes of any codes, whose numbers are about columns^-½; the same in every
    process."""
    block, layout = FORMATS[format], LAYOUTS[format]
    random = torch.Generator().manual_seed(shape[0])
    width, size = block.row_width(shape[-1]), layout.unit * shape[-1] ** -0.5
    data = torch.randint(256, (*shape[:-1], width), generator=random, dtype=torch.uint8)
    blocks = data.view(-1, block.block_bytes)
    if layout.floats:  # scales of groups from 0.5 to 1.9, and one for the matrix
        blocks[:, 4:8] = 0x30 + blocks[:, 4:8] % 16
        blocks[:, :4] = torch.tensor([size]).view(torch.uint8)
    for at in layout.halves:
        halves = (0.5 + torch.rand(len(blocks), 1, generator=random)) * size
        halves = halves.to(torch.bfloat16 if layout.wide else torch.float16)
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    return to_planes(QuantizedTensor(data.to(device), block, shape))


def whole_blocks(format: str, columns: int) -> int:
    """Columns, rounded up to whole blocks of a format, or to an aligned row of floats or codes."""
    size = FORMATS[format].block_size if format in LAYOUTS else ALIGNMENT
    return -(-columns // size) * size


def sizes_for(device: torch.device, small: Sequence[T], more: Sequence[T]) -> list[T]:
    """The sizes with which an operation is tested on a device: where kernels are compiled, also
    those that need tiles for many tokens, wide heads, or several parts of a long sum.  An
    interpreter would take minutes for them."""
    return [*small, *([] if device.type == "cpu" else more)]


def error_bound(dtype: torch.dtype) -> float:
    """The relative error that one rounded result may have, a few roundings of its dtype."""
    return 4 * torch.finfo(dtype).eps


def _indexed(device: torch.device) -> torch.device:
    """`cuda` and `cuda:0` are one device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


LARGEST = 1 << 16
"""Bytes of a note that is read."""
_NOTE = "sfumato-self-tests.json"


def kept(device: torch.device) -> frozenset[str]:
    """The operations that passed at an earlier start; none where that is not known."""
    if device.type != "cuda":
        return frozenset()
    names: object = []
    try:
        if path := _folder(device).get_file(_NOTE):
            with open(path, "rb") as file:
                names = json.loads(file.read(LARGEST))
    except Exception as error:  # a text that is no JSON, Triton's own functions, another's folder
        log.debug("the note of the self-tests of kernels is not read (%s)", error)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return frozenset(names) if isinstance(names, list) and is_list else frozenset()


def keep(device: torch.device, operations: Iterable[str]) -> None:
    """Notes these as all that have passed. Another process reads the old note or the new one."""
    if device.type != "cuda":
        return
    try:
        _folder(device).put(json.dumps(sorted(operations)), _NOTE, binary=False)
    except Exception as error:  # a full disk, a folder that may not be written
        log.debug("the self-tests of kernels are not noted (%s)", error)


def _folder(device: torch.device) -> Any:
    """Triton's keeper of files for one text of the kernels and all else that decides."""
    from triton.runtime.cache import get_cache_manager

    key = json.dumps([_sources(), *_circumstances(device)]).encode()
    return get_cache_manager(hashlib.sha256(key).hexdigest())


def _sources() -> str:
    """A hash of the kernels, their tiles and tests, and the references."""
    here = Path(__file__).parent
    paths = sorted([*here.glob("*.py"), *here.glob("*.toml"), *here.parent.glob("*.py")])
    text = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        text.update(f"{path.name} {len(content)}\n".encode())
        text.update(content)
    return text.hexdigest()


def _circumstances(device: torch.device) -> list[str]:
    """What else decides whether a kernel is right."""
    import triton
    from triton.compiler import compiler

    variables = compiler.get_cache_invalidating_env_vars()
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # which builds for CUDA have
    return [
        *(triton.__version__, torch.__version__, str(torch.version.cuda), str(torch.version.hip)),
        *(torch.cuda.get_device_name(device), str(own_architecture(device)), str(driver)),
        json.dumps(variables, sort_keys=True, default=str),
    ]
