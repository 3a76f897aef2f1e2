"""Pictures that the embedded model learns to read: handwritten digits, and boards of 4x4 Sudoku.

The digits are the 1,797 of scikit-learn, 8 × 8 pixels each; the fonts of boards are matplotlib's
and Pillow's own.  Every picture is square, and becomes `CUT`'s patches.  Knows no noise, no loss
and no network.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from sfumato.media.patches import Cut, patches_of
from sfumato.refused import Refused
from sfumato.train import sudoku
from sfumato.train.canvas_rows import padded
from sfumato.train.embedded_data import Example as Conversation
from sfumato.train.embedded_data import canvases, pick, trained_sudoku
from sfumato.train.vocabulary import BOS, END_OF_TURN, MASK, PAD, TOKENS, TURN, encode_text

PLACEHOLDER = MASK
"""The id whose place a soft token takes. No text has it."""
CUT = Cut(patch=8, pool=3, tokens=29)
"""Five by five soft tokens of a picture that is about square; with a budget of 25, rounding would
leave some sizes four by four."""
SOFT_TOKENS = 25
DIGITS = len(TOKENS)
"""The first of ten letters that only pictures have: all soft tokens of a digit spell its own, whose
vector the stage learns first."""
HELD_OUT = 360
_SPLIT_SEED = 8

DIGIT_SHARE = 0.4
PRINTED_SHARE = 0.2
"""Share of digits of a font among the pictures of digits."""
AS_IT_IS_SHARE = 0.3
"""Share of handwritten digits that are neither turned nor moved."""
NEGATIVE_SHARE = 0.4  # bright on dark
_BLANKS = (4, 5, 6, 7, *2 * (8, 9, 10, 11, 12))

DIGIT_WORDINGS = (
    *4 * ("Which digit is this?",),
    "which digit is this?",
    "Which digit is it?",
    "What digit is this?",
    "What digit do you see?",
    "Which number is this?",
    "What number is this?",
    "Read the digit.",
    "Read this digit",
    "Which digit do you see?",
    "which digit is in the picture?",
    "digit?",
)
BOARD_WORDINGS = (
    *4 * ("sudoku",),
    *2 * ("Solve this Sudoku.",),
    "Sudoku",
    "solve this sudoku",
    "Solve this Sudoku:",
    "Solve the Sudoku.",
    "Solve this.",
    "solve",
    "",
)

Levels = NDArray[np.uint8]
NOTHING = Image.new("RGB", (1, 1))


class PictureRow(NamedTuple):
    """A question about a picture, and the canvas that answers it."""

    prefix: list[int]
    place: int  # of the first soft token in it
    levels: Levels  # [patches, 3 · patch²]
    letters: list[int]  # what the soft tokens spell; those from DIGITS on are digits'
    target: list[int]


class PictureBatch(NamedTuple):
    """Rows for one training step, integers int64.

    `context` [B, S]: the prompts, padded on the right; `lengths` [B]; `places` [B]: where the soft
    tokens of each row begin; `levels` uint8 [B, patches, 3 · patch²]; `letters` [B, soft tokens]:
    what they spell; `target` [B, canvas].
    """

    context: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor
    levels: torch.Tensor
    letters: torch.Tensor
    target: torch.Tensor


class Digits(NamedTuple):
    """Handwritten digits: uint8 [n, 8, 8] of 0 to 16, and int64 [n]."""

    images: Levels
    labels: NDArray[np.int64]


@cache
def digits() -> tuple[Digits, Digits]:
    """The digits that are trained on and those that are held out, the same on every machine. Raises
    ValueError where scikit-learn is not installed."""
    images, labels = _package("sklearn.datasets").load_digits(return_X_y=True)
    images = images.astype(np.uint8).reshape(-1, 8, 8)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    trained, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return Digits(images[trained], labels[trained]), Digits(images[held_out], labels[held_out])


def _package(name: str) -> Any:
    """A package that training on pictures needs and nothing else does."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = f"pictures need {name.partition('.')[0]}, which is not installed"
        raise Refused("recipe", why, "pip install 'sfumato[train]'") from error


def plain_digit(image: Levels) -> Image.Image:
    """The picture as it is stored: bright on dark, 8 × 8 pixels."""
    return Image.fromarray((image.astype(np.float32) * (255 / 16)).astype(np.uint8)).convert("RGB")


def spelled(cells: sudoku.Cells) -> str:
    """What the soft tokens of a board say to the text network: 25 letters, which end where its
    prompts end. It finds cells by where they stand before the canvas."""
    return "udoku\n" + sudoku.to_text(cells)


