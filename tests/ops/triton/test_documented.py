"""The tables of docs/kernels.md name every operation and every kernel there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sfumato.ops.triton import OPERATIONS
from sfumato.ops.triton.kernel import all_kernels, installed
from sfumato.ops.triton.planes import LAYOUTS

TEXT = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")


def first_column(header: str) -> list[str]:
    """The cells of the first columns of the tables with this header."""
    tables = [part.partition("\n\n")[0] for part in TEXT.split(f"\n| {header} |")[1:]]
    return [row.split("|")[1] for table in tables for row in table.splitlines()[2:]]


def test_each_operation_has_a_row() -> None:
    names = {name for cell in first_column("operation") for name in re.findall(r"`(\w+)`", cell)}
    assert names == set(OPERATIONS)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_each_kernel_has_a_row_and_no_row_is_of_none() -> None:
    cells = first_column("kernel")
    assert {re.findall(r"`(\w+)`", cell)[0] for cell in cells} == set(all_kernels())


def test_each_format_in_planes_is_named() -> None:
    section = TEXT.partition("## Quantized weights\n")[2].partition("\n- ")[0]
    assert {name for name in LAYOUTS if re.search(rf"\b{name}\b", section)} == set(LAYOUTS)
