"""Bodies that arrive compressed: zstd, bounded by what comes out of it. Knows no JSON.

The library is Python's own `compression.zstd`, before 3.14 as `backports.zstd`, by the same author
and with the same names. Its decompressor gives as many bytes as it is asked for, so that a body of
a few bytes that stands for gigabytes takes no more memory than a body may have.
"""

from __future__ import annotations

import sys

from sfumato.refused import Refused
from sfumato.server.http.errors import ApiError, WrongField

MOST_WINDOW = 23  # log2 of bytes that a frame may refer back to: RFC 9659 allows 8 MiB over HTTP
_SUPPORTED = {"": False, "identity": False, "zstd": True}


class ExpandsTooFar(ValueError):
    """There is more than the limit. declared: bytes, as the frame says; None where it does not."""

    def __init__(self, declared: int | None) -> None:
        super().__init__("more bytes than the limit" if declared is None else f"{declared:,} bytes")
        self.declared = declared


def is_zstd(encoding: str) -> bool:
    """Whether a Content-Encoding is zstd. Raises ApiError for one that is not supported."""
    name = encoding.strip().lower()
    if name not in _SUPPORTED:
        raise ApiError(
            415,
            f"Content-Encoding: {name[:40]!r} is not supported; send the body as it is, or "
            "compressed with zstd",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "zstd"},
        )
    return _SUPPORTED[name]


def expanded(data: bytes | bytearray, most: int) -> bytearray:
    """The bytes of one zstd frame. Raises ExpandsTooFar where they are more than `most`, after so
    many of them at most; ApiError for what is no such frame."""
    # Only servers whose clients compress need it.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    try:
        declared = zstd.get_frame_info(data).decompressed_size
        if declared is not None and declared > most:
            raise ExpandsTooFar(declared)
        options = {int(zstd.DecompressionParameter.window_log_max): MOST_WINDOW}
        decompressor = zstd.ZstdDecompressor(options=options)
        content = bytearray()
        given: bytes | bytearray = data
        while not decompressor.eof and len(content) <= most:
            part = decompressor.decompress(given, most + 1 - len(content))
            given = b""
            content += part
            if not part and decompressor.needs_input:
                raise _broken("the body's zstd data is cut short")
    except zstd.ZstdError as error:
        raise _broken(
            f"the body is not zstd, as its Content-Encoding says: {str(error)[:200]}"
        ) from None
    if len(content) > most:
        raise ExpandsTooFar(None)
    if decompressor.unused_data:
        raise _broken("the body is more than one zstd frame; send one")
    return content


def _broken(message: str) -> ApiError:
    error = ApiError.of(Refused(None, message, code="bad_encoding"))
    error.field = WrongField((), message, "bad_encoding")
    return error
