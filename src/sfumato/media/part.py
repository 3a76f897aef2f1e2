"""A picture as a message has it → patches.

A part gives its picture as the path of a file, as bytes, as a picture of Pillow's, or as a URL.
Knows no network: what fetches a URL gives the bytes that stand there.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from sfumato.media.patches import BUDGETS, Cut, Patches, patches_of
from sfumato.media.picture import Limits, Source, read_picture
from sfumato.refused import Refused

_TYPES: dict[str, tuple[str, tuple[type, ...], Callable[[Any], Source | str]]] = {
    "path": ("a path", (str, Path), Path),
    "bytes": ("bytes", (bytes, bytearray, memoryview), bytes),
    "url": ("a text", (str,), str),
    "image": ("of PIL.Image.Image", (Image.Image,), lambda image: image),
}

DETAILS = {"auto": None, "low": 70, "high": 560, "original": 1120}
"""Soft tokens of a picture at most, by OpenAI's `detail`; None: the model's default."""

_SCHEME = 32  # characters; no scheme that is known here is longer


@dataclass(frozen=True, eq=False)
class PictureSource:
    """A picture of a message, not yet read.

    given: the bytes of a file, a picture of Pillow's, the path of a file, or a URL as text; field:
    the part of the request, as errors name it; tokens: how many soft tokens the picture may take;
    None: as many as the model takes by default.
    """

    given: Source | str
    field: str
    tokens: int | None = None

    @property
    def scheme(self) -> str:
        """The scheme of a URL; "" where there is none."""
        # Of a few characters: a data URL may have millions.
        return self.given[:_SCHEME].split(":", 1)[0].lower() if isinstance(self.given, str) else ""

    def patches(self, cut: Cut, limits: Limits, content: Source | None = None) -> Patches:
        """The patches. content: what stands at the URL, where it was fetched. Raises Refused."""
        if self.tokens is not None:
            cut = replace(cut, tokens=min(self.tokens, cut.most))
        source = self._content(limits) if content is None else content
        return patches_of(read_picture(source, limits, self.field), cut)

    def _content(self, limits: Limits) -> Source:
        """The source without a URL; of a data URL the bytes in it."""
        if not isinstance(self.given, str):
            return self.given
        if self.scheme == "data":
            return data_of(self.given, limits.nbytes, self.field)
        raise Refused(
            self.field,
            f"a URL of the scheme {self.scheme[:20]!r} is not read here",
            "send the picture itself, as a data URL",
        )


def source_of(part: Mapping[str, Any], field: str) -> PictureSource:
    """The source of a part {"type": "image", …}. field: the part's place in the request; a part may
    name another one, "field". Raises Refused."""
    field = str(part.get("field", field))
    given = [name for name in _TYPES if part.get(name) is not None]
    if len(given) != 1:
        raise Refused(field, f"must have one of {', '.join(_TYPES)}, has {len(given)} of them")
    (name,), tokens = given, part.get("tokens")
    wanted, types, made = _TYPES[name]
    if not isinstance(part[name], types):
        raise Refused(f"{field}.{name}", f"must be {wanted}, not {type(part[name]).__name__}")
    if tokens is not None and tokens not in BUDGETS:
        raise Refused(f"{field}.tokens", f"must be one of {', '.join(map(str, BUDGETS))}")
    where = field if "field" in part else f"{field}.{name}"
    return PictureSource(made(part[name]), where, tokens)


def of_url(part: Mapping[str, Any], where: str) -> PictureSource:
    """The source of OpenAI's parts `image_url` and `input_image`. Raises Refused."""
    given: Any = part.get("image_url")
    detail, at = part.get("detail"), f"{where}.detail"
    if part.get("file_id") is not None:
        raise Refused(
            f"{where}.file_id", "no files are kept here", "send a data URL", "unsupported"
        )
    if isinstance(given, Mapping):
        detail, at, given = given.get("detail"), f"{where}.image_url.detail", given.get("url")
    if not isinstance(given, str):
        raise Refused(f"{where}.image_url", "must be a URL")
    if not isinstance(detail, str | None) or (detail or "auto") not in DETAILS:
        raise Refused(at, f"must be one of {', '.join(DETAILS)}")
    return PictureSource(given, f"{where}.image_url", DETAILS[detail or "auto"])


def data_of(url: str, most: int, field: str) -> bytes:
    """The bytes of a data URL, of `most` at most. Its media type is not looked at: the bytes say
    what they are. Raises Refused."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise Refused(
            field, "the data URL has no base64 data", "write it as data:image/png;base64,iVBOR…"
        )
    return from_base64(text, most, field)


def from_base64(text: str, most: int, field: str) -> bytes:
    """The bytes of a text in base64, with or without line ends. Raises Refused, for over `most`
    bytes too, before they are made."""
    if len(text) // 4 * 3 > most + most // 16:  # line ends take 2 of 78 characters
        raise Refused(field, f"the picture has more than {most} bytes", "send a smaller one")
    try:
        return base64.b64decode(text.encode("ascii").translate(None, b" \t\r\n"), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(field, "the picture's base64 data are damaged", "encode it again") from None
