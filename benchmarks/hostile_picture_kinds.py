"""Pictures as hostile users send them, for `hostile_pictures`: whole ones of many kinds, which are
damaged then, and bombs, whose file is small and whose claim is large."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from PIL import Image

SIDE = 48
MOST = 5 << 20  # bytes; a body has to take them in base64


def picture(mode: str = "RGB", width: int = SIDE, height: int = SIDE, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    smooth = np.add.outer(np.arange(height), np.arange(width)).astype(np.uint8)[..., None]
    return Image.fromarray(noise // 4 + smooth, "RGBA").convert(mode)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def frames(kind: str, count: int) -> bytes:
    others = [picture(seed=seed) for seed in range(1, count)]
    return file_of(picture(), kind, save_all=True, append_images=others)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    *chunks: bytes,
    depth: int = 8,
    colours: int = 2,
    interlaced: bool = False,
    pixels: bytes | None = None,
) -> bytes:
    """A PNG by hand. pixels: filtered rows, zeros where they are left out."""
    head = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, interlaced)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours]
    if pixels is None:
        pixels = bytes(height * (1 + (width * channels * depth + 7) // 8) + 64 * interlaced)
    palette = (chunk(b"PLTE", bytes(range(48))),) if colours == 3 else ()
    data = chunk(b"IDAT", zlib.compress(pixels, 9))
    parts = (chunk(b"IHDR", head), *palette, *chunks, data, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""The depths that each colour type of PNG has."""


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    return file_of(picture(mode), "JPEG", **options)


def arithmetic(progressive: bool) -> bytes:
    """A JPEG whose data a decoder takes for arithmetic codes; such data are never wrong."""
    data = bytearray(jpeg(progressive=progressive))
    marker = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    data[marker + 1] = 0xCA if progressive else 0xC9
    return bytes(data)


def jpeg_claiming(width: int, height: int, progressive: bool = False) -> bytes:
    data = bytearray(jpeg(progressive=progressive))
    marker = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    struct.pack_into(">HH", data, marker + 5, height, width)
    return bytes(data)


def jpeg_with(segments: bytes) -> bytes:
    data = jpeg()
    return data[:2] + segments + data[2:]


def segment(marker: int, data: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def scans_of(count: int, side: int = 1000) -> bytes:
    data = file_of(picture(width=side, height=side), "JPEG", progressive=True, quality=5)
    at = data.rindex(b"\xff\xda")
    return (data[:at] + data[at:-2] * count)[: MOST - 2] + data[-2:]


def exif(entries: int, nbytes: int) -> bytes:
    """EXIF data whose entries all have the same bytes."""
    table = b"".join(
        struct.pack("<HHLL", tag, 1, nbytes, 10 + 12 * entries) for tag in range(entries)
    )
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + table + bytes(nbytes)


def webp_claiming(width: int, height: int) -> bytes:
    data = bytearray(file_of(picture("RGBA"), "WebP", exif=b"Exif\0\0MM"))
    data[24:27], data[27:30] = ((side - 1).to_bytes(3, "little") for side in (width, height))
    return bytes(data)


def bmp(mode: str, **at: int) -> bytes:
    """at: values of 32 bits that are put in the header: width, height, compression, colours."""
    data = bytearray(file_of(picture(mode), "BMP"))
    places = {"width": 18, "height": 22, "compression": 30, "colours": 46}
    for name, value in at.items():
        struct.pack_into("<I", data, places[name], value)
    return bytes(data)


def gif_with(extension: bytes) -> bytes:
    data = file_of(picture("P"), "GIF")
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    return data[:at] + extension + data[at:]


def flat(kind: str, side: int, mode: str = "RGB", **options: Any) -> bytes:
    """A picture of one colour: a few bytes, and as many pixels as are allowed."""
    return file_of(Image.new(mode, (side, side)), kind, **options)


def box(brand: bytes) -> bytes:
    return struct.pack(">I", 24) + b"ftyp" + brand + bytes(4) + b"mif1" + brand + bytes(4000)


WHOLE: dict[str, Callable[[], bytes]] = {
    **{
        f"PNG type {colours}, {depth} bits": partial(
            png, SIDE, SIDE, depth=depth, colours=colours, interlaced=depth in (2, 16)
        )
        for colours, depths in DEPTHS.items()
        for depth in depths
    },
    "PNG RGBA": lambda: file_of(picture("RGBA"), "PNG"),
    "PNG palette": lambda: file_of(picture("P"), "PNG", transparency=3),
    "PNG 16 bits": lambda: file_of(
        Image.fromarray(np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE) * 20), "PNG"
    ),
    "PNG interlaced": lambda: png(SIDE, SIDE, interlaced=True, colours=6),
    "APNG": lambda: frames("PNG", 3),
    "JPEG": jpeg,
    "JPEG grey": lambda: jpeg("L", quality=30),
    "JPEG CMYK": lambda: jpeg("CMYK"),
    "JPEG YCCK": lambda: jpeg("CMYK").replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2"),
    "JPEG progressive": lambda: jpeg(progressive=True),
    "JPEG arithmetic": lambda: arithmetic(False),
    "JPEG arithm. progressive": lambda: arithmetic(True),
    "MPO": lambda: frames("MPO", 3),
    "WebP lossy": lambda: file_of(picture(), "WebP"),
    "WebP lossless": lambda: file_of(picture("RGBA"), "WebP", lossless=True),
    "WebP animated": lambda: frames("WebP", 4),
    "GIF": lambda: file_of(picture("P"), "GIF", transparency=0),
    "GIF of many frames": lambda: frames("GIF", 40),
    "BMP 24 bits": lambda: bmp("RGB"),
    "BMP 8 bits": lambda: bmp("P"),
    "BMP 1 bit": lambda: bmp("1"),
    "BMP 32 bits": lambda: bmp("RGBA"),
}

