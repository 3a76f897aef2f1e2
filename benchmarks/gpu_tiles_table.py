"""Writes what was measured of a device into the checked-in table of tiles.

The table is text with comments that people write, so the lines of one device are exchanged and no
others.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence

from benchmarks.gpu_tiles import Use

from sfumato.ops.triton.tiles import Tile


def section(
    product: str,
    tiles: Mapping[Use, Tile],
    slower: Sequence[str],
    library: Sequence[Sequence[int]] = (),
) -> str:
    """The lines of a product: its fastest tiles, the operations that torch serves faster, and the
    shapes of products that the vendor's library does."""
    lines = [_header(product), f"slower = {json.dumps(sorted(slower))}"]
    if library:
        lines.append(f"library = {json.dumps(sorted(map(list, library)))}")
    for (kernel, use), tile in sorted(tiles.items()):
        numbers = {**tile.constants, "warps": tile.warps, "stages": tile.stages}
        values = ", ".join(f"{name} = {value}" for name, value in numbers.items())
        lines.append(f"tiles.{kernel}.{use} = {{ {values} }}")
    return "\n".join(lines) + "\n"


def with_section(text: str, product: str, lines: str) -> str:
    """The table with these lines of a product in place of its former ones, or after all others.

    Raises ValueError where the result would differ in anything else.
    """
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("["):
            inside = line.startswith((_header(product), _header(product)[:-1] + "."))
        if not inside:
            kept.append(line)
    result = "\n".join(kept).rstrip("\n") + "\n\n" + lines
    before, after = tomllib.loads(text), tomllib.loads(result)
    for table in (before, after):
        table.get("measured", {}).pop(product, None)
    if before != after:
        raise ValueError(f"the table of tiles: lines of {product} stand among others")
    return result


def _header(product: str) -> str:
    # A basic string of TOML has the escapes of JSON.
    return f"[measured.{json.dumps(product)}]"
