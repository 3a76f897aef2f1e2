"""A picture in a terminal: a character is two pixels, the upper one in the colour of its ink, the
lower one in that of its background.  Knows no files."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 32, 12  # characters, at most


def thumbnail(picture: Image.Image, columns: int = COLUMNS, rows: int = ROWS) -> Text:
    """The picture, of mode RGB, in lines of half blocks; at most `columns` × `rows` characters."""
    small = picture.copy()
    small.thumbnail((columns, 2 * rows), Image.Resampling.LANCZOS)
    lines, text = np.asarray(small).tolist(), Text()
    for upper, lower in zip_longest(lines[::2], lines[1::2]):
        for x, ink in enumerate(upper):
            below = None if lower is None else Color.from_rgb(*lower[x])
            text.append("▀", Style(color=Color.from_rgb(*ink), bgcolor=below))
        text.append("\n")
    return text
