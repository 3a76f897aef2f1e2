"""Narrow matrices under canonical names; matrices that were saved one by one become one stack.

Names come from the family's table (`TensorNames`): which tensor a stack has, of which matrices it
is made, and where config.json counts them. Knows no shapes but those of the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sfumato.weights.errors import CheckpointError, listed, quoted
from sfumato.weights.files.narrow import Scheme
from sfumato.weights.files.narrow_pieces import Files, NarrowMatrix, NarrowPiece, nearest
from sfumato.weights.files.tensorfile import TensorInfo, recoded
from sfumato.weights.formats import (
    BLOCKS,
    FLOAT,
    FORMATS,
    SCALED,
    Format,
    QuantizedTensor,
    ScaledTensor,
    Stored,
    weight_of,
)
from sfumato.weights.names import Stack, TensorNames

_MOST = 4096  # matrices of a stack
_NUMBER = "(0|[1-9][0-9]{0,3})"


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that is made of narrow matrices, or of plain ones that lie apart.

    info: what `read` returns; its format is that of blocks, of floats where rows do not divide
    into blocks, or of codes (see `of_codes`). pieces: in the order of the rows; shape:
    [..., columns].
    """

    info: TensorInfo
    pieces: tuple[NarrowPiece | TensorInfo, ...] = field(repr=False)

    @property
    def kind(self) -> str:
        """FP8 or INT8, where `read` can give the codes themselves, with a scale for each row; else
        empty."""
        first = self.pieces[0]
        if not isinstance(first, NarrowPiece) or first.scheme.group_size:
            return ""
        kind = first.scheme.kind
        return kind if FORMATS[kind].form == SCALED else ""

    @property
    def _narrow(self) -> Format | None:
        """The format of the pieces, where it is a narrow one."""
        first = self.pieces[0]
        return FORMATS[first.scheme.kind] if isinstance(first, NarrowPiece) else None

    def of_codes(self) -> JoinedTensor:
        """The same tensor, whose `read` gives codes. Only where it has a `kind`."""
        return self._as(FORMATS[self.kind])

    def of_plane_blocks(self) -> JoinedTensor | None:
        """The same tensor, whose `read` gives INT4 or NVFP4 as it is, in blocks of which a GPU's
        planes are made; None where it is neither, where its rows do not divide into these, and
        where the scales of INT4 are not of bfloat16."""
        format = self._narrow
        if format is None or format.form != BLOCKS or not format.divides(self.info.shape[-1]):
            return None
        if format.name == "INT4" and self._scale_formats() != {"BF16"}:
            return None
        return self._as(format)

    def _as(self, format: Format) -> JoinedTensor:
        nbytes = format.nbytes(self.info.shape)
        return replace(self, info=replace(self.info, format=format.name, nbytes=nbytes))

    def _scale_formats(self) -> set[str]:
        pieces = (piece for piece in self.pieces if isinstance(piece, NarrowPiece))
        return {piece.tensors["scale"].format for piece in pieces}

    def read(self, files: Files) -> Tensor | Stored:
        """All of it: one allocation, or one for codes and one for scales, which the pieces fill one
        after another. Raises CheckpointError naming a tensor that cannot be used."""
        format, shape = FORMATS[self.info.format], self.info.shape
        if format.form == SCALED:
            return self._codes(files)
        out = torch.empty(format.nbytes(shape), dtype=torch.uint8)
        rows, start = out.view(math.prod(shape[:-1]), -1).view(format.dtype), 0
        for part in self._parts(files):
            rows[start : start + len(part)] = part
            start += len(part)
        return weight_of(out, format, shape)

    def _codes(self, files: Files) -> ScaledTensor:
        shape = self.info.shape
        codes = torch.empty(shape, dtype=FORMATS[self.info.format].dtype)
        scales = torch.empty(shape[:-1])
        rows, each, start = codes.view(-1, shape[-1]), scales.view(-1), 0
        for piece in self.pieces:
            for part in _matrices(piece, files):
                assert isinstance(part, NarrowMatrix)
                stop = start + part.shape[0]
                rows[start:stop] = part.codes
                each[start:stop] = part.scales[:, 0]
                start = stop
        return ScaledTensor(codes, scales)

    def _parts(self, files: Files) -> Iterator[Tensor]:
        """Rows of `read`: blocks as bytes, or floats."""
        format = FORMATS[self.info.format]
        for piece in self.pieces:
            for part in _matrices(piece, files):
                if isinstance(part, Tensor):
                    yield part
                elif format.form == FLOAT:
                    yield part.values()
                elif format == part.format:
                    yield part.unchanged().data
                else:
                    yield _or_named(piece, part.blocks).data

    def recoded(self, files: Files, format: str) -> Iterator[Tensor]:
        """Its bytes in a format, uint8, some rows at a time: from the values themselves, and not
        from the blocks that `read` makes of them. Raises ValueError as `tensorfile.recoded`."""
        if format == self.info.format and FORMATS[format].form == BLOCKS:
            yield from (part.view(-1) for part in self._parts(files))
            return
        for piece in self.pieces:
            for part in _matrices(piece, files):
                yield from recoded(part if isinstance(part, Tensor) else part.values(), format)

    def prefetch(self, files: Files) -> None:
        """Lets the system begin to read the pieces from disk."""
        for piece in self.pieces:
            if isinstance(piece, TensorInfo):
                files[piece.file].prefetch(piece.name)
            else:
                piece.prefetch(files)


