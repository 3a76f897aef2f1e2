"""Pictures in a terminal."""

from __future__ import annotations

import pytest
from PIL import Image
from rich.console import Console

from sfumato.cli.thumbnail import thumbnail


@pytest.mark.parametrize(
    ("size", "shown"),
    [((640, 480), (32, 12)), ((1, 1), (1, 1)), ((5, 3), (5, 2)), ((10, 1000), (1, 12))],
)
def test_a_picture_keeps_its_shape_within_the_room(
    size: tuple[int, int], shown: tuple[int, int]
) -> None:
    lines = thumbnail(Image.new("RGB", size)).plain.splitlines()
    assert (max(map(len, lines)), len(lines)) == shown


def test_upper_and_lower_pixels_have_their_colours() -> None:
    picture = Image.new("RGB", (1, 2), (255, 0, 0))
    picture.putpixel((0, 1), (0, 0, 255))
    console = Console(force_terminal=True, color_system="truecolor", width=10)
    with console.capture() as shown:
        console.print(thumbnail(picture))
    assert "\x1b[38;2;255;0;0;48;2;0;0;255m▀" in shown.get()