OTHERS: dict[str, Callable[[], bytes]] = {
    "ICO": lambda: file_of(picture("RGBA"), "ICO"),
    "TIFF": lambda: file_of(picture(), "TIFF"),
    "SVG": lambda: (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    ),
    "PDF": lambda: file_of(picture(), "PDF"),
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + bytes(99),
    "HEIF": lambda: box(b"heic"),
    "AVIF": lambda: box(b"avif"),
    "ZIP": lambda: b"PK\3\4" + bytes(4000),
    "gzip of a PNG": lambda: zlib.compress(png(SIDE, SIDE), wbits=31),
}

BOMBS: dict[str, Callable[[], bytes]] = {
    "bomb: PNG pixels": lambda: png(60_000, 60_000, pixels=b""),
    "bomb: PNG row": lambda: png(1 << 26, 1),
    "bomb: PNG column": lambda: png(1, 1 << 24, colours=0),
    "bomb: PNG of the most": lambda: flat("PNG", 8192),
    "bomb: PNG RGBA of the most": lambda: flat("PNG", 8192, "RGBA"),
    "bomb: PNG texts": lambda: png(
        9, 9, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20), 9))] * 200
    ),
    "bomb: PNG profile": lambda: png(
        9, 9, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 28), 9))
    ),
    "bomb: PNG chunks": lambda: png(9, 9, *[chunk(b"aaAa", b"")] * 66_000),
    "bomb: PNG chunks allowed": lambda: png(9, 9, *[chunk(b"tEXt", b"a\0b")] * 60_000),
    "bomb: PNG EXIF": lambda: png(9, 9, chunk(b"eXIf", exif(60_000, 3 << 20)[6:])),
    "bomb: JPEG pixels": lambda: jpeg_claiming(65_000, 65_000),
    "bomb: JPEG of the most": lambda: jpeg_claiming(8192, 8192),
    "bomb: JPEG scans": lambda: scans_of(4000),
    "bomb: JPEG EXIF": lambda: jpeg_with(segment(0xE1, exif(2000, 40_000))),
    "bomb: JPEG segments": lambda: jpeg_with(segment(0xE1, b"") * 5000),
    "bomb: JPEG profile": lambda: jpeg_with(
        b"".join(
            segment(0xE2, b"ICC_PROFILE\0" + bytes((i, 90)) + bytes(60_000)) for i in range(90)
        )
    ),
    "bomb: WebP canvas": lambda: webp_claiming(16_383, 16_383),
    "bomb: WebP of the most": lambda: flat("WebP", 4096, lossless=True),
    "bomb: WebP RGBA of the most": lambda: flat("WebP", 4096, "RGBA", lossless=True),
    "bomb: WebP lossy, most": lambda: flat("WebP", 4096, quality=1, method=0),
    "bomb: BMP pixels": lambda: bmp("RGB", width=1 << 30, height=1 << 30),
    "bomb: BMP runs": lambda: bmp("P", compression=1),
    "bomb: BMP colours": lambda: bmp("P", colours=1 << 31),
    "bomb: GIF screen": lambda: b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b",",
    "bomb: GIF of the most": lambda: flat("GIF", 8192, "P"),
    "bomb: GIF comments": lambda: gif_with(b"\x21\xfe" + b"\1a" * 9000 + b"\0"),
    "bomb: GIF frames": lambda: frames("GIF", 3) + b"\x2c" * 100_000,
}

KINDS = (*WHOLE, *OTHERS, *BOMBS)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bits changed, a part cut out, repeated or replaced, or the end lost."""
    made = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 3, 20))):
        at = draw.randrange(len(made) if draw.random() < 0.6 else min(64, len(made)))
        end = min(len(made), at + draw.choice((1, 2, 4, 40)))
        change = draw.randrange(5)
        if change == 0:
            made[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            made[at:end] = draw.randbytes(end - at)
        elif change == 2 and end - at < len(made):
            del made[at:end]
        elif change == 3:
            made[at:at] = made[at:end] * draw.choice((1, 50))
        else:
            made[at:end] = draw.choice((b"\xff", b"\0", b"\x7f")) * (end - at)
    return bytes(made[: draw.randrange(1, len(made) + 1)] if draw.random() < 0.25 else made)


def pictures(
    count: int, seed: int = 0, without: Collection[str] = ()
) -> Iterator[tuple[str, bytes]]:
    """So many pictures, each with its kind: bombs and foreign files once, then damaged ones.
    without: kinds that are left out."""
    once = [kind for kind in (*BOMBS, *OTHERS) if kind not in without]
    for kind in once[:count]:
        yield kind, (BOMBS | OTHERS)[kind]()
    draw = random.Random(seed)
    for kind in islice(cycle(WHOLE), max(0, count - len(once))):
        yield kind, damaged(WHOLE[kind](), draw)
