"""Adapters on their way into other files: added to the weights of their base, or as a file of the
other kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sfumato.convert import HF_TARGETS, Converted, recipe_of, write_checkpoint
from sfumato.convert.files import Progress, check_checkpoint_folder
from sfumato.model.adapter_files import (
    CONFIG,
    AdapterFile,
    read_adapter,
    write_gguf_adapter,
    write_peft,
)
from sfumato.model.adapters import LowRank
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.quantization import TARGETS, QuantRecipe, formats
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.files.atomic_write import check_writable
from sfumato.weights.files.gguf import read_gguf
from sfumato.weights.files.tensorfile import Files, TensorInfo, recoded
from sfumato.weights.formats import FORMATS, Weight, is_float, quantize, ranges_of_rows
from sfumato.weights.joined import JoinedTensor

_CHUNK = 1 << 21  # elements changed at a time
_SAMPLED = 32  # rows of each matrix of which the rounding is measured
OWN = "the base's formats"


@dataclass(frozen=True)
class ChangedTensor(TensorInfo):
    """A tensor with the change of an adapter: [..., out, in], float32 when it is read."""

    source: TensorInfo = field(repr=False)
    change: LowRank = field(repr=False)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return self.source.stored

    def read(self, files: Files) -> Tensor:
        return torch.cat(list(self.rows(files))).view(self.shape)

    def recoded(self, files: Files, format: str) -> Iterator[Tensor]:
        for part in self.rows(files):
            yield from recoded(part, format)

    def recoded_part(
        self, files: Files, format: str, number: int, part: int, parts: int
    ) -> Iterator[Tensor]:
        count = self.shape[-2] // parts
        first = number * self.shape[-2] + part * count
        for changed in self.rows(files, first, first + count):
            yield from recoded(changed, format)

    def rows(self, files: Files, first: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """The rows of all matrices from one to before another, float32 [n, in], some at a time."""
        end, start = math.prod(self.shape[:-1]) if end is None else end, 0
        for count, read in _matrices(self.source):
            begin, stop = max(first - start, 0), min(end - start, count)
            if begin < stop:
                matrix = read(files)[begin:stop]
                for at in ranges_of_rows((stop - begin, self.shape[-1]), _CHUNK):
                    part = matrix[at]
                    plain = part if isinstance(part, Tensor) else part.dequantize()
                    yield self.added(start + begin + at.start, len(plain)).add_(plain)
            start += count

    def added(self, first: int, count: int) -> Tensor:
        """The sum of the changes of rows of one matrix, float32 [count, in]."""
        up, down = self.change.up.flatten(0, -2), self.change.down
        if down.ndim == 3:
            down = down[first // self.shape[-2]]
        return up[first : first + count] @ down * self.change.scale


def _matrices(info: TensorInfo) -> list[tuple[int, Callable[[Files], Weight]]]:
    """The numbers of rows of the matrices that a tensor is made of, and what reads each."""
    if isinstance(info, JoinedTensor):
        return [(piece.shape[0], piece.read) for piece in info.pieces]
    if len(info.shape) == 2:
        return [(info.shape[0], info.read)]

    def reader(number: int) -> Callable[[Files], Weight]:
        return lambda files: info.read(files)[number]

    return [(info.shape[1], reader(number)) for number in range(info.shape[0])]


def merge(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    to: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint whose weights have an adapter's changes in them, computed in float32: a
    GGUF file (`out` ends in .gguf) or a folder of safetensors.

    to: as `convert` takes it; None: each tensor in the format that it has in the base, and for a
    folder that of most of its matrices, or "bf16" for those of blocks. force: replaces what is
    there. Raises CheckpointError, ConfigError, ValueError or OSError, naming what cannot be used or
    written; `out` is then as it was.
    """
    out = Path(out)
    check_writable(out, force, check_checkpoint_folder)
    checkpoint = open_checkpoint(base)
    config = config_of(checkpoint)
    shapes = expected_shapes(config)
    checkpoint.check_tensors(shapes)
    changed = _changed(checkpoint, read_adapter(adapter, family_of(checkpoint), config))
    own = _own_formats(checkpoint, shapes)
    if to is None and out.suffix.lower() == ".gguf":
        to, chosen, recipe = OWN, own, _recipe_like(checkpoint, own)
    else:
        to, recipe = recipe_of(out, to or _float_like(checkpoint, own))
        is_file = out.suffix.lower() == ".gguf"
        chosen = formats(shapes, recipe) if is_file else dict.fromkeys(shapes, recipe.base)
    _check_written(changed, chosen)
    merged = replace(checkpoint, tensors={**checkpoint.tensors, **changed})
    lost = _rounding(merged.files, changed, chosen)
    done = write_checkpoint(merged, out, to, recipe, chosen, force, progress)
    return replace(done, notes=(*done.notes, *lost))


