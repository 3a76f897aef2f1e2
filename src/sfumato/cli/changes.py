"""A file that a command changes: reading it, showing what changes, and writing it."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sfumato.cli.view.token_text import harmless
from sfumato.weights.files.atomic_write import atomic_path, check_writable, create_file

MOST_BYTES = 16 << 20  # of a file: far more than any context holds
MOST_BACKUPS = 1000  # of one file
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class TextFile:
    """A file of text, with lines that end in \\n alone; where some end in \\r\\n and others do not,
    as they are."""

    path: Path
    text: str
    has_crlf: bool  # whether its lines end in \\r\\n
    data: bytes  # what was read

    @classmethod
    def read(cls, name: str) -> TextFile:
        """Raises OSError for what cannot be read, ValueError for what is no text."""
        path = Path(name)
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; name a file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{path}: has more than {MOST_BYTES:,} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text: {error}") from None
        has_crlf = 0 < text.count("\r\n") == text.count("\n")
        return cls(path, text.replace("\r\n", "\n") if has_crlf else text, has_crlf, data)

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
        data = (text.replace("\n", "\r\n") if self.has_crlf else text).encode()
        target = self._target
        like = target.stat()
        with atomic_path(target, len(data) + len(self.data), force=True) as part:
            create_file(part, data, like)
            if like.st_size != len(self.data) or target.read_bytes() != self.data:
                raise ValueError(
                    f"{self.path}: has changed since it was read, and was not written; run the "
                    "command again"
                )
            return _back_up(target, self.data, like)

    def diff(self, text: str) -> list[str]:
        """What another text changes, as lines of a unified diff; none where it is the same."""
        lines = difflib.unified_diff(
            self.text.splitlines(), text.splitlines(), str(self.path), str(self.path), lineterm=""
        )
        return list(lines)


def _back_up(path: Path, data: bytes, like: os.stat_result) -> Path:
    """Writes the data to a new file beside the path: FILE.bak, or FILE.bak.2 and so on where there
    is one already. Raises OSError, and ValueError where there are too many."""
    for number in range(1, MOST_BACKUPS + 1):
        backup = path.with_name(f"{path.name}.bak" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            create_file(backup, data, like)
            return backup
    raise ValueError(f"{path}: has {MOST_BACKUPS} backups, and was not written; remove some")


def show(lines: list[str]) -> None:
    """A diff on standard output, coloured at a terminal."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    console = Console(highlight=False)
    for line in lines:
        style = "bold" if line[:3] in ("+++", "---") else _STYLES.get(line[:1], "")
        console.print(Text(harmless(line), style), soft_wrap=True)
