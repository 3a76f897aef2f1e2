"""Which family a checkpoint is of; and a second family beside the first."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sfumato.model.families
from sfumato.model.families import DIFFUSION_GEMMA, FAMILIES, Family, family_of, open_checkpoint
from sfumato.text.markers import ChatMarkers
from sfumato.weights.errors import CheckpointError
from sfumato.weights.names import TensorNames

TOY = replace(
    DIFFUSION_GEMMA,
    name="toy",
    title="Toy",
    model_type="toy_diffusion",
    architecture="toy-diffusion",
    tensor_names=TensorNames(
        gguf={"tok.weight": "embed_tokens.weight"},
        gguf_layer={"q.weight": "self_attn.q_proj.weight"},
        prefix="net.",
        aliases={"output.weight": "embed_tokens.weight"},
    ),
    markers=ChatMarkers(thought_open="[think]", thought_close="[/think]", ends=("[end]",)),
)
"""A second family: what differs from the first is all that has to be said."""


def _folder(path: Path, model_type: object, names: tuple[str, ...]) -> Path:
    save_file({name: torch.ones(2, 2) for name in names}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def test_a_second_family_is_read_by_its_own_names(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "toy_diffusion", ("net.layers.0.self_attn.q_proj.weight",))
    families = (*FAMILIES, TOY)
    checkpoint = open_checkpoint(folder, families)
    assert list(checkpoint.tensors) == ["layers.0.self_attn.q_proj.weight"]
    assert family_of(checkpoint, families) is TOY
    assert TOY.tensor_names.gguf_name("layers.0.self_attn.q_proj.weight") == "blk.0.q.weight"
    with pytest.raises(CheckpointError, match="model_type: is 'toy_diffusion'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("model_type", ["gemma4", None, 3, ["diffusion_gemma"]])
def test_an_unknown_architecture_is_refused_naming_the_known(
    tmp_path: Path, model_type: object
) -> None:
    folder = _folder(tmp_path, model_type, ("norm.weight",))
    for families, known in (
        (FAMILIES, "'diffusion_gemma', .*'a2d-qwen3'$"),
        ((*FAMILIES, TOY), "'diffusion_gemma', .*'a2d-qwen3', 'toy_diffusion'$"),
    ):
        with pytest.raises(CheckpointError, match=f"config.json: model_type: is .*: {known}"):
            open_checkpoint(folder, families)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_complete(family: Family) -> None:
    """Its markers are tokens of its format, and no two families claim one checkpoint."""
    markers = family.markers
    roles = (markers.turn_open, markers.turn_close, markers.thought_open, markers.thought_close)
    calls = (markers.call_open, markers.call_close, markers.quote)
    named = {text for text in (*roles, *calls, *markers.ends, *markers.visible) if text}
    assert named <= set(markers.tokens)
    assert set(markers.end_tokens) <= set(markers.ends)
    assert sum(other.model_type == family.model_type for other in FAMILIES) == 1
    files = [(other.architecture, dict(other.gguf_keys)) for other in FAMILIES]
    assert files.count((family.architecture, dict(family.gguf_keys))) == 1
    assert family.sampler.hf.keys() == family.sampler.gguf.keys()


SRC = Path(sfumato.model.families.__file__).parents[2]
# Training makes a DiffusionGemma: its vocabulary and its chat template have the markers in them.
INSIDE = ("model/families/", "train/")


@cache
def _outside() -> dict[str, str]:
    """The texts of all other modules, by name."""
    names = [path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py")]
    outside = [name for name in names if not name.startswith(INSIDE)]
    return {name: (SRC / name).read_text(encoding="utf-8") for name in outside}


def test_no_other_module_imports_from_inside_a_family() -> None:
    inside = Path(sfumato.model.families.__file__).parent
    folders = "|".join(path.name for path in inside.iterdir() if path.is_dir())
    importing = re.compile(rf"^\s*(?:from|import) sfumato\.model\.families\.(?:{folders})\b", re.M)
    assert [name for name, text in _outside().items() if importing.search(text)] == []
    assert importing.search("from sfumato.model.families.qwen3_blocks.text import MARKERS")


def test_no_other_module_lists_the_markers_of_a_family() -> None:
    markers = DIFFUSION_GEMMA.markers
    listed = {text for text in (*markers.ends, *markers.visible) if "|" in text}
    literals = [f"{quote}{text}{quote}" for text in listed for quote in "\"'"]
    uses = [(name, each) for name, text in _outside().items() for each in literals if each in text]
    assert listed and uses == []
