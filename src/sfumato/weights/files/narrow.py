"""What a checkpoint says of its narrow matrices: `quantization_config` of config.json.

Two writers are read: compressed-tensors, and ModelOpt with its `hf_quant_config.json`. What is
unknown or mixed is refused by name, before any weight file is opened. Knows no tensors.

Both list the modules that a checkpoint keeps in full precision: compressed-tensors by exact names
and, after `re:`, regular expressions that match from the beginning of a name; ModelOpt by exact
names and names with `*`. The lists are of hostile files: an expression that could take long is
refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.jsonfile import read_object

Kind = Literal["FP8", "INT8", "INT4", "NVFP4"]

METHODS = ("compressed-tensors", "modelopt")
FP4_GROUP = 16  # columns to a scale of NVFP4
MOST_GROUP = 1024  # columns to a scale of INT4
BESIDE = "hf_quant_config.json"

_FORMATS: dict[str, tuple[Kind, ...]] = {
    "float-quantized": ("FP8",),
    "int-quantized": ("INT8",),
    "naive-quantized": ("FP8", "INT8"),
    "pack-quantized": ("INT4",),
    "nvfp4-pack-quantized": ("NVFP4",),
}
MOST_RULES = 20_000
_MOST_LENGTH = 300  # characters of a rule; of a name that expressions are tried on
_MOST_REPEATS = 3  # in an expression: the time is the name's length to this power
_MOST_SECONDS = 10.0  # for all names of a checkpoint
_REPEAT = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_ALGORITHMS: dict[str, Kind] = {"FP8": "FP8", "NVFP4": "NVFP4"}
_NUMBERS: dict[tuple[int, str], Kind] = {
    (8, "float"): "FP8",
    (8, "int"): "INT8",
    (4, "int"): "INT4",
    (4, "float"): "NVFP4",
}
_STRATEGIES: dict[Kind, tuple[str, ...]] = {
    "FP8": ("channel", "tensor"),
    "INT8": ("channel", "tensor"),
    "INT4": ("group",),
    "NVFP4": ("tensor_group", "group"),
}
_GROUPS: dict[Kind, tuple[Collection[int | None], str]] = {
    "FP8": ((None, -1), ", and the strategy {!r} has no groups"),
    "INT8": ((None, -1), ", and the strategy {!r} has no groups"),
    "INT4": (
        range(32, MOST_GROUP + 1, 32),
        f"; INT4 is read with a multiple of 32 up to {MOST_GROUP}",
    ),
    "NVFP4": ((FP4_GROUP,), f"; NVFP4 is read with {FP4_GROUP}"),
}
"""Columns to a scale that are read, and what is said of others; {}: the strategy."""
_PLAIN = {"codes": "weight", "scale": "weight_scale"}
_PACKED = {"codes": "weight_packed", "scale": "weight_scale"}
_ROLES: dict[Kind, dict[str, str]] = {
    "INT4": _PACKED | {"shape": "weight_shape"},
    "NVFP4": _PACKED | {"global_scale": "weight_global_scale"},
}
_UNUSED: tuple[str, ...] = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class IgnoreList:
    """Which modules stay as they are."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    where: str = ""

    @classmethod
    def of(cls, rules: Any, where: str, wildcards: bool = False) -> IgnoreList:
        """From a list of a file. wildcards: `*` in a name matches any characters. Raises
        CheckpointError, naming the rule, for a list that cannot be used."""
        if not isinstance(rules, list) or len(rules) > MOST_RULES:
            raise CheckpointError(f"{where}: is no list of names, or of more than {MOST_RULES}")
        names, patterns = set(), []
        for rule in rules:
            if not isinstance(rule, str) or len(rule) > _MOST_LENGTH:
                raise CheckpointError(f"{where}: {quoted(rule)} is no name of a module")
            if rule.startswith("re:"):
                patterns.append(_compiled(rule.removeprefix("re:"), where))
            elif wildcards and "*" in rule:
                patterns.append(re.compile(translate(rule)))
            else:
                names.add(rule)
        return cls(frozenset(names), tuple(dict.fromkeys(patterns)), where)

    def matching(self, modules: Iterable[tuple[str, ...]]) -> str | None:
        """The first module that is in the list; each is given by all names that it has. Raises
        CheckpointError where the expressions take too long."""
        started = time.perf_counter()
        for spellings in modules:
            for name in spellings:
                if name in self.names:
                    return name
                if len(name) <= _MOST_LENGTH and any(p.match(name) for p in self.patterns):
                    return name
            if self.patterns and time.perf_counter() - started > _MOST_SECONDS:
                raise CheckpointError(f"{self.where}: takes too long to compare with the tensors")
        return None


