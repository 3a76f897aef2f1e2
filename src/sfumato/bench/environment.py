"""With what a figure was taken: versions, backend, commit. Knows no machine and no model."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sfumato import __version__, ops

_PACKAGE = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Plain values; the commit is None where the package is not in a checkout of its own."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sfumato": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "backend": ops.backend,
        "backend_reason": ops.reason,
    }


def commit(package: Path = _PACKAGE) -> str | None:
    """The checkout's commit, with "-dirty" where files differ from it; None outside of one."""
    # Installed into an environment that lies within another project's checkout, the commit found
    # would be that project's.
    if _git(package, "rev-parse", "--show-prefix") != "src/sfumato/":
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
