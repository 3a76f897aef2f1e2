"""The stage of pictures: a tower for a network that stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.pictures import picture
from tests.support.vision_oracle import VisionOracle

import sfumato
from sfumato.media.patches import patches_of
from sfumato.model.vision.tower import Encoding
from sfumato.train import pictures, recipe
from sfumato.train.objective import soft_tokens
from sfumato.train.trainer import Watch

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "SEE_ROWS", 2)
    monkeypatch.setattr(recipe, "DIGITS_ROWS", 2)
    images = np.random.default_rng(3).integers(0, 17, (3, 8, 8)).astype(np.uint8)
    made = pictures.Digits(images, np.array([4, 0, 9]))
    monkeypatch.setattr(pictures, "digits", lambda: (made, made))


@pytest.fixture(scope="module")
def third() -> recipe.Transformer:
    return recipe.load_weights(Path(sfumato.load().path))


def random_tower() -> recipe.VisionTower:
    """As a checkpoint holds it."""
    tower = recipe.new_tower(recipe.TOWER, torch.Generator().manual_seed(1)).requires_grad_(False)
    for parameter in tower.parameters():
        parameter.mul_(3 if parameter.ndim > 1 else 0.8)
        parameter.copy_(parameter.to(torch.bfloat16))
    return tower


def test_the_same_seed_gives_the_same_tower_and_the_text_network_stays(small_network: None) -> None:
    third = recipe.initialised(recipe.EMBEDDED, torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in third.state_dict().items()}
    one, two, other = (recipe.train_see(third, 1, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(before[name], value) for name, value in third.state_dict().items())


def test_training_lowers_the_losses(third: recipe.Transformer, same_rows: None) -> None:
    lines: list[str] = []
    recipe.train_see(third, 4, watch=Watch(lines.append, every=1))
    for name in ("answer", "letters"):
        seeing = [line for line in lines if line.startswith("see")]
        losses = [float(line.split(f"{name} ")[1].split(",")[0]) for line in seeing]
        assert losses[-1] < losses[0], (name, losses)


def test_vectors_that_stand_for_digits_are_learnt_without_a_tower(
    third: recipe.Transformer, same_rows: None
) -> None:
    before = {name: value.clone() for name, value in third.state_dict().items()}
    lines: list[str] = []
    vectors = recipe.train_digits(third, 4, 0, Watch(lines.append, every=1))
    assert vectors.shape == (10, recipe.EMBEDDED.hidden_size) and vectors.isfinite().all()
    losses = [float(line.split("answer ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0] - 1
    assert all(torch.equal(before[name], value) for name, value in third.state_dict().items())


def test_letters_are_learnt_by_what_is_near() -> None:
    known = torch.eye(3)
    letters = torch.tensor([[0, 2]])
    near = recipe.letter_loss(known, 0.9 * known[letters], letters)
    far = recipe.letter_loss(known, known[torch.tensor([[1, 1]])], letters)
    assert near < 0.1 < far


def test_what_is_trained_is_what_is_run() -> None:
    tower, patches = random_tower(), patches_of(picture(50, 50), pictures.CUT)
    with torch.no_grad():
        ours = soft_tokens(tower, torch.from_numpy(patches.levels)[None])[0]
        run = Encoding(tower, torch.from_numpy(patches.values()), patches.columns).advance()
    assert run is not None and (ours - run).abs().max() < 1e-4 * run.abs().max()


def test_the_checkpoint_loads_here_and_in_transformers(
    third: recipe.Transformer, tmp_path: Path
) -> None:
    tower, patches = random_tower(), patches_of(picture(50, 50), pictures.CUT)
    recipe.save_checkpoint(third, tmp_path / "sees", tower)
    model = sfumato.load(tmp_path / "sees", dtype="float32")
    assert model.network.tower is not None
    state = model.network.tower.state_dict()
    assert all(torch.equal(state[name], value) for name, value in tower.state_dict().items())
    oracle, info = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "sees", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert oracle.config.image_token_id == pictures.PLACEHOLDER
    assert oracle.config.boi_token_id is None and oracle.config.eoi_token_id is None
    encoder = oracle.model.encoder
    theirs = VisionOracle(encoder.vision_tower, encoder.embed_vision).soft_tokens(patches)
    ours = model.network.soft_tokens(torch.from_numpy(patches.values()), patches.columns)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
