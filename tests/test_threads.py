"""One thread for tiny networks, wherever they are loaded; and threads that do not spin for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato import threads

SRC = Path(__file__).resolve().parents[1] / "src"

LOADS = """
import json, sys
{first}
import sfumato
from sfumato.bench.subject import random_subject
import torch
before = torch.get_num_threads()
model = sfumato.load()
seen = [before, torch.get_num_threads()]
large = random_subject("180m", layers=1, vocab=512)
seen.append(torch.get_num_threads())
again = sfumato.load()
seen.append(torch.get_num_threads())
print(json.dumps(seen))
"""


def _run(code: str, **variables: str) -> list[int]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in (*threads._WAIT, *threads._COUNTS)
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"PYTHONPATH": str(SRC)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen: list[int] = json.loads(done.stdout)
    return seen


def test_networks_that_are_all_tiny_run_on_one_thread() -> None:
    before, tiny, large, both = _run(LOADS.format(first=""))
    assert (tiny, large, both) == (1, before, before)


@pytest.mark.parametrize(
    ("first", "variables", "count"),
    [
        # Where torch takes two by itself, the first shows that the number is not what tells.
        ("import torch; torch.set_num_threads(2)", {}, 2),
        ("", {"OMP_NUM_THREADS": "2"}, 2),
    ],
)
def test_a_number_that_the_user_chose_stays(
    first: str, variables: dict[str, str], count: int
) -> None:
    assert _run(LOADS.format(first=first), **variables) == [count] * 4


def test_the_command_line_follows_the_same_rule() -> None:
    code = (
        "import json, torch\n"
        "from sfumato.cli import generation\n"
        "from sfumato.cli.arguments import CommandLine\n"
        "seen = []\n"
        "for options in '', ' --threads 2':\n"
        "    generation.load(CommandLine().parse_args(f'run Hi{options}'.split()))\n"
        "    seen.append(torch.get_num_threads())\n"
        "print(json.dumps(seen))"
    )
    assert _run(code) == [1, 2]


def test_waiting_threads_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    environment = {"HOME": "/"}
    threads.limit_spinning(environment)
    assert environment == {"HOME": "/", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        given = {name: "7"}
        threads.limit_spinning(given)
        assert given == {name: "7"}


def test_importing_sfumato_limits_spinning_before_torch_is_there() -> None:
    code = (
        "import sys, os, json, sfumato\n"
        "print(json.dumps([int(os.environ['GOMP_SPINCOUNT']), 'torch' in sys.modules]))"
    )
    assert _run(code) == [3000, False]
