"""The text side of a checkpoint: its tokenizer, its chat template, and the tokens that end a reply.

It reads small files and metadata, and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.diffusion.constraints.read_template import ReadTemplate
from sfumato.model.families import ReadFormat, family_of
from sfumato.model.model_config import ModelConfig
from sfumato.refused import Refused
from sfumato.text.prompt import user_turn
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class TextSide:
    """How a checkpoint reads and writes text."""

    tokenizer: Tokenizer
    template: ChatTemplate


def load_text(checkpoint: Checkpoint) -> TextSide:
    """The tokenizer and chat template of a checkpoint."""
    markers = family_of(checkpoint).markers
    if checkpoint.kind == "gguf":
        metadata = checkpoint.metadata
        return TextSide(Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata, markers))
    folder = checkpoint.folder
    return TextSide(
        Tokenizer.from_file(folder / "tokenizer.json"), ChatTemplate.from_folder(folder, markers)
    )


def end_ids(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a reply: those that the files list, and else the family's markers too."""
    generation = checkpoint.metadata.get("generation_config") or {}
    listed = generation.get("eos_token_id") if checkpoint.kind == "safetensors" else None
    if isinstance(listed, list):
        return config.eos_ids
    looked_up = (tokenizer.token_id(text) for text in family_of(checkpoint).markers.end_tokens)
    return tuple(dict.fromkeys((*config.eos_ids, *(i for i in looked_up if i is not None))))


def read_template(text: TextSide, form: ReadFormat, config: ModelConfig) -> ReadTemplate:
    """How a model with this text side reads questions. Raises ValueError, naming the token, where
    the tokenizer lacks one."""
    head, tail = user_turn(text.template, text.tokenizer, form.empty_thought)
    filler = config.filler_id
    return ReadTemplate(
        tuple(head),
        tuple(tail),
        lambda plain: text.tokenizer.encode(plain, special=False),
        _token(text.tokenizer, form.end),
        _token(text.tokenizer, form.filler) if filler is None else filler,
        config.canvas_length,
        config.vocab_size,
        text.tokenizer.longest_token,
    )


def _token(tokenizer: Tokenizer, marker: str) -> int:
    token = tokenizer.token_id(marker)
    if token is None:
        raise Refused(
            "tokenizer",
            f"has no token {marker!r}, without which no question can be read",
            "use the tokenizer that the model was trained with",
        )
    return token
