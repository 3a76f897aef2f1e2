"""Programs that take turns on one machine, each in a process of its own, and what else ran there.

On a shared machine other work slows every program; interleaved rounds let it slow all of them
alike. Knows no model and no figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 60  # for a process to end by itself


class Contender:
    """A Python program in a process of its own. For each line of its input the program measures a
    round, and prints the round's figures as a line of JSON."""

    def __init__(
        self, program: str, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> None:
        """program: the text of the program; environment: all variables (None: this process's)."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, line: str = "") -> Any:
        """The figures of a round; line: what the program is asked for, where it asks. Raises
        SystemExit where the program has ended."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, and answers nothing
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a program has ended with exit code {self._process.wait(LIMIT_S)}")
        return json.loads(answer)

    def seconds(self) -> float:
        """Processor time that the process has taken; Linux only."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the program end."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()


def in_turns(contenders: Sequence[Contender], rounds: int) -> list[list[Any]]:
    """The figures of each contender: of the round that warms it up, and then of so many rounds,
    the order of the contenders another one in every second round."""
    figures: list[list[Any]] = [[] for _ in contenders]
    pairs = list(zip(figures, contenders, strict=True))
    for number in range(rounds + 1):
        for own, contender in pairs if number % 2 else pairs[::-1]:
            own.append(contender.measure())
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return figures


class OtherWork:
    """What of the machine's processors other programs take, since this was made; Linux only."""

    def __init__(self, contenders: Sequence[Contender] = ()) -> None:
        """contenders: whose work does not count, nor that of this process."""
        self._contenders = contenders
        self._began, self._before = time.perf_counter(), self._others()

    def _others(self) -> float:
        """Seconds of all processors that were busy with other programs, since the start of the
        machine; time that the host took away too."""
        user, nice, system, _, _, *rest = map(int, _first_line(Path("/proc/stat")).split()[1:9])
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return busy - sum(each.seconds() for each in self._contenders) - time.process_time()

    def share(self) -> float:
        """Of all processors: 0 to 1."""
        passed = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return max(0.0, min(1.0, (self._others() - self._before) / passed))


def _first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]
