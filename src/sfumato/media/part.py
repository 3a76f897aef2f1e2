"""A picture as a request's message has it → patches.

Reads no addresses: what fetches them gives bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from sfumato.media.patches import Cut, Patches, patches_of
from sfumato.media.picture import Limits, Source, read_picture
from sfumato.refused import Refused

FIELDS = ("path", "bytes", "url", "image")
"""A file, the bytes of one, a data URL, or a picture of Pillow's: a part has one of them."""


def read_part(
    part: Mapping[str, Any], cut: Cut, field: str, limits: Limits | None = None
) -> Patches:
    """The patches of a part `{"type": "image", …}`. field: the part's place in the request, which
    errors name. Raises Refused."""
    given = [name for name in FIELDS if part.get(name) is not None]
    if len(given) != 1:
        raise Refused(field, f"must have one of {', '.join(FIELDS)}, has {len(given)} of them")
    (name,), limits = given, limits or Limits()
    source = _source(name, part[name], f"{field}.{name}", limits)
    return patches_of(read_picture(source, limits, f"{field}.{name}"), cut)


def _source(name: str, value: Any, field: str, limits: Limits) -> Source:
    if name == "path" and isinstance(value, str | Path):
        return Path(value)
    if name == "bytes" and isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if name == "image" and isinstance(value, Image.Image):
        return value
    if name == "url" and isinstance(value, str):
        return data_of(value, field, limits)
    wanted = {"path": "a path", "bytes": "bytes", "url": "a text", "image": "of PIL.Image.Image"}
    raise Refused(field, f"must be {wanted[name]}, not {type(value).__name__}")


def data_of(url: str, field: str, limits: Limits) -> bytes:
    """The bytes of a data URL, the kind that it names left aside."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise Refused(field, "must be a data URL in base64", "send data:image/png;base64,…")
    if len(data) > limits.nbytes // 3 * 4 + 4:
        raise Refused(field, f"must have {limits.nbytes:,} bytes at most", "send a smaller picture")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(field, "is no base64") from error


__all__ = ["FIELDS", "Cut", "read_part"]
