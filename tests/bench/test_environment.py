from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sfumato.bench.environment import commit, environment


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "sfumato"
    package.mkdir(parents=True)
    (package / "api.py").write_text("")
    try:
        git(tmp_path, "init")
    except FileNotFoundError:
        pytest.skip("needs git")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "v1")
    return package


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    facts = commit(checkout)
    assert facts is not None
    assert re.fullmatch("[0-9a-f]{12}", facts)
    (checkout / "api.py").write_text("changed")
    assert commit(checkout) == f"{facts}-dirty"


def test_another_projects_commit_is_none_of_ours(checkout: Path) -> None:
    installed = checkout.parents[1] / "venv" / "sfumato"
    installed.mkdir(parents=True)
    assert commit(installed) is None


def test_no_checkout_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_versions() -> None:
    facts = environment()
    assert {"sfumato", "torch", "python", "backend", "commit", "date"} <= set(facts)