def prompt(text: str) -> tuple[list[int], int]:
    """Ids of a user's text and a picture after it, up to the model's turn; and where the picture's
    soft tokens begin. Equals what the chat template writes."""
    ids = [BOS, TURN, *encode_text(f"user\n{text}\n" if text else "user\n")]
    after = [END_OF_TURN, *encode_text("\n"), TURN, *encode_text("model\n")]
    return [*ids, *[PLACEHOLDER] * SOFT_TOKENS, *after], len(ids)


def digit_row(text: str, picture: Image.Image, digit: int, canvas: int) -> PictureRow:
    return _row(text, picture, str(digit), [DIGITS + digit] * SOFT_TOKENS, canvas)


def board_row(
    text: str, picture: Image.Image, cells: sudoku.Cells, solved: str, canvas: int
) -> PictureRow:
    return _row(text, picture, solved, encode_text(spelled(cells)), canvas)


def _row(
    text: str, picture: Image.Image, answer: str, letters: list[int], canvas: int
) -> PictureRow:
    prefix, place = prompt(text)
    ((_, target),) = canvases(Conversation(prefix, [*encode_text(answer), END_OF_TURN]), canvas)
    return PictureRow(prefix, place, patches_of(picture, CUT).levels, letters, target)


def draw(rng: np.random.Generator, canvas: int) -> PictureRow:
    """One row to train on; depends on the generator's state alone."""
    if rng.random() < DIGIT_SHARE:
        picture, digit = draw_digit(rng)
        return digit_row(pick(DIGIT_WORDINGS, rng), picture, digit, canvas)
    cells, solved = trained_sudoku(_BLANKS, rng)
    return board_row(pick(BOARD_WORDINGS, rng), draw_board(cells, rng), cells, solved, canvas)


def collate(rows: list[PictureRow]) -> PictureBatch:
    """Stack rows, with prompts padded to the longest."""
    lengths = [len(row.prefix) for row in rows]
    return PictureBatch(
        padded([row.prefix for row in rows], max(lengths), PAD),
        torch.tensor(lengths),
        torch.tensor([row.place for row in rows]),
        torch.from_numpy(np.stack([row.levels for row in rows])),
        torch.tensor([row.letters for row in rows]),
        torch.tensor([row.target for row in rows]),
    )


def draw_asked(rng: np.random.Generator, canvas: int) -> PictureRow:
    """A question about a digit whose picture is left out."""
    digit = int(rng.random() * 10)
    return digit_row(pick(DIGIT_WORDINGS, rng), NOTHING, digit, canvas)


def batches(
    rng: np.random.Generator,
    count: int,
    canvas: int,
    draw: Callable[[np.random.Generator, int], PictureRow] = draw,
) -> Iterator[PictureBatch]:
    """Training batches of `count` rows without end; the same for the same generator's state."""
    while True:
        yield collate([draw(rng, canvas) for _ in range(count)])


def draw_digit(rng: np.random.Generator) -> tuple[Image.Image, int]:
    """A digit that is trained on or one of a font, in some form, and which it is."""
    if rng.random() < PRINTED_SHARE:
        digit = int(rng.random() * 10)
        return _printed(str(digit), rng), digit
    trained = digits()[0]
    number = int(rng.random() * len(trained.labels))
    digit = int(trained.labels[number])
    picture = plain_digit(trained.images[number])
    if rng.random() < AS_IT_IS_SHARE:
        return _toned(picture, rng, clean=True), digit
    side = 96
    how = pick((Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.BOX), rng)
    picture = _moved(picture.resize((side, side), how), rng, turn=15, shear=0.2, shift=0.1)
    if rng.random() < 0.5:  # as coarse as those that are not trained on
        picture = picture.resize((8, 8), Image.Resampling.BOX)
    return _toned(picture, rng), digit


def draw_board(cells: sudoku.Cells, rng: np.random.Generator) -> Image.Image:
    """A board in some font, size, tone and place."""
    side = int(rng.integers(100, 201))
    size = side * (1 - 0.06 * rng.random())
    left, top = rng.random(2) * (side - size)
    picture = Image.new("L", (side, side), 255)
    pen = ImageDraw.Draw(picture)
    _lines(pen, left, top, size, rng)
    cell = size / 4
    height, weight = cell * (0.5 + 0.3 * rng.random()), int(rng.random() * 1.3)
    font, moved = _font(pick(_fonts(), rng), round(height)), cell * 0.03
    for number, digit in enumerate(cells):
        row, column = divmod(number, 4)
        x, y = rng.normal(size=2) * moved
        x, y = left + (column + 0.5) * cell + x, top + (row + 0.5) * cell + y
        if digit:
            pen.text((x, y), str(digit), 0, font, anchor="mm", stroke_width=weight)
    picture = picture.convert("RGB")
    picture = picture.point(lambda level: 255 - level)  # what comes from beyond the edge is 0
    return _toned(_moved(picture, rng, turn=1, shear=0.01, shift=0.01), rng)


