"""Pictures of users: what is read, what is refused, and that damaged ones cost little."""

from __future__ import annotations

import gc
import io
import os
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.support.pictures import file_of, picture

from sfumato.media import picture as module
from sfumato.media.patches import Cut, patches_of
from sfumato.media.picture import KINDS, MOST_CHUNKS, MOST_PIECES, Limits, check, read_picture
from sfumato.refused import Refused

SMALL = Limits(nbytes=1 << 20, pixels=1 << 16, work=1 << 19)


def refusal(
    source: bytes | Path | Image.Image,
    limits: Limits = SMALL,
    field: str = "messages[0].content[1]",
) -> str:
    with pytest.raises(Refused) as caught:
        read_picture(source, limits, field)
    assert caught.value.field == field
    return caught.value.reason


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_is_read(kind: str, tmp_path: Path) -> None:
    lossless = {"lossless": True} if kind == "WebP" else {}
    data = file_of(picture(40, 30), kind, **lossless)
    assert check(data, SMALL, "image") == kind
    read = read_picture(data)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(read), np.asarray(image.convert("RGB")))
    (tmp_path / "file").write_bytes(data)
    assert read_picture(tmp_path / "file").tobytes() == read.tobytes()
    assert read_picture(read).tobytes() == read.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(40, 24), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image).convert("RGB")
    assert read_picture(data).size == ((40, 24) if orientation < 5 else (24, 40))
    assert read_picture(data).tobytes() == turned.tobytes()


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"nonsense"])
def test_damaged_exif_is_no_reason_to_refuse_a_picture(exif: bytes) -> None:
    assert read_picture(file_of(picture(20, 10), "JPEG", exif=exif)).size == (20, 10)


def exif_of(entries: int, nbytes: int) -> bytes:
    """EXIF data whose entries all have the same bytes."""
    table = b"".join(
        struct.pack("<HHLL", tag, 1, nbytes, 10 + 12 * entries) for tag in range(entries)
    )
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + table + bytes(nbytes)


@pytest.mark.filterwarnings("ignore")  # Pillow's, about what is damaged
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
def test_exif_whose_entries_share_their_bytes_takes_no_more_memory(kind: str) -> None:
    data = file_of(picture(20, 10), kind, exif=exif_of(2000, 40_000))
    tracemalloc.start()
    try:
        read_picture(data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 8 << 20  # 2,000 times 40,000 bytes are 80 MB


def test_a_picture_with_several_frames_counts_as_its_first() -> None:
    frames = [picture(30, 20, seed) for seed in range(3)]
    for kind in ("GIF", "WebP", "PNG", "MPO"):  # MPO: what telephones save as JPEG
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        with Image.open(io.BytesIO(data)) as image:
            assert read_picture(data).tobytes() == image.convert("RGB").tobytes()


def test_greys_of_16_bits_keep_their_high_bytes() -> None:
    """As colours of 16 bits do; `transformers` clips them at 255, which leaves a white picture."""
    greys = (np.arange(40 * 30, dtype=np.uint16) * 54).reshape(30, 40)
    read = read_picture(file_of(Image.fromarray(greys), "PNG"))
    assert np.array_equal(np.asarray(read)[..., 1], greys >> 8)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    assert "no picture" in refusal(b"")
    assert "PNG, JPEG, WebP, GIF, BMP" in refusal(b"<svg></svg>")
    assert "no picture" in refusal(file_of(picture(9, 9), "TIFF"))
    assert "is no file" in refusal(tmp_path)
    assert "is no file" in refusal(tmp_path / "none")


def test_sizes_are_bounded(tmp_path: Path) -> None:
    assert f"at most {1 << 20}" in refusal(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20))
    (tmp_path / "large").write_bytes(bytes(1 << 21))
    assert f"has {(1 << 20) + 1} bytes" in refusal(tmp_path / "large")
    for kind in KINDS:
        data = file_of(Image.new("RGB", (300, 300)), kind)
        assert "300 × 300 pixels" in refusal(data)
    assert "300 × 300 pixels" in refusal(Image.new("RGB", (300, 300)))
    assert "0 × 5 pixels" in refusal(Image.new("RGB", (0, 5)))
    for size in ((1 << 16) + 1, 1), (1, (1 << 16) + 1):
        image = Image.new("RGB", size)
        assert "in a row or a column" in refusal(image, Limits())
        assert "in a row or a column" in refusal(file_of(image, "PNG"), Limits())