def _matrices(piece: NarrowPiece | TensorInfo, files: Files) -> Iterator[Tensor | NarrowMatrix]:
    if isinstance(piece, NarrowPiece):
        yield from piece.read(files).parts()
        return
    value = files[piece.file].read(piece.name)
    assert isinstance(value, Tensor)
    yield value.view(-1, piece.shape[-1])


def _or_named(
    piece: NarrowPiece | TensorInfo, make: Callable[[], QuantizedTensor]
) -> QuantizedTensor:
    try:
        return make()
    except ValueError as error:
        info = piece.info if isinstance(piece, NarrowPiece) else piece
        raise CheckpointError(f"{info.file}: tensor {quoted(info.name)}: {error}") from error


def join(
    tensors: Mapping[str, TensorInfo],
    pieces: Mapping[str, NarrowPiece],
    names: TensorNames,
    config: Mapping[str, Any],
    scheme: Scheme,
) -> tuple[dict[str, TensorInfo], dict[str, JoinedTensor]]:
    """Canonical name → what reading gives, for all tensors, and the joined ones of these.

    tensors: canonical name → where it is, narrow matrices by the info of their piece; pieces: by
    the file's names. Raises CheckpointError naming what a stack lacks or has too much, narrow
    matrices that `names` wants exact or that the scheme ignores, and a scheme without any.
    """
    narrow = {name: info for name, info in tensors.items() if info.name in pieces}
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
    members, rest = _members(tensors, names.stacks)
    joined = {
        name: _joined(name, tensors[name].shape, (pieces[tensors[name].name],))
        for name in rest
        if tensors[name].name in pieces
    }
    count = _count(config, names.stack_count)
    for name, (stack, stacked) in members.items():
        joined[name] = _stacked(name, stack, stacked, count, pieces)
    plain = {name: tensors[name] for name in rest if name not in joined}
    return plain | {name: tensor.info for name, tensor in joined.items()}, joined


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


Members = dict[str, tuple[Stack, dict[tuple[int, int], tuple[str, TensorInfo]]]]
"""Stack → its rule, and (number, part) → canonical name and place of a matrix."""


