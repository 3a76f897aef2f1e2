"""Imports point one way only, name nothing undeclared, and the command line starts light."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sfumato"

# What each part may import, besides itself. "" is the package's own __init__: the public names.
_NETWORK = {"threads", "options", "model", "ops", "weights"}
_ENGINE = {"engine", "api", "decisions", "tasks", "diffusion", "text", "text_side", "media"}
_ENGINE |= _NETWORK
MAY_IMPORT: dict[str, set[str]] = {
    "refused": set(),
    "values": set(),
    "svg": set(),
    "threads": set(),
    "options": {"values"},
    "catalog": set(),
    "embedded_questions": set(),
    "weights": set(),
    "hub": {"values", "weights", "catalog"},
    "ops": {"weights.formats"},
    "text": {"weights"},
    "media": set(),
    # text.markers: families say which markers their chat format has.
    "model": {"threads", "options", "ops", "weights", "text.markers"},
    "diffusion": set(_NETWORK),
    # text: markers say where a thought is.
    "tasks": {"diffusion", "text", "media"} | _NETWORK,
    "device_trial": {"tasks", "diffusion"} | _NETWORK,
    "decisions": {"diffusion"},
    "text_side": {"tasks", "diffusion", "text", "media"} | _NETWORK,
    "api": {"decisions", "device_trial", "tasks", "diffusion", "text", "media", "text_side"}
    # embedded_questions: what the packaged models read of a conversation.
    | {"catalog", "embedded_questions", "hub"}
    | _NETWORK,
    "convert": {"api", "diffusion", "text"} | _NETWORK,
    "engine": _ENGINE - {"engine"},
    "": _ENGINE,
    "train": {"", "values", "svg", "convert", "embedded_questions"} | _ENGINE,
    # embedded_questions: a reply of the embedded model says where it is not one that it learned.
    "server": {"", "values", "embedded_questions"} | _ENGINE,
    "bench": {"", "svg", "train", "embedded_questions"} | _ENGINE,
    "deploy": {"", "catalog", "options", "values", "server"} | _ENGINE,
    "cli": {"", "catalog", "hub", "options", "values", "server", "bench", "train", "convert"}
    | {"deploy"}
    | {"device_trial", "embedded_questions"}
    | _ENGINE,
    "__main__": {"cli"},
}

# (module, imported module) -> why the arrow may point the other way. Every entry must be in use.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# Modules that import one another, in functions or for types alone at least. The list only shrinks:
# a module that has left its circle leaves the list, and no module joins one.
CIRCLES: set[frozenset[str]] = set()


def _module(path: Path) -> str:
    """src/sfumato/weights/names.py -> "weights.names"; the package's own __init__.py -> ""."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted(SRC.rglob("*.py"))}


def _resolve(target: str, name: str) -> str:
    """`from target import name` imports the module target.name where there is one, else target."""
    full = f"{target}.{name}".strip(".")
    is_module = full in MODULES or (SRC / full.replace(".", "/")).is_dir()
    return full if is_module else target


@cache
def _imports(path: Path) -> list[str]:
    """Every import of a file, in functions and under TYPE_CHECKING too, as an absolute name."""
    return list(_each_import(path))


def _each_import(path: Path) -> Iterator[str]:
    package = ["sfumato", *path.relative_to(SRC).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            if target.split(".")[0] != "sfumato":
                yield target
                continue
            inside = target.removeprefix("sfumato").lstrip(".")
            for alias in node.names:
                yield f"sfumato.{_resolve(inside, alias.name)}".rstrip(".")


def _allowed(part: str, target: str) -> bool:
    """Whether `part` may import sfumato.`target`. All may raise `Refused`."""
    own, *rest = target.split(".")
    rooms = {".".join([own, *rest[:depth]]) for depth in range(len(rest) + 1)}
    return own in (part, "refused") or bool(rooms & MAY_IMPORT[part])


def _upward() -> set[tuple[str, str]]:
    """(module, imported module) for each import that the table forbids."""
    upward = set()
    for module, path in MODULES.items():
        for name in _imports(path):
            top, _, target = name.partition(".")
            if top == "sfumato" and not _allowed(module.split(".")[0], target):
                upward.add((module, target))
    return upward


def test_every_part_has_its_place() -> None:
    assert {module.split(".")[0] for module in MODULES} <= set(MAY_IMPORT)


def test_the_table_has_no_cycle() -> None:
    """Each part, read upwards, imports only parts that came before it."""
    order = list(MAY_IMPORT)
    for part, allowed in MAY_IMPORT.items():
        assert {name.split(".")[0] for name in allowed} <= set(order[: order.index(part)])


def test_imports_point_one_way() -> None:
    upward = _upward()
    assert sorted(upward - set(EXCEPTIONS)) == []
    assert sorted(set(EXCEPTIONS) - upward) == [], "an exception that nothing needs"


def _circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that reach one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set[str](), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[start] = seen
    mutual = {m: frozenset(o for o in seen if m in reached[o]) for m, seen in reached.items()}
    return {circle for circle in mutual.values() if circle}


def _graph() -> dict[str, set[str]]:
    """The modules of ours that each module imports."""

    def module_of(name: str) -> str:
        target = name.removeprefix("sfumato").lstrip(".")
        return target if target in MODULES else target.rpartition(".")[0]

    return {
        module: {module_of(name) for name in _imports(path) if name.split(".")[0] == "sfumato"}
        for module, path in MODULES.items()
    }


def test_no_import_circle() -> None:
    circles = _circles(_graph())
    new = [circle for circle in circles if not any(circle <= known for known in CIRCLES)]
    assert sorted(map(sorted, new)) == []
    assert sorted(map(sorted, CIRCLES - circles)) == [], "a circle is smaller than the list has it"


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert _circles(graph) == {frozenset("abc"), frozenset("de")}
    assert _circles({"a": {"b"}, "b": set()}) == set()


@pytest.mark.parametrize(
    ("part", "target", "allowed"),
    [
        ("ops", "weights.formats", True),
        ("ops", "weights.formats.q4_k", True),
        ("ops", "weights.files.gguf", False),
        ("ops", "weights", False),
        ("text", "weights.errors", True),
        ("text", "model.model_config", False),
        ("model", "text.markers", True),
        ("model", "text.tokenizer", False),
        ("weights", "", False),
        ("cli", "api", True),
        ("api", "cli", False),
    ],
)
def test_the_rule_itself(part: str, target: str, allowed: bool) -> None:
    assert _allowed(part, target) is allowed


def test_every_form_of_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model" / "layers.py"
    source.parent.mkdir()
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "from ..weights.formats import QuantizedTensor\n"
        "from .. import cli\n"
        "from . import model_config\n"
        "import sfumato.api\n"
        "if TYPE_CHECKING:\n    from sfumato import engine\n"
        "def later():\n    from sfumato import load\n"
    )
    for name in ("cli", "engine", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "model_config.py").touch()
    monkeypatch.setitem(_each_import.__globals__, "SRC", tmp_path)
    monkeypatch.setitem(_each_import.__globals__, "MODULES", {"model.model_config": source})
    assert sorted(_imports(source)) == [
        "sfumato",
        "sfumato.api",
        "sfumato.cli",
        "sfumato.engine",
        "sfumato.model.model_config",
        "sfumato.weights.formats",
        "typing",
    ]


