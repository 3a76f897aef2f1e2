"""The package by which Sfumato leaves one machine."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_itself_loads_nothing_heavy() -> None:
    code = (
        "import sys, sfumato.deploy\n"
        "heavy = {'torch', 'numpy', 'ray', 'httpx', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