@dataclass(frozen=True)
class Scheme:
    """How the narrow matrices of one checkpoint are stored.

    roles: of each of a matrix's tensors, the last part of its name; "global_scale" is one number
    for the matrix. group_size: columns to a scale; 0 where a scale is for a row, or for all rows.
    inverted: the global scale divides. where: the file and field that say so. unused: the last
    parts of names of activations and of the cache, which are rounded otherwise here.
    """

    method: Literal["compressed-tensors", "modelopt"]
    kind: Kind
    roles: Mapping[str, str]
    group_size: int = 0
    inverted: bool = False
    where: str = ""
    ignored: IgnoreList = field(default_factory=IgnoreList, repr=False)
    unused: tuple[str, ...] = _UNUSED

    def __str__(self) -> str:
        group = f", a scale for {self.group_size} columns" if self.group_size else ""
        return f"{self.kind} of {self.method}{group}"


def read_scheme(config: Mapping[str, Any], folder: Path) -> Scheme | None:
    """The scheme of a checkpoint's folder, or None for one without narrow matrices.

    config: of config.json. Raises CheckpointError, naming the field, for a scheme that is not read.
    """
    values = config.get("quantization_config")
    where, path = f"{folder / 'config.json'}: quantization_config", folder / BESIDE
    beside = _modelopt(_quantization(path), str(path)) if path.exists() else None
    if values is None:
        return beside
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: is no object; download it again")
    method = values.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"{where}: quant_method is {quoted(method)}, which is not read; use a checkpoint of "
            "'compressed-tensors' or 'modelopt', or a GGUF file"
        )
    read = _modelopt if method == "modelopt" else _compressed_tensors
    scheme = read(values, where)
    if beside is not None and (beside.method, beside.kind) != (scheme.method, scheme.kind):
        raise CheckpointError(
            f"{where}: is {scheme}, and {BESIDE} beside it is {beside}: mixed checkpoints are not "
            "read; remove what is of another one"
        )
    return scheme


def _quantization(path: Path) -> Mapping[str, Any]:
    values = read_object(path).get("quantization")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: quantization: is no object; download it again")
    return values


def _modelopt(values: Mapping[str, Any], where: str) -> Scheme:
    algorithm = values.get("quant_algo")
    kind = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if kind is None:
        raise CheckpointError(
            f"{where}: quant_algo is {quoted(algorithm)}; only {' and '.join(_ALGORITHMS)} of "
            "ModelOpt are read"
        )
    group = values.get("group_size", FP4_GROUP)
    if kind == "NVFP4" and group not in (None, FP4_GROUP):
        raise CheckpointError(f"{where}: group_size is {quoted(group)}; NVFP4 has {FP4_GROUP}")
    names = values.get("ignore", values.get("exclude_modules"))
    ignored = IgnoreList.of(names or [], f"{where}: ignore", wildcards=True)
    if kind == "FP8":
        return Scheme("modelopt", kind, _PLAIN, where=where, ignored=ignored)
    roles = _PLAIN | {"global_scale": "weight_scale_2"}
    return Scheme("modelopt", kind, roles, FP4_GROUP, where=where, ignored=ignored)


