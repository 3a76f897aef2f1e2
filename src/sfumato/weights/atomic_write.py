"""Tensors on their way to a file, and files that appear under their name only when complete.

Knows no format of files: `write_gguf.py` and `write_safetensors.py` do. Of a checkpoint's folder it
knows the names, so that nothing else is ever replaced.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sfumato.weights.blocks import BLOCK_FORMATS, QuantizedTensor
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.jsonfile import read_object
from sfumato.weights.quantize import encoded
from sfumato.weights.tensorfile import FLOAT_FORMATS

_CHUNK = 1 << 22  # elements read at a time: what is in memory stays at some tens of megabytes
_WRITTEN = re.compile(  # the files of a folder that a conversion or a training wrote
    r"(generation_|tokenizer_)?config\.json|tokenizer\.json|chat_template\.jinja"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_MODEL_TYPE = "diffusion_gemma"  # in its config.json


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written: its name in the file, its shape in torch order, its format ("F32",
    "Q4_K", …), and how to get its bytes, uint8 tensors one after the other."""

    name: str
    shape: tuple[int, ...]
    format: str
    chunks: Callable[[], Iterator[Tensor]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        count = math.prod(self.shape)
        if block := BLOCK_FORMATS.get(self.format):
            return count // block.block_size * block.block_bytes
        return count * FLOAT_FORMATS[self.format].itemsize


def recoded(value: Tensor | QuantizedTensor, format: str) -> Iterator[Tensor]:
    """The bytes of a tensor in another format, uint8, chunk by chunk; blocks that are of this
    format already stay as they are. Raises ValueError for values that a format cannot hold."""
    if isinstance(value, QuantizedTensor):
        if value.format.name == format:
            yield from value.data.view(-1).split(_CHUNK)
            return
        blocks = value.data.view(-1, value.format.block_bytes)
        for some in blocks.split(_CHUNK // value.format.block_size):
            yield from _encoded(value.format.dequantize(some).view(-1), format)
        return
    for part in value.reshape(-1).split(_CHUNK):
        yield from _encoded(part, format)


def _encoded(values: Tensor, format: str) -> Iterator[Tensor]:
    """Float [n], n a multiple of every block size unless it is the end, as bytes of a format."""
    if block := BLOCK_FORMATS.get(format):
        yield from (chunk.view(-1) for chunk in encoded(values, block))
        return
    cast = values.to(FLOAT_FORMATS[format])
    if format == "F16" and not torch.equal(cast.isfinite(), values.isfinite()):
        raise ValueError("a value is too large for float16")
    yield cast.contiguous().view(torch.uint8)


@contextmanager
def beside(path: Path, nbytes: int, force: bool = False) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to, which takes its place at the end.

    nbytes: about what will be written. Whatever fails within, nothing stays behind and `path` is
    as it was; if it is a symbolic link, what it points to is replaced. Raises ValueError where it
    exists (unless `force`) or its disk has too little room.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, no error for a link to itself
    check_free(path, force)
    if (free := shutil.disk_usage(path.parent).free) < nbytes:
        raise ValueError(
            f"{path}: takes {nbytes / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free; "
            "make room, or write elsewhere"
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        _flush(part)
        check_free(path, force)
        _put(part, path)
    except OSError as error:
        if error.filename is None:  # a write that failed, of a full disk say, knows no name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _remove(part)


def check_free(path: Path, force: bool) -> None:
    """Raises ValueError if `path` may not be written.

    With `force`, plain files may be replaced, and folders of nothing but a checkpoint of ours.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not path.exists():
        return
    if not force:
        raise ValueError(f"{path}: exists already; name another, or replace it with --force")
    if path.is_dir():
        _check_folder(path)
    elif not path.is_file():
        raise ValueError(f"{path}: is neither a file nor a folder; name another")


def _check_folder(path: Path) -> None:
    for item in path.iterdir():
        if item.is_symlink() or not item.is_file() or not _WRITTEN.fullmatch(item.name):
            raise ValueError(
                f"{path}: holds {quoted(item.name)}, which is no part of a checkpoint and would be "
                "lost; name another folder"
            )
    try:
        kind = read_object(path / "config.json").get("model_type")
    except CheckpointError:
        kind = None
    if kind != _MODEL_TYPE:
        raise ValueError(f"{path}: is a folder, and no checkpoint that could be replaced")


def _flush(part: Path) -> None:
    """Has the bytes on the disk before the name is there; a full disk may tell only now."""
    for file in part.iterdir() if part.is_dir() else [part]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _put(part: Path, path: Path) -> None:
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
        if path.exists():  # then nobody needs the old one, and what cannot be removed is no failure
            shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
