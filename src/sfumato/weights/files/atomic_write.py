"""Files and folders that appear under their name only when they are complete.

Knows no format of files and no tensors; whether a folder may be replaced is the caller's to say.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def keep_folder(path: Path) -> None:
    """Raises ValueError: the folder stays."""
    raise ValueError(f"{path}: is a folder; name a file, or remove the folder first")


@contextmanager
def atomic_path(
    path: Path,
    nbytes: int,
    force: bool = False,
    check_folder: Callable[[Path], None] = keep_folder,
) -> Iterator[Path]:
    """A temporary path in the folder of `path`; the file or folder that is written there replaces
    `path` at the end.

    nbytes: about what will be written. If the writing fails, nothing is left and `path` is as
    before; if `path` is a symbolic link, its target is replaced. Raises ValueError where `path`
    exists (unless `force`) or its disk has too little room; for `check_folder` see
    `check_writable`.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, no error for a link to itself
    check_writable(path, force, check_folder)
    if (free := shutil.disk_usage(path.parent).free) < nbytes:
        raise ValueError(
            f"{path}: takes {nbytes / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free; "
            "make room, or write elsewhere"
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        _flush(part)
        check_writable(path, force, check_folder)
        _replace(part, path)
    except OSError as error:
        if error.filename is None:  # a write that failed, of a full disk say, knows no name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _remove(part)


def check_writable(
    path: Path, force: bool, check_folder: Callable[[Path], None] = keep_folder
) -> None:
    """Raises ValueError if `path` may not be written.

    With `force`, plain files may be replaced, and folders for which `check_folder` does not raise;
    an empty folder always.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: the folder {path.parent} cannot be written; name another")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not force:
        raise ValueError(f"{path}: exists already; name another, or replace it with --force")
    if path.is_dir():
        check_folder(path)
    elif not path.is_file():
        raise ValueError(f"{path}: is neither a file nor a folder; name another")
    elif not os.access(path, os.W_OK):
        raise ValueError(f"{path}: is read-only; name another, or make it writable first")


def create_file(path: Path, data: bytes, like: os.stat_result | None = None) -> None:
    """Writes a file that does not exist, whole or not at all. Raises OSError; FileExistsError for
    anything that has the name, and so a link is not followed.

    like: of the file whose owner and permissions the new one has."""
    # Only its owner may read it before it has its permissions.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if like is None else 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            if like is not None:
                with suppress(OSError):  # only root may give a file away
                    os.chown(path, like.st_uid, like.st_gid)
                os.chmod(path, like.st_mode & 0o7777)
            os.fsync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _flush(part: Path) -> None:
    """Writes the bytes to the disk before the name exists; a full disk may be reported only now."""
    for file in part.iterdir() if part.is_dir() else [part]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _replace(part: Path, path: Path) -> None:
    if not path.is_dir():
        part.replace(path)
        return
    old = part.with_suffix(".old")
    try:
        path.rename(old)  # a folder that is not empty cannot be replaced in one go
        part.rename(path)
    except BaseException:  # a signal may come when either is done
        if not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists():  # the old folder is not needed; that it cannot be removed is no failure
            shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
