"""Files that users name for what a command writes: one rule for all of them.

A file that exists is replaced only where its user says so, and the new one appears whole or not at
all. A pipe or a device (/dev/null, >(…)) has no content to lose and is always written. Knows no
command.
"""

from __future__ import annotations

import os
from pathlib import Path

from sfumato.weights.files.atomic_write import atomic_path, check_writable, create_file

_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def check(name: str, force: bool, option: str = "") -> None:
    """Raises ValueError where `write` would: before there is something to lose.

    option: the source of the name, for the message, as --json."""
    try:
        if not is_stream(name):
            path = Path(os.path.realpath(name) if os.path.islink(name) else name)
            if path.is_dir():
                raise ValueError(f"{name}: is a folder; name a file")
            check_writable(path, force)
    except ValueError as error:
        raise ValueError(f"{option} {error}".lstrip()) from None


def write(name: str, content: str | bytes, force: bool, option: str = "") -> None:
    """Writes the file whole, or not at all. Raises ValueError as `check` does, OSError of the
    disk."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    check(name, force, option)
    if is_stream(name):
        with open(name, "wb") as stream:
            stream.write(data)
        return
    path = Path(name)
    with atomic_path(path, len(data), force) as part:
        create_file(part, data, path.stat() if path.exists() else None)


def is_stream(name: str) -> bool:
    """Whether a path names a pipe, a device or an open stream of this process."""
    path = Path(name)
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or os.path.abspath(name).startswith(_STREAMS)
