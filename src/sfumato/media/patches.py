"""RGB pixels → patches: the picture as a vision tower reads it.

To the bit what `Gemma4ImageProcessorPil` of `transformers` makes: the largest size of the
picture's aspect ratio that the budget of soft tokens allows, bicubic, in squares of pixels.
The processor that `transformers` prefers where torchvision is installed resizes by other
arithmetic: up to 1 % of its values differ, by 1 or 2 levels of 255 (docs/log.md).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

BUDGETS = (70, 140, 280, 560, 1120)
"""How many soft tokens a picture may take; the models were trained with these."""

_LEVELS = (np.arange(256) * (1 / 255)).astype(np.float32)  # of the bytes of a picture


@dataclass(frozen=True)
class Cut:
    """How a picture is cut: squares of patch × patch pixels, of which pool × pool become one soft
    token; tokens: how many there may be; most: how many a tower can read."""

    patch: int = 16
    pool: int = 3
    tokens: int = 280
    most: int = BUDGETS[-1]

    @property
    def side(self) -> int:
        """Width and height of a soft token, in pixels."""
        return self.patch * self.pool

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of soft tokens: the most that the budget allows, of about the aspect
        ratio of a picture of width × height pixels."""
        # To the bit, the order of the reference's float operations counts.
        scale = math.sqrt(self.tokens * self.pool**2 * self.patch**2 / (height * width))
        columns = math.floor(scale * width / self.side)
        rows = math.floor(scale * height / self.side)
        if not rows:
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            columns, rows = 1, min(height // width, self.tokens)
        return columns, rows


@dataclass(frozen=True, eq=False)
class Patches:
    """A picture in patches, row by row from the top left."""

    levels: np.ndarray  # uint8 [rows · columns, patch · patch · 3], colours innermost
    columns: int
    rows: int
    cut: Cut

    @property
    def soft_tokens(self) -> int:
        return len(self.levels) // self.cut.pool**2

    def values(self) -> np.ndarray:
        """float32 like `levels`: 0 to 1."""
        return _LEVELS[self.levels]

    @cached_property
    def key(self) -> str:
        """A hash of all that a tower sees: pictures of one key have one encoding, and those of
        different pixels, shapes or patches have different keys."""
        shape = f"{self.columns} {self.rows} {self.cut.patch} {self.cut.pool};"
        return hashlib.sha256(shape.encode() + self.levels.tobytes()).hexdigest()


def patches_of(picture: Image.Image, cut: Cut) -> Patches:
    """A picture of mode RGB, resized and cut."""
    columns, rows = cut.size(*picture.size)
    size = columns * cut.side, rows * cut.side
    if picture.size != size:
        picture = picture.resize(size, resample=Image.Resampling.BICUBIC)
    across, down = columns * cut.pool, rows * cut.pool
    pixels = np.asarray(picture).reshape(down, cut.patch, across, cut.patch, 3)
    levels = np.ascontiguousarray(pixels.swapaxes(1, 2)).reshape(down * across, -1)
    return Patches(levels, across, down, cut)
