from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import tokenizers

from sfumato.embedded_questions import all_questions
from sfumato.train.embedded_data import evaluation_sets, sample
from sfumato.train.vocabulary import (
    BOS,
    CHARACTERS,
    END_OF_TURN,
    EOS,
    GEMMA,
    MASK,
    PAD,
    QWEN,
    SPECIAL_TOKENS,
    TOKENS,
    TURN,
    UNK,
    TextSide,
    build_tokenizer,
    encode_chat,
    encode_text,
    write_text_side,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_text_side(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def render(messages: list[dict[str, Any]], side: TextSide = GEMMA, **arguments: Any) -> str:
    template = jinja2.Environment().from_string(side.template)
    given = {"bos_token": "<bos>", "add_generation_prompt": True, **arguments}
    return template.render(messages=messages, **given)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_ids_are_those_the_network_is_trained_with(tokenizer: tokenizers.Tokenizer) -> None:
    assert (PAD, EOS, BOS, UNK, MASK, TURN, END_OF_TURN) == (0, 1, 2, 3, 4, 5, 6)
    assert tokenizer.get_vocab_size() == len(TOKENS) == len(set(TOKENS)) == 106
    assert [tokenizer.token_to_id(token) for token in TOKENS] == list(range(106))


def test_every_text_of_the_vocabulary_survives(tokenizer: tokenizers.Tokenizer) -> None:
    for text in (CHARACTERS, "  two  spaces ", "\n\n a\nb \n", "don't , stop !", ""):
        ids = tokenizer.encode(text).ids
        assert ids == encode_text(text) and len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_unknown_characters_are_unk_one_by_one(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode("aéü\tb").ids == encode_text("aéü\tb")
    assert encode_text("aéü\tb").count(UNK) == 3


def test_markers_are_special_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    text = "".join(SPECIAL_TOKENS) + "x"
    assert tokenizer.encode(text).ids == [*range(10), *encode_text("x")]
    assert tokenizer.decode(list(range(10)) + encode_text("x")) == "x"
    assert tokenizer.decode([TURN, END_OF_TURN], skip_special_tokens=False) == "<|turn><turn|>"


def test_template_writes_the_turns() -> None:
    assert render([user("Hi")]) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    messages = [
        {"role": "system", "content": "Be brief."},
        user(" Hi \n"),
        {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Hello!"},
        user("Bye"),
    ]
    assert render(messages) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
        "<|turn>model\nHello!<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )
    assert render([user("Hi")], add_generation_prompt=False) == "<bos><|turn>user\nHi<turn|>\n"


def test_the_template_of_qwen_writes_its_turns() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": " Hi \n"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
        user("Bye"),
    ]
    assert render(messages, QWEN) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_accepts_what_it_cannot_honour() -> None:
    plain = render([user("Hi")])
    assert render([user("Hi")], enable_thinking=True) == plain
    parts = [{"type": "text", "text": "H"}, {"type": "audio"}, {"type": "text", "text": "i"}]
    assert render([{"role": "user", "content": parts}]) == plain


def test_pictures_stand_after_the_text_of_their_message() -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "Hi "}
    for parts, shown in (
        ([image, text], "Hi\n<mask>"),
        ([text, image, image], "Hi\n<mask>\n<mask>"),
        ([image], "<mask>"),
    ):
        expected = f"<bos><|turn>user\n{shown}<turn|>\n<|turn>model\n"
        assert render([{"role": "user", "content": parts}]) == expected
    assert render([user("Hi"), {"role": "developer", "content": "x"}]).count("<|turn>system\n") == 1


@pytest.mark.parametrize("side", [GEMMA, QWEN], ids=["gemma", "qwen"])
def test_fast_encoding_equals_the_rendered_template(side: TextSide) -> None:
    tokenizer = build_tokenizer(side)
    conversations = [
        task.messages for tasks in evaluation_sets(count=20).values() for task in tasks[:40]
    ]
    system = {"role": "system", "content": " You are a demo. "}
    conversations += [[system, user("a < b | c\n\n  d")], [user("caf\u00e9")]]
    for messages in conversations:
        rendered = render(messages, side)
        assert encode_chat(messages, side) == tokenizer.encode(rendered).ids


def test_training_examples_are_what_the_runtime_would_encode(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        prompt, response = sample(rng)
        for ids in (prompt, response, prompt + response):
            assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)).ids == ids


def test_written_files(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert (folder / "chat_template.jinja").read_text() == GEMMA.template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<eos>" and config["bos_token"] == "<bos>"
    write_text_side(folder)
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == (
        build_tokenizer().to_str()
    )


def test_transformers_reads_the_folder(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert len(theirs) == 106
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (PAD, EOS, BOS)

    assert (theirs.unk_token_id, theirs.mask_token_id) == (UNK, MASK)
    assert set(range(10)) <= set(theirs.all_special_ids)
    for question in all_questions():
        messages = [user(question.text)]
        ids = theirs.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=True, return_dict=False
        )
        assert list(ids) == encode_chat(messages)
        answer = encode_text(question.answer)
        assert theirs.decode([*answer, END_OF_TURN, EOS], skip_special_tokens=True) == (
            question.answer
        )


def test_transformers_reads_the_folder_of_qwens_markers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_text_side(tmp_path, QWEN)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.convert_ids_to_tokens(list(range(10))) == list(QWEN.markers)
    assert (theirs.mask_token_id, theirs.eos_token_id, theirs.bos_token_id) == (MASK, EOS, None)
