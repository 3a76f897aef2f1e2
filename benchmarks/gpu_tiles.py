"""Measures the candidates of the checked-in table of tiles, for `gpu_kernel.py`.

Serving takes the first candidate of a kernel and use, or the one that the table says is the fastest
on the device; here each is put first in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sfumato.ops.triton import tiles

Use = tuple[str, str]
"""A kernel and the use of its tile."""


class _Uses(dict[str, tuple[tiles.Tile, ...]]):
    """The candidates of a kernel by their use, which remembers what was looked up."""

    def __init__(self, kernel: str, values: Mapping[str, Any], seen: dict[Use, int]) -> None:
        super().__init__(values)
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, use: str) -> tuple[tiles.Tile, ...]:
        tiles_of_use = super().__getitem__(use)
        self._seen[self._kernel, use] = len(tiles_of_use)
        return tiles_of_use


@contextmanager
def first_tiles(choice: Mapping[Use, int]) -> Iterator[dict[Use, int]]:
    """Kernels take the candidate of this number for these uses, and the first for others, whatever
    was measured before. Gives how many candidates each use that was looked up has."""
    seen: dict[Use, int] = {}
    table = tiles.candidates

    def chosen(kernel: str, target: str) -> dict[str, tuple[tiles.Tile, ...]]:
        values = {
            use: each[(first := choice.get((kernel, use), 0)) :] + each[:first]
            for use, each in table(kernel, target).items()
        }
        return _Uses(kernel, values, seen)

    with (
        mock.patch.object(tiles, "candidates", chosen),
        mock.patch.object(tiles, "measured", lambda kernel, device: {}),
    ):
        yield seen


def measured_tiles(
    run: Callable[[], object], milliseconds: Callable[[], float]
) -> list[dict[str, Any]]:
    """Of each kernel and use that a run looks up, the time of the run with each candidate, and
    which is the fastest. A candidate that fails has None."""
    with first_tiles({}) as seen:
        run()
    findings = []
    for use, count in seen.items():
        times: list[float | None] = []
        for number in range(count if count > 1 else 0):
            with first_tiles({use: number}):
                try:
                    times.append(milliseconds())
                except Exception:  # one that a device has too little shared memory for
                    times.append(None)
        known = [(time, number) for number, time in enumerate(times) if time is not None]
        findings.append(
            {"kernel": use[0], "use": use[1], "ms": times, "fastest": min(known)[1] if known else 0}
        )
    return findings
