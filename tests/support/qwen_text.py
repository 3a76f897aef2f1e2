"""A small vocabulary of Qwen3's kind: BPE of bytes, trained on a few lines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
MASK = "<|MASK|>"
_LINES = (
    "user system assistant You are a helpful assistant that answers the question in a few words.",
    'It writes {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} as calls',
    "It's a test, isn't it? We'll see: they've 1234567890 words\n\nand   spaces,\ttabs\r\n",
    "日本語の文章と中文的句子 и русский текст, déjà vu, naïve café 🙂🙂 👩‍👩‍👧",
    "def f(x):\n    return [x, x + 1]\n\n\nprint(f(3))  # \"quoted\" 'text'\n",
)


@cache
def state() -> str:
    """A `tokenizer.json` with Qwen2's pipeline. Its markers for thoughts and calls have no flag, as
    in the published files."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.train_from_iterator(_LINES, trainer)
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, normalized=False) for text in VISIBLE])
    inner.add_special_tokens([AddedToken(MASK, normalized=False)])
    return inner.to_str()


def write_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the former."""
    path = folder / "tokenizer.json"
    path.write_text(state(), encoding="utf-8")
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": MASK,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    path.with_name("tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
