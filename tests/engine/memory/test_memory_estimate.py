"""Predictions of memory, against what a process really takes, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks import random_checkpoint as script
from tests.support.fake_device import DEVICE, traced
from tests.support.gguf_files import gguf_config
from tests.support.live_bytes import LiveBytes
from tests.support.scripted_engine import Script, ScriptedNetwork, engine

from sfumato import ops
from sfumato.bench.environment import resident
from sfumato.bench.subject import random_checkpoint
from sfumato.engine import TooLarge
from sfumato.engine.engine_config import EngineConfig
from sfumato.engine.errors import EngineError
from sfumato.engine.memory.device_memory import Budget
from sfumato.engine.memory.estimate import (
    ModelFootprint,
    Prediction,
    _seen_of_pool,
    held_bytes,
    predict,
    state_bytes,
)
from sfumato.engine.memory.guard import MemoryGuard, check_load
from sfumato.model.cache import QuestionPool, slot_bytes
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of, load_network
from sfumato.model.network import Network
from sfumato.model.truncate import cutoff_bytes
from sfumato.ops.cpu.attention import packs
from sfumato.options.limits import MOST_STEPS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAYOUT = EngineConfig(slots=2, context=2048)

MEASURED = replace(LAYOUT, context=1024)
LARGER = 2048

# What an engine does with two requests that fill its slots, and with one beside a larger one, and
# the most that it holds over the bare process (all imported, the text side there) in either.
PROCESS = """
import json, sys
import torch
import sfumato.api
from sfumato.api import load_text
from sfumato.bench import environment as memory
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Engine, EngineConfig, Request
from sfumato.engine.memory.guard import MemoryGuard
from sfumato.model.families import open_checkpoint

path, slots, context, larger = sys.argv[1], *map(int, sys.argv[2:])
layout = EngineConfig(slots=slots, context=context)
two_steps = SamplerConfig(max_steps=2, ignore_eos=True)
torch.set_num_threads(1)
memory.INTERVAL_S = 0.003
load_text(open_checkpoint(path))
bare = memory.resident()["peak_anonymous"]

def submitted(seed, length, canvases):
    ids = [(7 + seed) * i % 251 + 5 for i in range(length - canvases * canvas)]
    made = dict(ids=ids, max_tokens=canvases * canvas, sampler=two_steps, seed=seed)
    return engine.submit(Request(**made))

def served(*handles):
    while engine.step():
        pass
    assert all(handle.result() for handle in handles)
    (peak,) = watch.values()["peak_anonymous"]
    contexts = [slot.context for slot in engine.state().slots]
    return {"peak": peak - bare, "snapshots": engine._pool.snapshot_bytes, "contexts": contexts}

