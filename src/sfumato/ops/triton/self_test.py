"""Which operations the kernels of this package serve on a device: those that passed a test on it.

`prepare` has each operation tried once on a device, on random tensors of the model's own widths,
against its reference, and switches off, with one log line for each reason, what fails and what the
table of tiles says is slower than torch.  On a GPU a process of its own tries them (`tries`), since
a wrong kernel may crash, hang or leave a device in an error.  Before `prepare`, no kernel serves: a
test waits for the device, which a captured graph and a step must not.  Knows no operation by name.

What has passed on a device is kept from start to start, in a note: a file in the folder of Triton's
cache, which goes with it.  The note holds for one text of the kernels and of their references, one
version of Triton, torch and the driver, one kind of device and the widths of one model; where any
of these changes, the tests run again.  No note is an error: without one the tests run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.ops.device_check import WRONG_INTEGERS, first_line, mapped, tensors_of
from sfumato.ops.registry import reference_only
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
from sfumato.weights.formats import (
    FORMATS,
    KINDS,
    QuantizedTensor,
    ScaledTensor,
    Stored,
    round_rows,
)

log = logging.getLogger(__name__)

LOSS = "; a row's bits then depend on the other rows"
"""What an operation loses where torch's products serve it, which choose their sums by the shape."""


@dataclass(frozen=True)
class Sizes:
    """The widths of a network with which its operations are tried; by default the 26B-A4B's.

    products: outputs and inputs of the dense matrices that may be multiplied alone, of which the
    first is what follows a gate.  attention: heads, heads of keys, the size
    of a head, and whether there is a window.  router: experts, and those of a token.  few, many:
    tokens for either use of a tile; none where one of them is tried alone.
    """

    hidden: int = 2816
    products: tuple[tuple[int, int], ...] = (
        (2816, 2112),
        *((4096, 2816), (2048, 2816), (2816, 4096), (8192, 2816), (1024, 2816), (2816, 8192)),
    )
    attention: tuple[tuple[int, int, int, bool], ...] = ((16, 8, 256, True), (16, 2, 512, False))
    expert: int = 704
    router: tuple[int, int] = (128, 8)
    vocabulary: int = 262_144
    tokens: tuple[int, ...] = (5, 602)


SMALL = Sizes(72, ((72, 88), (40, 96)), ((4, 2, 64, True),), 32, (20, 3), 200, (20,))
"""What an interpreter tries: it would take minutes for more."""


