"""The model in the package reads pictures that were kept out of its training."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import sfumato
from sfumato.cli import demo
from sfumato.train import pictures, sudoku

TEXT_WEIGHTS = "d427161c746de422b6fd768e6706a4ed951ef65f59effac4efc4039179c96f99"
"""SHA-256 of the text network's tensors by name: the stage of pictures leaves them as they are."""
MOST_BYTES = 9_000_000


@pytest.fixture(scope="module")
def model() -> sfumato.Model:
    return sfumato.load()


def answer(model: sfumato.Model, words: str, image: Image.Image) -> str:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image}]
    parts.append({"type": "text", "text": words})
    messages = [{"role": "user", "content": parts}]
    return model.generate(messages=messages, max_tokens=32, seed=0).text


def test_its_text_weights_are_those_of_the_third_stage(model: sfumato.Model) -> None:
    path, digest = Path(model.path) / "model.safetensors", hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(name for name in file.keys() if "vision" not in name):  # noqa: SIM118
            digest.update(file.get_tensor(name).view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == TEXT_WEIGHTS
    assert path.stat().st_size < MOST_BYTES


def test_it_reads_digits_that_were_held_out(model: sfumato.Model) -> None:
    pytest.importorskip("sklearn")
    held_out, count = pictures.digits()[1], 60
    replies = [
        answer(model, "Which digit is this?", pictures.plain_digit(image))
        for image in held_out.images[:count]
    ]
    right = [reply == str(label) for reply, label in zip(replies, held_out.labels, strict=False)]
    assert sum(right) >= 0.9 * count


def test_it_solves_pictures_of_boards_that_were_held_out(model: sfumato.Model) -> None:
    pytest.importorskip("matplotlib")
    rng, count, solved = np.random.default_rng(5), 30, 0
    for _ in range(count):
        grid = int(rng.choice(sudoku.split()[1]))
        cells = sudoku.puzzle(grid, int(rng.integers(4, 13)), rng)
        reply = answer(model, "Solve this Sudoku.", pictures.draw_board(cells, rng))
        solved += reply == sudoku.to_text(sudoku.all_grids()[grid])
    assert solved >= 0.8 * count


def test_it_answers_the_examples_of_the_page_and_of_the_demo(model: sfumato.Model) -> None:
    (digit, board) = demo._shown()
    assert answer(model, *digit) == "3"
    assert sudoku.is_solution("1...\n...3\n..21\n2.34", answer(model, *board))
