"""Narrow matrices of files under canonical names: which tensors belong to one, whether their
headers fit together, its codes and scales; and stacks of matrices that were saved one by one, or
as several tensors with some rows of each.

No data is read before `NarrowPiece.read`, which checks the scales' values. The values are those of
the publishers' own programs, in float32: FP8 and INT8 codes times a scale of the row, INT4 codes
times a scale of a group, FP4 codes times a scale of 16 columns times one of the matrix.

Names come from the family's table (`TensorNames`): which tensor a stack has, of which matrices it
is made, and where config.json counts them. Knows no shapes but those of the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sfumato.weights.errors import CheckpointError, listed, quoted
from sfumato.weights.files.narrow import Scheme
from sfumato.weights.files.tensorfile import Files, TensorInfo, recoded, require_readable
from sfumato.weights.formats import (
    FLOAT,
    FORMATS,
    SCALED,
    Format,
    Published,
    QuantizedTensor,
    ScaledTensor,
    Stored,
    Weight,
    empty,
    of_files,
    quantize,
    ranges_of_rows,
    tensors_of,
)
from sfumato.weights.names import Stack, TensorNames

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
"""Names of scales of activations, which stand beside a weight; scales of the cache may stand beside
none."""


_CHUNK = 1 << 21  # elements converted at a time: temporaries of some 8 MiB each


@dataclass(frozen=True)
class NarrowMatrix(Stored):
    """A matrix of a published checkpoint, as its file has it.

    codes: uint8 [rows, bytes], of INT4 and NVFP4 two in a byte, the first of two columns in the low
    four bits. scales: float32 [1 or rows, groups], finite, not negative; a group is
    `columns / groups` columns. Those of NVFP4 are `group_scales`, float8_e4m3fn, times `scale`, to
    a last place of float32; elsewhere these are not set.
    """

    format: Format
    codes: Tensor = field(repr=False)
    scales: Tensor = field(repr=False)
    group_scales: Tensor | None = field(default=None, repr=False)
    scale: float = 1.0
    form = "published"

    def __post_init__(self) -> None:
        rows, columns = self.shape
        assert self.scales.shape[0] in (1, rows) and columns % self.scales.shape[1] == 0

    @property
    def shape(self) -> tuple[int, ...]:
        rows, width = self.codes.shape
        return rows, width * _published(self.format).per_byte

    def __getitem__(self, index: int | slice, /) -> NarrowMatrix:
        assert isinstance(index, slice), "a single row is no matrix: take a range of one row"
        return self.moved(lambda each: each if len(each) == 1 else each[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._groups().mul_(self.scales[:, :, None]).flatten(1).to(dtype)

    def parts(self) -> Iterator[NarrowMatrix]:
        """The matrix in ranges of its rows, of some millions of elements each."""
        return (self[at] for at in ranges_of_rows(self.shape, _CHUNK))

    def loses_codes(self) -> bool:
        """Whether scales of zero make nothing of codes that are not zero. NVFP4 rounds the scales
        of groups that are small beside others to zero: there, whether all scales are zero."""
        if bool(self.scales.all()) or (self.group_scales is not None and bool(self.scales.any())):
            return False
        lost = ((part.scales == 0) & part._groups().any(dim=2) for part in self.parts())
        return any(bool(each.any()) for each in lost)

    def in_format(self, format: Format) -> Weight:
        """The matrix in floats; in blocks or codes of its own format, with codes and scales as they
        are; in the blocks of `nearest`; or quantized to others. Raises ValueError for values that
        blocks cannot hold."""
        if format.form == FLOAT:
            return self.dequantize()
        if format.form == SCALED:
            scales = self.scales.expand(len(self.codes), 1)[:, 0].contiguous()
            return ScaledTensor(self.codes.view(format.dtype), scales)
        published = _published(self.format)
        if format == self.format and published.unchanged is not None:
            scales = self.scales if self.group_scales is None else self.group_scales
            data = published.unchanged(self.codes, scales, self.scale)
        elif make := dict(published.nearest).get(format):
            data = make(self.codes, self.scales)
        else:
            return quantize(self.dequantize(), format)
        return QuantizedTensor(data, format, self.shape)

    def _groups(self) -> Tensor:
        """The numbers of the codes, float32 [rows, groups, columns of a group]."""
        numbers = _published(self.format).numbers(self.codes)
        return numbers.view(len(numbers), self.scales.shape[1], -1)


def nearest(format: Format, columns: int) -> Format | None:
    """The blocks that are nearest to a narrow format's values; None where rows do not divide into
    blocks."""
    known = (near for near, _ in _published(format).nearest)
    return next((near for near in known if near.divides(columns)), None)


def _published(format: Format) -> Published:
    assert format.published is not None, f"{format.name}: is no narrow format"
    return format.published


@dataclass(frozen=True)
class NarrowPiece(TensorInfo):
    """A matrix of a file: under which name it stands for all of its tensors, its shape in elements
    and its bytes; `tensors` are these by their role in the scheme."""

    scheme: Scheme
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return tuple(self.tensors.values())

    @property
    def fits_own_format(self) -> bool:
        """Whether blocks or codes of the matrix's format hold its rows: those of INT4 have scales
        of bfloat16."""
        is_exact = self.format != "INT4" or self.tensors["scale"].format == "BF16"
        return is_exact and FORMATS[self.format].divides(self.shape[-1])

    def read(self, files: Files) -> NarrowMatrix:
        """The matrix; its codes are a view of the mapped file. Raises CheckpointError, naming the
        tensor, for scales that are no numbers, negative or zero, and codes that are none."""
        codes = self._tensor(files, "codes").view(torch.uint8)
        if self.format == "FP8" and bool(((codes & 0x7F) == 0x7F).any()):
            raise self._fault("codes", "holds NaN")
        shape = list(self.shape)
        if "shape" in self.tensors and (noted := self._tensor(files, "shape").tolist()) != shape:
            raise self._fault("shape", f"says {quoted(noted)}, and the codes are {shape}")
        groups = shape[1] // (self.scheme.group_size or shape[1])
        scales = self._numbers(files, "scale").view(-1, groups)
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
        matrix = NarrowMatrix(FORMATS[self.format], codes, scales, *each)
        if matrix.loses_codes():
            raise self._fault("scale", "holds zeros for codes that are not zero")
        return matrix

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

    def _fault(self, role: str, problem: str) -> CheckpointError:
        return _fault(self.tensors[role], problem)


def group_pieces(infos: Iterable[TensorInfo], scheme: Scheme) -> list[TensorInfo]:
    """The tensors of a checkpoint, with one in place of those of each narrow matrix, whose name is
    `MODULE.weight`.

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
    grouped: list[TensorInfo] = []
    for module, leaves in modules.items():
        is_narrow = _is_narrow(leaves, scheme)
        grouped += [_piece(module, leaves, scheme)] if is_narrow else leaves.values()
    return grouped


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
    given = f"{module}.weight", shape, scheme.kind, nbytes, codes.file, codes.offset
    return NarrowPiece(*given, scheme, tensors)


