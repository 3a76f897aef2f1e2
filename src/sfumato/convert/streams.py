"""A checkpoint's tensors as streams to a file of the other kind, or of another format.

One tensor is read, recoded and written at a time, in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from sfumato.model.families import family_of
from sfumato.model.model_config import ModelConfig
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.tensor_stream import TensorStream


def gguf_tensors(
    checkpoint: Checkpoint,
    chosen: Mapping[str, str],
    config: ModelConfig,
) -> list[TensorStream]:
    """The tensors of a GGUF file: the constants of the config, then those of `chosen` (canonical
    name → format, all of the network's) in their order."""
    family = family_of(checkpoint)
    constants = family.config.gguf_constants(config).items()
    file_name = family.tensor_names.gguf_name
    return [
        *(TensorStream.of(name, value, "F32") for name, value in constants),
        *(_stream(checkpoint, file_name(name), name, chosen[name]) for name in chosen),
    ]


def hf_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], format: str
) -> list[TensorStream]:
    """The tensors of a safetensors folder, all in one format: F32, F16 or BF16."""
    file_name = family_of(checkpoint).tensor_names.transformers_name
    return [_stream(checkpoint, file_name(name), name, format) for name in shapes]


def _stream(checkpoint: Checkpoint, file_name: str, name: str, format: str) -> TensorStream:
    def chunks() -> Iterator[Tensor]:
        try:
            yield from checkpoint.recoded(name, format)
        except CheckpointError:
            raise  # names the file and the tensor of it
        except ValueError as error:
            info = checkpoint.tensors[name]
            raise ValueError(f"{info.file}: {info.name}: as {format}: {error}") from error

    return TensorStream(file_name, checkpoint.tensors[name].shape, format, chunks)