@dataclass(frozen=True)
class Trial:
    """A device on which operations are tried, in the dtype that serves there, with these sizes:
    where kernels are interpreted, float32 and small ones."""

    device: torch.device
    wanted: Sizes = Sizes()

    @property
    def sizes(self) -> Sizes:
        return SMALL if interpreting() else self.wanted

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if interpreting() else torch.bfloat16

    def random(self, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Tensors of normal numbers, the same in every process; torch's own generator keeps its
        state."""
        return tuple(
            torch.randn(shape, dtype=self.dtype, **_random(self.device, sum(shape) + at))
            for at, shape in enumerate(shapes)
        )

    def weight(
        self, format: str, *shape: int, number: int = 0
    ) -> Tensor | PlaneTensor | ScaledTensor:
        """A weight of a format, "" for floats, whose numbers are about columns^-½; number: which
        one of those of a shape."""
        if format in LAYOUTS:
            return random_planes(self.device, format, *shape, seed=number)
        *_, floats = self.random(*[(0,)] * number, shape)
        floats.mul_(shape[-1] ** -0.5)
        return round_rows(floats, KINDS[format]) if format else floats


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
    check: Callable[[Trial], None]


def twins_of(
    operation: str,
    function: Callable[..., Any],
    serves: Callable[..., bool],
    check: Callable[[str, Trial], None],
) -> dict[str, KernelTwin]:
    """An operation with weights of floats and of each format that its kernels take, by the name of
    the twin. check: of the format, "" for floats, and the trial."""
    names = {format: twin_name(operation, format) for format in ("", *OPERATIONS[operation])}
    return {
        name: KernelTwin(name, function, serves, partial(check, format))
        for format, name in names.items()
    }


Tries = Callable[[Sequence[str]], Mapping[str, str]]
"""Tries operations: why each failed, empty where it passed."""

_passed: dict[torch.device, frozenset[str]] = {}
_failed: dict[torch.device, dict[str, str]] = {}  # why, by operation
_tried_with: dict[torch.device, Sizes] = {}  # at first


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


def switch_off(
    operation: str, device: torch.device, error: Exception, what: str = "a kernel did not run"
) -> None:
    """Torch serves an operation on a device from now on, since its kernels do not run there, or
    what the error says was seen of them."""
    device = _indexed(device)
    if serves(operation, device):
        _passed[device] -= {operation}
        why = first_line(error)
        _failed.setdefault(device, {})[operation] = f"{what} ({why})"
        _keep(device)  # the next start tests it again
        log.warning("%s: torch serves it on %s from now on (%s%s)", operation, device, why, LOSS)


def prepare(trial: Trial, twins: Mapping[str, KernelTwin], tries: Tries) -> frozenset[str]:
    """Tests the twins, by operation, on a device, each once; the operations that serve from now on.

    tries: what tests on a GPU; elsewhere this process does.  What passed at an earlier start is not
    tested again: see `kept`.  Waits for the device: call it before a graph is captured.
    """
    device = _indexed(trial.device)
    if new := undecided(device, twins):
        _tried_with.setdefault(device, trial.sizes)
        before = kept(device)
        reasons = {
            name: "kernels are slower there, or left out" if slower(name, device) else ""
            for name in new
        }
        tested = [name for name in new if not reasons[name] and name not in before]
        if device.type == "cuda":
            outcomes = tries(tested) if tested else {}
        else:
            outcomes = {name: why_wrong(twins[name], trial) for name in tested}
        for name, why in outcomes.items():
            reasons[name] = why and f"the self-test of kernels failed ({why})"
        for reason in dict.fromkeys(filter(None, reasons.values())):
            names = ", ".join(name for name, each in reasons.items() if each == reason)
            log.warning("%s: torch serves on %s, since %s%s", names, device, reason, LOSS)
        failed = {name: reason for name, reason in reasons.items() if reason}
        _failed[device] = _failed.get(device, {}) | failed
        _passed[device] = _passed.get(device, frozenset()) | (reasons.keys() - failed.keys())
        if not _passed[device] <= before:
            _keep(device)
    return _passed[device]


def _keep(device: torch.device) -> None:
    """Notes what passed, here and at earlier starts with weights of other formats. Another process
    reads the old note or the new one."""
    if device.type != "cuda":
        return
    operations = _passed[device] | kept(device) - _failed.get(device, {}).keys()
    try:
        _folder(device).put(json.dumps(sorted(operations)), _NOTE, binary=False)
    except Exception as error:  # a full disk, a folder that may not be written
        log.debug("the self-tests of kernels are not noted (%s)", error)


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
    if os.name == "nt":
        return "Windows lacks the processes in which kernels are tried"
    if architecture(_indexed(device)) is None:
        return "the table of tiles has none for this GPU"
    return ""


def why_wrong(twin: KernelTwin, trial: Trial) -> str:
    """Why an operation fails on a device; empty where it passes."""
    try:
        twin.check(trial)
        if trial.device.type == "cuda":
            torch.cuda.synchronize(trial.device)  # or the next one would have its errors
    except Exception as error:  # Triton's compilers raise errors of many classes
        return first_line(error)
    return ""


MOST = 2.0
"""The error that kernels may have, in units of that which torch has in the same dtype, against
float64."""


def assert_near(out: Tensor, torchs: Tensor, exact: Tensor, most: float = MOST) -> None:
    """Raises AssertionError unless a result is finite and its error against an exact one is at most
    `most` times torch's, and a quarter of a last place; of integers, which differ in a few places
    at most.

    The norm of a whole tensor shows a wrong tile, and does not trip over single roundings.
    """
    if not exact.is_floating_point():
        share = float((out != exact).double().mean())
        assert share <= WRONG_INTEGERS, f"other integers: {share:.1%}"
        return
    assert out.isfinite().all(), "the result is not finite"
    error, allowed = relative_error(out, exact), most * relative_error(torchs, exact)
    allowed += max(torch.finfo(out.dtype).eps / 4, 4 * torch.finfo(torch.float32).eps)
    assert error <= allowed, f"the relative error is {error:.2e}, and {allowed:.0e} is allowed"


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖."""
    wide, right = out.double(), exact.double()
    return float((wide - right).norm() / right.norm().clamp(min=1e-300))


def compare(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Sequence[Any],
    weights: Sequence[Any] = (),
    part: Callable[[Tensor], Tensor] = lambda out: out,
) -> None:
    """Raises AssertionError unless the results of a function are near those of a reference, which
    gets the arguments in float64; torch's own error is that of the reference in their dtype.

    weights: of the function, behind the arguments.  part: what is compared of each result.
    """
    wide = mapped(tuple(arguments), lambda x: x.double() if x.is_floating_point() else x)
    with reference_only():
        exact = reference(*wide, *(_exact(weight, arguments[0].dtype) for weight in weights))
        torchs = reference(*arguments, *(_plain(weight, arguments[0].dtype) for weight in weights))
    out = function(*arguments, *weights)
    for own, near, right in zip(*map(tensors_of, (out, torchs, exact)), strict=True):
        assert_near(part(own), part(near), part(right))


def _exact(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor | Stored:
    """What a product with a weight is compared with: its numbers in float64, which a kernel rounds
    to `dtype`, or codes where the device multiplies such."""
    if isinstance(weight, ScaledTensor):
        return weight if _as_codes(weight) else weight.dequantize(torch.float64)
    return weight.to(dtype).double()


def _plain(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor | Stored:
    """What torch multiplies."""
    return weight if _as_codes(weight) else weight.to(dtype)


def _as_codes(weight: Tensor | Stored) -> bool:
    return isinstance(weight, ScaledTensor) and multiplies_codes(weight.kind, weight.device)


def random_planes(device: torch.device, format: str, *shape: int, seed: int = 0) -> PlaneTensor:
    """A weight in planes of any codes, whose numbers are about columns^-½; the same in every
    process."""
    block, layout = FORMATS[format], LAYOUTS[format]
    made = _random(device, shape[0] + seed)
    width, size = block.row_width(shape[-1]), layout.unit * shape[-1] ** -0.5
    data = torch.randint(256, (*shape[:-1], width), dtype=torch.uint8, **made)
    blocks = data.view(-1, block.block_bytes)
    if layout.floats:  # scales of groups from 0.5 to 1.9, and one for the matrix
        blocks[:, 4:8] = 0x30 + blocks[:, 4:8] % 16
        blocks[:, :4] = torch.tensor([size]).view(torch.uint8).to(device)
    for at in layout.halves:
        halves = (0.5 + torch.rand(len(blocks), 1, **made)) * size
        halves = halves.to(torch.bfloat16 if layout.wide else torch.float16)
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    return to_planes(QuantizedTensor(data, block, shape))


def _random(device: torch.device, seed: int) -> dict[str, Any]:
    """Where random numbers are made, and from what."""
    return {"generator": torch.Generator(device).manual_seed(seed), "device": device}


def whole_blocks(format: str, columns: int) -> int:
    """Columns, rounded up to whole blocks of a format, or to an aligned row of floats or codes."""
    size = FORMATS[format].block_size if format in LAYOUTS else ALIGNMENT
    return -(-columns // size) * size


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
    try:
        if device.type == "cuda" and (path := _folder(device).get_file(_NOTE)):
            with open(path, "rb") as file:
                names = json.loads(file.read(LARGEST))
            return frozenset(name for name in names if isinstance(name, str))
    except Exception as error:  # a text that is no JSON, Triton's own functions, another's folder
        log.debug("the note of the self-tests of kernels is not read (%s)", error)
    return frozenset()


def _folder(device: torch.device) -> Any:
    """Triton's keeper of files for one text of the kernels and all else that decides."""
    from triton.runtime.cache import get_cache_manager

    key = json.dumps([_sources(), *_circumstances(device)]).encode()
    return get_cache_manager(hashlib.sha256(key).hexdigest())


def _sources() -> list[tuple[str, str]]:
    """The names and hashes of the kernels, their tiles and tests, and the references."""
    here = Path(__file__).parent
    paths = sorted([*here.glob("*.py"), *here.glob("*.toml"), *here.parent.glob("*.py")])
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]


def _circumstances(device: torch.device) -> list[str]:
    """What else decides whether a kernel is right."""
    import triton
    from triton.compiler import compiler

    variables = compiler.get_cache_invalidating_env_vars()
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # which builds for CUDA have
    return [
        *(triton.__version__, torch.__version__, str(torch.version.cuda), str(torch.version.hip)),
        *(torch.cuda.get_device_name(device), str(own_architecture(device)), str(driver)),
        repr(_tried_with.get(device)),
        json.dumps(variables, sort_keys=True, default=str),
    ]
