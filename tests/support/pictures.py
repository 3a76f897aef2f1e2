"""Pictures that tests make, and their files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth picture with some noise: neither constant nor noise alone."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + seed % 5 + c) + c) + np.cos(y / (4 + c)) for c in range(4)]
    values = 128 + 50 * np.stack(waves, -1) + random.normal(0, 8, (height, width, 4))
    rgba = Image.fromarray(values.clip(0, 255).astype(np.uint8), "RGBA")
    return rgba.convert(mode)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The picture as a file of a kind."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
