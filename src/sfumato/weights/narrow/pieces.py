"""Which tensors of the files belong to one narrow matrix, and whether their headers fit together.

Everything here is known from headers: no data is read before `NarrowPiece.read`, which checks the
scales' values. Knows no canonical names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.narrow.config import Scheme
from sfumato.weights.narrow.matrix import NarrowMatrix
from sfumato.weights.tensorfile import FLOAT_FORMATS, TensorFile, TensorInfo

Files = Mapping[Path, TensorFile]

_CODES = {  # kind and method → format of the codes in a safetensors file, codes in an element of it
    ("FP8", "compressed-tensors"): ("F8_E4M3", 1),
    ("FP8", "modelopt"): ("F8_E4M3", 1),
    ("INT8", "compressed-tensors"): ("I8", 1),
    ("INT4", "compressed-tensors"): ("I32", 8),
    ("NVFP4", "compressed-tensors"): ("U8", 2),
    ("NVFP4", "modelopt"): ("U8", 2),
}
_DTYPES = FLOAT_FORMATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


_OF_ACTIVATIONS = ("input_scale", "output_scale", "input_global_scale")
"""They stand beside a weight; scales of the cache may stand beside none."""


@dataclass(frozen=True)
class NarrowPiece:
    """A matrix of a file: `info` says under which name it stands for all of its tensors, its shape
    in elements and its bytes; `tensors` are these by their role in the scheme."""

    info: TensorInfo
    scheme: Scheme
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    def read(self, files: Files) -> NarrowMatrix:
        """The matrix; its codes are a view of the mapped file. Raises CheckpointError, naming the
        tensor, for scales that are no numbers, negative or zero, and codes that are none."""
        kind, (rows, columns) = self.scheme.kind, self.info.shape
        codes = self._tensor(files, "codes")
        if kind == "INT4":  # little-endian integers: the first code is in the first byte
            codes = codes.view(torch.uint8)
        elif kind == "FP8" and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise self._fault("codes", "holds NaN")
        self._check_shape(files)
        scales = self._numbers(files, "scale")
        groups = scales.numel() // rows if self.scheme.group_size else 1
        scales = scales.view(-1, groups)
        each: tuple[Tensor, float] | tuple[()] = ()
        if "global_scale" in self.tensors:
            factor = self._numbers(files, "global_scale")
            if not bool(factor > 0):
                raise self._fault("global_scale", "is zero")
            products = scales / factor if self.scheme.inverted else scales * factor
            own = 1 / factor if self.scheme.inverted else factor
            if not bool(products.isfinite().all() & own.isfinite().all()):
                raise self._fault("global_scale", "makes scales infinite")
            if bool(((products == 0) & (scales != 0)).any()):
                raise self._fault("global_scale", "makes scales zero")
            scales, each = products, (self._tensor(files, "scale"), float(own))
        matrix = NarrowMatrix(kind, codes, scales, (rows, columns), *each)
        if matrix.loses_codes():
            raise self._fault("scale", "holds zeros for codes that are not zero")
        return matrix

    def prefetch(self, files: Files) -> None:
        """Lets the system begin to read the matrix from disk."""
        for info in self.tensors.values():
            files[info.file].prefetch(info.name)

    def _tensor(self, files: Files, role: str) -> Tensor:
        info = self.tensors[role]
        data, dtype = files[info.file].data(info.name), _DTYPES[info.format]
        if info.offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(info.shape)

    def _numbers(self, files: Files, role: str) -> Tensor:
        """float32 [n], all of them finite and not negative."""
        numbers = self._tensor(files, role).float().reshape(-1)
        if not bool(numbers.isfinite().all()):
            raise self._fault(role, "holds NaN or infinity")
        if bool((numbers < 0).any()):
            raise self._fault(role, "holds negative scales")
        return numbers

    def _check_shape(self, files: Files) -> None:
        if "shape" in self.tensors:
            shape = self._tensor(files, "shape").tolist()
            if shape != list(self.info.shape):
                raise self._fault(
                    "shape", f"says {quoted(shape)}, and the codes are {list(self.info.shape)}"
                )

    def _fault(self, role: str, problem: str) -> CheckpointError:
        return _fault(self.tensors[role], problem)


def group_pieces(
    infos: Iterable[TensorInfo], scheme: Scheme
) -> tuple[dict[str, NarrowPiece], list[TensorInfo]]:
    """The narrow matrices among a checkpoint's tensors, by the name that stands for each
    (`MODULE.weight`), and the other tensors.

    Raises CheckpointError, naming the tensor, where a matrix lacks a tensor, has one too many, or
    where formats, shapes and group size contradict each other.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    activations: list[tuple[str, TensorInfo]] = []
    for info in infos:
        module, _, leaf = info.name.rpartition(".")
        if leaf in _OF_ACTIVATIONS and leaf in scheme.roles.unused:
            activations.append((module, info))
        if leaf not in scheme.roles.unused:
            other = modules.setdefault(module, {}).setdefault(leaf, info)
            if other is not info:
                raise _fault(info, f"is also in {other.file.name}; remove one of them")
    for module, info in activations:
        if module not in modules:
            raise _fault(info, "is left over: there is no weight beside it")
    pieces: dict[str, NarrowPiece] = {}
    others: list[TensorInfo] = []
    for module, leaves in modules.items():
        if _is_narrow(leaves, scheme):
            piece = _piece(module, leaves, scheme)
            pieces[piece.info.name] = piece
        else:
            others += leaves.values()
    return pieces, others


