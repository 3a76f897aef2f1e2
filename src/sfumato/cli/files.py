"""Files that users name: reading a text, what a command writes, a file that a command changes, and
tables of states and of answers, row by row.

A file that exists is replaced only where its user says so, and the new one appears whole or not at
all. A pipe or a device (/dev/null, >(…)) has no content to lose and is always written.

A table is CSV, TSV or JSON Lines; one row of it is in memory, whatever the file has. Every refusal
of a row names the file and the line. Beside a table of answers stands a file of JSON that says how
the table was made; a run that would make it otherwise is refused. Knows no command, no questions
and no model.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sfumato.refused import Refused
from sfumato.weights.files.atomic_write import atomic_path, check_writable, create_file

MOST_BYTES = 16 << 20  # of a file: far more than any context holds
MOST_BACKUPS = 1000  # of one file
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")
MOST_ROW = 4 << 20  # bytes of a row
MOST_COLUMNS = 4_096
DELIMITERS = {".csv": ",", ".tsv": "\t", ".jsonl": None}
# What a row of the largest table of answers may become: quotation marks twice, and answers.
MOST_OWN_ROW, MOST_OWN_COLUMNS = 8 * MOST_ROW, 4 * MOST_COLUMNS


def read_bytes(name: str, most: int = MOST_BYTES) -> bytes:
    """What a file holds, or standard input for -. Raises ValueError where that is more than `most`
    bytes, OSError for what cannot be read."""
    if os.path.isdir(name):
        raise ValueError(f"{name}: is a folder; name a file")
    with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{_called(name)}: has more than {most:,} bytes")
    return data


def read_text(name: str, most: int = MOST_BYTES) -> str:
    """The text of a file, or of standard input for -. Raises as `read_bytes` does, and ValueError
    for what is not UTF-8."""
    try:
        return read_bytes(name, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{_called(name)}: is not UTF-8 text: {error}") from None


def _called(name: str) -> str:
    return "standard input" if name == "-" else name


def check(name: str, force: bool, field: str | None = None) -> None:
    """Raises ValueError where `write` would: before there is something to lose.

    field: the option that names the file, as `json`."""
    try:
        if not is_stream(name):
            path = Path(os.path.realpath(name) if os.path.islink(name) else name)
            if path.is_dir():
                raise ValueError(f"{name}: is a folder; name a file")
            check_writable(path, force)
    except ValueError as error:
        raise Refused(field, str(error)) from None


def write(name: str, content: str | bytes, force: bool, field: str | None = None) -> None:
    """Writes the file whole, or not at all. Raises ValueError as `check` does, OSError of the
    disk."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    check(name, force, field)
    if is_stream(name):
        with open(name, "wb") as stream:
            stream.write(data)
        return
    path = Path(name)
    with atomic_path(path, len(data), force) as part:
        create_file(part, data, path.stat() if path.exists() else None)


def is_stream(name: str) -> bool:
    """Whether a path names a pipe, a device or an open stream of this process."""
    path = Path(name)
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or os.path.abspath(name).startswith(_STREAMS)


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
        text = read_text(name)
        has_crlf = 0 < text.count("\r\n") == text.count("\n")
        return cls(Path(name), text.replace("\r\n", "\n") if has_crlf else text, has_crlf)

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
        data, before = self._data(text), self._data(self.text)
        target = self._target
        like = target.stat()
        with atomic_path(target, len(data) + len(before), force=True) as part:
            create_file(part, data, like)
            if like.st_size != len(before) or target.read_bytes() != before:
                raise ValueError(
                    f"{self.path}: has changed since it was read, and was not written; run the "
                    "command again"
                )
            return _back_up(target, before, like)

    def _data(self, text: str) -> bytes:
        """A text as the file holds it."""
        return (text.replace("\n", "\r\n") if self.has_crlf else text).encode()

    def diff(self, text: str) -> list[str]:
        """What another text changes, as lines of a unified diff; none where it is the same."""
        old, new, name = self.text.splitlines(), text.splitlines(), str(self.path)
        return list(difflib.unified_diff(old, new, name, name, lineterm=""))


