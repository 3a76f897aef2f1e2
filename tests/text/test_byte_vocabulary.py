"""Vocabularies of bytes, in the style of GPT-2 and Qwen: files, texts and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.support import qwen_text

from sfumato.convert import tokenizer_keys, write_tokenizer
from sfumato.model.families.qwen3_blocks.text import MARKERS
from sfumato.text.tokenizer import Detokenizer, Marker, Tokenizer, TokenizerError

ROWS = 700
HARD = (
    "",
    " ",
    "\n",
    "  two  spaces\n\n\n  and\ttabs\r\n \r\n",
    "12345 1,234.5e-6",
    "It's we'LL I'd they'Ve",
    "日本語の文章、中文。\n한국어 текст عربى",
    "🙂👩‍👩‍👧\u200d🏽 e\u0301 ﬁ \u212a Å",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call>',
    "[PAD650] <0xE2> ▁ Ġ \x00\x7f\x80\xa0\xad",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_text.write_tokenizer(tmp_path_factory.mktemp("qwen")).parent


@pytest.fixture(scope="module")
def inner(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, Any]:
    return tokenizer_keys(folder, ROWS, MARKERS)


@pytest.fixture(scope="module", params=["json", "gguf", "json from gguf"])
def tokenizer(request: Any, folder: Path, keys: dict[str, Any], tmp_path_factory: Any) -> Tokenizer:
    if request.param == "gguf":
        return Tokenizer.from_gguf(keys, MARKERS.tokens, ROWS)
    if request.param != "json":
        folder = tmp_path_factory.mktemp("back")
        write_tokenizer(keys, folder)
    return Tokenizer.from_file(folder / "tokenizer.json", MARKERS.tokens, ROWS)


def plain(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = inner.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("text", HARD)
def test_texts_there_and_back(tokenizer: Tokenizer, inner: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == plain(inner, text)
    assert tokenizer.decode(ids, skip_special=False) == inner.decode(ids, skip_special_tokens=False)
    own = tokenizer.encode(text, special=False)
    assert not tokenizer.special_ids.intersection(own)
    assert tokenizer.decode(own) == inner.normalizer.normalize_str(text)


def test_what_a_vocabulary_has(tokenizer: Tokenizer, inner: tokenizers.Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.rows) == (inner.get_vocab_size(), ROWS)
    assert tokenizer.bos_id is None
    assert tokenizer.eos_id == inner.token_to_id("<|im_end|>")
    assert tokenizer.pad_id == inner.token_to_id("<|endoftext|>")
    texts = {tokenizer.token_text(i) for i in tokenizer.special_ids}
    assert texts == {*qwen_text.SPECIAL, *qwen_text.VISIBLE, qwen_text.MASK}


@given(ids=st.lists(st.integers(0, 599), max_size=12), cut=st.integers(0, 12))
def test_ids_to_text_wherever_they_are_cut(ids: list[int], cut: int) -> None:
    inner = tokenizers.Tokenizer.from_str(qwen_text.state())
    tokenizer = Tokenizer(inner, markers=MARKERS.tokens)
    ids = [i % tokenizer.vocab_size for i in ids]
    expected = inner.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=False) == expected
    parts = Detokenizer(tokenizer)
    assert parts.push(ids[:cut]) + parts.push(ids[cut:]) + parts.flush() == expected


def test_tokens_of_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🐘")
    assert len(ids) > 1
    assert b"".join(tokenizer.bytes_of(i) or b"" for i in ids) == "🐘".encode()
    assert tokenizer.token_text(ids[-1]) == f"<0x{'🐘'.encode()[-1]:02X}>"
    assert tokenizer.decode(ids[:-1]) == "\ufffd"
    assert tokenizer.bytes_of(next(iter(tokenizer.special_ids))) is None


def test_markers_without_the_flag_are_special(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces(tokenizer.encode("<think>a</think>")) == [
        Marker("<think>"),
        "a",
        Marker("</think>"),
    ]
    assert tokenizer.decode(tokenizer.encode(f"a{qwen_text.MASK}b<tool_call>")) == "ab"
    # NFC makes a K of the sign for kelvins, and so a marker of a text that holds none.
    for text in (qwen_text.MASK, qwen_text.MASK.replace("K", "\u212a")):
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text, special=False))


def test_rows_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([ROWS - 1, *tokenizer.encode("a"), tokenizer.vocab_size]) == "a"
    with pytest.raises(TokenizerError, match=f"token id {ROWS} is outside the vocabulary"):
        tokenizer.decode([ROWS])


def test_the_keys_of_a_gguf_file(keys: dict[str, Any]) -> None:
    assert keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"] == ("gpt2", "qwen2")
    assert "tokenizer.ggml.scores" not in keys
    assert keys["tokenizer.ggml.add_bos_token"] is False
    tokens = keys["tokenizer.ggml.tokens"]
    kinds = dict(zip(tokens, keys["tokenizer.ggml.token_type"].tolist(), strict=True))
    assert len(tokens) == ROWS and tokens[-1] == f"[PAD{ROWS - 1}]"
    assert [kinds[name] for name in ("<|im_end|>", "<think>", "Ġ", tokens[-1])] == [3, 4, 1, 5]
    assert tokens[keys["tokenizer.ggml.mask_token_id"]] == qwen_text.MASK


def test_a_file_that_names_a_bos_without_use(keys: dict[str, Any]) -> None:
    """Published files name one, and say that it is not written."""
    named = keys | {"tokenizer.ggml.bos_token_id": 1}
    assert Tokenizer.from_gguf(named).bos_id is None
    assert Tokenizer.from_gguf(named | {"tokenizer.ggml.add_bos_token": True}).bos_id == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre is 'llama-bpe', and only 'qwen2' is supported"),
        ({"tokenizer.ggml.pre": None}, "pre is None, and only 'qwen2' is supported"),
        (
            {"tokenizer.ggml.model": "bert"},
            "model is 'bert', and only 'gemma4' or 'gpt2' is supported",
        ),
        ({"tokenizer.ggml.model": ["gpt2"]}, "model is .*, and only"),
    ],
)
def test_other_kinds_are_refused(keys: dict[str, Any], change: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(keys | change)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(normalizer=None),
        lambda state: state["pre_tokenizer"]["pretokenizers"].pop(0),
        lambda state: state.update(pre_tokenizer=None),
        lambda state: state["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        lambda state: state["model"].update(ignore_merges=True),
    ],
)
def test_what_gguf_cannot_name_is_refused(folder: Path, tmp_path: Path, change: Any) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    change(state)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match="known to GGUF files under no name; known are qwen2"):
        tokenizer_keys(tmp_path, ROWS, MARKERS)
