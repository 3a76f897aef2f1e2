"""A file that a command changes: reading it, showing what changes, and writing it."""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sfumato.cli.view.token_text import harmless
from sfumato.weights.atomic_write import atomic_path

MOST_BYTES = 16 << 20  # of a file: far more than any context holds
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


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
        path = Path(name)
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; name a file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path}: has more than {MOST_BYTES:,} bytes")
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text: {error}") from None
        has_crlf = 0 < text.count("\r\n") == text.count("\n")
        return cls(path, text.replace("\r\n", "\n") if has_crlf else text, has_crlf)

    def check_writable(self) -> None:
        """Raises ValueError where the file cannot be written: before there is a text to lose."""
        if not os.access(self.path, os.W_OK):
            raise ValueError(f"{self.path}: cannot be written")

    def write(self, text: str) -> None:
        """Replaces the file, whose permissions stay."""
        data = (text.replace("\n", "\r\n") if self.has_crlf else text).encode()
        mode = self.path.stat().st_mode
        with atomic_path(self.path, len(data), force=True) as part:
            part.write_bytes(data)
            part.chmod(mode)

    def diff(self, text: str) -> list[str]:
        """What another text changes, as lines of a unified diff; none where it is the same."""
        lines = difflib.unified_diff(
            self.text.splitlines(), text.splitlines(), str(self.path), str(self.path), lineterm=""
        )
        return list(lines)


def show(lines: list[str]) -> None:
    """A diff on standard output, coloured at a terminal."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    console = Console(highlight=False)
    for line in lines:
        style = "bold" if line[:3] in ("+++", "---") else _STYLES.get(line[:1], "")
        console.print(Text(harmless(line), style), soft_wrap=True)
