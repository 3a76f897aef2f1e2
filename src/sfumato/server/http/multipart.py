"""Bodies of several parts, `multipart/form-data` as RFC 7578 has it: a part of JSON, and files.

Knows bytes, and no field of a body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.message import Message

from sfumato.refused import Refused

MOST_PARTS = 64
MOST_HEAD = 4096  # bytes of the headers of a part
_NAME = re.compile(rb'^content-disposition: *form-data;.*\bname="([^"]{1,256})"', re.I | re.M)


def boundary_of(content_type: str) -> bytes | None:
    """What stands between the parts of such a body; None for a body of another kind. Raises
    Refused for another kind of several parts."""
    header = Message()
    header["Content-Type"] = content_type
    if header.get_content_maintype() != "multipart":
        return None
    boundary = header.get_param("boundary")
    is_form = header.get_content_subtype() == "form-data"
    if not (is_form and isinstance(boundary, str) and 1 <= len(boundary) <= 70):
        raise Refused(
            None, "the body of several parts is no multipart/form-data with a boundary", "send JSON"
        )
    return boundary.encode("latin-1", "replace")


def split(data: bytearray, boundary: bytes, main: str) -> tuple[bytearray, Mapping[str, bytes]]:
    """The part of the name `main`, and the others by their names; empties `data`. Raises
    Refused."""
    pieces = (b"\r\n" + data).split(b"\r\n--" + boundary, MOST_PARTS + 1)
    data.clear()
    if not pieces.pop().startswith(b"--"):
        raise Refused(None, f"the body is cut short, or has more than {MOST_PARTS} parts")
    parts: dict[str, bytes] = {}
    for piece in pieces[1:]:
        head, _, content = piece.partition(b"\r\n\r\n")
        match = _NAME.search(head[:MOST_HEAD])
        name = match[1].decode("utf-8", "replace") if match else ""
        if not name or name in parts:
            raise Refused(None, f"part {len(parts) + 1} of the body has no name of its own")
        parts[name] = content
    if main not in parts:
        raise Refused(None, f"the body has no part named {main}, which holds the JSON")
    return bytearray(parts.pop(main)), parts
