"""Which operations have passed their self-tests on a device, kept from start to start.

A note is a file in the folder of Triton's cache, and goes with it.  It holds for one text of the
kernels and of their references, one version of Triton, torch and the driver, and one kind of
device; where any of these changes, the tests run again.  Nothing here raises: without a note the
tests run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from sfumato.ops.triton.targets import own_architecture

log = logging.getLogger(__name__)

LARGEST = 1 << 16
"""Bytes of a note that is read."""


def kept(device: torch.device) -> frozenset[str]:
    """The operations that passed at an earlier start; none where that is not known."""
    if device.type != "cuda":
        return frozenset()
    try:
        with _path(device).open("rb") as file:
            names = json.loads(file.read(LARGEST))
    except FileNotFoundError:
        return frozenset()
    except Exception as error:  # a text that is no JSON, Triton's own functions, another's folder
        log.debug("the note of the self-tests of kernels is not read (%s)", error)
        return frozenset()
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return frozenset(names) if is_list else frozenset()


def keep(device: torch.device, operations: Iterable[str]) -> None:
    """Notes these as all that have passed."""
    if device.type != "cuda":
        return
    try:
        _write(_path(device), json.dumps(sorted(operations)))
    except Exception as error:  # a full disk, a folder that may not be written
        log.debug("the self-tests of kernels are not noted (%s)", error)


def _write(path: Path, text: str) -> None:
    """Another process reads the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _path(device: torch.device) -> Path:
    from triton import knobs

    key = hashlib.sha256(json.dumps([_sources(), *_circumstances(device)]).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"sfumato-self-tests-{key[:32]}.json"


def _sources() -> str:
    """A hash of the kernels, their tiles and tests, and the references."""
    here = Path(__file__).parent
    paths = sorted([*here.glob("*.py"), *here.glob("*.toml"), *here.parent.glob("*.py")])
    text = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        text.update(f"{path.name} {len(content)}\n".encode())
        text.update(content)
    return text.hexdigest()


def _circumstances(device: torch.device) -> list[str]:
    """What else decides whether a kernel is right."""
    import triton
    from triton.compiler import compiler

    variables = compiler.get_cache_invalidating_env_vars()
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # which builds for CUDA have
    return [
        *(triton.__version__, torch.__version__, str(torch.version.cuda), str(torch.version.hip)),
        *(torch.cuda.get_device_name(device), str(own_architecture(device)), str(driver)),
        json.dumps(variables, sort_keys=True, default=str),
    ]