def test_only_declared_packages_are_imported() -> None:
    """No transformers, no gguf, nothing that `pip install sfumato` would not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"[^\w-]", name)[0] for name in project["dependencies"]}
    declared = {name.replace("-", "_") for name in named} | {"PIL"}  # the module of pillow
    known = declared | set(sys.stdlib_module_names) | {"sfumato", "compression"}  # since 3.14
    undeclared = {
        f"{module}: {name}"
        for module, path in MODULES.items()
        for name in _imports(path)
        if name.split(".")[0] not in known
    }
    # The kernels are imported where Triton, an extra, is installed; the tools where MCP's SDK is.
    extra = {one for one in undeclared if one.startswith("ops.triton.") and ": triton" in one}
    extra |= {one for one in undeclared if one.startswith("cli.mcp: mcp.")}
    extra |= {"train.chats: datasets", "deploy.ray: ray"} & undeclared
    extra |= {one for one in undeclared if one.startswith("deploy.ray: ray.")}
    assert undeclared - extra == set()
    assert any(name.startswith("triton") for name in project["optional-dependencies"]["gpu"])


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from sfumato.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers', 'jinja2', 'fastapi', 'uvicorn'}\n"
        "heavy |= {'shtab', 'tomllib', 'json'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_what_clients_of_an_engine_make_and_see_loads_no_torch() -> None:
    """What talks to an engine of another process needs neither its network nor its libraries."""
    code = "import sys, sfumato.engine.request\nassert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_step_loads_little_and_a_server_nothing_of_training() -> None:
    """A step, formats of weights aside: no kernel, no grammar, no decision, no option of a
    server."""
    code = (
        "import importlib, pkgutil, sys, sfumato.diffusion.step\n"
        "ours = [name for name in sys.modules if name.split('.')[0] == 'sfumato']\n"
        "ours = [name for name in ours if not name.startswith('sfumato.weights')]\n"
        "parts = 'constraints', 'decisions', 'engine', 'server', 'serve', 'llguidance'\n"
        "wrong = [name for name in sys.modules if set(name.split('.')).intersection(parts)\n"
        "         and (name in ours or name.startswith('llguidance'))]\n"
        "assert len(ours) <= 80 and not wrong and 'triton' not in sys.modules, (ours, wrong)\n"
        "import sfumato.server, sfumato.cli.serve\n"
        "for module in pkgutil.walk_packages(sfumato.server.__path__, 'sfumato.server.'):\n"
        "    importlib.import_module(module.name)\n"
        "loaded = [name for name in sys.modules if name.startswith('sfumato.train')]\n"
        "assert 'sfumato.server.app' in sys.modules and not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_help_is_quick(note: Callable[[str], None]) -> None:
    """The house promises 0.2 s, which the note tells; the limit allows for a slow machine. It is
    one of processor time, since a busy machine lets a program wait for as long as it works."""
    command = [str(Path(sys.executable).with_name("sfumato")), "--help"]

    def seconds() -> tuple[float, float]:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - start, used

    walls, used = zip(*(seconds() for _ in range(7)), strict=True)
    note(f"sfumato --help: {min(walls):.3f} s, {min(used):.3f} s of a processor (least of 7)")
    assert min(used) < 1
