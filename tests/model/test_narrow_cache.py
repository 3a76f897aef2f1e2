"""A cache in fp8 or q8_0: what it stores, what it leaves alone, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sfumato.bench.random_weights import random_checkpoint
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory_estimate import ModelFootprint, predict
from sfumato.model.cache import FP8, Q8_0, slot_bytes, stored_as, stored_width, widened
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.placement import CACHE_TYPES

CPU = torch.device("cpu")


def network(cache_type: str | None, dtype: torch.dtype = torch.float32) -> Network:
    checkpoint = random_checkpoint("tiny", "f32", layers=3)
    return load_network(checkpoint, CPU, dtype, cache_type=cache_type)


def test_an_fp8_number_is_within_a_sixteenth_and_what_is_too_large_is_clamped() -> None:
    values = torch.randn(4, 500, 32, generator=torch.Generator().manual_seed(0)) * 3
    error = (stored_as(values, FP8).float() - values).abs()
    # 3 bits of mantissa; below 2^-6 numbers are multiples of 2^-9.
    assert (error <= values.abs() / 16 + 2.0**-10).all()
    assert error.max() > 0
    assert stored_as(torch.tensor([1e4, -1e4]), FP8).float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("d", [1, 32, 40, 256])
def test_q8_0_is_within_half_a_step_of_each_block(d: int) -> None:
    """The scale is float16, so that a code's step is off by 2^-11 of itself."""
    values = torch.randn(4, 50, d, generator=torch.Generator().manual_seed(0)) * 3
    values[0, 0], values[0, 1, 0] = 0.0, 1e4  # a block of zeros, and one with an outlier
    stored = stored_as(values, Q8_0)
    blocks = -(-d // 32)
    assert stored.dtype == torch.uint8 and stored.shape == (4, 50, d + 2 * blocks)
    assert stored.shape[-1] == stored_width(d, Q8_0)
    (back,) = widened([stored], torch.float32)
    for a in range(0, d, 32):
        part, error = values[..., a : a + 32], (back - values)[..., a : a + 32].abs()
        step = part.abs().amax(-1, keepdim=True) / 127
        assert (error <= step * (0.5 + 127 * 2.0**-11) + 1e-7).all()
    assert not back[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q8_0_of_what_it_cannot_hold(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 64, dtype=dtype)
    values[0, 3], values[1, 3], values[2, 3] = torch.nan, torch.inf, 1e-9
    (back,) = widened([stored_as(values, Q8_0)], dtype)
    assert back[0, :32].isnan().all() and not back[0, 32:].any()  # of its block alone
    assert back.dtype == dtype and back[1].isfinite().all() and back[1, 3] > 1e6
    assert not back[2].any()  # below the least scale


@pytest.mark.parametrize("cache", ["fp8", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_copies_and_neighbours_change_nothing(dtype: torch.dtype, cache: str) -> None:
    model = network(cache, dtype)
    ids = torch.arange(40) % model.config.vocab_size
    at_once, in_parts, beside, copy = model.new_slots(4, 64)
    model.encode([ids], [at_once])
    model.encode([ids[:17]], [in_parts])
    model.encode([ids[17:], ids.flip(0)], [in_parts, beside])
    copy.restore(at_once, 40)
    canvas = torch.arange(8)
    alone = model.denoise([canvas], [at_once])
    assert torch.equal(model.denoise([canvas], [copy]), alone)
    both = model.denoise([canvas, canvas], [in_parts, beside])
    assert torch.equal(both[:8], alone)
    assert at_once.read(0)[0].dtype == CACHE_TYPES[cache]


@pytest.mark.parametrize(("cache", "most", "bytes_of_32"), [("fp8", 0.1, 32), ("q8_0", 0.02, 34)])
def test_the_error_of_hidden_states_and_the_bytes_of_a_slot(
    cache: str, most: float, bytes_of_32: int
) -> None:
    wide, narrow = network(None), network(cache)
    ids, canvas, states = torch.arange(40), torch.arange(8), []
    for model in (wide, narrow):
        cache = model.new_cache(1, 64)
        model.encode([ids], cache)
        states.append(model.denoise([canvas], cache))
    error = (states[0] - states[1]).norm() / states[0].norm()
    assert 0 < error < most
    sizes = [slot_bytes(m.config, 64, m.cache_dtype) for m in (wide, narrow)]
    assert sizes[1] == narrow.new_slot(64).nbytes()
    assert sizes[0] * bytes_of_32 == sizes[1] * 128


@pytest.mark.parametrize("cache", ["fp8", "q8_0"])
def test_the_prediction_of_a_loaded_model_counts_the_narrow_bytes(cache: str) -> None:
    config, models = EngineConfig(slots=2, context=2048), (network(None), network(cache))
    wide, narrow = (predict(ModelFootprint.of_network(m), config).slots for m in models)
    sizes = [slot_bytes(m.config, 2048, m.cache_dtype) for m in models]
    assert wide - narrow == 2 * (sizes[0] - sizes[1]) > 0  # the rest is the state of canvases


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("q3", "cpu", "'q3' is none of bf16, fp8, q8_0"),
        *((name, "cuda", "for a CPU alone.*cuda") for name in ("fp8", "q8_0")),
    ],
)
def test_what_is_refused(name: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"cache_type: .*{message}"):
        load_network(
            random_checkpoint("tiny", "f32"), torch.device(device), torch.float32, cache_type=name
        )
