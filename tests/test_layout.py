"""The house's measures: file and function sizes, docstrings, mirrored tests, no machine paths."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sfumato"
SOURCES = sorted(SRC.rglob("*.py"))

FILE_LIMIT, MEDIAN_LIMIT, FUNCTION_LIMIT = 400, 150, 60

# Kernels and parsers may be longer: "module.py:function" -> why.
LONG_FUNCTIONS: dict[str, str] = {}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file as "folder/file.py:name" with its length, decorators excluded."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            name = f"{path.relative_to(SRC).as_posix()}:{node.name}"
            yield name, node.end_lineno - node.lineno + 1


def test_sizes(note: Callable[[str], None]) -> None:
    files = {path.relative_to(SRC).as_posix(): _lines(path) for path in SOURCES}
    functions = dict(
        sorted((item for path in SOURCES for item in _functions(path)), key=lambda item: item[1])
    )
    median = statistics.median(count for count in files.values() if count)
    longest = max(files, key=files.__getitem__)
    name, length = next(reversed(functions.items()))
    note(
        f"src: {len(files)} files, {sum(files.values())} lines; median {median:.0f}, "
        f"longest {files[longest]} ({longest}); longest function {length} ({name})"
    )
    assert [f"{name}: {count}" for name, count in files.items() if count > FILE_LIMIT] == []
    assert median < MEDIAN_LIMIT
    over = {name for name, length in functions.items() if length >= FUNCTION_LIMIT}
    assert over == set(LONG_FUNCTIONS), "split the function, or update LONG_FUNCTIONS"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_tests_mirror_the_source() -> None:
    packages = {path.parent.relative_to(SRC) for path in SOURCES} - {Path(".")}
    untested = [
        package.as_posix()
        for package in sorted(packages)
        if not any((ROOT / "tests" / package).rglob("test_*.py"))
    ]
    assert untested == []
    tested = {path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py")}
    assert [folder for folder in tested if not (SRC / folder).is_dir()] == []


def test_no_machine_paths() -> None:
    """A path of the machine it was written on works nowhere else."""
    pattern = re.compile(r"(?<![\w.])/(work|root|home)/")
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".cfg", ".yml", ".cpp", ".h", ""}
    places = ["src", "tests", "docs", "benchmarks", ".ci"]
    paths = [path for place in places for path in (ROOT / place).rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.name not in {".git", ".venv"}]
    guilty = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        if path.is_file() and path.suffix in kinds and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert guilty == []
