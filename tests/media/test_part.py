"""Pictures as requests have them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import picture

from sfumato.media.part import source_of
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
