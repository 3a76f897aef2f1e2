"""The folder of a tuning run: its settings, checkpoints, curves and answers.

A checkpoint has its name only when it is complete, and the newest few are kept; so a run that is
killed at any moment goes on from the last one.  Knows no network: states are tensors and plain
values.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sfumato.refused import Refused
from sfumato.svg import Point, curves
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.atomic_write import atomic_path
from sfumato.weights.files.jsonfile import read_object

SETTINGS, CURVES, PLOT, SAMPLES = "tuning.json", "curves.jsonl", "curves.svg", "samples.jsonl"
CHECKPOINTS, ADAPTER, MODEL = "checkpoints", "adapter", "model"
_OURS = {SETTINGS, CURVES, PLOT, SAMPLES, CHECKPOINTS, ADAPTER, MODEL}
_CHECKPOINT = re.compile(r"step-(\d{9})\.pt")
_UNFINISHED = re.compile(r"\.(.+)\.\d+\.(?:part|old)")
"""What `atomic_path` leaves of a name where the process is killed."""


def check_out(path: Path, resume: bool, force: bool) -> set[str]:
    """The names in the folder of a run, which need not exist. Raises Refused for a folder of
    another run, and for one of something else: a run's has its settings."""
    entries = {each.name for each in path.iterdir()} if path.is_dir() else set[str]()
    unfinished = {name for name in entries if _finished_name(name) in _OURS}
    others = entries - _OURS - unfinished
    is_run = not entries or SETTINGS in entries or entries == unfinished
    if path.exists() and (not path.is_dir() or others or not is_run):
        raise Refused("out", f"{path} holds what is no part of a run", "name another")
    if entries and not (resume or force):
        raise Refused(
            "out",
            f"{path} has a run",
            "go on with it by --resume, replace it by --force, or name another folder",
        )
    return entries


def _finished_name(name: str) -> str:
    """The name that an unfinished file or folder was to have; "" for any other."""
    match = _UNFINISHED.fullmatch(name)
    return match[1] if match else ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path, settings: Mapping[str, Any], keep: int = 3) -> None:
        """settings: plain values that all numbers of the run depend on; keep: checkpoints."""
        self.path, self.settings, self.keep = path, settings, keep

    def begin(self, resume: bool, force: bool) -> dict[str, Any] | None:
        """Makes the folder; returns the state to go on from, None for a new run. Raises as
        `check_out` does, CheckpointError for what cannot be read, and OSError."""
        entries = check_out(self.path, resume, force)
        if resume and SETTINGS in entries:
            state = self._resumed()
            self._clean()
            return state
        for name in sorted(
            entries, key=lambda name: name == SETTINGS
        ):  # last: it says what this is
            _remove(self.path / name)
        (self.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        self._write(SETTINGS, json.dumps(self.settings, indent=2) + "\n")
        return None

    def _resumed(self) -> dict[str, Any] | None:
        before = read_object(self.path / SETTINGS)
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise Refused(
                    name,
                    f"the run in {self.path} has {json.dumps(before.get(name))}, and not "
                    f"{json.dumps(value)}",
                    "go on with what it has, or begin another run",
                )
        if not (kept := self.checkpoints()):
            return None
        path = kept[-1]
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive fails in any way
            why = str(error).split("\n")[0][:200]
            raise CheckpointError(
                f"{path}: is damaged ({why}); remove it to go on from the one before it"
            ) from error
        for name in (CURVES, SAMPLES):  # a killed run may have gone on after its checkpoint
            lines = [line for line in self.lines(name) if line["step"] <= state["done"]]
            self._write(name, "".join(json.dumps(line) + "\n" for line in lines))
        return state

    def _clean(self) -> None:
        """Removes what a killed run left unfinished."""
        checkpoints = self.path / CHECKPOINTS
        for folder in (self.path, checkpoints):
            for each in list(folder.iterdir()) if folder.is_dir() else ():
                name = _finished_name(each.name)
                if name in _OURS or _CHECKPOINT.fullmatch(name):
                    _remove(each)
        checkpoints.mkdir(exist_ok=True)

    def checkpoints(self) -> list[Path]:
        """The checkpoints that there are, from the oldest."""
        folder = self.path / CHECKPOINTS
        return sorted(each for each in folder.glob("step-*.pt") if _CHECKPOINT.fullmatch(each.name))

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Writes a checkpoint, whole or not at all, and removes those that are too many. Raises
        ValueError or OSError where the disk is full; then the last one is as it was."""
        size = sum(each.nbytes for each in _tensors(state))
        path = self.path / CHECKPOINTS / f"step-{step:09}.pt"
        with atomic_path(path, size, force=True) as part, part.open("wb") as file:
            torch.save(state, file)
        for old in self.checkpoints()[: -self.keep]:
            old.unlink(missing_ok=True)

    def add(self, name: str, line: Mapping[str, Any]) -> None:
        """Appends a line to the curves or to the answers."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of the curves or the answers; one that a killed run left half is none."""
        path, lines = self.path / name, list[dict[str, Any]]()
        for text in path.read_text("utf-8").splitlines() if path.is_file() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def plot(self) -> None:
        """Draws the losses of the curves."""
        lines: dict[str, list[Point]] = {}
        for line in self.lines(CURVES):
            for name, value in line["losses"].items():
                lines.setdefault(name, []).append(Point(line["step"], value))
        self._write(PLOT, curves(lines, "step", "loss, nats a token"))

    def _write(self, name: str, text: str) -> None:
        with atomic_path(self.path / name, len(text), force=True) as part:
            part.write_text(text, encoding="utf-8")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for each in value.values() for tensor in _tensors(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in _tensors(each))