def _shape(codes: TensorInfo, scheme: Scheme) -> tuple[int, int]:
    published = _published(FORMATS[scheme.kind])
    if codes.format != published.codes:
        expected = f"{scheme} has {published.codes}: mixed formats are not read"
        raise _fault(codes, f"is {codes.format}, where {expected}")
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _fault(codes, f"has the shape {list(codes.shape)}, and is no matrix")
    rows = codes.shape[0]
    return rows, codes.nbytes // rows * published.per_byte


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


_MOST = 4096  # matrices of a stack
_NUMBER = "(0|[1-9][0-9]{0,3})"


@dataclass(frozen=True)
class JoinedTensor(TensorInfo):
    """A tensor that is made of narrow matrices, or of plain ones that lie apart.

    Its format is that of blocks, of floats where rows do not divide into blocks, or of codes (see
    `unchanged`). pieces: in the order of the rows; shape: [..., columns].
    """

    pieces: tuple[TensorInfo, ...] = field(repr=False)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return tuple(dict.fromkeys(info for piece in self.pieces for info in piece.stored))

    @property
    def is_narrow(self) -> bool:
        """Whether its matrices are narrow ones."""
        return isinstance(self.pieces[0], NarrowPiece)

    def piece(self, number: int) -> JoinedTensor:
        """One of its matrices."""
        return _joined(self.name, self.pieces[number].shape, self.pieces[number : number + 1])

    def unchanged(self) -> JoinedTensor | None:
        """The same tensor, whose `read` gives FP8 or INT8 codes with a scale for each row, or INT4
        or NVFP4 in blocks of which a GPU's planes are made; None where it is none of these, where
        its rows do not divide into blocks, and where the scales of INT4 are not of bfloat16."""
        if not all(isinstance(each, NarrowPiece) and each.fits_own_format for each in self.pieces):
            return None
        return self.in_format(FORMATS[self.pieces[0].format])

    def read(self, files: Files) -> Weight:
        """All of it: one allocation, or one for codes and one for scales, which the pieces fill one
        after another. Raises CheckpointError naming a tensor that cannot be used."""
        format, start = FORMATS[self.format], 0
        out = empty(format, self.shape)
        rows = [each.flatten(0, len(self.shape) - 2) for each in tensors_of(out)]
        for part in self._parts(files, format):
            stop = start + part.shape[0]
            for target, source in zip(rows, tensors_of(part), strict=True):
                target[start:stop] = source
            start = stop
        return out

    def recoded(self, files: Files, format: str) -> Iterator[Tensor]:
        """The weight's bytes in a format, uint8, some rows at a time: from the values themselves,
        and not from the blocks that `read` makes of them. Raises ValueError as
        `tensorfile.recoded`."""
        for part in self._parts(files, FORMATS[format]):
            yield from recoded(part, format)

    def recoded_part(
        self, files: Files, format: str, number: int, part: int, parts: int
    ) -> Iterator[Tensor]:
        if len(self.pieces) != self.shape[0] * parts:
            return super().recoded_part(files, format, number, part, parts)
        return self.piece(number * parts + part).recoded(files, format)

    def _parts(self, files: Files, format: Format) -> Iterator[Weight]:
        """Ranges of the rows in a format; plain matrices as they are."""
        for piece in self.pieces:
            matrix = piece.read(files)
            if not isinstance(matrix, NarrowMatrix):
                yield matrix
                continue
            try:
                yield from (part.in_format(format) for part in matrix.parts())
            except ValueError as error:
                where = f"{piece.file}: tensor {quoted(piece.name)}"
                raise CheckpointError(f"{where}: as {format.name}: {error}") from error


