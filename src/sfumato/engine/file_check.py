"""Notices between two steps that a file of the model was truncated, before a step reads it."""

from __future__ import annotations

from collections.abc import Callable

from sfumato.engine.errors import FileTruncated
from sfumato.weights.files.tensorfile import FileSizes

EVERY_S = 1.0


class FileCheck:
    """Asks for the sizes of the files once a second at most: some microseconds each."""

    def __init__(self, files: FileSizes, clock: Callable[[], float]) -> None:
        self._files, self._clock, self._next = files, clock, clock()

    def check(self) -> None:
        """Raises FileTruncated, with the file's name and not its folder."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + EVERY_S
        path = self._files.truncated()
        if path is not None:
            raise FileTruncated(
                f"{path.name} was made shorter while the model is in use; restore the file"
            )
