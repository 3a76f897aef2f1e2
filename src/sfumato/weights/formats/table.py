"""The table of formats in the docs: `python -m sfumato.weights.formats.table` prints it."""

from __future__ import annotations

from sfumato.weights.formats import BLOCKS, FLOAT, FORMATS, SCALED, Format

_WIDE = 2816
"""Columns by which the bytes of a row count: those of the 26B-A4B."""


def table() -> str:
    """Every registered format, as Markdown."""
    head = ["| format | bits of a weight | read from | written | kernels of a GPU |"]
    return "\n".join([*head, "|---|---|---|---|---|", *map(_row, FORMATS.values())])


def _row(format: Format) -> str:
    bits = 8 * format.nbytes((1, _WIDE)) / _WIDE
    places = ["GGUF"] if format.ggml_type is not None else []
    places += ["safetensors"] if format.published or format.form != BLOCKS else []
    written = "yes" if format.encode and format.ggml_type is not None else "no"
    kernels = {FLOAT: "as bfloat16", SCALED: "codes"}.get(format.form)
    kernels = kernels or ("planes" if format.layout else "no: torch dequantizes it")
    cells = format.name, f"{bits:.4g}", ", ".join(places), written, kernels
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table())
