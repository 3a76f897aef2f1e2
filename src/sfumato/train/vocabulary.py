"""The embedded models' text side: a character vocabulary and a chat template, written as files.

Knows the ids, which both models share, and the Hugging Face files that carry them (tokenizer.json,
tokenizer_config.json, chat_template.jinja). Does not know the networks, nor what is said in a
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

PAD, EOS, BOS, UNK, MASK, TURN, END_OF_TURN, CHANNEL, END_OF_CHANNEL, THINK = range(10)
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
)
CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""Newline and printable ASCII, in the order of their ids; any other character is `<unk>`."""

TOKENS: tuple[str, ...] = SPECIAL_TOKENS + tuple(CHARACTERS)
"""Every entry of the vocabulary; a token's id is its index."""


@dataclass(frozen=True)
class TextSide:
    """What the ten markers are called and how a conversation is written with them."""

    markers: tuple[str, ...]  # the texts of ids 0 to 9, in the order of `SPECIAL_TOKENS`
    begin: tuple[int, ...]  # ids before the first turn
    assistant: str  # the role of the model's turns
    folder: str  # of the packaged model whose template it is

    @property
    def template(self) -> str:
        """How a conversation is written, in Jinja."""
        path = files("sfumato").joinpath(self.folder, "chat_template.jinja")
        return path.read_text(encoding="utf-8")


GEMMA = TextSide(SPECIAL_TOKENS, (BOS,), "model", "embedded")
QWEN = TextSide(
    (
        "<|pad|>",
        "<|endoftext|>",
        "<tool_call>",  # no text begins with a marker of its own
        "<unk>",
        "<|MASK|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "</tool_call>",
    ),
    (),
    "assistant",
    "embedded_masks",
)

_ID_OF = {character: len(SPECIAL_TOKENS) + i for i, character in enumerate(CHARACTERS)}


def encode_text(text: str) -> list[int]:
    """Ids of plain text, one per character; chat markers in it are plain characters here."""
    return [_ID_OF.get(character, UNK) for character in text]


def encode_chat(messages: Sequence[Mapping[str, str]], side: TextSide = GEMMA) -> list[int]:
    """Ids of a conversation up to where the model's next turn starts.

    Equals rendering the template with a generation prompt and encoding it with build_tokenizer(),
    for messages of `role` and `content` strings without markers; but fast enough for training.
    """
    ids = list(side.begin)
    for message in messages:
        role = side.assistant if message["role"] == "assistant" else message["role"]
        turn = encode_text(f"{role}\n{message['content'].strip()}")
        ids += [TURN, *turn, END_OF_TURN, _ID_OF["\n"]]
    return [*ids, TURN, *encode_text(f"{side.assistant}\n")]


def build_tokenizer(side: TextSide = GEMMA) -> Tokenizer:
    """The vocabulary as a tokenizer of the `tokenizers` library: BPE that never merges."""
    ids = {token: i for i, token in enumerate((*side.markers, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=side.markers[UNK]))
    # The decoder of Gemma's own tokenizer, so that one kind serves all; here only Fuse does work.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in side.markers]
    )
    return tokenizer


def write_text_side(folder: str | Path, side: TextSide = GEMMA) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a checkpoint folder.

    The folder is made if it is not there; files of these names in it are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(side).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"bos_token": side.markers[BOS]} if side.begin else {}),
        "eos_token": side.markers[EOS],
        "pad_token": side.markers[PAD],
        "unk_token": side.markers[UNK],
        "mask_token": side.markers[MASK],
        "additional_special_tokens": [
            token
            for token in side.markers[BOS if not side.begin else TURN :]
            if token not in (side.markers[UNK], side.markers[MASK])
        ],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(side.template, encoding="utf-8")
