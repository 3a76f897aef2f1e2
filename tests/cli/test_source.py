from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.cli.files import Source, cell_text


def source(folder: Path, name: str, data: str | bytes) -> Source:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return Source(path)


def test_csv_rows_have_the_line_that_they_begin_in(tmp_path: Path) -> None:
    text = '\ufeffname,text\r\n\r\na,"two\nlines, ""quoted"""\r\nb,'
    rows = list(source(tmp_path, "a.csv", text).rows())
    assert [(row.line, row.cells) for row in rows] == [
        (3, {"name": "a", "text": 'two\nlines, "quoted"'}),
        (5, {"name": "b", "text": ""}),
    ]


def test_tsv_and_json_lines(tmp_path: Path) -> None:
    rows = list(source(tmp_path, "a.TSV", "a\tb\n1,5\t2\n").rows())
    assert rows[0].cells == {"a": "1,5", "b": "2"}
    table = source(tmp_path, "a.jsonl", '{"a": 1}\n\n{"b": ["ü\\u00fc"]}')
    assert [(row.line, row.cells) for row in table.rows()] == [(1, {"a": 1}), (3, {"b": ["üü"]})]
    assert table.scan(lambda row: None) == (2, ["a", "b"])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv:3: has 3 cells, and the header has 2"),
        ("a.csv", "a;b\n1;2,3\n", "divided by ';': use commas"),
        ("a.csv", 'a\n"x"y\n', r"a\.csv:2: is not CSV"),
        ("a.csv", 'a\n1\n"open\n' + "x\n" * 9, r"a\.csv:3: is not CSV: unexpected end"),
        ("a.csv", 'a\n"' + ("x" * 1023 + "\n") * 4200, r"a\.csv:2: .*quotation mark left open"),
        ("a.csv", "a,,b\n", r"a\.csv:1: a column has no name"),
        ("a.csv", "a,a\n", r"a\.csv:1: two columns have the name 'a'"),
        ("a.csv", ",".join(f"c{i}" for i in range(4097)), r"a\.csv:1: has more than 4096 columns"),
        ("a.csv", b"a\n\xff\n", r"a\.csv:2: is not UTF-8"),
        ("a.csv", "a\n" + "x" * (4 << 20) + "x", r"a\.csv:2: the line has more than 4 MiB"),
        ("a.csv", "a\n", r"a\.csv: has no rows"),
        ("a.jsonl", "", r"a\.jsonl: has no rows"),
        ("a.jsonl", "{}\n[]", r"a\.jsonl:2: must be a JSON object"),
        ("a.jsonl", '{"a": NaN}', r"a\.jsonl:1: is not JSON: NaN"),
        ("a.jsonl", '{"a": "\\ud800"}', r"a\.jsonl:1: is not JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: is not JSON"),
        ("a.txt", "", r"a\.txt: must end in \.csv, \.tsv or \.jsonl"),
    ],
)
def test_what_is_no_table_is_named_with_its_line(
    tmp_path: Path, name: str, data: str | bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        source(tmp_path, name, data).scan(lambda row: None)


def test_a_check_of_rows_gets_the_line(tmp_path: Path) -> None:
    def check(row: object) -> None:
        raise ValueError("is odd")

    with pytest.raises(ValueError, match=r"a\.csv:2: is odd"):
        source(tmp_path, "a.csv", "a\n1\n").scan(check)


def test_values_as_cells() -> None:
    values = ["x", None, True, 1.5, {"a": "ü"}]
    assert list(map(cell_text, values)) == ["x", "", "true", "1.5", '{"a": "ü"}']
