"""Narrow matrices of files: which tensors belong to one, whether their headers fit together, and
its codes and scales.

No data is read before `NarrowPiece.read`, which checks the scales' values. The values are those of
the publishers' own programs, in float32: FP8 and INT8 codes times a scale of the row, INT4 codes
times a scale of a group, FP4 codes times a scale of 16 columns times one of the matrix. Knows no
canonical names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.narrow import Scheme
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo
from sfumato.weights.formats import (
    FLOAT,
    FORMATS,
    Format,
    Published,
    QuantizedTensor,
    of_files,
    quantize,
)

Files = Mapping[Path, TensorFile]

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


_OF_ACTIVATIONS = ("input_scale", "output_scale", "input_global_scale")
"""They stand beside a weight; scales of the cache may stand beside none."""


_CHUNK = 1 << 21  # elements converted at a time: temporaries of some 8 MiB each


@dataclass(frozen=True)
class NarrowMatrix:
    """A matrix of `shape` (rows, columns).

    codes: of FP8 float8_e4m3fn and of INT8 int8 [rows, columns]; of INT4 and NVFP4 uint8
    [rows, columns / 2], the first of two columns in the low four bits. scales: float32
    [1 or rows, groups], finite, not negative; a group is `columns / groups` columns. Those of
    NVFP4 are `group_scales`, float8_e4m3fn, times `scale`, to a last place of float32; elsewhere
    these are not set.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    group_scales: Tensor | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        rows, columns = self.shape
        nibbles = self.codes.dtype == torch.uint8
        assert tuple(self.codes.shape) == (rows, columns // 2 if nibbles else columns)
        assert self.scales.shape[0] in (1, rows) and columns % self.scales.shape[1] == 0

    def values(self) -> Tensor:
        """float32 [rows, columns], exact as the format has them."""
        rows, columns = self.shape
        groups = self.scales.shape[1]
        out = self._numbers().view(rows, groups, -1)
        return out.mul_(self.scales[:, :, None]).view(rows, columns)

    def parts(self) -> Iterator[NarrowMatrix]:
        """The matrix in ranges of its rows, of some millions of elements each."""
        rows, columns = self.shape
        step = max(1, _CHUNK // max(columns, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            scales = self.scales if len(self.scales) == 1 else self.scales[start:stop]
            groups = None if self.group_scales is None else self.group_scales[start:stop]
            codes, shape = self.codes[start:stop], (stop - start, columns)
            yield NarrowMatrix(self.format, codes, scales, shape, groups, self.scale)

    def loses_codes(self) -> bool:
        """Whether scales of zero make nothing of codes that are not zero. NVFP4 rounds the scales
        of groups that are small beside others to zero: there, whether all scales are zero."""
        if bool(self.scales.all()) or (self.group_scales is not None and bool(self.scales.any())):
            return False
        for part in self.parts():
            codes = part._numbers().view(part.shape[0], part.scales.shape[1], -1)
            if bool(((part.scales == 0) & codes.any(dim=2)).any()):
                return True
        return False

    def unchanged(self) -> QuantizedTensor:
        """INT4 with scales that bfloat16 holds, or NVFP4, as the blocks of this name: codes and
        scales as they are."""
        make = _published(self.format).unchanged
        assert make is not None, f"{self.format.name}: has no blocks"
        scales = self.scales if self.group_scales is None else self.group_scales
        return QuantizedTensor(make(self.codes, scales, self.scale), self.format, self.shape)

    def blocks(self) -> QuantizedTensor:
        """The blocks of `nearest`. Raises ValueError for values that they cannot hold."""
        format = nearest(self.format, self.shape[1])
        assert format is not None, f"{self.shape[1]} columns divide into no blocks"
        if make := dict(_published(self.format).nearest)[format]:
            return QuantizedTensor(make(self.codes, self.scales), format, self.shape)
        return quantize(self.values(), format)

    def _numbers(self) -> Tensor:
        return _published(self.format).numbers(self.codes)


def nearest(format: Format, columns: int) -> Format | None:
    """The blocks that are nearest to a narrow format's values; None where rows do not divide into
    blocks."""
    known = (near for near, _ in _published(format).nearest)
    return next((near for near in known if near.divides(columns)), None)


def _published(format: Format) -> Published:
    assert format.published is not None, f"{format.name}: is no narrow format"
    return format.published


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
        matrix = NarrowMatrix(FORMATS[kind], codes, scales, (rows, columns), *each)
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
        if leaf in _OF_ACTIVATIONS and leaf in scheme.unused:
            activations.append((module, info))
        if leaf not in scheme.unused:
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
    weight, marks = leaves.get("weight"), set(scheme.roles.values()) - {"weight"}
    return bool(marks & leaves.keys()) or (
        weight is not None and weight.format not in of_files(FLOAT) and weight.format in _DTYPES
    )


def _piece(module: str, leaves: Mapping[str, TensorInfo], scheme: Scheme) -> NarrowPiece:
    any_info = next(iter(leaves.values()))
    for leaf in scheme.roles.values():
        if leaf not in leaves:
            raise CheckpointError(
                f"{any_info.file}: tensor {quoted(module + '.' + leaf)} is missing: {scheme} has "
                f"one beside {quoted(any_info.name)}; download the checkpoint again"
            )
    for leaf, info in leaves.items():
        if leaf not in scheme.roles.values():
            raise _fault(info, f"is left over: {scheme} has no such tensor")
    tensors = {role: leaves[leaf] for role, leaf in scheme.roles.items()}
    shape = _shape(tensors["codes"], scheme)
    _check_scales(tensors, shape, scheme)
    codes = tensors["codes"]
    nbytes = sum(info.nbytes for info in tensors.values())
    info = TensorInfo(f"{module}.weight", shape, scheme.kind, nbytes, codes.file, codes.offset)
    return NarrowPiece(info, scheme, tensors)


def _shape(codes: TensorInfo, scheme: Scheme) -> tuple[int, int]:
    published = _published(FORMATS[scheme.kind])
    if codes.format != published.codes:
        expected = f"{scheme} has {published.codes}: mixed formats are not read"
        raise _fault(codes, f"is {codes.format}, where {expected}")
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _fault(codes, f"has the shape {list(codes.shape)}, and is no matrix")
    rows, columns = codes.shape
    return rows, columns * published.count


def _check_scales(
    tensors: Mapping[str, TensorInfo], shape: tuple[int, int], scheme: Scheme
) -> None:
    (rows, columns), scale = shape, tensors["scale"]
    formats = ("F8_E4M3",) if scheme.kind == "NVFP4" else tuple(of_files(FLOAT))
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
        math.prod(factor.shape) != 1 or factor.format not in of_files(FLOAT)
    ):
        raise _fault(factor, f"is {factor.format} {list(factor.shape)}, and not one float")
    if (size := tensors.get("shape")) and (size.shape != (2,) or size.format not in ("I64", "I32")):
        raise _fault(size, f"is {size.format} {list(size.shape)}, and not two integers")


def _fault(info: TensorInfo, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {quoted(info.name)} {problem}; download the checkpoint again, or "
        "convert it again"
    )
