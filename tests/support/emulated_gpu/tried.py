"""Runs one test on the emulated device, in a process of its own: `python -m
tests.support.emulated_gpu.tried NAME`. Prints one line of JSON, and ends with 1 where it failed."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from tests.support.emulated_gpu import driver, machine

driver.activate()

import torch  # noqa: E402

from sfumato.ops import triton as kernels  # noqa: E402
from sfumato.ops.triton.planes import OPERATIONS  # noqa: E402
from sfumato.ops.triton.self_test import Sizes, Trial  # noqa: E402

CPU = torch.device("cpu")
SIZES = Sizes(
    hidden=2816,
    products=((72, 2816), (24, 2112), (24, 4096), (24, 8192)),
    attention=((4, 2, 256, True), (4, 1, 512, False)),
    expert=704,
    router=(16, 4),
    vocabulary=8_200,
    tokens=(5, 70),
)
"""What is summed has the 26B-A4B's widths, tails of a tile included; what is only repeated
(outputs, heads, experts, tokens) is a tile and a part of one."""


def every_format() -> tuple[str, ...]:
    """The formats of weights that kernels take."""
    return tuple(dict.fromkeys(name for known in OPERATIONS.values() for name in known))


def operations(formats: Sequence[str]) -> list[str]:
    """The names of all operations, and of those with weights of these formats."""
    return list(kernels.twins(formats))


def special_values() -> None:
    """What the emulator itself gets wrong."""
    from tests.support.emulated_gpu.special_values import wrong

    lines = list(wrong())
    assert not lines, "; ".join(lines)


def operation(name: str) -> None:
    """An operation's own test, against the reference in float64."""
    kernels.twins(every_format())[name].check(Trial(CPU, SIZES))


TESTS: dict[str, Callable[..., None]] = {
    "special_values": special_values,
    "operation": operation,
}


def main(test: str, *arguments: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, error = time.perf_counter(), ""
    try:
        TESTS[test](*arguments)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    seconds = round(time.perf_counter() - start, 1)
    line = {"test": test, "of": arguments, "error": error, "seconds": seconds}
    print(json.dumps({**line, "instructions": machine.executed, "pid": os.getpid()}))
    return bool(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
