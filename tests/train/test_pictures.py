"""Pictures that the embedded model learns to read."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.media.patches import patches_of
from sfumato.refused import Refused
from sfumato.text.prompt import prompt_ids
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.text_side import PictureTokens
from sfumato.train import pictures, sudoku
from sfumato.train.vocabulary import GEMMA, encode_text, write_text_side

CELLS = sudoku.puzzle(7, 8, np.random.default_rng(0))


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> pictures.Digits:
    """Three digits that are no one's handwriting, in place of scikit-learn's."""
    images = np.random.default_rng(3).integers(0, 17, (3, 8, 8)).astype(np.uint8)
    made = pictures.Digits(images, np.array([4, 0, 9]))
    monkeypatch.setattr(pictures, "digits", lambda: (made, made))
    return made


@pytest.mark.parametrize("text", ["Solve this.", ""])
def test_a_prompt_is_what_the_chat_template_writes(text: str, tmp_path: Any) -> None:
    write_text_side(tmp_path)
    parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": text}]
    shown: list[Any] = []
    ids = prompt_ids(
        ChatTemplate(GEMMA.template),
        Tokenizer.from_file(tmp_path / "tokenizer.json"),
        [{"role": "user", "content": parts}],
        pictures=shown,
    )
    patches = patches_of(Image.new("RGB", (8, 8)), pictures.CUT)
    made = PictureTokens(pictures.PLACEHOLDER).placed(ids, [patches] * len(shown))
    assert (made.ids, made.pictures[0].start) == pictures.prompt(text)


@pytest.mark.parametrize("side", [*range(1, 40), 48, 96, 127, 239, 240, 241, 999])
def test_square_pictures_of_all_sizes_have_five_by_five_soft_tokens(side: int) -> None:
    assert pictures.CUT.size(side, side) == (5, 5)
    assert pictures.CUT.size(1000, 1100) == (5, 5)


def test_soft_tokens_spell_what_the_text_network_reads_where_it_stood() -> None:
    spelled = pictures.spelled(CELLS)
    assert len(spelled) == pictures.SOFT_TOKENS
    row = pictures.board_row("sudoku", Image.new("RGB", (240, 240)), CELLS, "1234", 32)
    plain = encode_text(spelled)
    end = row.place + pictures.SOFT_TOKENS
    ids = [*row.prefix[: row.place], *plain, *row.prefix[end:]]
    assert encode_text(sudoku.to_text(CELLS)) == ids[end - 19 : end]
    assert row.letters == plain


@pytest.mark.usefixtures("digits")
def test_the_same_seed_gives_the_same_rows() -> None:
    one, two, other = (
        next(pictures.batches(np.random.default_rng(seed), 6, 32)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.levels, other.levels)
    assert one.levels.shape == (6, 225, 192) and one.target.shape == (6, 32)


@pytest.mark.usefixtures("digits")
def test_rows_ask_about_digits_and_about_boards_of_grids_that_are_not_held_out() -> None:
    rng = np.random.default_rng(0)
    rows = [pictures.draw(rng, 32) for _ in range(60)]
    boards = [row for row in rows if row.letters[0] < pictures.DIGITS]
    assert 20 < len(boards) < 50
    for row in rows:
        if row.letters[0] >= pictures.DIGITS:  # every soft token says which digit it is
            (letter,) = set(row.letters)
            assert row.target[:1] == encode_text(str(letter - pictures.DIGITS))
    held_out = {sudoku.to_text(sudoku.all_grids()[grid]) for grid in sudoku.split()[1]}
    solved = {"".join(chr(22 + i) if i > 10 else "\n" for i in row.target[:19]) for row in boards}
    assert solved and not solved & held_out


@pytest.mark.parametrize("cell", [0, 3, 6, 9, 12, 15])
def test_a_board_shows_a_digit_in_its_cell(cell: int) -> None:
    blank, one = np.zeros((2, 16), np.uint8)
    one[cell] = 3
    for seed in range(4):
        drawn = (
            pictures.draw_board(cells, np.random.default_rng(seed)).convert("L").resize((256, 256))
            for cells in (blank, one)
        )
        without, changed = (np.asarray(picture, np.float32) for picture in drawn)
        rows, columns = np.nonzero(np.abs(changed - without) > 40)
        assert (rows.mean() // 64, columns.mean() // 64) == divmod(cell, 4)


def test_the_split_is_fixed() -> None:
    pytest.importorskip("sklearn")
    trained, held_out = pictures.digits()
    assert (len(trained.labels), len(held_out.labels)) == (1437, 360)
    assert held_out.labels[:5].tolist() == [8, 2, 0, 7, 6]
    assert trained.images.max() == 16


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    pictures.digits.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(Refused, match=r"sklearn, which is not installed.*sfumato\[train\]"):
        pictures.digits()
    pictures.digits.cache_clear()
