"""A cache in fp8 or q8_0: what it stores, what it leaves alone, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfumato.bench.subject import random_checkpoint
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.memory.estimate import ModelFootprint, predict
from sfumato.model.cache import slot_bytes
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.placement import CACHE_TYPES, cache_dtype, serving_kernels
from sfumato.ops.cpu.attention import packs

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def network(cache_type: str | None, dtype: torch.dtype = torch.float32) -> Network:
    checkpoint = random_checkpoint("tiny", "f32", layers=3)
    return load_network(checkpoint, CPU, dtype, cache_type=cache_type)


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
    ("name", "device", "dtype", "message"),
    [
        ("q3", "cpu", torch.float32, "'q3' is none of bf16, fp8, q8_0"),
        ("fp8", "mps", torch.float32, "'fp8' is not for mps, where .* in float32; leave"),
        ("q8_0", "cuda", torch.bfloat16, "'q8_0' is not for cuda, .* the device cpu"),
        ("bf16", "cuda", torch.float32, "'bf16' is not for cuda, where .* in float32; leave"),
    ],
)
def test_what_is_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=f"cache_type: .*{message}"):
        load_network(random_checkpoint("tiny", "f32"), torch.device(device), dtype, cache_type=name)


def test_which_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of bfloat16 alone, on a device that stores what activations are."""
    checkpoint = random_checkpoint("tiny", "f32")
    assert cache_dtype(checkpoint, GPU, torch.bfloat16, "bf16") == torch.bfloat16
    every = frozenset(("linear", "attend"))
    monkeypatch.setattr("sfumato.ops.kernels_on", lambda device: every)
    assert serving_kernels(GPU, torch.bfloat16, torch.bfloat16) == every
    assert not serving_kernels(GPU, torch.float32, torch.float32)


@pytest.mark.parametrize("cache", ["fp8", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prediction_counts_widened_keys_where_torch_attends(
    dtype: torch.dtype, cache: str
) -> None:
    """The library packs some keys of a long slot at a time, whatever the cache; torch copies."""
    wide = ModelFootprint(network(None).config, CPU, dtype, dtype, 0)
    narrow = replace(wide, cache_dtype=CACHE_TYPES[cache])
    buffers = [
        [
            predict(footprint, EngineConfig(slots=2, context=context))
            for context in (1 << 16, 1 << 17)
        ]
        for footprint in (wide, narrow)
    ]
    (of_wide, of_narrow) = ([b.step - a.step, b.prefill - a.prefill] for a, b in buffers)
    if packs(CACHE_TYPES[cache], dtype):
        assert of_narrow == of_wide == [0, 0]
        assert buffers[1][0].prefill >= buffers[0][0].prefill  # new keys, as they are stored
    else:
        assert of_narrow[0] > of_wide[0]