def _back_up(path: Path, data: bytes, like: os.stat_result) -> Path:
    """Writes the data to a new file beside the path: FILE.bak, or FILE.bak.2 and so on where there
    is one already. Raises OSError, and ValueError where there are too many."""
    for number in range(1, MOST_BACKUPS + 1):
        backup = path.with_name(f"{path.name}.bak" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            create_file(backup, data, like)
            return backup
    raise ValueError(f"{path}: has {MOST_BACKUPS} backups, and was not written; remove some")


@dataclass(frozen=True)
class Row:
    """One row: the line that it begins in, from 1, and its cells by column."""

    line: int
    cells: Mapping[str, Any]  # texts of CSV; any JSON values of JSON Lines


class Source:
    """A table of a file, read as often as wanted."""

    def __init__(
        self, path: str | Path, most_row: int = MOST_ROW, most_columns: int = MOST_COLUMNS
    ) -> None:
        """most_row: bytes. Raises ValueError for a name that says no format, and OSError where
        there is no file."""
        self.path, self._most_row, self._most_columns = Path(path), most_row, most_columns
        self._delimiter = delimiter_of(self.path)
        with self.path.open("rb"):  # whether it is there, and readable
            pass

    def rows(self) -> Iterator[Row]:
        """Raises ValueError, naming the line, for what is no row."""
        with self.path.open("rb") as file:
            yield from self._json(file) if self._delimiter is None else self._csv(file)

    def scan(self, check: Callable[[Row], object]) -> tuple[int, list[str]]:
        """Reads all rows, and calls `check` with each, whose ValueError gets the line's name. Gives
        their count, and the columns of all of them in the order in which they came."""
        count, columns = 0, dict[str, None]()
        for count, row in enumerate(self.rows(), 1):  # noqa: B007 (the last one is the result)
            columns |= dict.fromkeys(row.cells)
            if len(columns) > self._most_columns:
                self._refuse(row.line, f"with it there are over {self._most_columns} columns")
            try:
                check(row)
            except ValueError as error:
                self._refuse(row.line, str(error))
        if not count:
            raise ValueError(f"{self.path}: has no rows")
        return count, list(columns)

    def _refuse(self, line: int, why: str) -> NoReturn:
        raise ValueError(f"{self.path}:{line}: {why}") from None

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        """Each line with its end, decoded, of bounded length."""
        number = 0
        while data := file.readline(self._most_row + 1):
            number += 1
            if len(data) > self._most_row:
                self._refuse(number, f"the line has more than {self._most_row >> 20} MiB")
            try:
                yield data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                self._refuse(number, f"is not UTF-8 text: {error.reason}; save the table as UTF-8")

    def _json(self, file: BinaryIO) -> Iterator[Row]:
        for number, line in enumerate(self._lines(file), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line, parse_constant=_no_constant)
                if "\\u" in line:  # perhaps half of a surrogate pair, which no file can hold
                    json.dumps(value, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                self._refuse(number, f"is not JSON: {str(error)[:120]}")
            if not isinstance(value, dict):
                self._refuse(number, "must be a JSON object, with columns as its keys")
            if len(value) > self._most_columns:
                self._refuse(number, f"has more than {self._most_columns} keys")
            yield Row(number, value)

    def _csv(self, file: BinaryIO) -> Iterator[Row]:
        assert self._delimiter
        csv.field_size_limit(self._most_row)  # Python's own is smaller, and for the whole process
        start = size = 0  # the line in which a row begins, and its characters

        def lines() -> Iterator[str]:
            nonlocal size
            for line in self._lines(file):
                size += len(line)
                if size > self._most_row:
                    most = f"{self._most_row >> 20} MiB"
                    why = f"the row has more than {most}; is a quotation mark left open?"
                    self._refuse(start, why)
                yield line

        reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
        header: list[str] | None = None
        while True:
            start, size = reader.line_num + 1, 0
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._refuse(start, f"is not CSV: {error}")
            if not cells:
                continue
            if header is None:
                header = self._header(start, cells)
            elif len(cells) != len(header):
                fault = f"has {len(cells)} cells, and the header has {len(header)}"
                self._refuse(start, fault + _other_delimiter(header))
            else:
                yield Row(start, dict(zip(header, cells, strict=True)))

    def _header(self, line: int, names: list[str]) -> list[str]:
        if len(names) > self._most_columns:
            self._refuse(line, f"has more than {self._most_columns} columns")
        if "" in names:
            self._refuse(line, "a column has no name; the first row must name every column")
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            self._refuse(line, f"two columns have the name {name!r:.80}")
        return names


def _other_delimiter(header: list[str]) -> str:
    """Advice where a header of one column holds a mark that may divide several; "" elsewhere."""
    mark = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
    if mark is None:
        return ""
    return f"; columns seem to be divided by {mark!r}: use commas, or tabs in a .tsv file"


def delimiter_of(path: Path) -> str | None:
    """The mark that divides the cells of a table; None for JSON Lines. Raises ValueError for a name
    that says no format."""
    if path.suffix.lower() not in DELIMITERS:
        *others, last = DELIMITERS
        raise ValueError(f"{path}: must end in {', '.join(others)} or {last}")
    return DELIMITERS[path.suffix.lower()]


def cell_text(value: Any) -> str:
    """A value as a cell of CSV: a text as it is, nothing for null, else JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class Target:
    """A table of answers. Use it in a `with`."""

    def __init__(
        self, path: str | Path, columns: Sequence[str], made: Mapping[str, Any], force: bool
    ) -> None:
        """columns: of CSV; made: how the table is made, plain values; force: replace a file.

        Raises ValueError where there is a file that was not made so, OSError where it cannot be
        written."""
        self.path, self._columns = Path(path), list(columns)
        self._delimiter = delimiter_of(self.path)
        self.count = 0  # rows that are there already
        self.last: Mapping[str, Any] = {}  # the last of them
        made = {**made, "columns": self._columns}
        is_there = self.path.exists() or self._about.exists()
        goes_on = is_there and not force and self._goes_on(made)
        if not goes_on:
            text = json.dumps(made, ensure_ascii=False, indent=1)
            self._about.write_text(text + "\n", encoding="utf-8")
            self.path.write_bytes(b"")
        self._file: BinaryIO = self.path.open("r+b", buffering=0)
        # What is left of a row that was not written to its end is cut off.
        end, _ = _whole_records(self._file, self._delimiter is not None)
        self._file.truncate(end)
        self._file.seek(end)
        if end:
            for row in Source(self.path, MOST_OWN_ROW, MOST_OWN_COLUMNS).rows():
                self.count, self.last = self.count + 1, row.cells
        elif self._delimiter is not None:
            self._append(_csv_text(self._columns, self._delimiter))

    @property
    def _about(self) -> Path:
        return self.path.with_name(f"{self.path.name}.about.json")

    def _goes_on(self, made: Mapping[str, Any]) -> bool:
        """Whether the file was made so; False where it was not, but has no rows yet."""
        advice = "name another file with --out, or replace it with --force"
        if self.path.exists() and not (self.path.is_file() and self._about.is_file()):
            raise ValueError(
                f"{self.path}: exists, and {self._about.name} does not, which says how such a file "
                f"is made; {advice}"
            )
        try:
            before = json.loads(self._about.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            before = None
        if not isinstance(before, dict) or "columns" not in before:
            raise ValueError(f"{self._about}: does not say how a file is made; {advice}")
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

    def append(self, cells: Mapping[str, Any]) -> None:
        """Writes a row to its end, or not at all. Raises OSError."""
        self._append(_row_text(cells, self._columns, self._delimiter))

    def _append(self, line: str) -> None:
        start = self._file.tell()
        left = memoryview(line.encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            self._file.truncate(start)  # of a full disk, say
            raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Printed:
    """A table of answers on standard output, in UTF-8, from its first row on. Has what a command
    asks of a `Target`."""

    path = Path("-")
    count = 0
    last: Mapping[str, Any] = {}

    def __init__(self, columns: Sequence[str], delimiter: str | None) -> None:
        """columns: of CSV; delimiter: None for JSON Lines."""
        self._columns, self._delimiter = columns, delimiter
        self._head = "" if delimiter is None else _csv_text(columns, delimiter)

    def append(self, cells: Mapping[str, Any]) -> None:
        """Prints a row, the first one below the names of the columns. Raises OSError."""
        if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        text = self._head + _row_text(cells, self._columns, self._delimiter)
        self._head = ""
        print(text, end="", flush=True)


def _row_text(cells: Mapping[str, Any], columns: Sequence[str], delimiter: str | None) -> str:
    """A row with its end. columns: of CSV; JSON Lines have all cells."""
    if delimiter is None:
        return json.dumps(cells, ensure_ascii=False) + "\n"
    return _csv_text([cell_text(cells.get(name)) for name in columns], delimiter)


def _csv_text(cells: Sequence[str], delimiter: str) -> str:
    text = io.StringIO()
    # Before Python 3.13 a lone carriage return is not quoted by itself.
    writer = csv.writer(
        text,
        delimiter=delimiter,
        lineterminator="\n",
        quoting=csv.QUOTE_ALL if any("\r" in cell for cell in cells) else csv.QUOTE_MINIMAL,
    )
    writer.writerow(cells)
    return text.getvalue()


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
