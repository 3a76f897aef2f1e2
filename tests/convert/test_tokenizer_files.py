from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.support.pieces import MARKERS
from tokenizers import models

from sfumato.convert import tokenizer_keys, write_tokenizer
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer, TokenizerError
from sfumato.train.vocabulary import TOKENS, write_text_side

TEXTS = ("Hello, world", "  two  spaces\n", "<|turn>user\nHi<turn|>", "bad cable")


@pytest.fixture
def characters(tmp_path: Path) -> Path:
    """The embedded model's files: no merges, a plain space, no normalizer."""
    write_text_side(tmp_path)
    return tmp_path


def _same(first: Tokenizer, second: Tokenizer) -> None:
    for text in TEXTS:
        ids = first.encode(text)
        assert second.encode(text) == ids
        assert second.decode(ids, skip_special=False) == first.decode(ids, skip_special=False)
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "special_ids"):
        assert getattr(second, name) == getattr(first, name)


def test_a_vocabulary_of_characters_there_and_back(characters: Path, tmp_path: Path) -> None:
    before = Tokenizer.from_file(characters / "tokenizer.json")
    keys = tokenizer_keys(characters, len(TOKENS), MARKERS)
    _same(before, Tokenizer.from_gguf(keys))
    back = tmp_path / "back"
    back.mkdir()
    write_tokenizer(keys, back)
    _same(before, Tokenizer.from_file(back / "tokenizer.json"))
    template, again = ChatTemplate.from_folder(characters), ChatTemplate.from_folder(back)
    assert (again.source, again.bos, again.eos) == (template.source, template.bos, template.eos)


def test_bytes_and_merges_there_and_back(tiny_json: Path, tmp_path: Path) -> None:
    before = Tokenizer.from_file(tiny_json)
    keys = tokenizer_keys(tiny_json.parent, before.vocab_size, MARKERS)
    assert keys["tokenizer.ggml.merges"] == ["▁ a"]
    assert "tokenizer.chat_template" not in keys
    kinds = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    assert (kinds["a"], kinds["<0x0A>"], kinds["<|turn>"], kinds["<|channel>"]) == (1, 6, 3, 4)
    _same(before, Tokenizer.from_gguf(keys))
    back = tmp_path / "back"
    back.mkdir()
    write_tokenizer(keys, back)
    _same(before, Tokenizer.from_file(back / "tokenizer.json"))
    assert {item.name for item in back.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_rows_without_a_token_get_one(characters: Path) -> None:
    keys = tokenizer_keys(characters, len(TOKENS) + 2, MARKERS)
    assert keys["tokenizer.ggml.tokens"][-2:] == ["[PAD106]", "[PAD107]"]
    assert keys["tokenizer.ggml.token_type"].tolist()[-3:] == [1, 5, 5]
    for key in ("token_type", "scores"):
        assert len(keys[f"tokenizer.ggml.{key}"]) == len(TOKENS) + 2


def test_without_files_there_are_no_keys(tmp_path: Path) -> None:
    assert tokenizer_keys(tmp_path, 10, MARKERS) == {}
    write_tokenizer({}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # 262,144 tokens there and back, as the few above
def test_the_real_vocabulary(gemma_metadata: dict[str, Any], tmp_path: Path) -> None:
    """Through Hugging Face's files and back, the published keys are the same."""
    write_tokenizer(gemma_metadata, tmp_path)
    keys = tokenizer_keys(tmp_path, 262144, MARKERS)
    for key, value in keys.items():
        expected = gemma_metadata[key]
        same = np.array_equal(value, expected) if isinstance(value, np.ndarray) else None
        assert value == expected if same is None else same, key
    assert set(keys) == {key for key in gemma_metadata if key.startswith("tokenizer.")}


def _edit(path: Path, change: Any) -> None:
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(normalizer={"type": "Lowercase"}), "its normalizer is a Lowercase"),
        (
            lambda s: s.update(pre_tokenizer={"type": "Digits", "individual_digits": True}),
            "would encode .* otherwise",
        ),
    ],
)
def test_what_gguf_cannot_say_is_refused(characters: Path, change: Any, message: str) -> None:
    def with_merge(state: Any) -> None:
        state["model"]["vocab"]["01"] = len(TOKENS)
        state["model"]["vocab"]["12"] = len(TOKENS) + 1
        state["model"]["merges"] = [["0", "1"], ["1", "2"]]
        change(state)

    path = characters / "tokenizer.json"
    _edit(path, with_merge)
    with pytest.raises(TokenizerError, match=message):
        tokenizer_keys(characters, len(TOKENS) + 2, MARKERS)


def test_two_tokens_for_a_space_are_refused(characters: Path) -> None:
    _edit(characters / "tokenizer.json", lambda s: s["model"]["vocab"].update({"▁": len(TOKENS)}))
    with pytest.raises(TokenizerError, match="cannot tell apart"):
        tokenizer_keys(characters, len(TOKENS) + 1, MARKERS)


def test_only_bpe_and_only_as_many_ids_as_rows(characters: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="more than the embedding's 50"):
        tokenizer_keys(characters, 50, MARKERS)
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="a WordLevel model; only BPE"):
        tokenizer_keys(tmp_path, 10, MARKERS)
