"""What the C library does with memory that is given back.

A step makes and frees buffers of some MB hundreds of times.  By default glibc gives each back to
the system, and every 4096 bytes of the next one cost a page fault.  Knows the process, and nothing
of what the memory is for.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT = 128 << 20  # bytes at the end of the heap that are kept at most
_LARGEST = 32 << 20  # bytes of a piece that comes from the heap: glibc takes no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_VARIABLES = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"


def keep_freed_memory() -> bool:
    """Lets the process keep up to KEPT bytes that it frees, in pieces of up to 32 MiB, for its next
    buffers. False, and nothing done, where the C library is not glibc and where the user's
    environment has settings of its own."""
    if not sys.platform.startswith("linux") or any(os.environ.get(name) for name in _VARIABLES):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = (_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, KEPT)
    done = [library.mallopt(name, value) == 1 for name, value in settings]
    return all(done)