@dataclass(frozen=True)
class MatrixOfStack(TensorInfo):
    """A matrix [rows, columns] of a tensor [n, rows, columns]."""

    source: TensorInfo = field(repr=False)
    number: int

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return self.source.stored

    def read(self, files: Files) -> Weight:
        return self.source.read(files)[self.number]


def join(
    tensors: Mapping[str, TensorInfo],
    names: TensorNames,
    config: Mapping[str, Any],
    scheme: Scheme,
) -> dict[str, TensorInfo]:
    """Canonical name → what reading gives, for all tensors.

    tensors: canonical name → where it is, narrow matrices as `group_pieces` gives them. Raises
    CheckpointError naming what a stack lacks or has too much, narrow matrices that `names` wants
    exact or that the scheme ignores, and a scheme without any.
    """
    narrow = {name: info for name, info in tensors.items() if isinstance(info, NarrowPiece)}
    if not narrow:
        raise CheckpointError(
            f"{scheme.where}: is {scheme}, but no tensor of the network is stored "
            "so; use weights and config of one checkpoint"
        )
    _check_ignored(narrow, names, scheme)
    for name, info in narrow.items():
        if name.endswith(names.exact):
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} is {scheme.kind}, and is read "
                "in full precision alone; use a checkpoint that keeps it so"
            )
    return {
        name: _joined(name, info.shape, (info,)) if isinstance(info, NarrowPiece) else info
        for name, info in stacked(tensors, names, config).items()
    }


def stacked(
    tensors: Mapping[str, TensorInfo], names: TensorNames, config: Mapping[str, Any]
) -> dict[str, TensorInfo]:
    """The same tensors, with one in place of the matrices, or the ranges of rows, of each stack.
    Raises CheckpointError naming what a stack lacks or has too much."""
    members, rest = _members(tensors, names.stacks)
    count = _count(config, names.stack_count)
    for name, (stack, matrices) in members.items():
        rest[name] = _stacked(name, stack, matrices, count)
    for stack in names.stacks:
        if stack.ranges:
            _join_ranges(rest, stack)
    return rest


def _join_ranges(tensors: dict[str, TensorInfo], stack: Stack) -> None:
    """Puts one tensor in place of those that have ranges of the rows of a stack."""
    first = "." + stack.ranges[0]
    for prefix in [name.removesuffix(first[1:]) for name in tensors if name.endswith(first)]:
        infos = [tensors.pop(prefix + own, None) for own in stack.ranges]
        present = [info for info in infos if info is not None]
        count = present[0].shape[0]
        lacks = len(present) < len(infos)
        if lacks or any(len(i.shape) != 3 or i.shape != present[0].shape for i in present):
            shown = ", ".join(f"{quoted(info.name)} {list(info.shape)}" for info in present)
            raise CheckpointError(
                f"{present[0].file}: {prefix}{stack.name} is made of {len(infos)} tensors of one "
                f"shape, and the file has {shown}; download the checkpoint again"
            )
        if count > _MOST:
            first_info = present[0]
            raise CheckpointError(
                f"{first_info.file}: {first_info.name}: {count} matrices; no real checkpoint"
            )
        pieces = tuple(_matrix(info, number) for number in range(count) for info in present)
        _check_alike(pieces, len(present))
        rows = sum(info.shape[1] for info in present)
        name = prefix + stack.name
        tensors[name] = _joined(name, (count, rows, present[0].shape[2]), pieces)


