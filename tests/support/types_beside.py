"""A plugin for pytest, which `make test` names: mypy runs beside the tests, whose waits it fills.

What mypy prints stands before pytest's own summary, and what it finds is a failure of the run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Types:
    """One run of mypy."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mypy"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.output, _ = self.process.communicate()
        if self.process.returncode and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("mypy")
        terminalreporter.write_line(self.output.rstrip())

    def pytest_unconfigure(self) -> None:
        self.process.kill()  # where the run was broken off


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one mypy, and not one in each worker of pytest-xdist
        config.pluginmanager.register(Types())