def _is_narrow(leaves: Mapping[str, TensorInfo], scheme: Scheme) -> bool:
    roles = scheme.roles
    marks = {roles.codes, roles.scale, roles.global_scale, roles.shape} - {"weight", None}
    weight = leaves.get("weight")
    return bool(marks & leaves.keys()) or (
        weight is not None and weight.format not in FLOAT_FORMATS and weight.format in _DTYPES
    )


def _piece(module: str, leaves: Mapping[str, TensorInfo], scheme: Scheme) -> NarrowPiece:
    roles = scheme.roles
    names = {"codes": roles.codes, "scale": roles.scale}
    names |= {"global_scale": roles.global_scale} if roles.global_scale else {}
    names |= {"shape": roles.shape} if roles.shape else {}
    any_info = next(iter(leaves.values()))
    for leaf in names.values():
        if leaf not in leaves:
            raise CheckpointError(
                f"{any_info.file}: tensor {quoted(module + '.' + leaf)} is missing: {scheme} has "
                f"one beside {quoted(any_info.name)}; download the checkpoint again"
            )
    for leaf, info in leaves.items():
        if leaf not in names.values():
            raise _fault(info, f"is left over: {scheme} has no such tensor")
    tensors = {role: leaves[leaf] for role, leaf in names.items()}
    shape = _shape(tensors["codes"], scheme)
    _check_scales(tensors, shape, scheme)
    codes = tensors["codes"]
    nbytes = sum(info.nbytes for info in tensors.values())
    info = TensorInfo(f"{module}.weight", shape, scheme.kind, nbytes, codes.file, codes.offset)
    return NarrowPiece(info, scheme, tensors)


def _shape(codes: TensorInfo, scheme: Scheme) -> tuple[int, int]:
    format, count = _CODES[scheme.kind, scheme.method]
    if codes.format != format:
        raise _fault(
            codes, f"is {codes.format}, where {scheme} has {format}: mixed formats are not read"
        )
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _fault(codes, f"has the shape {list(codes.shape)}, and is no matrix")
    rows, columns = codes.shape
    return rows, columns * count


def _check_scales(
    tensors: Mapping[str, TensorInfo], shape: tuple[int, int], scheme: Scheme
) -> None:
    (rows, columns), scale = shape, tensors["scale"]
    formats = ("F8_E4M3",) if scheme.kind == "NVFP4" else tuple(FLOAT_FORMATS)
    if scale.format not in formats:
        raise _fault(scale, f"is {scale.format}, where {scheme} has {' or '.join(formats)}")
    if scheme.group_size == 0:
        sound = scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
        expected = f"[{rows}, 1], or one number"
    else:
        groups, rest = divmod(columns, scheme.group_size)
        sound = rest == 0 and scale.shape == (rows, groups)
        expected = f"[{rows}, {columns} / {scheme.group_size}]"
    if not sound:
        raise _fault(
            scale,
            f"has the shape {list(scale.shape)}, where {scheme} has {expected} for {columns} "
            "columns",
        )
    if (factor := tensors.get("global_scale")) and (
        math.prod(factor.shape) != 1 or factor.format not in FLOAT_FORMATS
    ):
        raise _fault(factor, f"is {factor.format} {list(factor.shape)}, and not one float")
    if (size := tensors.get("shape")) and (size.shape != (2,) or size.format not in ("I64", "I32")):
        raise _fault(size, f"is {size.format} {list(size.shape)}, and not two integers")


def _fault(info: TensorInfo, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {quoted(info.name)} {problem}; download the checkpoint again, or "
        "convert it again"
    )