@pytest.mark.parametrize("size", [(1 << 16, 1), (1, 1 << 16), (1 << 16, 64)])
def test_the_longest_rows_cost_little_to_resize(size: tuple[int, int]) -> None:
    start = time.process_time()
    patches = patches_of(read_picture(Image.new("RGB", size)), Cut(tokens=1120))
    assert 0 < patches.soft_tokens <= 1120
    assert time.process_time() - start < 5


TRANSPARENT: dict[str, Callable[[], Image.Image]] = {
    "RGBA": lambda: picture(30, 20, mode="RGBA"),
    "LA": lambda: picture(30, 20, mode="LA"),
    "P": lambda: picture(30, 20, mode="P"),
    "L": lambda: picture(30, 20, mode="L"),
    "RGB": lambda: picture(30, 20),
}


@pytest.mark.parametrize("mode", TRANSPARENT)
def test_transparency_is_white_whatever_the_stripes(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = TRANSPARENT[mode]()
    pixel = image.getpixel((3, 3))
    options = {} if "A" in mode else {"transparency": pixel}
    data = file_of(image, "PNG", **options)
    with Image.open(io.BytesIO(data)) as opened:
        clear = opened.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    expected = Image.alpha_composite(white, clear).convert("RGB").tobytes()
    assert read_picture(data).tobytes() == expected
    assert mode == "RGB" or expected != clear.convert("RGB").tobytes()
    for stripe in (1, 70, 600):
        monkeypatch.setattr(module, "_STRIPE", stripe)
        assert read_picture(data).tobytes() == expected


def test_rgb_pixels_are_not_copied() -> None:
    image = picture(20, 10)
    assert read_picture(image) is image


def test_what_is_no_plain_file_keeps_no_thread_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    others = [pipe, tmp_path, Path("/dev/zero"), Path("/proc/self/fd")]
    for path in others:
        assert "is no file" in refusal(path)
    # As if each took the place of a file between the look at it and the opening of it.
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    for path in others:
        assert "is no file" in (why := refusal(path)) or "cannot be read" in why


def test_a_refusal_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("text")
    for name in ("none.png", "text.png", "none.png\0", "x" * 5000):
        assert str(tmp_path) not in refusal(tmp_path / name)


def test_a_webp_has_fewer_pixels_than_others() -> None:
    for data in (webp_claiming(4096, 4097), file_of(Image.new("L", (4097, 4096)), "WebP")):
        assert f"at most {1 << 24} are read" in refusal(data, Limits())
    assert check(webp_claiming(4096, 4096), Limits(), "image") == "WebP"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (
        chunk(b"IHDR", head),
        *chunks,
        chunk(b"IDAT", zlib.compress(pixels)),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_claiming(width: int, height: int) -> bytes:
    """An extended WebP whose canvas, as it says, is this large."""
    data = bytearray(file_of(picture(8, 8, mode="RGBA"), "WebP", exif=b"Exif\0\0MM"))
    assert data[12:16] == b"VP8X"
    data[24:27], data[27:30] = ((side - 1).to_bytes(3, "little") for side in (width, height))
    return bytes(data)


def bmp_claiming(width: int, height: int, compression: int = 0) -> bytes:
    data = bytearray(file_of(picture(8, 8), "BMP"))
    struct.pack_into("<ii", data, 18, width, height)
    data[30] = compression
    return bytes(data)


def gif_with(extension: bytes) -> bytes:
    data = file_of(Image.new("P", (8, 8)), "GIF")
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    return data[:at] + extension + data[at:]


def jpeg_of_many_scans(count: int) -> bytes:
    data = file_of(picture(250, 250), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * count + data[-2:]


BOMBS: dict[str, Callable[[], bytes]] = {
    "png pixels": lambda: png(60000, 60000),
    "png text": lambda: png(9, 9, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28), 9))),
    "png colours": lambda: png(9, 9, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 28), 9))),
    "png pieces": lambda: png(9, 9, *[chunk(b"aaAa", b"")] * (MOST_CHUNKS + 1)),
    "webp canvas": lambda: webp_claiming(16383, 16383),
    "bmp pixels": lambda: bmp_claiming(1 << 30, 1 << 30),
    "bmp runs": lambda: bmp_claiming(200, 200, compression=1),
    "gif comments": lambda: gif_with(b"\x21\xfe" + b"\1a" * (MOST_PIECES + 1) + b"\0"),
    "gif screen": lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c",
    "jpeg segments": lambda: b"\xff\xd8" + b"\xff\xe1\0\2" * (MOST_PIECES + 1) + b"\xff\xd9",
    "jpeg fill": lambda: b"\xff\xd8" + b"\xff" * (2 * MOST_PIECES),
    "jpeg scans": lambda: jpeg_of_many_scans(40),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    data = BOMBS[name]()
    tracemalloc.start()
    try:
        start = time.process_time()
        refusal(data, Limits(nbytes=1 << 21, pixels=1 << 16, work=1 << 19))
        seconds, (_, most) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 5 and most < 80 << 20  # Pillow expands 64 MB of a PNG's texts