def _matrix(info: TensorInfo, number: int) -> MatrixOfStack:
    nbytes = info.nbytes // info.shape[0]
    given = info.name, info.shape[1:], info.format, nbytes, info.file, info.offset + number * nbytes
    return MatrixOfStack(*given, info, number)


def _check_ignored(narrow: Mapping[str, TensorInfo], names: TensorNames, scheme: Scheme) -> None:
    """Refuses narrow matrices that the checkpoint says it keeps, by any name they have."""
    spellings = (
        tuple(
            dict.fromkeys(
                text.removesuffix(".weight")
                for text in (info.name, names.transformers_name(name), names.tied_prefix + name)
            )
        )
        for name, info in narrow.items()
    )
    if module := scheme.ignored.matching(spellings):
        raise CheckpointError(
            f"{scheme.ignored.where}: has {quoted(module)}, which is stored as {scheme.kind}; use "
            "weights and config of one checkpoint"
        )


Members = dict[str, tuple[Stack, dict[tuple[int, int], TensorInfo]]]
"""Stack → its rule, and (number, part) → place of a matrix."""


def _members(
    tensors: Mapping[str, TensorInfo], stacks: tuple[Stack, ...]
) -> tuple[Members, dict[str, TensorInfo]]:
    """The matrices of stacks, and the other tensors."""
    members: Members = {}
    rest = {}
    rules = [
        (re.compile(r"(.*\.)?" + re.escape(part).replace(r"\{\}", _NUMBER)), stack, place)
        for stack in stacks
        for place, part in enumerate(stack.parts)
    ]
    for name, info in tensors.items():
        for pattern, stack, place in rules:
            if match := pattern.fullmatch(name):
                _, stacked = members.setdefault((match[1] or "") + stack.name, (stack, {}))
                stacked[int(match[2]), place] = info
                break
        else:
            rest[name] = info
    return members, rest


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """How many matrices a stack has by config.json, or None where it does not say."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if type(value) is int and 0 < value <= _MOST else None


def _stacked(
    name: str, stack: Stack, stacked: Mapping[tuple[int, int], TensorInfo], count: int | None
) -> JoinedTensor:
    file = next(iter(stacked.values())).file
    count = count or 1 + max(number for number, _ in stacked)
    if count > _MOST:
        raise CheckpointError(f"{file}: {name}: {count} matrices; that is no real checkpoint")
    places = [(number, part) for number in range(count) for part in range(len(stack.parts))]
    prefix = name.removesuffix(stack.name)
    missing = [prefix + stack.parts[p].format(n) for n, p in places if (n, p) not in stacked]
    leftover = [info.name for place, info in stacked.items() if place[0] >= count]
    if missing or leftover:
        faults = filter(None, (listed("missing", missing), listed("left over", leftover)))
        raise CheckpointError(
            f"{file}: {name} is made of {count} matrices each of {len(stack.parts)} kinds: "
            f"{'; '.join(faults)}. Download the checkpoint again"
        )
    infos = tuple(stacked[place] for place in places)
    _check_alike(infos, len(stack.parts))
    rows = sum(info.shape[0] for info in infos[: len(stack.parts)])
    return _joined(name, (count, rows, infos[0].shape[1]), infos)


def _check_alike(infos: Sequence[TensorInfo], parts: int) -> None:
    """Refuses a matrix of a stack of `parts` kinds that differs in columns or format from the first
    one, and one, or a scale of it, that differs in shape or format from that of the first matrix of
    its kind."""

    def differs(info: TensorInfo, other: TensorInfo) -> CheckpointError:
        return CheckpointError(
            f"{info.file}: tensor {quoted(info.name)} is {info.format} {list(info.shape)}, beside "
            f"{quoted(other.name)}, which is {other.format} {list(other.shape)}: mixed stacks are "
            "not read; use a checkpoint with one format"
        )

    first = infos[0]
    for index, info in enumerate(infos):
        model = infos[index % parts]
        columns = len(info.shape) == 2 and info.shape[1] == first.shape[1]
        if not columns or info.format != first.format:
            raise differs(info, first)
        for each, other in zip((info, *info.stored), (model, *model.stored), strict=True):
            if (each.shape, each.format) != (other.shape, other.format):
                raise differs(each, other)


def _joined(name: str, shape: tuple[int, ...], pieces: tuple[TensorInfo, ...]) -> JoinedTensor:
    first = pieces[0]
    if isinstance(first, NarrowPiece):
        format = nearest(FORMATS[first.format], shape[-1]) or FORMATS["F32"]
    else:
        require_readable(first)
        format = FORMATS[first.format]
    given = name, shape, format.name, format.nbytes(shape), first.file, first.offset
    return JoinedTensor(*given, pieces)
