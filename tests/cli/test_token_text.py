from __future__ import annotations

from sfumato.cli.display import Pieces, harmless


def test_escape_codes_cannot_reach_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9b\u202ec\ud800") == "a·[2Jb···c·"


def test_newlines_stay_and_tabs_become_spaces() -> None:
    assert harmless("a\r\nb\tc\n") == "a\nb    c\n"
    assert harmless("é漢🙂") == "é漢🙂"


def test_each_token_keeps_its_place() -> None:
    words = {0: "", 1: "Hello", 2: " world"}
    pieces = Pieces(lambda ids: "".join(words[i] for i in ids))
    assert pieces([0, 1, 0, 2, 2]) == ["", "Hello", "", " world", " world"]


def test_the_bytes_of_one_character_are_put_together() -> None:
    pieces = Pieces(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert pieces(list("aé!".encode())) == ["a", "é", "", "!"]
    assert pieces([0xC3, 0x41]) == ["\ufffd", "A"]
