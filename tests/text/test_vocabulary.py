"""Broken vocabularies: one clear error each, naming the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from sfumato.text.tokenizer import Tokenizer, TokenizerError


def _metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of seven tokens; a change of None takes the key away."""
    keys: dict[str, Any] = {
        "model": "gemma4",
        "tokens": ["<pad>", "<eos>", "<bos>", "<|turn>", "a", "b", "ab"],
        "token_type": np.array([3, 3, 3, 4, 1, 1, 1], np.int32),
        "merges": ["a b"],
        "bos_token_id": 2,
        "eos_token_id": np.uint32(1),
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}


def test_a_small_vocabulary_works() -> None:
    tokenizer = Tokenizer.from_gguf(_metadata())
    assert tokenizer.encode("<|turn>ab") == [3, 6]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 1, None)
    assert tokenizer.special_ids == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"ggml\.model is None, and only 'gemma4'"),
        ({"model": "llama"}, r"ggml\.model is 'llama', and only 'gemma4'"),
        ({"add_space_prefix": True}, r"ggml\.add_space_prefix is true"),
        ({"tokens": None}, r"ggml\.tokens is missing"),
        ({"tokens": []}, r"ggml\.tokens is empty"),
        ({"tokens": "abc"}, r"ggml\.tokens must be an array, not str"),
        ({"tokens": 7}, r"ggml\.tokens must be an array, not int"),
        ({"tokens": ["a", 3]}, r"ggml\.tokens must hold texts, but entry 1 is 3"),
        ({"tokens": ["a", "b", "a"]}, r"ggml\.tokens has 'a' twice, at 0 and 2"),
        ({"token_type": None}, r"ggml\.token_type is missing"),
        ({"token_type": [1, 1]}, r"ggml\.token_type has 2 entries for 7 tokens"),
        ({"token_type": [1, 1, 1, 1, 1, 1, 9]}, r"ggml\.token_type has 9, which is none"),
        ({"merges": None}, r"ggml\.merges is missing"),
        ({"merges": ["a b", "ab"]}, r"ggml\.merges entry 1 is 'ab', not two tokens"),
        ({"merges": ["a b", "a b c"]}, r"ggml\.merges entry 1 is 'a b c', not two tokens"),
        ({"merges": ["a z"]}, r"ggml\.merges entry 0 is 'a z', and no token is 'z'"),
        ({"merges": ["b a"]}, r"ggml\.merges entry 0 is 'b a', and no token is 'ba'"),
        ({"bos_token_id": 7}, r"ggml\.bos_token_id is 7, outside the 7 tokens"),
        ({"padding_token_id": "x"}, r"ggml\.padding_token_id is 'x', outside"),
        ({"unknown_token_id": -1}, r"ggml\.unknown_token_id is -1, outside"),
    ],
)
def test_broken_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=f"tokenizer.{message}.*download or convert"):
        Tokenizer.from_gguf(_metadata(**changes))


def test_merges_that_build_a_marker_are_caught() -> None:
    tokens = ["<|turn>", "<|", "turn>"]
    metadata = _metadata(
        tokens=[*tokens, "<", "|", "t", "u", "r", "n", ">", "tu", "rn", "turn"],
        token_type=[3] + [1] * 12,
        merges=["< |", "t u", "r n", "tu rn", "turn >", "<| turn>"],
        bos_token_id=None,
        eos_token_id=None,
    )
    tokenizer = Tokenizer.from_gguf(metadata)
    with pytest.raises(TokenizerError, match=r"builds the special token '<\|turn>'"):
        tokenizer.encode("<|turn>", special=False)


def test_an_unknown_character_may_become_unk() -> None:
    metadata = _metadata(
        tokens=["<unk>", "a"], token_type=[3, 1], merges=["a a"], unknown_token_id=0
    )
    metadata["tokenizer.ggml.tokens"] += ["aa"]
    metadata["tokenizer.ggml.token_type"] += [1]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("aaz", special=False) == [2, 0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": "1.0"}', "\x00\xff"])
def test_a_bad_tokenizer_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable"):
        Tokenizer.from_file(path)


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_another_style_of_decoder_is_refused(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    with pytest.raises(TokenizerError, match=r"decoder .* is not supported"):
        Tokenizer.from_file(path)
    inner.decoder = decoders.WordPiece()
    inner.save(str(path))
    with pytest.raises(TokenizerError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token": 3}'])
def test_a_bad_config_beside_the_tokenizer(tiny_json: Path, text: str) -> None:
    tiny_json.with_name("tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*download it again"):
        Tokenizer.from_file(tiny_json)


def test_a_damaged_model_inside_the_json(tiny_json: Path) -> None:
    data = json.loads(tiny_json.read_text())
    data["model"]["merges"] = [["a", "nowhere"]]
    tiny_json.write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="not a readable"):
        Tokenizer.from_file(tiny_json)
