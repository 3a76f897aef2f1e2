"""Tensor names of files to canonical ones and back, by the tables of a family of models.

`TensorNames` holds the tables as data; which names there are and what the tensors mean is the
family's to say. Knows no shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_CANONICAL_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)")


@dataclass(frozen=True)
class TensorPlace:
    """The role of a file's tensor.

    "tensor": the canonical tensor `name`; "alias": a tied copy of it; "vision": kept aside;
    "constant": no weight, but something that the config's reader looks at; "unknown": none of
    these, `name` as in the file.
    """

    kind: Literal["tensor", "alias", "vision", "constant", "unknown"]
    name: str


@dataclass(frozen=True)
class Stack:
    """A tensor that some files hold as one matrix after another.

    name: its canonical name, without the layer's; parts: those of the matrices, with {} for their
    number. The rows of a number's parts follow one another. in_parts: whether safetensors are
    written so too. ranges: the canonical names of the tensors that GGUF files have in place of it,
    if they do: each has of every matrix the rows of one part.
    """

    name: str
    parts: tuple[str, ...]
    in_parts: bool = False
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorNames:
    """The names of one family's tensors.

    gguf, gguf_layer: name in a GGUF file → canonical name; those of a layer without `blk.N.` and
    `layers.N.`. gguf_older: spellings of earlier files, which are read and not written.
    prefix: what safetensors files put before a canonical name; beside: those of other names → the
    canonical ones. tied_prefix: what they put before
    a tied copy of one, except for `tied_layer` (file's → canonical), which are independent tensors.
    layer: names within a layer of safetensors that differ from the canonical ones, which follow.
    stack_count: the keys of config.json that lead to the number of a stack's matrices. exact: ends
    of canonical names of tensors that are never read from narrow formats.
    """

    gguf: Mapping[str, str]
    gguf_layer: Mapping[str, str]
    prefix: str
    gguf_older: Mapping[str, str] = field(default_factory=dict)
    gguf_constants: tuple[str, ...] = ()
    gguf_vision: tuple[str, ...] = ()  # prefixes
    beside: Mapping[str, str] = field(default_factory=dict)
    tied_prefix: str = ""
    tied_layer: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # the file's names → canonical names
    vision: tuple[str, ...] = ()  # prefixes
    stacks: tuple[Stack, ...] = ()
    stack_count: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()

    def place_gguf(self, name: str) -> TensorPlace:
        """The place of a tensor of a GGUF file."""
        if name in self.gguf_constants:
            return TensorPlace("constant", name)
        if self.gguf_vision and name.startswith(self.gguf_vision):
            return TensorPlace("vision", name)
        canonical = self.gguf.get(name) or self.gguf_older.get(name)
        layer = _GGUF_LAYER.fullmatch(name)
        if layer and layer[2] in self.gguf_layer:
            canonical = f"layers.{layer[1]}.{self.gguf_layer[layer[2]]}"
        return TensorPlace("tensor", canonical) if canonical else TensorPlace("unknown", name)

    def place_transformers(self, name: str) -> TensorPlace:
        """The place of a tensor of a safetensors file."""
        if self.vision and name.startswith(self.vision):
            return TensorPlace("vision", name)
        if name in self.beside:
            return TensorPlace("tensor", self.beside[name])
        if name in self.aliases:
            return TensorPlace("alias", self.aliases[name])
        if self.tied_prefix and name.startswith(self.tied_prefix):
            rest = name.removeprefix(self.tied_prefix)
            layer = _CANONICAL_LAYER.fullmatch(rest)
            if layer and layer[2] in self.tied_layer:
                return TensorPlace("tensor", f"layers.{layer[1]}.{self.tied_layer[layer[2]]}")
            return TensorPlace("alias", rest)
        if name.startswith(self.prefix):
            rest = name.removeprefix(self.prefix)
            layer = _CANONICAL_LAYER.fullmatch(rest)
            if layer and layer[2] in self.layer:
                rest = f"layers.{layer[1]}.{self.layer[layer[2]]}"
            return TensorPlace("tensor", rest)
        return TensorPlace("unknown", name)

    def gguf_name(self, canonical: str) -> str:
        """The GGUF name of a canonical tensor. Raises KeyError if there is none."""
        layer = _CANONICAL_LAYER.fullmatch(canonical)
        if layer:
            return f"blk.{layer[1]}.{_back(self.gguf_layer)[layer[2]]}"
        return _back(self.gguf)[canonical]

    def transformers_name(self, canonical: str) -> str:
        """The transformers name of a canonical tensor."""
        layer, tied = _CANONICAL_LAYER.fullmatch(canonical), _back(self.tied_layer)
        if layer and layer[2] in tied:
            return f"{self.tied_prefix}layers.{layer[1]}.{tied[layer[2]]}"
        if layer and (own := _back(self.layer).get(layer[2])):
            return f"{self.prefix}layers.{layer[1]}.{own}"
        return _back(self.beside).get(canonical) or self.prefix + canonical

    def tied_name(self, canonical: str) -> str | None:
        """The transformers name of the tied copy of a layer's tensor; None where it has none."""
        layer = _CANONICAL_LAYER.fullmatch(canonical)
        is_tied = self.tied_prefix and layer and layer[2] not in self.tied_layer
        return self.tied_prefix + canonical if is_tied else None

    def stack_of(self, canonical: str) -> Stack | None:
        """The rule of a canonical tensor that some files hold in parts."""
        layer = _CANONICAL_LAYER.fullmatch(canonical)
        own = layer[2] if layer else canonical
        return next((stack for stack in self.stacks if stack.name == own), None)


def _back(table: Mapping[str, str]) -> dict[str, str]:
    """Canonical name → name of a file."""
    return {canonical: name for name, canonical in table.items()}
