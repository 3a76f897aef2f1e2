from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.text.tokenizer import Detokenizer, Tokenizer, TokenizerError


def test_known_strings_give_the_known_ids(
    gemma: Tokenizer, vocabulary_strings: list[tuple[str, list[int]]]
) -> None:
    assert len(vocabulary_strings) == 46
    for text, ids in vocabulary_strings:
        assert gemma.encode(text) == ids, text
        assert gemma.encode(text, special=False) == ids, text
        assert gemma.decode(ids) == text


def test_the_real_vocabulary(gemma: Tokenizer) -> None:
    assert gemma.vocab_size == 262144
    assert (gemma.pad_id, gemma.eos_id, gemma.bos_id) == (0, 1, 2)
    assert {gemma.token_id(m) for m in DIFFUSION_GEMMA.markers.tokens} == gemma.special_ids
    assert gemma.token_id("<turn|>") == 106
    assert gemma.token_id("no such token") is None


def test_building_the_real_vocabulary_is_quick(
    gemma_metadata: dict[str, Any], note: Callable[[str], None]
) -> None:
    start = time.perf_counter()
    Tokenizer.from_gguf(gemma_metadata)
    seconds = time.perf_counter() - start
    note(f"text: tokenizer of 262144 tokens and 514906 merges built in {seconds:.2f} s")
    assert seconds < 20


def test_special_tokens_are_one_token_or_plain_text(gemma: Tokenizer) -> None:
    for marker in DIFFUSION_GEMMA.markers.tokens:
        assert gemma.encode(f"a{marker}b") == [
            *gemma.encode("a"),
            gemma.token_id(marker),
            *gemma.encode("b"),
        ]
        plain = gemma.encode(f"a{marker}b", special=False)
        assert gemma.special_ids.isdisjoint(plain)
        assert gemma.decode(plain) == f"a{marker}b"


def test_decode_drops_or_shows_special_tokens(gemma: Tokenizer) -> None:
    ids = gemma.encode("<bos><|turn>user\nhi<turn|><|channel>")
    assert gemma.decode(ids) == "user\nhi"
    assert gemma.decode(ids, skip_special=False) == "<bos><|turn>user\nhi<turn|><|channel>"


@pytest.mark.parametrize("token_id", [-1, 262144, 2**40])
def test_ids_outside_the_vocabulary(gemma: Tokenizer, token_id: int) -> None:
    with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of 262144"):
        gemma.decode([5, token_id])


def test_a_lone_surrogate_is_refused(gemma: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"^text: holds .*U\+D800 at position 2\); remove it"):
        gemma.encode("ab\ud800")


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    return [i for i in ids if i is not None]


def test_an_incomplete_character_shows_as_replacement(gemma: Tokenizer) -> None:
    bytes_of_a_bird = _byte_ids(gemma, "🦙".encode())
    assert gemma.decode(bytes_of_a_bird) == "🦙"
    assert gemma.decode(bytes_of_a_bird[:3]) == "\ufffd"
    assert gemma.decode([*bytes_of_a_bird[:3], *gemma.encode("a")]) == "\ufffda"


def test_detokenizer_emits_complete_characters_only(gemma: Tokenizer) -> None:
    detokenizer = Detokenizer(gemma)
    pieces = [detokenizer.push([i]) for i in _byte_ids(gemma, "é🦙".encode())]
    assert pieces == ["", "é", "", "", "", "🦙"]
    assert detokenizer.push(_byte_ids(gemma, b"\xf0\x9f")) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(data=st.data())
def test_detokenizer_joined_is_decode(gemma: Tokenizer, data: st.DataObject) -> None:
    one = st.one_of(st.integers(238, 493), st.integers(0, 262143), st.sampled_from([1, 106, 100]))
    ids = data.draw(st.lists(one, max_size=20))
    cut = data.draw(st.integers(0, len(ids)))
    for skip in (True, False):
        detokenizer = Detokenizer(gemma, skip_special=skip)
        pieces = detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:]), detokenizer.flush()
        assert "".join(pieces) == gemma.decode(ids, skip_special=skip)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_round_trip(gemma: Tokenizer, text: str) -> None:
    assert gemma.decode(gemma.encode(text, special=False)) == text


def test_a_json_file_gives_the_same(
    gemma: Tokenizer, vocabulary_strings: list[tuple[str, list[int]]], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    gemma._inner.save(str(path))
    loaded = Tokenizer.from_file(path)
    assert loaded.special_ids == gemma.special_ids
    assert (loaded.pad_id, loaded.eos_id, loaded.bos_id) == (0, 1, 2)
    for text, ids in vocabulary_strings:
        assert loaded.encode(text) == ids


def test_unflagged_markers_are_special_and_truncation_is_off(tiny_json: Path) -> None:
    tokenizer = Tokenizer.from_file(tiny_json)
    channel = tokenizer.token_id("<|channel>")
    assert channel in tokenizer.special_ids
    assert tokenizer.encode("<|channel>") == [channel]
    assert channel not in tokenizer.encode("<|channel>", special=False)
    assert tokenizer.decode(tokenizer.encode("a<|channel> hello a")) == "a hello a"


def test_names_come_from_the_config_beside(tiny_json: Path) -> None:
    config = tiny_json.with_name("tokenizer_config.json")
    config.write_text('{"bos_token": {"content": "<|turn>"}, "eos_token": "<turn|>"}')
    tokenizer = Tokenizer.from_file(tiny_json)
    assert tokenizer.bos_id == tokenizer.token_id("<|turn>")
    assert tokenizer.eos_id == tokenizer.token_id("<turn|>")
    assert tokenizer.pad_id == tokenizer.token_id("<pad>")
    config.write_text('{"bos_token": "<s>"}')
    with pytest.raises(TokenizerError, match=r"bos_token is '<s>', which tokenizer\.json"):
        Tokenizer.from_file(tiny_json)


def test_threads_do_not_change_each_others_reading(tiny_json: Path) -> None:
    tokenizer = Tokenizer.from_file(tiny_json)
    turn = tokenizer.token_id("<|turn>")
    wrong: list[list[int]] = []

    def work(special: bool) -> None:
        for _ in range(300):
            ids = tokenizer.encode("a<|turn>b", special=special)
            if (turn in ids) is not special:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_text_lets_other_threads_run(tiny_json: Path) -> None:
    tokenizer = Tokenizer.from_file(tiny_json)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode("hello a" * 100_000)
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert sum(began < t < ended for t in ticks) >= 3  # some fifty; none where it holds them up