with memory.PeakMemory() as watch:
    model = sfumato.api.load(path)
    canvas = model.config.canvas_length
    engine = Engine(model, layout)
    full = served(*[submitted(row, context, 1) for row in range(slots)])
    long = submitted(8, larger, 2)
    for _ in range(larger // layout.chunk_on(model.network.device)):
        engine.step()  # until both denoise together
    more = served(long, submitted(9, context, 1))
added = MemoryGuard(model.network, layout).added([larger])
print(json.dumps({"full": full, "more": more, "added": added}))
"""


# Large buffers go back at once. Else glibc keeps some, each run others: 195 to 256 MB.
STEADY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 20))


def measured(path: Path) -> dict[str, Any]:
    numbers = MEASURED.slots, MEASURED.context, LARGER
    argv = [sys.executable, "-c", PROCESS, str(path), *map(str, numbers)]
    env = os.environ | STEADY | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["full"]["contexts"] == [MEASURED.context] * MEASURED.slots
    assert figures["more"]["contexts"] == [MEASURED.context] * MEASURED.slots + [LARGER]
    return figures


@pytest.mark.skipif(not resident(), reason="only Linux tells the memory of a process")
@pytest.mark.parametrize("format", ["q4_k_m", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_prediction_is_what_a_process_takes(
    format: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    note: Callable[[str], None],
) -> None:
    """180 million parameters, two slots filled to the brim, two rows stepping; and then a request
    that is admitted to a larger slot. Without compiled operations the weights stay in the file,
    and what torch keeps of its buffers differs from run to run: there the prediction is held from
    below alone."""
    path = tmp_path / "model.gguf"
    argv = ["random_checkpoint.py", str(path), "--preset", "180m", "--format", format]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    checkpoint = open_checkpoint(path)
    dtype = torch.bfloat16 if format == "bf16" else torch.float32
    footprint = ModelFootprint.of_checkpoint(checkpoint, config_of(checkpoint), CPU, dtype)
    # Where the first run does not hold, the median of three counts: what the allocator keeps
    # differs from run to run.
    runs = [measured(path)]
    added = runs[0]["added"]
    prediction_with_cutoffs = predict(footprint, MEASURED)
    # These rows ask for no top-k and no top-p, and read no questions, whose memory is predicted for
    # all that may.
    cutoffs = cutoff_bytes(footprint.config, MEASURED.slots * footprint.config.canvas_length)
    plain = replace(prediction_with_cutoffs, step=prediction_with_cutoffs.step - cutoffs, reads=0)
    parts = (("full", 0), ("more", added))

    def predicted_of(figures: dict[str, Any], more: int) -> int:
        return replace(plain, snapshots=figures["snapshots"]).total - plain.mapped + more

    def holds(ratio: float) -> bool:
        return 0.9 < ratio < (1.15 if ops.multiplies_bf16(CPU) else 2.5)

    ratios = [
        predicted_of(run[what], more) / run[what]["peak"] for run in runs for what, more in parts
    ]
    if not all(map(holds, ratios)):
        runs += [measured(path) for _ in range(2)]
    for what, more in parts:
        figures = sorted((run[what] for run in runs), key=lambda run: run["peak"])[len(runs) // 2]
        predicted = predicted_of(figures, more)
        ratio = predicted / figures["peak"]
        peaks = ", ".join(f"{run[what]['peak'] / 1e6:.1f}" for run in runs)
        note(
            f"memory of 180m {format}, 2 rows{' and a larger slot' if more else ''}: predicted "
            f"{predicted / 1e6:.1f} MB, measured {peaks} MB ({ratio - 1:+.1%})"
        )
        assert holds(ratio)


def tiny(format: str = "q4_k_m") -> Network:
    return load_network(random_checkpoint("tiny", format), CPU, torch.float32)


def budgets(nbytes: int) -> Callable[[torch.device], Budget]:
    return lambda device: Budget(nbytes, f"the test's {device}")


def test_a_loaded_model_weighs_what_was_predicted() -> None:
    for format in ("q4_k_m", "q8_0", "f32"):
        checkpoint = random_checkpoint("tiny", format)
        config = config_of(checkpoint)
        before = ModelFootprint.of_checkpoint(checkpoint, config, CPU, torch.float32)
        after = ModelFootprint.of_network(tiny(format))
        assert replace(after, weights=0) == replace(before, weights=0)
        assert after.weights == before.weights


def kept_for_reads(footprint: ModelFootprint, places: int) -> int:
    """What the pool of questions and the tensors of forwards hold of a device's memory."""
    model, meta = footprint.config, torch.device("meta")
    pool = QuestionPool(model, places, 256, footprint.cache_dtype, meta)
    room = 2 * [512 * model.hidden_size * footprint.dtype.itemsize]
    sizes = [tensor.nbytes for tensor in (*pool.keys, *pool.values)]
    return held_bytes([*sizes, *room], footprint.device)


def test_parts_follow_the_layout() -> None:
    footprint = ModelFootprint.of_network(tiny())
    base = predict(footprint, LAYOUT)
    more = predict(footprint, replace(LAYOUT, slots=4))
    assert more.slots == 2 * base.slots
    slots = 2 * slot_bytes(footprint.config, 2048, footprint.cache_dtype)
    assert base.slots == slots + state_bytes(footprint, 2)
    assert more.step > base.step and more.prefill == base.prefill
    assert predict(footprint, replace(LAYOUT, prefill_chunk=2048)).prefill > base.prefill
    assert predict(footprint, replace(LAYOUT, snapshot_bytes=5)).snapshots == 5
    assert predict(footprint, replace(LAYOUT, prefill_chunk=2048)).reads == base.reads
    piece = slot_bytes(footprint.config, 256, footprint.cache_dtype)
    assert base.reads == (2 + 2) * piece  # of each decision one, and those of a step
    cuda = replace(footprint, device=torch.device("cuda"))
    on_cuda = predict(cuda, replace(LAYOUT, prefill_chunk=2048)).reads
    assert on_cuda == (2 + 8) * piece + kept_for_reads(cuda, (2 + 8) * 256)
    by_itself = predict(replace(cuda, placement=None), LAYOUT)
    small_chunks = predict(cuda, replace(LAYOUT, prefill_chunk=512))
    assert by_itself.reads == small_chunks.reads < on_cuda, "reads share 512 tokens"
    assert by_itself.prefill > small_chunks.prefill, "a GPU's chunks have 2,048 tokens"
    most = predict(cuda, replace(LAYOUT, prefill_chunk=1 << 20)).reads
    assert most == (2 + 4096) * piece + kept_for_reads(cuda, 4096)
    assert 0 < base.snapshots < LAYOUT.snapshot_bytes  # as many as a few slots are worth
    assert base.total == base.weights + base.slots + base.working + base.snapshots + base.libraries


def subject(**fields: Any) -> ModelFootprint:
    """A model that lies on a device without compiled operations."""
    config = gguf_config(sliding_window=8, canvas_length=32, context_length=1 << 20)
    return replace(
        ModelFootprint(config, torch.device("cuda"), torch.bfloat16, torch.bfloat16, 0), **fields
    )


@pytest.mark.parametrize(("stored", "copies"), [(torch.bfloat16, 3 * 2), (torch.float32, 4 + 4)])
def test_the_reference_copies_the_slots_of_all_rows(stored: torch.dtype, copies: int) -> None:
    """Of keys or values of the full layer (one head of 32) gathered once, and in the step's dtype
    where that is another; and both joined with the canvases', the values in the place of what was
    gathered in another dtype. Nothing of rows on a CPU."""
    footprint = subject(cache_dtype=stored)

    def step(context: int, slots: int = 4, larger: int = 0) -> int:
        return predict(footprint, EngineConfig(slots=slots, context=context), larger).step

    assert step(1 << 18) - step(1 << 17) == 4 * (1 << 17) * 32 * copies
    assert step(1 << 18, 8) - step(1 << 17, 8) == 8 * (1 << 17) * 32 * copies
    # A larger slot is a pool of one, whose copies are made when those of the rows are gone.
    assert step(1 << 17, larger=1 << 19) == step(1 << 17)
    more = step(1 << 17, larger=1 << 20) - step(1 << 17, larger=3 << 18)
    assert more == (1 << 18) * 32 * copies
    plain = replace(footprint, device=CPU, dtype=torch.float32)
    two, four = (
        predict(plain, EngineConfig(slots=slots, context=1 << 17)).step
        - predict(plain, EngineConfig(slots=slots, context=1 << 16)).step
        for slots in (2, 4)
    )
    # Compiled attention packs so many keys at a time.
    assert two == four and (two == 0) == (packs(stored, torch.float32) is not None)


def test_the_reference_holds_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most bytes of tensors that live at a time in the operation, but for the attention itself,
    on a device that holds no numbers."""
    attention = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(attention, lambda q, *rest, scale: torch.empty_like(q))
    rows, capacity, footprint = 4, 5000, subject()
    layer = footprint.config.layers[-1]
    with traced(), LiveBytes() as live:
        new = [
            torch.empty(rows, 32, heads, layer.head_dim, dtype=torch.bfloat16, device=DEVICE)
            for heads in (footprint.config.num_heads, layer.kv_heads, layer.kv_heads)
        ]
        pool = torch.empty(
            rows, layer.kv_heads, capacity, layer.head_dim, dtype=torch.bfloat16, device=DEVICE
        )
        numbers = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        before = live.now()
        ops.attend_padded(*new, ops.Rows(pool, pool, numbers, numbers, None, numbers))
    predicted = _seen_of_pool(footprint, rows, capacity)
    assert 0.9 < predicted / (live.most - before) < 1.1


@pytest.mark.skipif(not ops.multiplies_bf16(CPU), reason="predicted of these operations alone")
def test_compiled_operations_keep_what_the_largest_call_needs() -> None:
    """Of steps and prefills, of attention and experts: one piece of memory serves all."""
    model = tiny().config
    footprint = replace(subject(), device=CPU, config=model)
    each = model.experts_per_token * model.hidden_size * 4

    def kept(chunk: int, context: int) -> int:
        return predict(footprint, EngineConfig(slots=1, context=context, prefill_chunk=chunk)).kept

    assert kept(512, 1024) == 512 * each
    assert kept(8, 1024) >= model.canvas_length * each
    long = [kept(8, context) for context in (4096, 8192)]
    assert long[1] - long[0] > 0 and kept(8, 1 << 14) < 2 * long[1]
    assert predict(replace(footprint, cache_dtype=torch.float32), LAYOUT).kept == 0


def test_the_state_of_canvases_counts() -> None:
    """Batches for canvases of 16, 32, 64, 128 and 256; the soft embeddings are most of it."""
    footprint = subject()
    soft = (16 + 32 + 64 + 128 + 256) * footprint.config.hidden_size * 2
    tables = 5 * MOST_STEPS * 4
    one = state_bytes(footprint, 1)
    assert soft + tables < one < 1.5 * (soft + tables)
    assert state_bytes(footprint, 3) == 3 * one


def test_what_does_not_fit_says_so() -> None:
    network = tiny()
    with pytest.raises(EngineError) as error:
        MemoryGuard(network, LAYOUT, budgets(6_000_000))
    text = str(error.value)
    assert "an engine of 2 slots x 2,048 tokens needs" in text
    assert "of 6.0 MB (the test's cpu) a margin of 5% leaves 5.7 MB" in text
    assert "lower --slots, --context or --snapshot-memory" in text


def test_larger_slots_fit_into_what_is_left() -> None:
    network = tiny()
    need = _added(predict(ModelFootprint.of_network(network), LAYOUT))
    layout = replace(LAYOUT, memory_margin=0.0)
    one, two = (slot_bytes(network.config, n, network.cache_dtype) for n in (2000, 1000))
    guard = MemoryGuard(network, layout, budgets(need + one + two))
    assert guard.lacks([2000, 1000], None) is None
    assert guard.lacks([2000, 1001], None)
    with pytest.raises(EngineError):
        MemoryGuard(network, layout, budgets(need - 1))
    assert MemoryGuard(network, LAYOUT, lambda device: None).lacks([1 << 40], 0) is None


def test_a_larger_slot_makes_larger_buffers() -> None:
    """A forward of a longer context takes more besides the slot, where its keys need more than the
    experts of a chunk."""
    network, layout = tiny(), replace(LAYOUT, memory_margin=0.0, prefill_chunk=64)
    footprint = ModelFootprint.of_network(network)
    base, longer = predict(footprint, layout), predict(footprint, replace(layout, context=9000))
    need, more = _added(base), longer.working - base.working
    slot = slot_bytes(footprint.config, 9000, footprint.cache_dtype)
    # In float32 it packs no more keys at a time than the layout's context has.
    packed = packs(footprint.cache_dtype, footprint.dtype)
    assert more > 0 or packed == torch.float32
    tight = MemoryGuard(network, layout, budgets(need + slot + more - 1)).lacks([9000], None)
    assert tight == f"takes {slot + more:,} bytes, and of memory {slot + more - 1:,} are left"
    assert MemoryGuard(network, layout, budgets(need + slot + more)).lacks([9000], None) is None


def test_an_engine_refuses_a_slot_whose_buffers_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the slot alone would."""
    request_script = Script(40, 3000)
    layout = EngineConfig(slots=1, context=64, prefill_chunk=32, memory_margin=0.0)
    footprint = ModelFootprint.of_network(cast(Network, ScriptedNetwork([request_script])))
    need, slot = (
        _added(predict(footprint, layout)),
        slot_bytes(footprint.config, 3000, torch.float32),
    )
    for spare, fits in ((slot, False), (2 * slot + 10**8, True)):
        guard = partial(MemoryGuard, ask=budgets(need + spare))
        monkeypatch.setattr("sfumato.engine.engine.MemoryGuard", guard)
        serving, _ = engine(request_script, slots=1, context=64, memory_margin=0.0)
        if fits:
            assert serving.generate(request_script.request(max_tokens=8)).text == "Hello."
            assert [view.context for view in serving.state().slots] == [64, 3008]
        else:
            with pytest.raises(TooLarge, match=f"and of memory {spare:,} are left"):
                serving.submit(request_script.request(max_tokens=8))


def test_memory_is_looked_at_again_for_a_larger_slot() -> None:
    """What others have taken since is not there any more, and what idle slots hold is."""
    network, layout = tiny(), replace(LAYOUT, memory_margin=0.0)
    working = predict(ModelFootprint.of_network(network), layout).working
    available = [10**9]
    guard = MemoryGuard(network, layout, lambda device: Budget(available[0], "the test"))
    need = guard.added([4096])
    assert guard.lacks([4096], 0) is None
    available[0] = working + need - 1
    assert guard.lacks([4096], 0) and guard.lacks([4096], None) is None
    assert guard.lacks([4096], 1) is None
    available[0] += 1
    assert guard.lacks([4096], 0) is None


def test_a_model_that_is_not_loaded_yet() -> None:
    checkpoint = random_checkpoint("26b-a4b")
    footprint = ModelFootprint.of_checkpoint(checkpoint, config_of(checkpoint), CPU, torch.float32)
    with pytest.raises(EngineError, match=r"the model \(\d\d\.\d\d GB\) with 4 slots needs"):
        check_load(footprint, EngineConfig(), budgets(10**10))
    prediction = check_load(footprint, EngineConfig(), budgets(10**11))
    assert prediction.snapshots == EngineConfig().snapshot_bytes
    gpu = replace(footprint, device=torch.device("cuda"))
    layout = replace(EngineConfig(), memory_margin=0)
    on_gpu = predict(gpu, layout)  # snapshots are there too
    need = on_gpu.total - on_gpu.libraries
    assert check_load(gpu, layout, budgets(need)) == on_gpu and on_gpu.snapshots
    with pytest.raises(EngineError):
        check_load(gpu, layout, budgets(need - 1))


def _added(prediction: Prediction) -> int:
    return prediction.total - prediction.weights
