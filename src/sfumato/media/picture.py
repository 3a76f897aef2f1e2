"""A picture as its user gave it → RGB pixels, upright.

Reads PNG, JPEG, WebP, GIF (the first picture) and BMP with Pillow.  Decoders make memory for what
a header claims, and spend time on every piece of a container and on every scan: here the claims
are counted first, in one pass over the pieces.  Knows no sizes that a network wants.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.refused import Refused

Source = bytes | Path | Image.Image
"""Bytes of a file, the path of one, or a picture of Pillow's."""

_ORIENTATION = 0x0112  # of EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

KINDS = ("PNG", "JPEG", "WebP", "GIF", "BMP")
"""The kinds of files that are read."""

MOST_PIECES = 1 << 12
"""Segments or sub-blocks in front of the pixels.  Decoders handle each of them in Python."""

MOST_CHUNKS = 1 << 16  # of a PNG, whose pixels lie in chunks too

WEBP_PIXELS = 1 << 24
"""Pillow's decoder holds a WebP four times, and copies it whole while no other thread runs."""

_STRIPE = 1 << 20  # pixels


@dataclass(frozen=True)
class Limits:
    """How large a picture may be. Every number is checked before memory of its size is made."""

    nbytes: int = 32 << 20  # of the file
    pixels: int = 1 << 26  # 67 million: 268 MB, since Pillow takes four bytes for RGB too
    side: int = 1 << 16  # a resize holds 32 bytes for each pixel of a row or of a column
    work: int = 1 << 30  # pixels times the scans of a JPEG, each of which visits all pixels


def read_picture(source: Source, limits: Limits | None = None, field: str = "image") -> Image.Image:
    """The picture in mode RGB, turned as its EXIF data say, transparency on white.

    field: the part of the request that errors name. Raises Refused for what is no picture, too
    large a one, or a damaged one.
    """
    limits = limits or Limits()
    if isinstance(source, Image.Image):
        check_size(*source.size, limits, field)
        return _decoded(source, field, source.format or "picture")
    data = file_bytes(source, limits, field) if isinstance(source, Path) else source
    kind = check(data, limits, field)
    try:
        opened = Image.open(io.BytesIO(data), formats=[kind])
    except Exception as error:
        raise _refused(error, field, kind) from error
    with opened:
        check_size(*opened.size, limits, field, scans(data) if kind == "JPEG" else 1)
        return _decoded(opened, field, kind)


