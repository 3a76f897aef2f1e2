"""Names and phrases that may not come back: one thing has one word, and it is the field's word.

Each entry says what to write instead. CHANGELOG.md, which lists old names beside new ones, and
test_docs.py, which holds docs/ against more words than these, are exempt.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sfumato"
EXEMPT = {Path(__file__).resolve(), ROOT / "tests" / "test_docs.py", ROOT / "CHANGELOG.md"}
KINDS = {".py", ".cpp", ".h", ".inc", ".md", ".js", ".css", ".html", ".toml"}

# Of text in src, the static page, tests, benchmarks and docs: regular expressions, case ignored.
PHRASES = {
    r"\bfates? of\b": "supported fields; or what becomes of it",
    r"\bcrowd(s|ed)?\b": "other requests, a full queue",
    r"\bin company\b|\bcompany of\b": "beside other rows",
    r"\bamid\b": "in, among",
    r"\bnobody\b": "no client, no thread, nothing",
    r"\bwhoever\b": "the caller, a client",
    r"\blikeliest\b": "most probable",
    r"\bhottest\b|\bcoldest\b": "highest, lowest temperature",
    r"\bonline softmax law\b|\bthe law of\b": "online softmax state; the distribution",
    r"\bmakes? .{0,20}\bwhole again\b": "restores",
    r"\bfate of every field\b": "supported fields",
    r"\bsf_law\b": "the kernel's name",
    r"\btells? (how|what|more|whether)\b": "says, shows, measures",
    r"\bof no use\b": "what is wrong with the value",
    r"\btakes? note\b": "counts, records",
    r"\b(some|any)body\b": "a user, a client",
    r"\bfront door\b|\bto be read aloud\b": "entry point; short enough to read at once",
    r"\brude\b": "that breaks the protocol",
    r"\bcpu/twins\b": "cpu/kernels",
    r"\bview/pieces\b": "view/token_text",
    r"\bcli/tune\b": "cli/train",
    r"\bengine/(settle|behind|state|budget)\b": "see MODULES",
    r"\bseats?\b|\bseated\b": "a row of a batch",
    r"\bbare.pins?\b|\bheld_open\b": "hard pins, whose positions have no soft embedding; open",
    r"\btakes? (the|its) turns\b|\btakes? a turn\b": "runs chunks, iterates",
    r"\"\"\"What [^.\"]*\btook\b": "tokens, steps and times of",
}

# Of modules, as packages and files below src/sfumato name them.
MODULES = {
    "ops.law": "ops.online_softmax",
    "ops.cpu.twins": "ops.cpu.kernels",
    "engine.settle": "engine.output_processor",
    "engine.behind": "engine.audit_writer",
    "engine.state": "engine.stats",
    "engine.budget": "engine.memory.guard",
    "weights.fit": "weights.formats.bits",
    "weights.onload": "model.quantization",
    "weights.mixes": "model.quantization",
    "weights.outgoing": "weights.files.atomic_write, tensorfile",
    "server.running": "inflight",
    "server.bodies": "request_body",
    "server.listen": "uvicorn_server",
    "server.replies": "openai_objects",
    "server.messages": "openai_messages",
    "cli.view.pieces": "cli.canvas",
    "cli.tune": "cli.train",
}

# Of classes and functions.
DEFINITIONS = {
    "Law": "SoftmaxState",
    "Settler": "OutputProcessor",
    "Meters": "Statistics",
    "Guard": "MemoryGuard",
    "Behind": "AuditWriter",
    "absorb": "update",
    "harvest": "truncate_canvas",
    "complete": "resolve",
    "asked": "request_fields",
    "whole": "response_body",
    "account": "check_tensors",
    "settle": "advance, process",
    "look": "forward",
    "Seats": "BatchRows",
    "Scratch": "Suffix",
    "Span": "PoolLease",
    "took": "advance, commit",
}

# Of variables, parameters and functions: words that say nothing of what is held.
VAGUE = {
    *("found", "told", "tell", "teller", "heat", "hottest", "coldest", "likeliest", "few", "gone"),
    *("there", "asked", "said", "whole", "nobody", "whoever", "somebody", "crowd", "company"),
    *("amid", "fate", "law"),
    *("seat", "seats", "seated", "took", "held_open", "bare_pins", "scratches"),
}

# Of variables and parameters in src alone: tests and benchmarks may use these words otherwise.
HOUSE = {
    "spans": "widths, chunks, places, leases",
    "scratch": "suffix; buffer",
}

# How no docstring in src begins: with what it describes left out, or said in another sentence.
WITHOUT_SUBJECT = re.compile(
    r"(Of|As|Those|Likewise|It|Its|They|Their|Them|This|These|He|She|His|Her|Ours)\b"
)


OTHERS = {"vendor", "node_modules"}  # folders; `make test-clients` installs the second


def _texts() -> Iterator[tuple[str, str]]:
    """Names and texts of all files that people read, but for code of others."""
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "docs")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*"))]
    for path in [*paths, *sorted(ROOT.glob("*.md"))]:
        if path.suffix in KINDS and path not in EXEMPT and not OTHERS & set(path.parts):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


TEXTS = dict(_texts())


def _where(pattern: str) -> list[str]:
    expression = re.compile(pattern, re.IGNORECASE)
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        for name, text in TEXTS.items()
        for match in expression.finditer(text)
    ]


@pytest.mark.parametrize("pattern", sorted(PHRASES))
def test_a_phrase_does_not_come_back(pattern: str) -> None:
    assert _where(pattern) == [], f"write instead: {PHRASES[pattern]}"


def test_modules_keep_their_names() -> None:
    modules = {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.rglob("*.py")
    }
    assert {old: new for old, new in MODULES.items() if old in modules} == {}


class Names(NamedTuple):
    """What a file calls things, and what it says of them."""

    definitions: frozenset[str]  # classes, functions and methods
    variables: frozenset[str]  # and parameters and functions
    docstrings: tuple[tuple[int, str], ...]  # lines, and texts: of constants and fields too


@cache
def _names(path: Path) -> Names:
    classes, functions, variables = set(), set(), set()
    docstrings = list[tuple[int, str]]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                variables.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                functions.add(name)
            case ast.ClassDef(name=name):
                classes.add(name)
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                docstrings.append((line, text.strip()))
    return Names(
        frozenset(classes | functions), frozenset(variables | functions), tuple(docstrings)
    )


SOURCES = sorted(SRC.rglob("*.py"))


def test_definitions_keep_their_names() -> None:
    assert [
        (name, path.relative_to(SRC).as_posix())
        for path in SOURCES
        for name in _names(path).definitions
        if name.strip("_") in DEFINITIONS
    ] == []


def test_variables_say_what_they_hold(note: Callable[[str], None]) -> None:
    others = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    vague = {
        path.relative_to(ROOT).as_posix(): names
        for path in (*SOURCES, *others)
        if (names := {name for name in _names(path).variables if name.strip("_") in VAGUE})
    }
    note(f"vague names of variables: {sum(map(len, vague.values()))} in {len(vague)} files")
    assert vague == {}


def test_words_of_the_house_do_not_come_back_in_src() -> None:
    used = {path: HOUSE.keys() & _names(path).variables for path in SOURCES}
    assert {path.relative_to(SRC).as_posix(): names for path, names in used.items() if names} == {}


def _without_subject(text: str) -> bool:
    return WITHOUT_SUBJECT.match(text) is not None


def test_docstrings_begin_with_their_subject() -> None:
    """So "The bans of all rows", not "Those of all rows"; "Computes `encode`", not "As
    `encode`"."""
    assert [
        f"{path.relative_to(SRC)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in _names(path).docstrings
        if _without_subject(text)
    ] == []


@pytest.mark.parametrize(
    ("text", "guilty"),
    [
        ("Of each row.", True),
        ("Those of all rows.", True),
        ("As `encode`.", True),
        ("Its name.", True),
        ("Likewise of a row.", True),
        ("Offers a slot.", False),
        ("Assigns rows.", False),
        ("Thesaurus of names.", False),
    ],
)
def test_a_docstring_without_its_subject_is_found(text: str, guilty: bool) -> None:
    assert _without_subject(text) is guilty
