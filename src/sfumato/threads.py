"""How many threads compute on the CPU, and how long idle ones spin: the one rule of the library,
the command line and the server.

What the user chooses wins: OMP_NUM_THREADS or MKL_NUM_THREADS, `torch.set_num_threads` (so
`--threads`), and the variables of `SPIN`. Imports torch when a network is loaded, and not before:
its OpenMP runtime reads the environment once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from pathlib import Path
from threading import Thread
from weakref import WeakSet

TINY = 256
"""The hidden size up to which a network runs on one thread: its products are so small that several
threads mostly wait for each other, and on a busy machine for a hundred times as long."""

SPIN = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
"""How long a thread that waits for the others spins before it sleeps: some 0.1 ms with GCC's
runtime (torch on Linux), 1 ms, the smallest number there is but none, with LLVM's and Intel's.
Their own numbers, ten milliseconds and more, take a core from other work, and the share of a core
that the next product needs; without any spinning a step on an idle machine takes 1.2 times as
long (`benchmarks/waiting_threads.py`)."""

_WAIT = (*SPIN, "OMP_WAIT_POLICY")
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables of SPIN, unless one that says how to wait is set. Has an effect on this
    process where torch is imported afterwards, and on those that it starts."""
    if not any(name in environment for name in _WAIT):
        environment.update(SPIN)


class _Rule:
    """What this module has set in this process."""

    def __init__(self) -> None:
        self._before: int | None = None  # the number that one thread replaced
        self._large: WeakSet[object] = WeakSet()

    def suit(self, network: object, hidden_size: int) -> None:
        """Chooses the number of threads for the networks that are loaded, of which `network` is
        the newest: one where all are tiny. Changes nothing where the user has chosen."""
        import torch

        if hidden_size > TINY:
            self._large.add(network)
        if any(os.environ.get(name) for name in _COUNTS):
            return
        if self._before is not None and torch.get_num_threads() == 1:
            if self._large:
                torch.set_num_threads(self._before)
                self._before = None
        elif not self._large and not is_chosen():
            self._before = torch.get_num_threads()
            torch.set_num_threads(1)


def is_chosen() -> bool:
    """Whether `torch.set_num_threads` has been called, with any number.

    Torch does not say; but a new thread takes the number that was set, and only where none was,
    the one that MKL has for this thread. A torch without MKL takes the number of cores."""
    import torch

    now = torch.get_num_threads()
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        limit = library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return now != os.cpu_count()
    seen: list[int] = []

    def read() -> None:
        limit(now + 1)
        seen.append(torch.get_num_threads())

    thread = Thread(target=read)
    thread.start()
    thread.join()
    return seen[0] != now + 1


suit = _Rule().suit
