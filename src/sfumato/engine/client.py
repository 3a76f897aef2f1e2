"""The model that an engine serves, as the engine's clients see it.

It has no network and no tensor, and this module does not load torch, so that an engine may live in
another process one day.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sfumato.api import Model
    from sfumato.diffusion.sampler_config import SamplerConfig
    from sfumato.model.model_config import ModelConfig
    from sfumato.text.template import ChatTemplate
    from sfumato.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as clients of its engine see it. Hashed by identity."""

    name: str  # of its file or folder
    embedded: bool  # whether it is the demonstration model that comes with this package
    family: str  # as people write it
    device: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    sampler_defaults: SamplerConfig
    end_ids: tuple[int, ...]
    written: float | None = None  # when its weights were, in seconds since 1970
    nbytes: int | None = None  # of its files of weights
    undecided: str | None = None  # why it cannot answer questions; None: it can

    @classmethod
    def of(cls, model: Model) -> ServedModel:
        """For the process that has the model."""
        from sfumato.api import EMBEDDED  # which loads torch

        return cls(
            model.path.name,
            model.path == EMBEDDED,
            model.family.title,
            str(model.network.device),
            model.config,
            model.tokenizer,
            model.template,
            model.sampler_defaults,
            model.end_ids,
            *_files(model.path),
            _undecided(model),
        )


def _undecided(model: Model) -> str | None:
    """Why no question can be read with this model: what its tokenizer or chat template lacks."""
    try:
        _ = model.read_template
    except ValueError as error:
        return str(error)
    return None


def _files(path: Path) -> tuple[float | None, int | None]:
    """When the newest file of weights was written, and bytes of all; None where the files are
    gone."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        states = [file.stat() for file in files or [path]]
    except OSError:
        return None, None
    return max(state.st_mtime for state in states), sum(state.st_size for state in states)
