"""Pictures that a user names: read once, shown in the terminal, and put into messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from sfumato.api import Model
from sfumato.cli.display import is_visual
from sfumato.cli.thumbnail import thumbnail
from sfumato.media.patches import patches_of
from sfumato.media.picture import read_picture

_COLOURS = ("256", "truecolor")  # of a terminal; with sixteen no picture is to be recognized


def read(name: str, field: str) -> Image.Image:
    """The picture of a file. Raises Refused, naming the field, for what is none."""
    return read_picture(Path(name).expanduser(), field=field)


def show(image: Image.Image) -> None:
    """Prints the picture in half blocks, where the terminal has the colours."""
    console = Console(highlight=False)
    if is_visual() and console.color_system in _COLOURS and not console.no_color:
        console.print(thumbnail(image))


def part(name: str, image: Image.Image, model: Model) -> dict[str, Any]:
    """The picture as a part of a message. Raises Refused where the model reads none."""
    return {"type": "image", "path": name, "patches": patches_of(image, model.cut)}


def content(text: str, parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a user's message: the pictures, and the text about them."""
    return [*parts, {"type": "text", "text": text}] if parts else text
