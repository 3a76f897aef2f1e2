"""Pictures as requests have them."""

from __future__ import annotations

import base64
import io
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import picture

from sfumato.media.part import PictureSource, from_base64, source_of
from sfumato.media.patches import Cut, patches_of
from sfumato.media.picture import Limits
from sfumato.refused import Refused

CUT = Cut(tokens=6)


def png() -> bytes:
    stream = io.BytesIO()
    picture(40, 30).save(stream, "PNG")
    return stream.getvalue()


def test_all_forms_of_a_picture_give_the_same_patches(tmp_path: Path) -> None:
    file, data = tmp_path / "a.png", png()
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"path": file},
        {"path": str(file), "url": None},
        {"bytes": data},
        {"url": url},
        {"image": picture(40, 30)},
    ]
    keys = {source_of({"type": "image"} | part, "at").patches(CUT, Limits()).key for part in parts}
    assert keys == {patches_of(picture(40, 30), CUT).key}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({}, r"at: must have one of path, bytes, url, image, has 0"),
        ({"path": "a", "bytes": b""}, r"has 2 of them"),
        ({"path": 3}, r"at\.path: must be a path, not int"),
        ({"bytes": "text"}, r"at\.bytes: must be bytes, not str"),
        ({"image": b"x"}, r"at\.image: must be of PIL\.Image\.Image, not bytes"),
        ({"url": b"x"}, r"at\.url: must be a text"),
        ({"url": "https://a.b/c.png"}, r"at\.url: a URL of the scheme 'https'"),
        ({"url": "data:image/png,abc"}, r"at\.url: the data URL has no base64 data"),
        ({"url": "data:image/png;base64,a$b"}, r"at\.url: .*base64 data are damaged"),
        (
            {"url": "data:image/png;base64," + "A" * 400},
            r"at\.url: .* has more than 100 bytes",
        ),
        ({"path": "/nowhere/at/all.png"}, r"at\.path: .* is no file"),
        ({"bytes": b"no picture"}, r"at\.bytes: "),
        ({"bytes": b"no picture", "tokens": 71}, r"at\.tokens: must be one of 70, 140, 280"),
        ({"bytes": b"no picture", "field": "there"}, r"there: "),
    ],
)
def test_what_is_no_picture_is_refused_and_named(part: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        source_of(part, "at").patches(CUT, Limits(nbytes=100))


def test_blanks_between_all_characters_take_no_more_memory() -> None:
    text = "ab " * 200_000
    tracemalloc.start()
    try:
        assert len(from_base64(text, 1 << 20, "at")) == 300_000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 * len(text)


@pytest.mark.parametrize("text", ["YWJj\u00a0", "YWJj\0", "YWJ\u0441", "YQ==YQ=="])
def test_other_characters_are_damage(text: str) -> None:
    with pytest.raises(Refused, match=r"at: .*damaged"):
        from_base64(text, 1 << 20, "at")


def test_a_scheme_is_looked_for_in_few_characters() -> None:
    assert PictureSource("DATA:" + "A" * 99, "at").scheme == "data"
    assert len(PictureSource("A" * (1 << 20), "at").scheme) < 99
