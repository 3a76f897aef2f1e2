"""The model in the package reads pictures that were kept out of its training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import sfumato
from sfumato.bench import evaluate
from sfumato.cli import demo
from sfumato.train import sudoku
from sfumato.train.embedded_data import evaluation_sets

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


@pytest.mark.parametrize(
    ("count", "digits", "boards"),
    [
        pytest.param(8, 0.95, 0.85, id="some"),
        pytest.param(360, 0.95, 0.9, id="all", marks=pytest.mark.slow),
    ],
)
def test_it_reads_what_was_held_out(
    model: sfumato.Model,
    count: int,
    digits: float,
    boards: float,
    note: Callable[[str], None],
) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    puzzles = evaluation_sets(count=count // 2)["sudoku"]
    sets = evaluate.picture_sets(puzzles, 0, count)
    for (name, tasks), floor in zip(sets.items(), (digits, boards), strict=True):
        score = evaluate.evaluate(model, tasks)
        note(f"embedded model, {name}: {score.exact:.1%} of {score.tasks} exact")
        assert score.exact >= floor


def test_it_answers_the_examples_of_the_page_and_of_the_demo(model: sfumato.Model) -> None:
    (digit, board) = demo._shown()
    assert answer(model, *digit) == "3"
    assert sudoku.is_solution("1...\n...3\n..21\n2.34", answer(model, *board))
