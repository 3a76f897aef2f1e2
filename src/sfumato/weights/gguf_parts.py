"""GGUF checkpoints in several files, NAME-00001-of-00003.gguf and so on, as llama.cpp's
`gguf-split` writes them: the first has the metadata, each has some of the tensors.

Knows no architecture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.tensorfile import TensorFile

MOST_PARTS = 512
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.[gG][gG][uU][fF])$")


def part_names(name: str) -> list[str]:
    """The names of all parts of the checkpoint that a file of this name is a part of, in order; the
    name itself where it is no part's. Raises CheckpointError for more than MOST_PARTS."""
    match = _PART.search(name)
    if match is None:
        return [name]
    number, count = int(match[1]), int(match[2])
    if not 1 <= number <= count <= MOST_PARTS:
        raise CheckpointError(
            f"{name}: names part {number} of {count}; parts are numbered from 1, and a checkpoint "
            f"has at most {MOST_PARTS}"
        )
    stem, end = name[: match.start()], match[3]
    return [f"{stem}-{part:05}-of-{count:05}{end}" for part in range(1, count + 1)]


def part_files(path: Path) -> list[Path]:
    """The files of the checkpoint that this file is, or is a part of. Raises CheckpointError where
    some are absent."""
    files = [path.with_name(name) for name in part_names(path.name)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        raise CheckpointError(
            f"{path}: is one of {len(files)} parts, of which {len(absent)} are absent "
            f"({', '.join(absent[:8])}{more}); download them into the same folder"
        )
    return files


def check_parts(files: Sequence[TensorFile]) -> None:
    """Checks that these files, in order, are all parts of one checkpoint, by the numbers that they
    hold. Raises CheckpointError."""
    if len(files) == 1:
        # 0 is what gguf-split writes into a file that it merged of parts.
        if files[0].metadata.get("split.count") != 0:
            _check(files[0], "split.count", 1, 1)
        return
    for number, file in enumerate(files):
        _check(file, "split.count", None, len(files))
        _check(file, "split.no", None, number)
    tensors = sum(len(file.tensors) for file in files)
    _check(files[0], "split.tensors.count", tensors, tensors)


def _check(file: TensorFile, key: str, default: int | None, expected: int) -> None:
    value: Any = file.metadata.get(key, default)
    if value != expected or isinstance(value, bool):
        raise CheckpointError(
            f"{file.path}: {key}: is {quoted(value)}, and by the names and tensors of the files it "
            f"is {expected}; download all parts again, and keep their names"
        )
