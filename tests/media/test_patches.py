"""Patches against `Gemma4ImageProcessorPil` of `transformers`, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.pictures import picture
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from sfumato.media.patches import BUDGETS, Cut, Patches, patches_of
from sfumato.media.picture import read_picture


def reference(image: Image.Image, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and places of the patches, without padding."""
    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=cut.tokens, patch_size=cut.patch, pooling_kernel_size=cut.pool
    )
    made = processor(image, return_tensors="np")
    count = made["num_soft_tokens_per_image"][0] * cut.pool**2
    return made["pixel_values"][0][:count], made["image_position_ids"][0][:count]


def check(patches: Patches, pixels: np.ndarray, places: np.ndarray) -> None:
    assert patches.values().dtype == pixels.dtype == np.float32
    assert np.array_equal(patches.values(), pixels)
    at = [(i % patches.columns, i // patches.columns) for i in range(len(pixels))]
    assert np.array_equal(np.array(at), places)
    assert patches.soft_tokens <= patches.cut.tokens


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from(BUDGETS[:3]),
    st.sampled_from([(16, 3), (4, 2), (8, 1)]),
    st.sampled_from(["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"]),
)
@example(1000, 2, 70, (16, 3), "RGB")  # one row of soft tokens
@example(2, 1000, 70, (16, 3), "RGB")
@example(480, 336, 70, (16, 3), "RGB")  # needs no resizing
def test_patches_are_those_of_transformers(
    width: int, height: int, tokens: int, sizes: tuple[int, int], mode: str
) -> None:
    image, cut = picture(width, height, mode=mode), Cut(*sizes, tokens)
    check(patches_of(read_picture(image), cut), *reference(image, cut))


@pytest.mark.parametrize("tokens", BUDGETS)
def test_each_budget(tokens: int) -> None:
    image, cut = picture(700, 500), Cut(tokens=tokens)
    patches = patches_of(read_picture(image), cut)
    check(patches, *reference(image, cut))
    assert patches.soft_tokens > 0.9 * tokens - 30


def test_a_palette_with_transparency_is_laid_on_white() -> None:
    image = picture(60, 60, mode="P")
    image.info["transparency"] = image.getpixel((30, 30))
    check(patches_of(read_picture(image), Cut(tokens=70)), *reference(image, Cut(tokens=70)))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1 << 13), st.integers(1, 1 << 13), st.sampled_from(BUDGETS))
@example(1 << 26, 1, 1120)
@example(1, 1 << 26, 70)
def test_no_size_exceeds_the_budget(width: int, height: int, tokens: int) -> None:
    columns, rows = Cut(tokens=tokens).size(width, height)
    assert columns >= 1 and rows >= 1 and columns * rows <= tokens
    if columns > 1 and rows > 1:  # the largest of the ratio: neither side has room for one more
        scale = (tokens * 48 * 48 / (width * height)) ** 0.5
        assert columns <= scale * width / 48 < columns + 1
        assert rows <= scale * height / 48 < rows + 1


def test_a_key_is_of_the_pixels_and_the_shape() -> None:
    one = picture(96, 96)
    cut = Cut(tokens=70)

    def key(image: Image.Image, cut: Cut = cut) -> str:
        return patches_of(read_picture(image), cut).key

    changed = one.copy()
    changed.putpixel((50, 50), (1, 2, 3))
    assert key(one) == key(one.copy())
    assert key(changed) != key(one)
    assert key(one, Cut(tokens=140)) != key(one)
    grey = Image.new("RGB", (480, 336), (7, 7, 7))  # the same bytes in another shape
    assert key(grey) != key(grey.transpose(Image.Transpose.ROTATE_90))
    assert key(grey, Cut(8, 6, 70)) != key(grey)