def _changed(checkpoint: Checkpoint, adapter: AdapterFile) -> dict[str, ChangedTensor]:
    changed = {}
    for path, change in adapter.changes.items():
        name = path if change.up.ndim == 3 else f"{path}.weight"
        info = checkpoint.tensors[name]
        given = info.name, info.shape, info.format, info.nbytes, info.file, info.offset
        changed[name] = ChangedTensor(*given, info, change)
    return changed


def _own_formats(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The format that each tensor has, as a GGUF file has it: vectors and routers of safetensors
    become F32 there."""
    own = {name: checkpoint.tensors[name].format for name in shapes}
    if checkpoint.kind == "gguf":
        return own
    plain = formats(shapes, TARGETS["bf16"])
    return {name: "F32" if plain[name] == "F32" else format for name, format in own.items()}


def _common(checkpoint: Checkpoint, own: Mapping[str, str]) -> str:
    """The format of most matrices."""
    matrices = [own[name] for name in own if len(checkpoint.tensors[name].shape) > 1]
    return Counter(matrices).most_common(1)[0][0]


def _recipe_like(checkpoint: Checkpoint, own: Mapping[str, str]) -> QuantRecipe:
    """A recipe with GGUF's number for a file of these formats."""
    base = _common(checkpoint, own)
    numbers = {each.base: each.file_type for each in TARGETS.values() if not each.sensitive}
    return QuantRecipe(base, checkpoint.metadata.get("general.file_type", numbers.get(base, 0)))


def _float_like(checkpoint: Checkpoint, own: Mapping[str, str]) -> str:
    common = _common(checkpoint, own).lower()
    return common if common in HF_TARGETS else "bf16"


def _check_written(changed: Mapping[str, ChangedTensor], chosen: Mapping[str, str]) -> None:
    """Raises ValueError where a changed tensor would get blocks that are read and not made."""
    for name in changed:
        if FORMATS[chosen[name]].encode is None:
            raise ValueError(
                f"{changed[name].file}: {changed[name].name}: blocks of {chosen[name]} are read "
                "and not made here; choose another format for the result (--to)"
            )


def _rounding(
    files: Files, changed: Mapping[str, ChangedTensor], chosen: Mapping[str, str]
) -> list[str]:
    """The error of formats with fewer bits beside the change, of some rows of changed tensors."""
    moved = error = 0.0
    rounded = Counter[str]()
    for name, tensor in changed.items():
        format = FORMATS[chosen[name]]
        count = min(_SAMPLED, tensor.shape[-2])
        exact = torch.cat(list(tensor.rows(files, 0, count)))
        if is_float(format.name):
            written = exact.to(format.dtype).float()
        else:
            written = quantize(exact, format).dequantize()
        rounded[format.name] += format.name != "F32"
        error += float((written - exact).square().sum())
        moved += float(tensor.added(0, count).square().sum())
    if not +rounded or error < moved / 100:
        return []
    share = math.sqrt(error / moved) if moved else math.inf
    return [
        f"writing {', '.join(+rounded)} rounds the changed weights by {share:.2g} times what the "
        "adapter changes them (root mean squares, of some rows); --to f32, or serving the adapter "
        "beside the base, keeps its change"
    ]


def holds_adapter(path: str | Path) -> bool:
    """Whether an adapter is there, and no checkpoint."""
    path = Path(path)
    if path.is_dir():
        return (path / CONFIG).is_file()
    is_gguf = path.suffix.lower() == ".gguf" and path.is_file()
    return is_gguf and read_gguf(path).metadata.get("general.type") == "adapter"


def convert_adapter(
    source: str | Path, out: str | Path, base: str | Path, force: bool = False
) -> AdapterFile:
    """Writes an adapter as a GGUF file (`out` ends in .gguf) or as a folder of PEFT. base: the
    checkpoint that it is for, of which the config alone is read. Raises as `merge`."""
    checkpoint, out = open_checkpoint(base), Path(out)
    network = family_of(checkpoint), config_of(checkpoint)
    adapter = read_adapter(source, *network)
    write = write_gguf_adapter if out.suffix.lower() == ".gguf" else write_peft
    write(out, adapter, *network, force)
    return adapter
