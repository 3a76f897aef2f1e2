"""The real vocabulary and chat template, where they are at hand, and a tiny vocabulary always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.support.pieces import MARKERS
from tokenizers import AddedToken, decoders, models, normalizers

from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.files.gguf import read_gguf

VOCABULARY = Path(__file__).resolve().parents[2].parent / "shared/fixtures/ggml-vocab-gemma-4.gguf"


@pytest.fixture(scope="session")
def gemma_metadata() -> dict[str, Any]:
    if not VOCABULARY.is_file():
        pytest.skip("needs ../shared/fixtures/ggml-vocab-gemma-4.gguf")
    return dict(read_gguf(VOCABULARY).metadata)


@pytest.fixture(scope="session")
def gemma(gemma_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(gemma_metadata)


@pytest.fixture(scope="session")
def gemma_template(gemma_metadata: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate.from_gguf(gemma_metadata, MARKERS)


@pytest.fixture(scope="session")
def vocabulary_strings(gemma_metadata: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """llama.cpp's test strings for this vocabulary and the ids they must give."""
    texts = VOCABULARY.with_name(VOCABULARY.name + ".inp").read_bytes().decode()
    ids = VOCABULARY.with_name(VOCABULARY.name + ".out").read_text()
    return [
        (text, [int(number) for number in line.split()])
        for text, line in zip(texts.split("\n__ggml_vocab_test__\n"), ids.split("\n"), strict=False)
    ]


@pytest.fixture
def tiny_json(tmp_path: Path) -> Path:
    """A tokenizer.json of Gemma's style: letters, bytes, "▁a" merged, markers partly unflagged."""
    pieces = [
        *MARKERS.tokens,
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abcdehlo<>|/turn\n",
        "▁a",
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for marker in MARKERS.tokens:
        special = marker != "<|channel>"
        inner.add_tokens([AddedToken(marker, special=special, normalized=False)])
    inner.enable_truncation(3)
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    return path
