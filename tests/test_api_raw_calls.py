"""The raw calls of a `Model`: `encode`, `denoise_logits` and `soft_embedding`, by tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.denoise import denoise_step
from tests.support.soft_of import soft_of
from tests.support.tiny_checkpoint import save_tiny_checkpoint

import sfumato
from sfumato import Model
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return sfumato.load(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_lengths_say_how_many_tokens_count(model: Model) -> None:
    ids = torch.randint(10, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 4, 0])
    cache = model.new_cache(3, 16)
    model.encode(ids, cache, lengths)
    assert cache.lengths == [9, 4, 0]
    canvas = torch.randint(10, 100, (3, 8), generator=torch.Generator().manual_seed(1))
    together = model.denoise_logits(canvas, cache)
    assert together.shape == (3, 8, model.config.vocab_size) and together.dtype == torch.float32
    assert float(together.abs().max()) <= model.config.logit_softcap
    for row, length in enumerate(lengths.tolist()):
        own = model.new_cache(capacity=16)
        model.encode(ids[row : row + 1, :length], own)
        alone = model.denoise_logits(canvas[row : row + 1], own)
        torch.testing.assert_close(together[row], alone[0], atol=1e-3, rtol=1e-3)


def test_encode_appends(model: Model) -> None:
    ids = torch.randint(10, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    at_once, parts = model.new_cache(1, 16), model.new_cache(1, 16)
    model.encode(ids, at_once)
    model.encode(ids[:, :4], parts)
    model.encode(ids[:, 4:], parts)
    canvas = ids[:, :8]
    torch.testing.assert_close(
        model.denoise_logits(canvas, at_once),
        model.denoise_logits(canvas, parts),
        atol=1e-3,
        rtol=1e-3,
    )
    assert at_once.lengths == parts.lengths == [9]  # denoising leaves no trace


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        (2, None, r"ids: for this cache must be int64 \[1, n\], got int64 \[2, 4\]"),
        (1, [3, 3], r"lengths: must be int64 \[1\], got int64 \[2\]"),
        (1, [5], r"lengths: must lie in 0\.\.4, got \[5\]"),
        (1, [-1], r"lengths: must lie in 0\.\.4"),
    ],
)
def test_rows_and_lengths_must_fit(
    model: Model, rows: int, lengths: list[int] | None, message: str
) -> None:
    ids = torch.full((rows, 4), 12)
    with pytest.raises(ValueError, match=message):
        model.encode(ids, model.new_cache(), None if lengths is None else torch.tensor(lengths))


def test_a_full_cache_and_strange_ids_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="row 0: 9 tokens do not fit a cache slot of 8"):
        model.encode(torch.full((1, 9), 12), model.new_cache(1, 8))
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.105"):
        model.encode(torch.tensor([[106]]), model.new_cache())
    with pytest.raises(ValueError, match=r"canvas 0: must hold 1 to 32 tokens.* got 33"):
        model.denoise_logits(torch.zeros(1, 33, dtype=torch.int64), model.new_cache())


def test_the_raw_calls_make_the_same_steps(model: Model) -> None:
    """Two steps by hand, self-conditioning included, against those of a canvas."""
    ids = model.prompt_ids("Hi")
    config = replace(REFERENCE, canvas_length=32)
    slot = model.network.new_slot(64)
    model.network.encode([torch.tensor(ids)], [slot])
    canvas = Canvas(config, Noise(0, 0), model.config.vocab_size, torch.device("cpu"))
    cache = model.new_cache(1, 64)
    model.encode(torch.tensor([ids]), cache)
    soft = None
    for _ in range(2):
        processed = model.denoise_logits(canvas.tokens[None], cache, soft) / canvas.temperature()
        soft = model.soft_embedding(processed)
        assert soft.shape == (1, 32, model.config.hidden_size)
        (draft,) = denoise_step(model.network, [canvas], [slot])
        assert torch.equal(draft.token_ids, processed[0].argmax(-1))
        torch.testing.assert_close(soft_of(canvas), soft[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        [[2, 5]],
        [2],
        torch.ones(1, 2),
        torch.ones(2, dtype=torch.int64),
        torch.ones(1, 2).int(),
        None,
    ],
    ids=["list", "flat list", "float", "rank 1", "int32", "None"],
)
def test_raw_calls_refuse_what_is_no_tensor_of_ids(model: Model, wrong: Any) -> None:
    cache = model.new_cache(1, 16)
    with pytest.raises(ValueError, match=r"^ids: for this cache must be int64 \[1, n\], got"):
        model.encode(wrong, cache)
    if wrong is not None:
        with pytest.raises(ValueError, match=r"^lengths: must be int64 \[1\], got"):
            model.encode(torch.ones(1, 2, dtype=torch.int64), cache, wrong)
    with pytest.raises(ValueError, match=r"^canvas: for .* must be int64 \[1, length\], got"):
        model.denoise_logits(wrong, cache)


def test_a_soft_embedding_is_of_finite_floats(model: Model) -> None:
    cache, canvas = model.new_cache(1, 16), torch.full((1, 4), 20)
    soft = torch.ones(1, 4, model.config.hidden_size)
    assert torch.equal(
        model.denoise_logits(canvas, cache, soft.double()),
        model.denoise_logits(canvas, cache, soft),
    )
    for wrong in (soft.long(), soft.tolist(), soft[0], 5):
        with pytest.raises(ValueError, match=r"^soft: must be float \[1, 4, 128\], got"):
            model.denoise_logits(canvas, cache, wrong)  # type: ignore[arg-type]
    soft[0, 2, 7] = float("nan")
    with pytest.raises(ValueError, match=r"^soft: must be finite"):
        model.denoise_logits(canvas, cache, soft)


def test_a_soft_embedding_is_of_a_distribution(model: Model) -> None:
    scores = torch.zeros(1, 4, model.config.vocab_size)
    for wrong in (scores.long(), scores[0], scores.tolist(), None):
        with pytest.raises(ValueError, match=r"^processed_logits: must be float .*106\], got"):
            model.soft_embedding(wrong)  # type: ignore[arg-type]
    scores[0, 1, 1:] = float("-inf")
    assert bool(model.soft_embedding(scores).isfinite().all())
    for value in ("nan", "inf", "-inf"):
        scores[0, 1, 0] = float(value)
        with pytest.raises(ValueError, match=r"^processed_logits: must hold no NaN"):
            model.soft_embedding(scores)


def test_a_cache_beyond_the_memory_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"^rows, capacity: .* needs [\d,]+ bytes, and .*; lower"):
        model.new_cache(10**9, 10**9)
    with pytest.raises(ValueError, match=r"^rows: must be a whole number from 1, got 0"):
        model.new_cache(rows=0)


def test_raw_calls_refuse_what_does_not_fit(model: Model) -> None:
    cache = model.new_cache(2, 16)
    canvas = torch.full((2, 8), 20)
    wrong = torch.full((2, 8), 9999)
    hidden = model.config.hidden_size
    for arguments, message in (
        ((canvas[:1],), r"canvas: for this cache must be .* got int64 \[1, 8\]"),
        ((canvas[0],), r"canvas: .* must be int64 \[2, length\], got int64 \[8\]"),
        ((wrong,), r"canvas: token ids must lie in 0\.\.105, got 9999"),
        (
            (canvas, torch.zeros(2, 7, hidden)),
            r"soft: must be .*\[2, 8, 128\], got .*\[2, 7, 128\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.denoise_logits(arguments[0], cache, *arguments[1:])
    with pytest.raises(ValueError, match=r"processed_logits: .* length, 106\], got"):
        model.soft_embedding(torch.zeros(2, 8, 7))
