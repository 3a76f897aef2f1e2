from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.cli.files import Source, Target

ROWS = [{"a": "x\ny", "b": '"'}, {"a": "carriage\rreturn", "b": ","}, {"a": "", "b": "ü"}]


@pytest.mark.parametrize("name", ["o.csv", "o.tsv", "o.jsonl"])
def test_rows_are_taken_up_where_they_stop(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Target(path, ["a", "b"], {"model": "m"}, False) as target:
        target.append(ROWS[0])
        target.append(ROWS[1])
    written = path.read_bytes()
    for torn in (b"", b"x", b'"half' if name == "o.jsonl" else b'"half a\n', b'{"a": 1'):
        path.write_bytes(written + torn)
        with Target(path, ["a", "b"], {"model": "m"}, False) as target:
            assert (target.count, target.last) == (2, ROWS[1])
        assert path.read_bytes() == written
    with Target(path, ["a", "b"], {"model": "m"}, False) as target:
        target.append(ROWS[2])
    assert [row.cells for row in Source(path).rows()] == ROWS


def test_its_own_rows_may_be_larger_than_those_that_it_reads(tmp_path: Path) -> None:
    columns = [f"c{number}" for number in range(5000)]
    row = dict.fromkeys(columns, "") | {"c0": '"' * (3 << 20)}
    with Target(tmp_path / "o.csv", columns, {}, False) as target:
        target.append(row)
    with Target(tmp_path / "o.csv", columns, {}, False) as target:
        assert (target.count, target.last) == (1, row)


def test_a_torn_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    with Target(path, ["a", "b"], {}, False):
        pass
    path.write_bytes(b"a,")
    with Target(path, ["a", "b"], {}, False) as target:
        assert target.count == 0
    assert path.read_bytes() == b"a,b\n"


def test_a_file_that_was_made_otherwise_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text("mine")
    with pytest.raises(ValueError, match="is made; name another file with --out"):
        Target(path, ["a"], {}, False)
    with Target(path, ["a"], {"model": "m", "seed": 0}, True) as target:
        target.append({"a": "1"})
    with pytest.raises(ValueError, match="was made with other model, columns, so this run"):
        Target(path, ["b"], {"model": "n", "seed": 0}, False)
    with Target(tmp_path / "empty.csv", ["a"], {"model": "m"}, False):
        pass  # and no row of it is written
    with Target(tmp_path / "empty.csv", ["b"], {"model": "n"}, False):
        assert (tmp_path / "empty.csv").read_text() == "b\n"
    (tmp_path / "o.csv.about.json").write_text("{")
    with pytest.raises(ValueError, match="does not say how a file is made"):
        Target(path, ["a"], {"model": "m", "seed": 0}, False)
    assert path.read_text() == "a\n1\n"


def test_what_stands_beside_a_table_is_kept(tmp_path: Path) -> None:
    about = tmp_path / "o.csv.about.json"
    for mine in ("notes", '{"mine": 1}', "[]"):
        about.write_text(mine)
        with pytest.raises(ValueError, match="does not say how a file is made"):
            Target(tmp_path / "o.csv", ["a"], {}, False)
        assert about.read_text() == mine and not (tmp_path / "o.csv").exists()
    with Target(tmp_path / "o.csv", ["a"], {}, True) as target:
        target.append({"a": "1"})
    (tmp_path / "o.csv").rename(tmp_path / "moved.csv")
    with Target(tmp_path / "o.csv", ["a"], {"model": "n"}, False) as target:
        assert target.count == 0


def test_a_write_that_fails_leaves_no_part_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "o.csv"
    with Target(path, ["a"], {}, False) as target:
        target.append({"a": "1"})

        class Full:
            """A disk with room for three more bytes."""

            def __init__(self, file: object) -> None:
                self.file, self.room = file, 3

            def __getattr__(self, name: str) -> object:
                return getattr(self.file, name)

            def write(self, data: memoryview) -> int:
                if not self.room:
                    raise OSError(28, "No space left on device")
                data, self.room = data[: self.room], 0
                return self.file.write(data)  # type: ignore[attr-defined, no-any-return]

        plain = target._file
        target._file = Full(plain)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            target.append({"a": "12345"})
        target._file = plain
    assert path.read_text() == "a\n1\n"
