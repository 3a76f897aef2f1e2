"""The colours of the page, as people with each kind of colour blindness see them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import sfumato

PAGE = Path(sfumato.__file__).parent / "server" / "page"
Colour = NDArray[np.float64]
"""Linear red, green and blue."""

# Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", severity 1.0; they apply to linear colours.
SEEN_BY = {
    "no deficiency": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# Distances in Oklab (Ottosson 2020), where two neighbours that people just tell apart are about
# 0.02 apart, and black and white 1.
STATES, SIGNS = 0.1, 0.08
# What stands for a state of a token is told from each other one; an error has words as well.
TOKENS = [
    ("settled", "fresh"),
    ("settled", "uncertain"),
    ("fresh", "uncertain"),
    ("fresh", "very uncertain"),
]
OTHERS = [
    ("danger", "ink"),
    ("danger", "dim"),
    ("danger", "accent"),
    ("accent", "dim"),
    ("accent", "ink"),
]


def linear(colour: str) -> Colour:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def over(ink: str, paper: str, opacity: float) -> str:
    """What is drawn where an ink of some opacity is on paper: browsers mix encoded values."""
    mixed = (
        round(int(ink[i : i + 2], 16) * opacity + int(paper[i : i + 2], 16) * (1 - opacity))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def oklab(colour: Colour) -> Colour:
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    axes = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.asarray(axes @ np.cbrt(cones @ np.clip(colour, 0, 1)))


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def palette(scheme: str) -> dict[str, str]:
    """The colours of the style sheet, and those of the states of a token."""
    sheet = (PAGE / "style.css").read_text("utf-8")
    head = r":root \{" if scheme == "dark" else r':root\[data-theme="light"\] \{'
    block = re.search(head + r"(.*?)\}", sheet, re.DOTALL)
    assert block
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1]))
    haze = dict(
        re.findall(r"\.haze-(\d) \{ opacity: ([\d.]+);", (PAGE / "reply.css").read_text("utf-8"))
    )
    ink, paper = colours["ink"], colours["raised"]
    return colours | {
        "settled": ink,
        "fresh": colours["accent"],
        "uncertain": over(ink, paper, float(haze["2"])),
        "very uncertain": over(ink, paper, float(haze["3"])),
    }


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_everybody_tells_the_colours_apart(scheme: str) -> None:
    colours = palette(scheme)
    for kind, matrix in SEEN_BY.items():
        for limit, pairs in ((STATES, TOKENS), (SIGNS, OTHERS)):
            for one, other in pairs:
                seen = [oklab(matrix @ linear(colours[name])) for name in (one, other)]
                distance = float(np.linalg.norm(seen[0] - seen[1]))
                assert distance >= limit, (kind, one, other, distance)
    for name in ("ink", "dim", "accent", "danger"):
        for ground in ("paper", "raised"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
