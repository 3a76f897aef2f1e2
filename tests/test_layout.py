"""The house's measures: sizes of functions, docstrings, mirrored tests, no machine paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sfumato"
SOURCES = sorted(SRC.rglob("*.py"))

PROGRAMS = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

FUNCTION_LIMIT = 60  # lines

# Kernels and parsers may be longer: "folder/file.py:function" -> why.
LONG_FUNCTIONS: dict[str, str] = {
    "src/sfumato/ops/triton/attention.py:_attend": "a kernel: its ranges of keys share one state",
    "src/sfumato/ops/triton/linear.py:_tile": "of a kernel: all products share one loop",
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file as "folder/file.py:name" with its length, decorators excluded."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield f"{_name(path)}:{node.name}", node.end_lineno - node.lineno + 1


def test_sizes_of_functions(note: Callable[[str], None]) -> None:
    lengths = dict(item for path in PROGRAMS for item in _functions(path))
    source = [item for item in lengths.items() if item[0].startswith("src/")]
    name, length = max(source, key=lambda item: item[1])
    note(f"src: {len(SOURCES)} files; longest function {length} lines ({name})")
    long_functions = {name for name, length in lengths.items() if length > FUNCTION_LIMIT}
    assert long_functions == set(LONG_FUNCTIONS), "split it, or say why it is long"


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
    tested.discard(Path("clients"))  # of others, against the whole server
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
