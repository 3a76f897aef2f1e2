"""Where a message has a picture: its bytes, a path, or a URL. Knows no network and no file."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sfumato.media.picture import Limits, Source, read_picture
from sfumato.refused import Refused

SCHEMES = ("data", "http", "https", "file")


@dataclass(frozen=True, eq=False)
class PictureSource:
    """A picture of a message, not yet read.

    given: the bytes of a file, a picture of Pillow's, the path of a file, or a URL as text; field:
    the part of the request, as errors name it; tokens: how many soft tokens the picture may take;
    None: as many as the model takes by default.
    """

    given: bytes | Path | Image.Image | str
    field: str
    tokens: int | None = None

    @property
    def scheme(self) -> str:
        """The scheme of a URL; "" where there is none."""
        return self.given.split(":", 1)[0].lower() if isinstance(self.given, str) else ""

    def read(self, limits: Limits | None = None, content: Source | None = None) -> Image.Image:
        """The picture in mode RGB. content: what stands at the URL, where it was fetched. Raises
        Refused."""
        if content is None:
            content = self.content(limits or Limits())
        return read_picture(content, limits, self.field)

    def content(self, limits: Limits) -> Source:
        """The source without a URL; of a data URL the bytes in it. Raises Refused for other URLs:
        who fetches knows which hosts and folders may be read."""
        if not isinstance(self.given, str):
            return self.given
        if self.scheme == "data":
            return data_of(self.given, limits.nbytes, self.field)
        raise Refused(
            self.field,
            f"a URL of the scheme {self.scheme[:20]!r} is not read here",
            "send the picture itself, as a data URL",
        )


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
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(field, "the picture's base64 data are damaged", "encode it again") from None
