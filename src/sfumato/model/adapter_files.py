"""Adapters as files: folders of PEFT, and GGUF files as llama.cpp has them.

A change has two factors, A [rank, in] and B [out, rank]; a file names them after the module or the
tensor that they change, and a family's table of names says which of the network's it is. Files are
hostile: sizes are held against the config before anything of that size is made.

PEFT (https://github.com/huggingface/peft, tuners/lora) has the factors of experts as matrices,
[experts · rank, in] and [out, rank · experts]; llama.cpp (src/llama-adapter.cpp) as stacks,
[experts, rank, in] and [experts, out, rank], and scales by `adapter.lora.alpha / rank`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.model.adapters import Adapter, LowRank
from sfumato.model.families import Family
from sfumato.model.families.family import FieldReader, shown
from sfumato.model.loading import expected_shapes
from sfumato.model.model_config import ConfigError, ModelConfig
from sfumato.options.limits import MOST_ALPHA, MOST_RANK
from sfumato.weights.errors import CheckpointError, first_of, quoted
from sfumato.weights.files.atomic_write import atomic_path
from sfumato.weights.files.gguf import layout, read_gguf, write_gguf
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.safetensors import read_safetensors, write_file
from sfumato.weights.files.tensorfile import TensorFile, TensorInfo, TensorStream

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Fields of adapter_config.json with which an adapter is more or other than low-rank sums.
_REFUSED = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "trainable_token_indices"),
    *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"),
    *("kasa_config", "monteclora_config", "velora_config"),
)
# Fields that are read, and fields that count for training alone.
_KNOWN = (
    *("peft_type", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "init_lora_weights", "base_model_name_or_path", "peft_version"),
    *("auto_mapping", "revision", "task_type", "inference_mode", "lora_dropout", "corda_config"),
    *("qalora_group_size", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("lora_ga_config", "runtime_config", "ensure_weight_tying", "unsloth_fixed"),
)
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values of `init_lora_weights` with which PEFT changes the base's weights too."""

_PEFT_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_GGUF_FACTOR = re.compile(r"(.+)\.lora_([ab])")
_LEVELS = re.compile(r"(\.base_layer)+$")  # of parameters of one module, each wrapped in the next
_LITERAL = re.compile(r"\^?[\w.-]+")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter, and what its file says of it. rank: that of most changes; alpha: the scale of
    these times their rank; base: the model that it is for, as the file names it, or ""."""

    changes: Adapter = field(repr=False)
    rank: int
    alpha: float
    base: str = ""


@dataclass(frozen=True)
class _Place:
    """What a pair of factors in a file changes: `name` there, which is the weight at `path`, or a
    range of its rows, of the shape [out, in] or [experts, out, in]. A file has `count` pairs for
    that weight, of which this is the one of a number."""

    name: str
    path: str
    shape: tuple[int, ...]
    number: int = 0
    count: int = 1

    @property
    def target(self) -> str:
        """What PEFT's config calls it: a linear module, or a parameter of another module."""
        if len(self.shape) == 3:
            return f"{self.name}.{self.path.rpartition('.')[2]}"
        return self.name if self.name.endswith("proj") else f"{self.name}.weight"


Factors = tuple[TensorInfo, TensorInfo]


def adaptable(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that an adapter can change, by its path in the network."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in expected_shapes(config).items()
        if len(shape) > 1 and name.startswith(("layers.", "self_conditioning."))
    }


def read_adapter(path: str | Path, family: Family, config: ModelConfig) -> AdapterFile:
    """The adapter in a folder of PEFT or a GGUF file, in float32. Raises CheckpointError or
    ConfigError, naming the file and the field or tensor, for what is no adapter of such a network,
    and for options that would compute something else."""
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        return _read_gguf(path, family, config)
    folder = path.parent if path.name in (CONFIG, WEIGHTS) else path
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{path}: is no adapter; give a folder with {CONFIG} and {WEIGHTS}, or a GGUF file"
        )
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder}: adapter_model.bin is a pickle, which can run code when it is read, and is "
            "refused; save the adapter as safetensors"
        )
    return _read_peft(folder, family, config)