def _members(
    tensors: Mapping[str, TensorInfo], stacks: tuple[Stack, ...]
) -> tuple[Members, list[str]]:
    members: Members = {}
    rest = []
    rules = [
        (re.compile(r"(.*\.)?" + re.escape(part).replace(r"\{\}", _NUMBER)), stack, place)
        for stack in stacks
        for place, part in enumerate(stack.parts)
    ]
    for name, info in tensors.items():
        for pattern, stack, place in rules:
            if match := pattern.fullmatch(name):
                _, stacked = members.setdefault((match[1] or "") + stack.name, (stack, {}))
                stacked[int(match[2]), place] = name, info
                break
        else:
            rest.append(name)
    return members, rest


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """How many matrices a stack has by config.json, or None where it does not say."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if type(value) is int and 0 < value <= _MOST else None


def _stacked(
    name: str,
    stack: Stack,
    stacked: Mapping[tuple[int, int], tuple[str, TensorInfo]],
    count: int | None,
    pieces: Mapping[str, NarrowPiece],
) -> JoinedTensor:
    file = next(iter(stacked.values()))[1].file
    count = count or 1 + max(number for number, _ in stacked)
    if count > _MOST:
        raise CheckpointError(f"{file}: {name}: {count} matrices; that is no real checkpoint")
    places = [(number, part) for number in range(count) for part in range(len(stack.parts))]
    prefix = name.removesuffix(stack.name)
    missing = [prefix + stack.parts[p].format(n) for n, p in places if (n, p) not in stacked]
    leftover = [info.name for place, (_, info) in stacked.items() if place[0] >= count]
    if missing or leftover:
        faults = filter(None, (listed("missing", missing), listed("left over", leftover)))
        raise CheckpointError(
            f"{file}: {name} is made of {count} matrices each of {len(stack.parts)} kinds: "
            f"{'; '.join(faults)}. Download the checkpoint again"
        )
    infos = [stacked[place][1] for place in places]
    for info in infos:
        sizes = [other.shape for other in infos[: len(stack.parts)]]
        if len(info.shape) != 2 or info.shape[1] != infos[0].shape[1]:
            raise _differs(info, infos[0])
    _check_alike(infos, len(stack.parts), pieces)
    rows = sum(size[0] for size in sizes)
    shape = (count, rows, infos[0].shape[1])
    return _joined(name, shape, tuple(pieces.get(info.name, info) for info in infos))


def _check_alike(
    infos: Sequence[TensorInfo], parts: int, pieces: Mapping[str, NarrowPiece]
) -> None:
    """Refuses a matrix of a stack of `parts` kinds, and a scale of it, that differs in shape or
    format from that of the first matrix of its kind."""
    for index, info in enumerate(infos):
        model = infos[index % parts]
        if (info.shape, info.format) != (model.shape, model.format):
            raise _differs(info, model)
        if info.format != infos[0].format:
            raise _differs(info, infos[0])
        piece, other = pieces.get(info.name), pieces.get(model.name)
        if piece is None or other is None:
            continue
        for role, tensor in piece.tensors.items():
            theirs = other.tensors[role]
            if (tensor.shape, tensor.format) != (theirs.shape, theirs.format):
                raise _differs(tensor, theirs)


def _differs(info: TensorInfo, other: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {quoted(info.name)} is {info.format} {list(info.shape)}, beside "
        f"{quoted(other.name)}, which is {other.format} {list(other.shape)}: mixed stacks are not "
        "read; use a checkpoint with one format"
    )


def _joined(
    name: str, shape: tuple[int, ...], pieces: tuple[NarrowPiece | TensorInfo, ...]
) -> JoinedTensor:
    first = pieces[0]
    if isinstance(first, NarrowPiece):
        format = nearest(FORMATS[first.scheme.kind], shape[-1]) or FORMATS["F32"]
        info = first.info
    else:
        format, info = FORMATS[first.format], first
    info = replace(info, name=name, shape=shape, format=format.name, nbytes=format.nbytes(shape))
    return JoinedTensor(info, pieces)
