"""Vocabularies from files: `tokenizer.json`, `tokenizer_config.json`, and GGUF metadata.

Checks what a file says and builds the object of the `tokenizers` library. Knows nothing of how it
is used; that is tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from sfumato.refused import Refused
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.jsonfile import read_object

SPACE = "▁"
# ggml's token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
_TOKEN_TYPES = range(1, 7)
_MARKER_TYPES = (3, 4)
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding"}


class TokenizerError(Refused):
    """A vocabulary that cannot be used, or text or ids that it cannot turn into the other."""

    def __init__(self, why: str, field: str | None = None) -> None:
        super().__init__(field, why)
        self.args = (why, field)


def from_json(path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a `tokenizer.json`.

    Raises:
        TokenizerError: no such file, or not a tokenizer.
    """
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file; a checkpoint needs its tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise TokenizerError(
            f"{path}: not a readable tokenizer.json ({error}); download it again"
        ) from error


def from_gguf(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, int | None]]:
    """The library's tokenizer of `tokenizer.ggml.*`, and its `bos_id`, `eos_id` and `pad_id`.

    The pipeline is that of Gemma's `tokenizer.json`: spaces become U+2581, BPE runs over the whole
    text between markers, unknown characters fall back to byte tokens.

    Raises:
        TokenizerError: a key is missing, of another kind or length, or contradicts another.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gemma4":
        raise _bad("model", f"is {quoted(kind)}, and only 'gemma4' is supported")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise _bad("add_space_prefix", "is true, and only false is supported")
    tokens = _texts(metadata, "tokens")
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) != len(tokens):
        again = next(i for i, token in enumerate(tokens) if vocabulary[token] != i)
        token = tokens[again]
        raise _bad("tokens", f"has {quoted(token)} twice, at {again} and {vocabulary[token]}")
    types = _array(metadata, "token_type")
    if len(types) != len(tokens):
        raise _bad("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    if unknown_types := set(types) - set(_TOKEN_TYPES):
        raise _bad("token_type", f"has {unknown_types.pop()!r}, which is none of 1 to 6")
    unknown = _token_id(metadata, "unknown", len(tokens))
    ids = {f"{short}_id": _token_id(metadata, long, len(tokens)) for short, long in _NAMED.items()}

    merges = _texts(metadata, "merges")
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=_Pairs(merges),  # type: ignore[arg-type]  # pairs, else refused just below
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # bare Exception again; TypeError where a merge is no pair
        raise _bad("merges", _bad_merge(merges, vocabulary) or f"is unusable ({error})") from error

    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _MARKER_TYPES and token
        ]
    )
    return inner, ids


class _Pairs(Sequence[tuple[str, ...]]):
    """Merges, split while the library walks over them: half a million tuples at once would cost
    Python's garbage collector more time than the splitting."""

    def __init__(self, merges: Sequence[str]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._merges[index].split(" "))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return (tuple(merge.split(" ")) for merge in self._merges)


def named_tokens(config: Path) -> dict[str, str]:
    """The texts of bos, eos and pad in a `tokenizer_config.json`; empty where it is absent.

    Raises:
        TokenizerError: the file is no JSON object, or a name in it is neither null, text, nor an
            object with its text under "content".
    """
    if not config.is_file():
        return {}
    try:
        fields = read_object(config)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    named = {}
    for name in ("bos", "eos", "pad"):
        text = fields.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text is None:
            continue
        if not isinstance(text, str):
            raise TokenizerError(
                f"{config}: {name}_token must be a text, not {quoted(text)}; download it again"
            )
        named[name] = text
    return named


def check_decoder(inner: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose text is not plain concatenation of pieces.

    Raises:
        TokenizerError: naming the decoder and the one that is supported.
    """
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    replaced = [s for s in steps if s.get("type") == "Replace"]
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse"} and all(
        step["pattern"] == {"String": SPACE} and step["content"] == " " for step in replaced
    )
    if not (replaced and known):
        raise TokenizerError(
            f"decoder {kinds} is not supported; Sfumato reads SentencePiece-style tokenizers, "
            f"whose decoder is Replace({SPACE!r} by a space), ByteFallback, Fuse"
        )


def _bad(key: str, problem: str) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.ggml.{key} {problem}; the GGUF file is damaged or of another kind: "
        "download or convert it again"
    )


def _array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise _bad(key, "is missing")
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise _bad(key, f"must be an array, not {type(value).__name__}")
    # NumPy arrays too give plain Python values this way.
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _array(metadata, key)
    if not values and key != "merges":  # a vocabulary of characters never merges
        raise _bad(key, "is empty")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise _bad(key, f"must hold texts, but entry {i} is {quoted(value)}")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    key = f"{name}_token_id"
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not hasattr(value, "__index__") or not 0 <= int(value) < n_tokens:
        raise _bad(key, f"is {quoted(value)}, outside the {n_tokens} tokens")
    return int(value)


def _bad_merge(merges: Sequence[str], vocabulary: Mapping[str, int]) -> str | None:
    for i, merge in enumerate(merges):
        pair = merge.split(" ")
        if len(pair) != 2:
            return f"entry {i} is {quoted(merge)}, not two tokens, a space between"
        for token in (*pair, "".join(pair)):
            if token not in vocabulary:
                return f"entry {i} is {quoted(merge)}, and no token is {quoted(token)}"
    return None