def write_peft(
    folder: str | Path,
    adapter: AdapterFile,
    family: Family,
    config: ModelConfig,
    force: bool = False,
) -> None:
    """Writes a folder that PEFT loads, whole or not at all, with factors in the dtypes that they
    have. What `transformers` has in two stacks is written for both.

    force: replaces a folder that holds an adapter and nothing else. Raises ValueError or OSError.
    """
    tensors: list[TensorStream] = []
    modules, parameters = list[str](), list[str]()
    ranks, alphas = dict[str, int](), dict[str, float]()
    for name, places in _peft_places(family, config).items():
        changed = [place for place in places if place.path in adapter.changes]
        for level, place in enumerate(reversed(changed)):  # the first parameter is wrapped first
            change, target = adapter.changes[place.path], place.target
            (modules if target == name else parameters).append(target)
            rank = change.down.shape[-2]
            if rank != adapter.rank:
                ranks[target] = rank
            if not math.isclose(change.scale * rank, adapter.alpha, rel_tol=1e-6):
                alphas[target] = change.scale * rank
            up = change.up if change.up.ndim == 2 else change.up.permute(1, 2, 0).flatten(1)
            prefix = f"base_model.model.{name}{'.base_layer' * level}.lora_"
            tensors.append(_stream(f"{prefix}A.weight", change.down.flatten(0, -2)))
            tensors.append(_stream(f"{prefix}B.weight", up))
    assert adapter.changes.keys() <= adaptable(config).keys(), "changes of no weight"
    values = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    size = sum(tensor.nbytes for tensor in tensors)
    with atomic_path(Path(folder), size, force, _check_adapter_folder) as part:
        part.mkdir()
        (part / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        with (part / WEIGHTS).open("xb") as stream:
            write_file(stream, tensors)


def write_gguf_adapter(
    path: str | Path,
    adapter: AdapterFile,
    family: Family,
    config: ModelConfig,
    force: bool = False,
) -> None:
    """Writes a GGUF file that llama.cpp loads beside a model of this architecture, whole or not at
    all; factors are in the dtypes that they have. Raises ValueError or OSError."""
    metadata = {
        "general.architecture": family.architecture,
        "general.type": "adapter",
        "general.name": Path(path).stem,
        "general.base_model.count": 1,
        "general.base_model.0.name": adapter.base,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(adapter.alpha),
    }
    tensors: list[TensorStream] = []
    for name, place in _gguf_places(family, config).items():
        if (change := adapter.changes.get(place.path)) is None:
            continue
        ratio = change.scale * change.down.shape[-2] / adapter.alpha
        up = change.up if math.isclose(ratio, 1, rel_tol=1e-6) else change.up * ratio
        rows = place.shape[-2]
        own = up.narrow(-2, place.number * rows, rows)
        tensors += [_stream(f"{name}.lora_a", change.down), _stream(f"{name}.lora_b", own)]
    assert adapter.changes.keys() <= adaptable(config).keys(), "changes of no weight"
    size = len(layout(metadata, ())[0]) + sum(tensor.nbytes for tensor in tensors)
    with atomic_path(Path(path), size, force) as part, part.open("xb") as stream:
        write_gguf(stream, metadata, tensors)


def _check_adapter_folder(path: Path) -> None:
    """Raises ValueError for a folder that is more or other than an adapter."""
    names = {item.name for item in path.iterdir()}
    if CONFIG not in names or not names <= {CONFIG, WEIGHTS, "README.md"}:
        raise ValueError(f"{path}: holds more than an adapter, or none; name another folder")


def _stream(name: str, factor: Tensor) -> TensorStream:
    formats = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return TensorStream.of(name, factor.detach().cpu().contiguous(), formats[factor.dtype])


def _tensor_name(path: str, shape: tuple[int, ...]) -> str:
    return path if len(shape) == 3 else f"{path}.weight"


def _peft_places(family: Family, config: ModelConfig) -> dict[str, list[_Place]]:
    """What a PEFT file can change, by the module's name in `transformers`: the weight of one, or
    those of experts, which are parameters of one module, in their order there."""
    names, places = family.tensor_names, dict[str, list[_Place]]()
    for path, shape in adaptable(config).items():
        tensor = _tensor_name(path, shape)
        own = names.transformers_name(tensor), names.tied_name(tensor)
        modules = [each.rpartition(".")[0] for each in own if each is not None]
        for number, module in enumerate(modules):
            place = _Place(module, path, shape, number, len(modules))
            places.setdefault(module, []).append(place)
    return places


def _gguf_places(family: Family, config: ModelConfig) -> dict[str, _Place]:
    """What a GGUF file can change, by the name of the tensor there; what is one weight here may be
    several tensors, each with a range of its rows."""
    names, places = family.tensor_names, dict[str, _Place]()
    for path, shape in adaptable(config).items():
        own, stack = [_tensor_name(path, shape)], names.stack_of(path)
        if stack is not None and stack.ranges:
            own = [path.removesuffix(stack.name) + each for each in stack.ranges]
        part = *shape[:-2], shape[-2] // len(own), shape[-1]
        for number, tensor in enumerate(own):
            name = names.gguf_name(tensor)
            places[name] = _Place(name, path, part, number, len(own))
    return places


def _read_gguf(path: Path, family: Family, config: ModelConfig) -> AdapterFile:
    file = read_gguf(path)
    for key, value in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", family.architecture),
    ):
        if (given := file.metadata.get(key)) != value:
            raise CheckpointError(
                f"{path}: {key}: is {shown(given)}, and {value!r} in adapters for {family.title}"
            )
    # An alpha of 0, or none, means a scale of 1 in llama.cpp.
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not 0 <= alpha < MOST_ALPHA:
        raise CheckpointError(f"{path}: adapter.lora.alpha: is {quoted(alpha)}, which is no scale")
    places = _gguf_places(family, config)
    pairs: dict[_Place, LowRank] = {}
    for name, factors in _pairs(file, _GGUF_FACTOR).items():
        if (place := places.get(name)) is None:
            raise _unknown(factors[0], family)
        *stack, out, width = place.shape
        rank = _rank(factors[0], math.prod(factors[0].shape[-2:-1]))
        down, up = _read(file, factors, (*stack, rank, width), (*stack, out, rank))
        pairs[place] = LowRank(down, up, alpha / rank if alpha else 1.0)
    complete = _by_weight(path, pairs, places.values(), "these are one weight here")
    changes = {name: _joined(parts) for name, parts in complete.items()}
    rank = max(change.down.shape[-2] for change in changes.values())
    base = file.metadata.get("general.base_model.0.name", "")
    return AdapterFile(changes, rank, alpha or float(rank), base if isinstance(base, str) else "")