def _opened(path: str, flags: int) -> int:
    """A descriptor that no pipe keeps waiting for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def file_bytes(
    path: Path, limits: Limits, field: str, opener: Callable[[str, int], int] = _opened
) -> bytes:
    """The bytes of a plain file, one more than the limit at most. opener: as `open` takes it.
    Raises Refused, which has the file's name and not its folder."""
    no_file = Refused(field, f"{path.name!r} is no file", "give the path of a picture")
    try:
        if not path.is_file():
            raise no_file
        with open(path, "rb", opener=opener) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):  # it is another one by now
                raise no_file
            return stream.read(limits.nbytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        why = getattr(error, "strerror", None) or "is no path"
        raise Refused(field, f"{path.name!r} cannot be read ({why})") from None


def _decoded(image: Image.Image, field: str, kind: str) -> Image.Image:
    try:
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        rgb = _rgb(image)
        return rgb if turn is None else rgb.transpose(turn)
    except Exception as error:
        raise _refused(error, field, kind) from error


def _refused(error: Exception, field: str, kind: str) -> Refused:
    """The refusal that a decoder's error becomes. Decoders raise any error for damaged data."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return Refused(field, "the picture has too many pixels", "send a smaller one")
    return broken(field, kind)


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1 where the picture does not say, or its EXIF data are damaged."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # whatever is wrong with the data beside them, the pixels are good
        return 1
    return value if isinstance(value, int) else 1


def _rgb(image: Image.Image) -> Image.Image:
    """The picture's colours, transparent ones on white."""
    if image.mode.startswith("I;16"):  # whose values Pillow would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """The picture on white, made in stripes: one of them is in memory several times, not the
    picture, and between them other threads run."""
    rgb, stripe = Image.new("RGB", image.size), max(1, _STRIPE // image.width)
    for top in range(0, image.height, stripe):
        bottom = min(top + stripe, image.height)
        clear = image.crop((0, top, image.width, bottom)).convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        rgb.paste(Image.alpha_composite(white, clear).convert("RGB"), (0, top))
    return rgb


def check(data: bytes, limits: Limits, field: str) -> str:
    """The kind of the file. Raises Refused, naming the field, for other kinds, and for a file that
    would cost a decoder more memory or time than its limits allow."""
    if len(data) > limits.nbytes:
        raise Refused(
            field, f"the picture has {len(data)} bytes", f"at most {limits.nbytes} are read"
        )
    kind = _kind(data)
    if kind is None:
        raise Refused(field, "the bytes are no picture", f"send {', '.join(KINDS)}")
    try:
        most = MOST_CHUNKS if kind == "PNG" else MOST_PIECES
        if sum(1 for _ in islice(_PIECES[kind](data), most + 1)) > most:
            raise Refused(field, f"the {kind} has more than {most} parts", "save the picture again")
        if kind == "WebP":
            bounds = replace(limits, pixels=min(limits.pixels, WEBP_PIXELS))
            check_size(*_webp_size(data), bounds, field)
    except (struct.error, IndexError):
        raise broken(field, kind) from None
    if kind == "BMP" and _is_run_length(data):
        raise Refused(field, "run-length encoded BMP is not supported", "save it as PNG")
    return kind


def check_size(width: int, height: int, limits: Limits, field: str, scans: int = 1) -> None:
    """Raises Refused for a picture of too many pixels, or of too many scans for its size."""
    pixels = width * height
    if pixels < 1:
        raise Refused(field, f"the picture has {width} × {height} pixels", "send one that has some")
    if pixels > limits.pixels:
        raise Refused(
            field,
            f"the picture has {width} × {height} pixels",
            f"at most {limits.pixels} are read; send a smaller one",
        )
    if max(width, height) > limits.side:
        raise Refused(
            field,
            f"the picture has {width} × {height} pixels",
            f"at most {limits.side} in a row or a column are read; send a smaller one",
        )
    if pixels * scans > limits.work:
        raise Refused(
            field, f"the picture has {width} × {height} pixels in {scans} scans", "save it again"
        )


def broken(field: str, kind: str) -> Refused:
    """The refusal of a file that a decoder cannot read."""
    return Refused(field, f"the {kind} is truncated or damaged", "send a picture that opens")


def scans(data: bytes) -> int:
    """How many scans a JPEG has at most: a start of scan is a marker, which pixels never contain,
    though other segments may."""
    return data.count(b"\xff\xda")


def _kind(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "BMP" if data.startswith(b"BM") else None


def _chunks(data: bytes) -> Iterator[int]:
    """Where the chunks of a PNG begin."""
    at = 8
    while at + 8 <= len(data):
        yield at
        at += 12 + int(struct.unpack_from(">I", data, at)[0])


def _segments(data: bytes) -> Iterator[int]:
    """Where the segments of a JPEG begin, and the bytes between them that a decoder skips."""
    at = 2
    while at + 4 <= len(data):
        yield at
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at += 1
        elif data[at + 1] == 0xDA:  # the first scan
            return
        elif 0xD0 <= data[at + 1] <= 0xD8 or data[at + 1] == 0x01:  # these have no length
            at += 2
        else:
            at += 2 + int(struct.unpack_from(">H", data, at + 2)[0])


def _blocks(data: bytes) -> Iterator[int]:
    """Where the sub-blocks of a GIF's extensions begin, up to the first picture."""
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while at < len(data) and data[at] != 0x2C:
        yield at
        at += 1
        if data[at - 1] == 0x21:
            at += 1
            while size := data[at]:
                yield at
                at += 1 + size
            at += 1


def _riff(data: bytes) -> Iterator[int]:
    """Where the chunks of a WebP begin."""
    at = 12
    while at + 8 <= len(data):
        yield at
        size = int(struct.unpack_from("<I", data, at + 4)[0])
        at += 8 + size + size % 2


_PIECES = {
    "PNG": _chunks,
    "JPEG": _segments,
    "GIF": _blocks,
    "WebP": _riff,
    "BMP": lambda data: iter(()),
}


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height that a WebP claims. Its decoder makes its canvas before it can be asked."""
    first = data[12:16]
    if first == b"VP8X":  # two numbers of 24 bits, less one
        return (
            1 + int.from_bytes(data[24:27], "little"),
            1 + int.from_bytes(data[27:30], "little"),
        )
    if first == b"VP8L":  # a byte, and two numbers of 14 bits, less one
        bits = int(struct.unpack_from("<I", data, 21)[0])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _is_run_length(data: bytes) -> bool:
    """Whether a BMP is compressed by runs, which Pillow decodes in Python, a pixel at a time."""
    return len(data) >= 34 and data[14] >= 40 and data[30] in (1, 2)
