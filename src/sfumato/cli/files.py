"""Files that users name: reading a text, what a command writes, and a file that a command changes.

A file that exists is replaced only where its user says so, and the new one appears whole or not at
all. A pipe or a device (/dev/null, >(…)) has no content to lose and is always written. Knows no
command.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sfumato.refused import Refused
from sfumato.weights.files.atomic_write import atomic_path, check_writable, create_file

MOST_BYTES = 16 << 20  # of a file: far more than any context holds
MOST_BACKUPS = 1000  # of one file
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def read_bytes(name: str, most: int = MOST_BYTES) -> bytes:
    """What a file holds, or standard input for -. Raises ValueError where that is more than `most`
    bytes, OSError for what cannot be read."""
    if os.path.isdir(name):
        raise ValueError(f"{name}: is a folder; name a file")
    with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{_called(name)}: has more than {most:,} bytes")
    return data


def read_text(name: str, most: int = MOST_BYTES) -> str:
    """The text of a file, or of standard input for -. Raises as `read_bytes` does, and ValueError
    for what is not UTF-8."""
    try:
        return read_bytes(name, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{_called(name)}: is not UTF-8 text: {error}") from None


def _called(name: str) -> str:
    return "standard input" if name == "-" else name


def check(name: str, force: bool, field: str | None = None) -> None:
    """Raises ValueError where `write` would: before there is something to lose.

    field: the option that names the file, as `json`."""
    try:
        if not is_stream(name):
            path = Path(os.path.realpath(name) if os.path.islink(name) else name)
            if path.is_dir():
                raise ValueError(f"{name}: is a folder; name a file")
            check_writable(path, force)
    except ValueError as error:
        raise Refused(field, str(error)) from None


def write(name: str, content: str | bytes, force: bool, field: str | None = None) -> None:
    """Writes the file whole, or not at all. Raises ValueError as `check` does, OSError of the
    disk."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    check(name, force, field)
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


@dataclass(frozen=True)
class TextFile:
    """A file of text, with lines that end in \\n alone; where some end in \\r\\n and others do not,
    as they are."""

    path: Path
    text: str
    has_crlf: bool  # whether its lines end in \\r\\n

    @classmethod
    def read(cls, name: str) -> TextFile:
        """Raises OSError for what cannot be read, ValueError for what is no text."""
        text = read_text(name)
        has_crlf = 0 < text.count("\r\n") == text.count("\n")
        return cls(Path(name), text.replace("\r\n", "\n") if has_crlf else text, has_crlf)

    def check_writable(self) -> None:
        """Raises ValueError where the file cannot be written: before there is a text to lose."""
        check_writable(self._target, force=True)

    @property
    def _target(self) -> Path:
        """The file itself, where the path is a link."""
        return Path(os.path.realpath(self.path))

    def write(self, text: str) -> Path:
        """Replaces the file, whose owner and permissions stay. Returns the backup's path, a new
        file with the text before. Raises ValueError where the file has changed since it was read
        and OSError where it cannot be written; then it is as it was."""
        data, before = self._data(text), self._data(self.text)
        target = self._target
        like = target.stat()
        with atomic_path(target, len(data) + len(before), force=True) as part:
            create_file(part, data, like)
            if like.st_size != len(before) or target.read_bytes() != before:
                raise ValueError(
                    f"{self.path}: has changed since it was read, and was not written; run the "
                    "command again"
                )
            return _back_up(target, before, like)

    def _data(self, text: str) -> bytes:
        """A text as the file holds it."""
        return (text.replace("\n", "\r\n") if self.has_crlf else text).encode()

    def diff(self, text: str) -> list[str]:
        """What another text changes, as lines of a unified diff; none where it is the same."""
        old, new, name = self.text.splitlines(), text.splitlines(), str(self.path)
        return list(difflib.unified_diff(old, new, name, name, lineterm=""))


def _back_up(path: Path, data: bytes, like: os.stat_result) -> Path:
    """Writes the data to a new file beside the path: FILE.bak, or FILE.bak.2 and so on where there
    is one already. Raises OSError, and ValueError where there are too many."""
    for number in range(1, MOST_BACKUPS + 1):
        backup = path.with_name(f"{path.name}.bak" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            create_file(backup, data, like)
            return backup
    raise ValueError(f"{path}: has {MOST_BACKUPS} backups, and was not written; remove some")
