"""Reads JSON objects out of files that may be malformed; knows nothing of their content."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sfumato.weights.errors import CheckpointError, quoted

MAX_JSON = 16 << 20
"""Bytes. Real configs have some kilobytes; the index of a model whose experts were saved one by one
has some megabytes. JSON made to be slow takes about two seconds at this size."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is absent or holds none."""
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; complete the checkpoint's folder")
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(f"{path}: is larger than {MAX_JSON >> 20} MiB; download it again")
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError for anything else, duplicate keys too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: {quoted(twice)} occurs twice; download it again")
        return values

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        problem = str(error).split("\n")[0][:120]
        raise CheckpointError(f"{where}: is not JSON ({problem}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: holds a JSON {type(value).__name__} instead of an object; download it again"
        )
    return value
