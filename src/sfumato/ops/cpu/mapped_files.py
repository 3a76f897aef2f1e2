"""One line, with the file's name, in place of a silent death where a mapped file was truncated.

A page of a mapped file that is not there any more is a fault of the machine (SIGBUS), which no
exception of Python's can be. The compiled library handles that signal for the addresses that are
registered here, and passes on others. Without the library the process ends as the system does it.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.ops.cpu import library

if TYPE_CHECKING:
    from ctypes import CDLL

EXIT_CODE = 70
"""As of a server whose engine has stopped; sysexits.h: internal error."""


@cache
def _code() -> CDLL | None:
    """The library, also where its operations are not chosen."""
    try:
        return library.load(library.LIBRARY)
    except OSError:
        return None


def watch(mapping: object, address: int, nbytes: int, path: Path) -> bool:
    """Registers a mapped file for as long as the `mapping` lives. False where a fault of it would
    end the process without a line."""
    code = _code()
    number = code.sf_watch(address, nbytes, os.fsencode(path), EXIT_CODE) if code else -1
    if code is None or number < 0:
        return False
    # Not at the exit, when threads may still compute.
    weakref.finalize(mapping, code.sf_unwatch, number).atexit = False
    return True
