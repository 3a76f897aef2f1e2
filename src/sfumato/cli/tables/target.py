"""The table of answers: rows appended whole, and taken up again where an earlier run has stopped.

Beside it stands a file of JSON that says how the table was made; a run that would make it otherwise
is refused. Knows no questions and no model.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sfumato.cli.tables.source import (
    DELIMITERS,
    MOST_COLUMNS,
    MOST_ROW,
    Source,
    cell_text,
    check_suffix,
)

# What a row of the largest table may become: quotation marks twice, and answers.
MOST_OWN_ROW, MOST_OWN_COLUMNS = 8 * MOST_ROW, 4 * MOST_COLUMNS


class Target:
    """A table of answers. Use it in a `with`."""

    def __init__(
        self, path: str | Path, columns: Sequence[str], made: Mapping[str, Any], force: bool
    ) -> None:
        """columns: of CSV; made: how the table is made, plain values; force: replace a file.

        Raises ValueError where there is a file that was not made so, OSError where it cannot be
        written."""
        self.path, self._columns = Path(path), list(columns)
        check_suffix(self.path)
        self._delimiter = DELIMITERS.get(self.path.suffix.lower())
        self.count = 0  # rows that are there already
        self.last: Mapping[str, Any] = {}  # the last of them
        made = {**made, "columns": self._columns}
        if not force and (self.path.exists() or self._about.exists()) and self._goes_on(made):
            self._take_up()
        else:
            self._begin(made)

    @property
    def _about(self) -> Path:
        return self.path.with_name(f"{self.path.name}.about.json")

    def _begin(self, made: Mapping[str, Any]) -> None:
        text = json.dumps(made, ensure_ascii=False, indent=1)
        self._about.write_text(text + "\n", encoding="utf-8")
        self._file: BinaryIO = self.path.open("wb", buffering=0)
        if self._delimiter is not None:
            self._append(self._csv(self._columns))

    def _goes_on(self, made: Mapping[str, Any]) -> bool:
        """Whether the file was made so; False where it was not, but has no rows yet."""
        advice = "name another file with --out, or replace it with --force"
        if self.path.exists() and not (self.path.is_file() and self._about.is_file()):
            raise ValueError(f"{self.path}: exists, and `sfumato decide` did not make it; {advice}")
        try:
            before = json.loads(self._about.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            before = None
        if not isinstance(before, dict) or "columns" not in before:
            raise ValueError(f"{self._about}: is not what `sfumato decide` writes; {advice}")
        if not self.path.exists():  # moved away
            return False
        other = [key for key in made if before.get(key) != made[key]]
        with self.path.open("rb") as file:
            _, records = _whole_records(file, self._delimiter is not None)
        if other and records > (self._delimiter is not None):
            raise ValueError(
                f"{self.path}: was made with other {', '.join(other)}, so this run cannot go on "
                f"with it; {advice}"
            )
        return not other

    def _take_up(self) -> None:
        """Counts the rows, and cuts off what is left of one that was not written to its end."""
        with self.path.open("r+b") as file:
            end, _ = _whole_records(file, self._delimiter is not None)
            file.truncate(end)
        if end:
            for row in Source(self.path, MOST_OWN_ROW, MOST_OWN_COLUMNS).rows():
                self.count, self.last = self.count + 1, row.cells
        self._file = self.path.open("ab", buffering=0)
        if not end and self._delimiter is not None:
            self._append(self._csv(self._columns))

    def append(self, cells: Mapping[str, Any]) -> None:
        """Writes a row to its end, or not at all. Raises OSError."""
        if self._delimiter is None:
            line = json.dumps(cells, ensure_ascii=False) + "\n"
        else:
            line = self._csv([cell_text(cells.get(name)) for name in self._columns])
        self._append(line)

    def _append(self, line: str) -> None:
        start = self._file.tell()
        left = memoryview(line.encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            self._file.truncate(start)  # of a full disk, say
            raise

    def _csv(self, cells: Sequence[str]) -> str:
        text = io.StringIO()
        assert self._delimiter
        # Before Python 3.13 a lone carriage return is not quoted by itself.
        writer = csv.writer(
            text,
            delimiter=self._delimiter,
            lineterminator="\n",
            quoting=csv.QUOTE_ALL if any("\r" in cell for cell in cells) else csv.QUOTE_MINIMAL,
        )
        writer.writerow(cells)
        return text.getvalue()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _whole_records(file: BinaryIO, quoted: bool) -> tuple[int, int]:
    """Where the last complete record ends, and how many there are. quoted: a line within quotation
    marks goes on; files of our own have an even number of them in each record."""
    file.seek(0)
    position = end = marks = records = 0
    while data := file.readline(MOST_ROW):
        position += len(data)
        marks += data.count(b'"') if quoted else 0
        if marks % 2 == 0 and data.endswith(b"\n"):
            end, records = position, records + 1
    return end, records