def _compressed_tensors(values: Mapping[str, Any], where: str) -> Scheme:
    _refuse_other_functions(values, where)
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= MOST_RULES:
        raise CheckpointError(f"{where}: config_groups: is no map of groups; download it again")
    weights = {
        name: _weights(group, values.get("format"), f"{where}: config_groups: {quoted(name)}")
        for name, group in groups.items()
    }
    if len(set(weights.values())) > 1:
        listed = ", ".join(f"{quoted(name)} is {kind}" for name, (kind, _) in weights.items())
        raise CheckpointError(
            f"{where}: config_groups: mixed formats are not read ({listed[:300]}); use a "
            "checkpoint with one"
        )
    kind, group_size = next(iter(weights.values()))
    ignored = IgnoreList.of(values.get("ignore") or [], f"{where}: ignore")
    roles, unused = _ROLES.get(kind, _PLAIN), _UNUSED
    if is_fp4 := kind == "NVFP4":
        unused += ("input_global_scale",)
    return Scheme("compressed-tensors", kind, roles, group_size, is_fp4, where, ignored, unused)


def _refuse_other_functions(values: Mapping[str, Any], where: str) -> None:
    """Refuses what changes the function of the matrices, or says that they are not narrow."""
    status = values.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(
            f"{where}: quantization_status is {quoted(status)}; only 'compressed' matrices are read"
        )
    for name in ("transform_config", "sparsity_config"):
        other = values.get(name)
        if other and other != {"format": "dense"}:
            raise CheckpointError(f"{where}: {name}: is {quoted(other)}, which is not read")


def _weights(group: Any, outer_format: Any, where: str) -> tuple[Kind, int]:
    """Kind and group size of a config group. Raises CheckpointError for another."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise CheckpointError(f"{where}: weights: is no object; download it again")
    name = group.get("format") or outer_format
    kinds = _FORMATS.get(name) if isinstance(name, str) else None
    if kinds is None:
        raise CheckpointError(f"{where}: format is {quoted(name)}; read are {', '.join(_FORMATS)}")
    if outer_format not in (None, name, "mixed-precision"):
        raise CheckpointError(
            f"{where}: format is {quoted(name)}, and {quoted(outer_format)} above"
        )
    weights = group["weights"]
    bits, type_ = weights.get("num_bits"), weights.get("type")
    kind = _NUMBERS.get((bits, type_)) if type(bits) is int and isinstance(type_, str) else None
    if kind is None or kind not in kinds:
        raise CheckpointError(
            f"{where}: weights: {quoted(bits)} bits of type {quoted(type_)} are not read in "
            f"{name!r}; use FP8, INT8, INT4 or NVFP4"
        )
    _refuse_orders(weights, where)
    return kind, _group_size(kind, weights, where)


def _refuse_orders(weights: Mapping[str, Any], where: str) -> None:
    for key, normal in (("symmetric", True), ("dynamic", False)):
        if weights.get(key, normal) is not normal:
            raise CheckpointError(
                f"{where}: weights: {key} is {quoted(weights[key])}, not {normal}"
            )
    if weights.get("actorder") in ("group", "dynamic", True):
        raise CheckpointError(
            f"{where}: weights: actorder is {quoted(weights['actorder'])}: columns in "
            "another order are not read"
        )


def _group_size(kind: Kind, weights: Mapping[str, Any], where: str) -> int:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy not in _STRATEGIES[kind]:
        raise CheckpointError(
            f"{where}: weights: strategy is {quoted(strategy)}, which is not read for {kind}"
        )
    known, expected = _GROUPS[kind]
    if type(group) not in (int, NoneType) or group not in known:
        shown = f"{quoted(group)}{expected.format(strategy)}"
        raise CheckpointError(f"{where}: weights: group_size is {shown}")
    return 0 if group in (None, -1) else int(group)


def _compiled(text: str, where: str) -> re.Pattern[str]:
    # What follows the beginning of a name matters to no match.
    text = text if text.endswith("\\.*") else text.removesuffix(".*")
    if len(_REPEAT.findall(text)) > _MOST_REPEATS or _REPEATED_GROUP.search(text):
        raise CheckpointError(
            f"{where}: {quoted('re:' + text)} could take too long to match; repeat single "
            f"characters, {_MOST_REPEATS} times at most"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: {quoted('re:' + text)} is no regular expression ({str(error)[:80]})"
        ) from None
