"""Text to token ids and back, for BPE vocabularies of characters with byte fallback, which is
SentencePiece's style, and of bytes, which is GPT-2's; from a `tokenizer.json` with its
`tokenizer_config.json` or from GGUF metadata.

Knows no chat format: which marker means what is the business of template.py and reply.py.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from sfumato.refused import Refused
from sfumato.text.jsonscan import unicode_fault
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.jsonfile import read_object

SPACE = "▁"
# ggml's token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
_TOKEN_TYPES = range(1, 7)
UNUSED = 5
_MARKER_TYPES = (3, 4)
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding"}


@dataclass(frozen=True)
class Pipeline:
    """What stands around BPE, as `tokenizer.json` has it, and what GGUF files call it.

    model, pre: `tokenizer.ggml.model` and `tokenizer.ggml.pre`; pre is None where the model says
    all. by_bytes: tokens are bytes in GPT-2's alphabet, and not characters.
    """

    model: str
    pre: str | None
    by_bytes: bool
    normalizer: Mapping[str, Any]
    pre_tokenizer: Mapping[str, Any] | None
    decoder: Mapping[str, Any]

    def around(self, model: models.BPE) -> tokenizers.Tokenizer:
        """The library's tokenizer, without added tokens."""
        parts = {name: getattr(self, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        state = {"added_tokens": [], "post_processor": None, "model": empty, **parts}
        inner = tokenizers.Tokenizer.from_str(json.dumps(state))
        inner.model = model
        return inner


_OF_BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def _splitting(pre: str, pattern: str) -> Pipeline:
    """GPT-2's style: a pattern splits texts, of which BPE merges the bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [{**split, "invert": False}, _OF_BYTES]
    before = {"type": "Sequence", "pretokenizers": steps}
    return Pipeline("gpt2", pre, True, {"type": "NFC"}, before, _OF_BYTES)


PIPELINES = (
    Pipeline(
        "gemma4",
        None,
        False,
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        None,
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ),
    _splitting(
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
"""The pipelines that GGUF files can name."""

_LETTERS = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _LETTERS]
_BYTE = {chr(byte): byte for byte in _LETTERS}
_BYTE |= {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""GPT-2's alphabet: a printable character for each byte."""


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

    Raises:
        TokenizerError: a key is missing, of another kind or length, or contradicts another.
    """
    pipeline = _pipeline(metadata)
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
    while types and types[-1] == UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
        types.pop(), vocabulary.pop(tokens.pop())  # no tokens, but rows of the embedding
    if unknown_types := set(types) - set(_TOKEN_TYPES):
        raise _bad("token_type", f"has {unknown_types.pop()!r}, which is none of 1 to 6")
    unknown = _token_id(metadata, "unknown", len(tokens))
    ids = {f"{short}_id": _token_id(metadata, long, len(tokens)) for short, long in _NAMED.items()}
    if pipeline.by_bytes and not metadata.get("tokenizer.ggml.add_bos_token", False):
        ids["bos_id"] = None  # the files name one all the same

    merges = _texts(metadata, "merges")
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=_Pairs(merges),  # type: ignore[arg-type]  # pairs, else refused just below
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=not pipeline.by_bytes,
            byte_fallback=not pipeline.by_bytes,
        )
    except Exception as error:  # bare Exception again; TypeError where a merge is no pair
        raise _bad("merges", _bad_merge(merges, vocabulary) or f"is unusable ({error})") from error

    inner = pipeline.around(model)
    inner.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _MARKER_TYPES and token
        ]
    )
    return inner, ids


def _pipeline(metadata: Mapping[str, Any]) -> Pipeline:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    of_kind = [each for each in PIPELINES if each.model == kind]
    if not of_kind:
        known = " or ".join(dict.fromkeys(repr(each.model) for each in PIPELINES))
        raise _bad("model", f"is {quoted(kind)}, and only {known} is supported")
    pipeline = next((each for each in of_kind if each.pre in (None, pre)), None)
    if pipeline is None:
        known = " or ".join(repr(each.pre) for each in of_kind)
        raise _bad("pre", f"is {quoted(pre)}, and only {known} is supported")
    return pipeline


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


def check_decoder(inner: tokenizers.Tokenizer) -> bool:
    """Refuse a tokenizer whose text is not plain concatenation of pieces; returns whether the
    pieces are bytes in GPT-2's alphabet.

    Raises:
        TokenizerError: naming the decoder and those that are supported.
    """
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    replaced = [s for s in steps if s.get("type") == "Replace"]
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse"} and all(
        step["pattern"] == {"String": SPACE} and step["content"] == " " for step in replaced
    )
    by_bytes = kinds == ["ByteLevel"]
    if not (by_bytes or (replaced and known)):
        raise TokenizerError(
            f"decoder {kinds} is not supported; Sfumato reads tokenizers of SentencePiece's style, "
            f"whose decoder is Replace({SPACE!r} by a space), ByteFallback, Fuse, and of GPT-2's "
            "style, whose decoder is ByteLevel"
        )
    return by_bytes


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


_MARKER = re.compile(r"<\|.+>|<.+\|>")


@dataclass(frozen=True)
class Marker:
    """A special token among text. Text that merely looks like one is a `str`, like all text."""

    text: str


Piece = str | Marker
"""What ids are decoded to: text, or a special token."""


class Tokenizer:
    """A vocabulary: `encode` and `decode`, and the ids that have a meaning of their own.

    Attributes:
        vocab_size: number of tokens; ids are 0 .. vocab_size - 1.
        bos_id, eos_id, pad_id: the id, or None where the vocabulary has none.
        special_ids: ids of markers (`<bos>`, `<|turn>`, `<|"|>` …): one token each in `encode`,
            never produced from plain text, dropped by `decode` unless asked for.
        rows: rows of the embedding; ids of vocab_size and above are of no token, and no text.

    Safe to share between threads: nothing changes after construction.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        markers: Collection[str] = (),
        rows: int = 0,
    ) -> None:
        """markers: texts of added tokens that are special whatever the files say of them."""
        self._by_bytes = check_decoder(inner)
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder()
        self._inner = inner
        special = {i for i, token in added.items() if _is_special(token, markers)}
        self._plain = _without_special(inner, added, special)
        self._added = frozenset(added)
        self._bytes = {
            token_id: bytes([byte])
            for byte in range(256)
            if (token_id := inner.token_to_id(f"<0x{byte:02X}>")) is not None
        }
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.rows = max(rows, self.vocab_size)
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.special_ids = frozenset(special)
        # Where bytes cannot stand in for an unknown character, plain text may well become <unk>.
        unknown = getattr(inner.model, "unk_token", None)
        self._never_plain = self.special_ids - {unknown and inner.token_to_id(unknown)}

    @classmethod
    def from_file(cls, path: str | Path, markers: Collection[str] = (), rows: int = 0) -> Tokenizer:
        """Read a `tokenizer.json`; bos, eos and pad are named by `tokenizer_config.json` beside it.

        Where that file is absent or silent they are looked up as `<bos>`, `<eos>` and `<pad>`.
        markers, rows: see the class.

        Raises:
            TokenizerError: no such file, not a tokenizer, or not of a style that is supported.
        """
        path = Path(path)
        inner = from_json(path)
        named = named_tokens(path.with_name("tokenizer_config.json"))
        ids = {}
        for name in ("bos", "eos", "pad"):
            text = named.get(name)
            ids[f"{name}_id"] = inner.token_to_id(f"<{name}>" if text is None else text)
            if text is not None and ids[f"{name}_id"] is None:
                raise TokenizerError(
                    f"{path.with_name('tokenizer_config.json')}: {name}_token is {text!r}, which "
                    f"{path.name} does not know; both files must come from one checkpoint"
                )
        try:
            return cls(inner, **ids, markers=markers, rows=rows)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], markers: Collection[str] = (), rows: int = 0
    ) -> Tokenizer:
        """Build from the `tokenizer.ggml.*` keys of GGUF metadata; some 0.7 s for Gemma 4, nearly
        all of it in the `tokenizers` library. markers, rows: see the class.

        Raises:
            TokenizerError: a key is missing, of another kind or length, or contradicts another.
        """
        inner, ids = from_gguf(metadata)
        return cls(inner, **ids, markers=markers, rows=rows)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters is n / longest_token tokens or
        more, so that a very long text is recognised without tokenizing it."""
        longest = max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)
        # Normalization makes one character of up to three, and that has two bytes or more.
        return 2 * longest if self._by_bytes else longest

    def token_id(self, token: str) -> int | None:
        """The id of the token whose text is exactly `token`, or None."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def token_text(self, token_id: int) -> str:
        """The text of one token as `decode` shows it; bytes that are no text by themselves show as
        `<0xE2>`. Nothing for a row that has no token.

        Raises:
            TokenizerError: the id is outside the vocabulary.
        """
        piece = self._inner.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if piece is None:
            if self.vocab_size <= token_id < self.rows:
                return ""
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens; "
                "the model and the tokenizer must come from one checkpoint"
            )
        if not self._by_bytes:
            return piece.replace(SPACE, " ")
        raw = self.bytes_of(token_id)
        if raw is None:
            return piece
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in raw)

    def bytes_of(self, token_id: int) -> bytes | None:
        """What a token of bytes stands for, such as `<0xE2>` or any that GPT-2's style merges; None
        for a token of text, which no character crosses, and outside the vocabulary."""
        if not self._by_bytes or token_id in self._added:
            return self._bytes.get(token_id)
        piece = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return None
        try:
            return bytes(_BYTE[letter] for letter in piece)
        except KeyError:  # no token of that style
            return piece.encode()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; no bos is added.

        Args:
            text: any valid Unicode text.
            special: read markers such as `<|turn>` as their one token; if False they are plain
                text like any other, so that no id of `special_ids` is returned.

        Raises:
            TokenizerError: `text` holds a lone surrogate, or a vocabulary whose merges build a
                marker out of plain text was to encode plain text.
        """
        if fault := unicode_fault(text):
            raise TokenizerError(fault, "text")
        inner = self._inner if special else self._plain
        # Of one text too `encode` holds the interpreter's lock throughout, and a batch does not.
        ids: list[int] = inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not special and not self._never_plain.isdisjoint(ids):
            marker = next(i for i in ids if i in self._never_plain)
            raise TokenizerError(
                f"the vocabulary builds the special token {self.token_text(marker)!r} out of plain "
                "text, so text that contains it cannot be encoded safely; remove it from the text"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; special tokens are dropped, or shown as their text.

        Byte tokens are joined to characters; bytes that are no UTF-8 show as U+FFFD, so an
        incomplete character at the end is recognised by it (or use `Detokenizer`).

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Text of `ids`, with every special token as a `Marker`: what `parse_reply` reads.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        return Detokenizer(self).pieces(ids, last=True)


class Detokenizer:
    """Ids to text in parts: each `push` returns the characters that it completes.

    The texts and the last `flush` joined are exactly `tokenizer.decode` of all ids. `pieces` is for
    readers that must distinguish special tokens from text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._dropped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; bytes of an unfinished character wait for the next call.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        pieces = self.pieces(ids)
        return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)

    def pieces(self, ids: Iterable[int], last: bool = False) -> list[Piece]:
        """`push`, with every special token as a `Marker` of its own; no text is empty.

        last: nothing follows, so that this is `flush` too.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        out: list[Piece] = []
        texts: list[str] = []
        for token_id in ids:
            raw = self._tokenizer.bytes_of(token_id)
            if raw is not None:
                texts.append(self._utf8.decode(raw))
            elif token_id not in self._dropped:
                texts.append(self.flush())
                text = self._tokenizer.token_text(token_id)
                if token_id in self._tokenizer.special_ids:
                    out += [*_joined(texts), Marker(text)]
                    texts = []
                else:
                    texts.append(text)
        if last:
            texts.append(self.flush())
        return out + _joined(texts)

    def flush(self) -> str:
        """U+FFFD for the bytes of a character that never became complete, else nothing."""
        return self._utf8.decode(b"", final=True)

    @property
    def unfinished(self) -> bool:
        """Whether bytes of a character wait for the rest of it."""
        return bool(self._utf8.getstate()[0])

    def copy(self) -> Detokenizer:
        """An independent copy in the same state."""
        other = Detokenizer(self._tokenizer)
        other._dropped = self._dropped
        other._utf8.setstate(self._utf8.getstate())
        return other


def _joined(texts: list[str]) -> list[Piece]:
    """The texts as one piece, or none."""
    text = "".join(texts)
    return [text] if text else []


def _is_special(token: AddedToken, markers: Collection[str]) -> bool:
    # Some files leave markers such as <|tool_call> without the flag, to keep them visible.
    marked = token.content in markers or _MARKER.fullmatch(token.content) is not None
    return token.special or marked


def _without_special(
    inner: tokenizers.Tokenizer, added: Mapping[int, AddedToken], special: Collection[int]
) -> tokenizers.Tokenizer:
    """A copy of `inner` that reads the special ones of the added tokens as plain text.

    The model inside is shared, not copied. A copy rather than a flag that each call would set:
    other threads would see the flag.
    """
    plain = tokenizers.Tokenizer(inner.model)
    if inner.normalizer is not None:
        plain.normalizer = inner.normalizer
    if inner.pre_tokenizer is not None:
        plain.pre_tokenizer = inner.pre_tokenizer
    for token_id in sorted(added):
        token = added[token_id]
        if token_id in special:
            plain.add_special_tokens([token])
        else:
            plain.add_tokens([token])
    plain.encode_special_tokens = True
    return plain