def test_pillow_would_take_what_is_refused() -> None:
    """The reasons for the limits that Pillow lacks: its guards let these through."""
    with Image.open(io.BytesIO(BOMBS["jpeg scans"]())) as image:
        image.load()
    with Image.open(io.BytesIO(png(9, 9, *[chunk(b"aaAa", b"")] * 99, pixels=bytes(252)))) as image:
        image.load()


def mutated(data: bytes, seed: int) -> bytes:
    """Damaged: bits changed, a part cut out, repeated or replaced, or the end lost."""
    draw = random.Random(seed)
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        at = (
            draw.randrange(len(made)) if draw.random() < 0.6 else draw.randrange(min(64, len(made)))
        )
        end = min(len(made), at + draw.choice((1, 2, 4, 40)))
        kind = draw.randrange(5)
        if kind == 0:
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            made[at:end] = draw.randbytes(end - at)
        elif kind == 2:
            del made[at:end]
        elif kind == 3:
            made[at:at] = made[at:end] * draw.choice((1, 50))
        else:
            made[at:end] = draw.choice((b"\xff", b"\0", b"\x7f")) * (end - at)
        made = made or bytearray(data)
    return bytes(made[: draw.randrange(1, len(made) + 1)] if draw.random() < 0.2 else made)


def originals() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture(24, 20, seed) for seed in range(3)]
    modes = ("RGB", "RGBA", "P", "L", "1")
    return [
        *(file_of(picture(40, 32, mode=mode), "PNG") for mode in modes),
        file_of(picture(40, 32), "JPEG", exif=exif),
        file_of(picture(40, 32), "JPEG", progressive=True, quality=95),
        file_of(picture(40, 32, mode="CMYK"), "JPEG"),
        file_of(picture(40, 32), "WebP"),
        file_of(picture(40, 32), "WebP", lossless=True, exif=exif),
        *(file_of(frames[0], kind, save_all=True, append_images=frames[1:]) for kind in KINDS[2:4]),
        file_of(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        *(file_of(picture(40, 32, mode=mode), "BMP") for mode in ("RGB", "P", "1")),
    ]


def read_or_refused(data: bytes) -> bool:
    """Whether it was read; anything but a picture within the limits or Refused fails the test."""
    try:
        image = read_picture(data, SMALL)
    except Refused as error:
        assert error.field == "image" and error.why
        return False
    assert image.mode == "RGB" and image.width * image.height <= SMALL.pixels
    return True


@pytest.mark.filterwarnings("ignore")  # Pillow's, about what is damaged
def test_mutated_pictures_neither_stall_nor_leak(note: Callable[[str], None]) -> None:
    files = [mutated(data, seed) for seed in range(28) for data in originals()]
    assert len(files) >= 400
    slowest = read = 0.0
    for data in files:
        start = time.process_time()
        read += read_or_refused(data)
        slowest = max(slowest, time.process_time() - start)
    gc.collect()
    tracemalloc.start()
    try:
        held = []
        for _ in range(2):
            for data in files:
                read_or_refused(data)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    note(f"{len(files)} mutated pictures: {read:.0f} read, the slowest in {slowest * 1000:.1f} ms")
    assert read > 20 and len(files) - read > 100  # the mutations are neither harmless nor all fatal
    assert slowest < 5
    assert held[1] - held[0] < 100_000


def test_every_truncation_is_read_or_refused() -> None:
    for data in originals():
        for end in range(0, len(data), max(1, len(data) // 25)):
            read_or_refused(data[:end])


def test_the_decoders_own_guard_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    monkeypatch.setattr(module, "check_size", lambda *_, **__: None)
    assert "too many pixels" in refusal(png(60000, 60000))