def _joined(parts: Sequence[LowRank]) -> LowRank:
    """The change of a weight of which each part changes a range of rows, one after another."""
    first = parts[0]
    if all(torch.equal(part.down, first.down) for part in parts):
        return LowRank(first.down, torch.cat([part.up for part in parts], -2), first.scale)
    down = torch.cat([part.down for part in parts], -2)
    rows, row, column = sum(part.up.shape[-2] for part in parts), 0, 0
    up = torch.zeros(*first.up.shape[:-2], rows, down.shape[-2])
    for part in parts:
        height, width = part.up.shape[-2:]
        up[..., row : row + height, column : column + width] = part.up * part.scale
        row, column = row + height, column + width
    return LowRank(down, up, 1.0)


def _read_peft(folder: Path, family: Family, config: ModelConfig) -> AdapterFile:
    path = folder / CONFIG
    read = FieldReader(str(path), read_object(path))
    _check_options(read)
    usual, alpha = read.integer("r"), read.number("lora_alpha", below=MOST_ALPHA)
    root = math.sqrt if read.flag("use_rslora", False) else float
    rank_of, alpha_of = _pattern(read, "rank_pattern"), _pattern(read, "alpha_pattern")
    check_target = _target_check(read)
    file, places = read_safetensors(folder / WEIGHTS), _peft_places(family, config)
    pairs: dict[_Place, LowRank] = {}
    for name, factors in _pairs(file, _PEFT_FACTOR).items():
        place = _place_of(name, factors, places, family)
        check_target(place)
        if place in pairs:
            raise _fault(
                factors[0], "changes the same weight as another tensor; remove one of them"
            )
        *stack, out, width = place.shape
        count = math.prod(stack)
        rows = math.prod(factors[0].shape[:1])
        rank = _rank(factors[0], rows // count)
        if rank != (wanted := rank_of(place.target) or usual):
            raise _fault(factors[0], f"has the rank {rank}, and {CONFIG} says {wanted:g}")
        down, up = _read(file, factors, (rank * count, width), (out, rank * count))
        if stack:
            down = down.view(count, rank, width)
            up = up.view(out, rank, count).permute(2, 0, 1).contiguous()
        pairs[place] = LowRank(down, up, (alpha_of(place.target) or alpha) / root(rank))
    why = "both are one weight here, for both phases; tune with the two stacks tied"
    every = (place for own in places.values() for place in own)
    changes = {}
    for where, copies in _by_weight(folder / WEIGHTS, pairs, every, why).items():
        first = changes[where] = copies[0]
        if any(not _equal(first, other) for other in copies[1:]):
            names = [place.name for place in pairs if place.path == where]
            raise CheckpointError(
                f"{folder / WEIGHTS}: {' and '.join(names)} have different changes: {why}"
            )
    base = read.values.get("base_model_name_or_path")
    return AdapterFile(changes, usual, alpha / root(usual) * usual, str(base or "")[:200])


def _equal(one: LowRank, other: LowRank) -> bool:
    return (
        torch.equal(one.down, other.down)
        and torch.equal(one.up, other.up)
        and one.scale == other.scale
    )


def _check_options(read: FieldReader) -> None:
    """Raises ConfigError for options with which PEFT would compute something else."""
    read.only("peft_type", "LORA")
    read.only("bias", "none")
    for name in _REFUSED:
        if value := read.values.get(name):
            raise ConfigError(f"{read.where}: {name} is {shown(value)}, which is not supported")
    begins = read.values.get("init_lora_weights")
    if isinstance(begins, str) and begins.startswith(_OTHER_BASE):
        raise ConfigError(
            f"{read.where}: init_lora_weights is {quoted(begins)}, which changes the base's weights"
            " too; save the adapter with path_initial_model_for_weight_conversion"
        )
    unknown = [name for name, value in read.values.items() if value and name not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"{read.where}: {first_of(sorted(unknown))}: not known here; remove the field if it "
            "does not count for what the adapter computes"
        )


def _pattern(read: FieldReader, field: str) -> Callable[[str], float | None]:
    """What a field says of a target: of the first name in it with which the target ends, from a
    dot on. Raises ConfigError for patterns that are more than names."""
    given = {} if read.values.get(field) is None else read.child(field).values
    order: dict[str, tuple[int, float]] = {}
    for key, value in given.items():
        name = key.replace("\\.", ".")
        if not _LITERAL.fullmatch(name):
            raise ConfigError(f"{read.where}: {field}: {quoted(key)} is a pattern; only names are")
        if type(value) not in (int, float) or not 0 < value < MOST_ALPHA:
            raise ConfigError(f"{read.where}: {field}: {quoted(key)} is {shown(value)}")
        order.setdefault(name, (len(order), value))

    def of(target: str) -> float | None:
        return min((order[end] for end in _ends(target) if end in order), default=(0, None))[1]

    return of


def _ends(target: str) -> Iterator[str]:
    """The names that mean a target in PEFT's lists: its own, and what follows each dot."""
    yield f"^{target}"
    yield target
    while target := target.partition(".")[2]:
        yield target


def _target_check(read: FieldReader) -> Callable[[_Place], None]:
    """What raises ConfigError for a change that PEFT would not load. Patterns are not run: those of
    a hostile file may take forever."""

    def listed(key: str, kind: type) -> frozenset[Any]:
        value = read.values.get(key)
        values = value if isinstance(value, list) else [value]
        return frozenset(each for each in values if type(each) is kind)

    modules, excluded = listed("target_modules", str), listed("exclude_modules", str)
    targets = modules | listed("target_parameters", str)
    is_pattern = isinstance(read.values.get("target_modules"), str)
    layers = listed("layers_to_transform", int)
    has_layers = read.values.get("layers_to_transform") is not None

    def check(place: _Place) -> None:
        names, layer = {*_ends(place.target), *_ends(place.name)}, _LAYER.match(place.path)
        for key, leaves_out in (
            ("target_modules", not is_pattern and names.isdisjoint(targets)),
            ("exclude_modules", not names.isdisjoint(excluded)),
            ("layers_to_transform", has_layers and not (layer and int(layer[1]) in layers)),
        ):
            if leaves_out:
                raise ConfigError(
                    f"{read.where}: {key}: leaves out {place.target}, which {WEIGHTS} has"
                )

    return check


def _place_of(
    name: str, factors: Factors, places: Mapping[str, list[_Place]], family: Family
) -> _Place:
    """Which of a module's weights the factors change. PEFT numbers the parameters of a module by
    levels, in an order that older versions had otherwise; the sizes of experts' factors differ."""
    own = places.get(_LEVELS.sub("", name), [])
    if len(own) == 1 and own[0].name == name:
        return own[0]
    sizes = factors[0].shape[-1:], factors[1].shape[:1]
    for place in own:
        if ((place.shape[-1],), (place.shape[-2],)) == sizes:
            return place
    if any(((place.shape[-2],), (place.shape[-1],)) == sizes for place in own):
        raise _fault(factors[0], "is transposed; save the adapter by PEFT 0.19 or later")
    raise _unknown(factors[0], family)


def _pairs(file: TensorFile, names: re.Pattern[str]) -> dict[str, Factors]:
    """The factors A and B of a file's changes, by what their names begin with."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for info in file.tensors.values():
        match = names.fullmatch(info.name)
        if match is None:
            raise _fault(info, "is no factor of a low-rank change")
        if pairs.setdefault(match[1], {}).setdefault(match[2].lower(), info) is not info:
            raise _fault(info, "is there twice; remove one of them")
    for factors in pairs.values():
        if len(factors) == 1:
            raise _fault(next(iter(factors.values())), "lacks the other factor of the change")
    return {name: (factors["a"], factors["b"]) for name, factors in pairs.items()}


def _rank(info: TensorInfo, rank: int) -> int:
    if not 0 < rank <= MOST_RANK:
        raise _fault(info, f"has the shape {list(info.shape)}; ranks are 1 to {MOST_RANK}")
    return rank


def _read(
    file: TensorFile, factors: Factors, down: tuple[int, ...], up: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The factors in float32, of these shapes."""
    for info, shape in zip(factors, (down, up), strict=True):
        if info.shape != shape:
            raise _fault(
                info, f"has the shape {list(info.shape)}, and {list(shape)} fits the model"
            )
    return _numbers(file, factors[0]), _numbers(file, factors[1])


def _numbers(file: TensorFile, info: TensorInfo) -> Tensor:
    value = file.read(info.name)
    if isinstance(value, Tensor):
        numbers = value.to(torch.float32, copy=True)
    else:
        numbers = value.dequantize()
    if not bool(numbers.isfinite().all()):
        raise _fault(info, "holds values that are not finite")
    return numbers


def _by_weight(
    path: Path, pairs: Mapping[_Place, LowRank], places: Iterable[_Place], why: str
) -> dict[str, list[LowRank]]:
    """The pairs of each weight that is changed, in their order, all of them."""
    own: dict[str, list[_Place]] = {}
    for place in places:
        own.setdefault(place.path, []).append(place)
    complete = {}
    for weight, every in own.items():
        present = [place for place in every if place in pairs]
        absent = [place.name for place in every if place not in pairs]
        if present and absent:
            raise CheckpointError(
                f"{path}: changes {present[0].name} and not {first_of(absent)}: {why}"
            )
        if present:
            complete[weight] = [pairs[place] for place in every]
    if not complete:
        raise CheckpointError(f"{path}: holds no change of a weight")
    return complete


def _unknown(info: TensorInfo, family: Family) -> CheckpointError:
    return _fault(info, f"is of no matrix of {family.title} that an adapter can change")


def _fault(info: TensorInfo, problem: str) -> CheckpointError:
    return CheckpointError(f"{info.file}: tensor {quoted(info.name)}: {problem}")