def _lines(
    pen: ImageDraw.ImageDraw, left: float, top: float, size: float, rng: np.random.Generator
) -> None:
    """The board's lines, those between boxes and around all thicker or not."""
    thin = 1 + int(rng.random() * size / 90)
    thick = thin + int(rng.random() * size / 50)
    grey = int(rng.random() * 160)
    for number in range(5):
        at, width = number * size / 4, thin if number % 2 else thick
        tone = grey if number % 2 else grey // 2
        for line in (
            (left + at, top, left + at, top + size),
            (left, top + at, left + size, top + at),
        ):
            pen.line(line, tone, width)


def _printed(digit: str, rng: np.random.Generator) -> Image.Image:
    """A digit of a font, bright on dark."""
    side = 96
    picture = Image.new("RGB", (side, side))
    font = _font(pick(_fonts(), rng), round(side * (0.5 + 0.45 * rng.random())))
    pen, weight = ImageDraw.Draw(picture), int(rng.random() * 4)
    pen.text((side / 2, side / 2), digit, "white", font, anchor="mm", stroke_width=weight)
    return _toned(_moved(picture, rng, turn=8, shear=0.1, shift=0.1), rng)


def _moved(
    picture: Image.Image, rng: np.random.Generator, turn: float, shear: float, shift: float
) -> Image.Image:
    """Turned by up to so many degrees, sheared, scaled and shifted by up to a share of its side;
    what comes from beyond the edge is dark."""
    side = picture.width
    angle = np.deg2rad(turn * (2 * rng.random() - 1))
    slant, (dx, dy) = shear * (2 * rng.random() - 1), shift * side * (2 * rng.random(2) - 1)
    wide, tall = 1 + shear * (2 * rng.random(2) - 1)
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turned @ np.array([[wide, slant], [0.0, tall]])
    middle = np.full(2, side / 2)
    offset = middle - matrix @ (middle + np.array([dx, dy]))
    values = (*matrix[0], offset[0], *matrix[1], offset[1])
    return picture.transform(
        picture.size, Image.Transform.AFFINE, values, Image.Resampling.BILINEAR
    )


def _toned(picture: Image.Image, rng: np.random.Generator, clean: bool = False) -> Image.Image:
    """A picture that is bright on dark, in other colours, blurred and with noise; clean: as it is,
    or its negative."""
    negative = rng.random() >= NEGATIVE_SHARE
    if clean:
        return picture.point(lambda level: 255 - level) if negative else picture
    if rng.random() < 0.3:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.random() * picture.width / 120))
    ink, ground = rng.random(3) * 0.3, 1 - rng.random(3) * 0.25
    if rng.random() < 0.6:  # grey
        ink[:], ground[:] = ink[0], ground[0]
    dark, bright = (ground, ink) if negative else (ink, ground)
    shares = np.asarray(picture, np.float32) / 255
    values = dark + shares * (bright - dark)
    if picture.width > 8 and rng.random() < 0.5:
        values = values + rng.normal(size=(*values.shape[:2], 1)) * 0.06 * rng.random()
    return Image.fromarray((values.clip(0, 1) * 255).astype(np.uint8))


@cache
def _fonts() -> tuple[str, ...]:
    """Files of fonts that matplotlib has, and "" for Pillow's own."""
    folder = Path(_package("matplotlib").get_data_path()) / "fonts" / "ttf"
    styles = ("", "-Bold", "-Oblique", "-BoldOblique")
    names = [f"DejaVuSans{style}" for style in styles]
    names += [f"DejaVuSansMono{style}" for style in styles]
    names += [f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")]
    names += [f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")]
    names += ["cmr10", "cmss10", "cmtt10", "cmb10"]
    return ("", "", *(str(folder / f"{name}.ttf") for name in names))


@cache
def _font_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def _font(path: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if not path:
        return ImageFont.load_default(size)
    return ImageFont.truetype(io.BytesIO(_font_bytes(path)), size)
