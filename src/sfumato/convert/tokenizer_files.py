"""A tokenizer and chat template in the other kind of file: `tokenizer.json` to GGUF keys, and back.

Knows how the files and keys of both kinds are written; `sfumato.text` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from sfumato.text.markers import ChatMarkers
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import SPACE, Tokenizer, TokenizerError, from_gguf, from_json
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.jsonfile import read_object

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # ggml's token types
SCORE = -1000.0  # what published files give every token: BPE does not use scores

_PRINTABLE = "\n" + "".join(map(chr, range(0x20, 0x7F)))
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "mask": "mask"}


def tokenizer_keys(folder: Path, rows: int, markers: ChatMarkers) -> dict[str, Any]:
    """The `tokenizer.*` keys of the files in a checkpoint's folder; empty without tokenizer.json.

    rows: of the embedding; llama.cpp wants a token for each. markers: of the chat format; those
    that other programs look for in the text are written as visible tokens. Raises TokenizerError or
    TemplateError for files that cannot be used, or that GGUF's one kind of vocabulary cannot say.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    inner = from_json(path)
    state = json.loads(inner.to_str())
    if state["model"]["type"] != "BPE":
        raise TokenizerError(f"{path}: a {state['model']['type']} model; only BPE can be converted")
    ids = inner.get_vocab(with_added_tokens=True)
    space = _space(path, state, ids)
    tokens = {i: token.replace(" ", space) for token, i in ids.items()}
    if sorted(tokens) != list(range(len(tokens))) or len(tokens) > rows:
        raise TokenizerError(
            f"{path}: its {len(tokens)} ids are not 0 to {len(tokens) - 1}, or more than the "
            f"embedding's {rows}; use the tokenizer that the model was trained with"
        )
    names = _special_names(folder / "tokenizer_config.json")
    named_ids = {long: ids.get(names[short]) for short, long in _NAMED.items()}
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(rows)],
        "tokenizer.ggml.scores": np.full(rows, SCORE, np.float32),
        "tokenizer.ggml.token_type": _types(inner, tokens, rows, markers.visible),
        "tokenizer.ggml.merges": [
            " ".join(part.replace(" ", space) for part in merge)
            for merge in state["model"]["merges"]
        ],
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in named_ids.items() if i is not None},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    source = ChatTemplate.from_folder(folder).source if _has_template(folder) else ""
    _check(path, metadata, [source, f"{markers.turn_open}user\nHi{markers.turn_close}"])
    return metadata | ({"tokenizer.chat_template": source} if source else {})


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, as far as the keys are
    there. Raises TokenizerError for keys that contradict each other."""
    source = metadata.get("tokenizer.chat_template")
    if isinstance(source, str):
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    if "tokenizer.ggml.tokens" not in metadata:
        return
    inner, _ = from_gguf(metadata)
    inner.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{short}_token": tokens[i]
        for short, long in _NAMED.items()
        if (i := metadata.get(f"tokenizer.ggml.{long}_token_id")) is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _space(path: Path, state: Mapping[str, Any], ids: Mapping[str, int]) -> str:
    """The text of a space in GGUF's tokens, where spaces always become U+2581 first."""
    normalizer = state["normalizer"]
    if normalizer is None:
        if " " in ids and SPACE in ids:
            raise TokenizerError(
                f"{path}: has tokens for a space and for {SPACE!r}, which GGUF files cannot tell "
                "apart"
            )
        return SPACE
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if normalizer != replaces:
        raise TokenizerError(
            f"{path}: its normalizer is a {normalizer.get('type')}; GGUF files know only the "
            f"replacement of spaces by {SPACE!r}"
        )
    return " "  # whatever spaces are in its tokens then are meant


def _special_names(config: Path) -> dict[str, str]:
    """The texts of the tokens that have a role, by role."""
    try:
        fields = read_object(config) if config.is_file() else {}
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    names = {}
    for role in _NAMED:
        text = fields.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        names[role] = text if isinstance(text, str) else f"<{role}>"
    return names


def _types(
    inner: tokenizers.Tokenizer, tokens: Mapping[int, str], rows: int, visible: Sequence[str]
) -> np.ndarray:
    types = np.full(rows, UNUSED, np.int32)
    for i, token in tokens.items():
        types[i] = BYTE if _BYTE.fullmatch(token) else NORMAL
    for i, added in inner.get_added_tokens_decoder().items():
        shown = added.content in visible or not added.special
        types[i] = USER_DEFINED if shown else CONTROL
    return types


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_object(config)


def _check(path: Path, metadata: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raises TokenizerError where the keys encode a text otherwise than the file does."""
    before, after = Tokenizer.from_file(path), Tokenizer.from_gguf(metadata)
    for text in (_PRINTABLE, "  two  spaces\n\n", *texts):
        if before.encode(text) != after.encode(text):
            raise TokenizerError(
                f"{path}: a GGUF file's tokenizer would encode {text[:40]!r}… otherwise; its kind "
                "cannot be converted"
            )
