"""Both phases against `transformers`: random tiny networks, histories and batches, in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.oracle import (
    F,
    S,
    encode_logits,
    network_of,
    oracle_encode,
    oracle_encode_logits,
    oracle_logits,
    random_oracle,
    relative,
    router_gaps,
    tiny_config,
)
from torch import Tensor

from sfumato.model.cache import Slot
from sfumato.model.network import Network

TOLERANCE = 1e-4
NEAREST_ROUTES = 1e-5  # below it, rounding alone may choose another expert

logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of every forced last layer


@dataclass(frozen=True)
class Case:
    """A network, and for each row the lengths of its prompt and of its committed canvases."""

    sizes: dict[str, Any]
    rows: tuple[tuple[int, ...], ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn, most_rows: int = 1) -> Case:
    heads = draw(st.sampled_from((1, 2, 4)))
    divisors = st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])
    experts = draw(st.integers(2, 8))
    canvas = draw(st.integers(1, 10))
    sizes = {
        "vocab_size": draw(st.integers(20, 120)),
        "hidden_size": draw(st.sampled_from((32, 48))),
        "intermediate_size": draw(st.sampled_from((24, 40))),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(divisors),
        "num_global_key_value_heads": draw(divisors),
        "head_dim": draw(st.sampled_from((8, 16))),
        "global_head_dim": draw(st.sampled_from((8, 16, 32))),
        # The reference's cache keeps everything at a window of 1, against its own meaning.
        "sliding_window": draw(st.integers(2, 24)),
        "num_experts": experts,
        "top_k_experts": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.sampled_from((8, 24))),
        "layer_types": [*draw(st.lists(st.sampled_from((S, S, F)), max_size=3)), F],
        "canvas_length": canvas,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-2))),
        "final_logit_softcapping": draw(st.sampled_from((5.0, 30.0))),
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": draw(st.sampled_from((1e2, 1e4)))},
            F: {
                "rope_type": "proportional",
                "rope_theta": draw(st.sampled_from((1e3, 1e6))),
                "partial_rotary_factor": draw(st.sampled_from((0.25, 0.5, 1.0))),
            },
        },
    }
    history = st.tuples(st.integers(1, 45), st.lists(st.just(canvas), max_size=3)).map(
        lambda lengths: (lengths[0], *lengths[1])
    )
    rows = draw(st.lists(history, min_size=1, max_size=most_rows).map(tuple))
    return Case(sizes, rows, draw(st.integers(0, 2**31)))


def tokens(random: torch.Generator, vocab: int, count: int) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=random)


def compare(case: Case, attention: str = "eager") -> tuple[float, float]:
    """Runs every row's history through ours, all rows in one call, and alone through the oracle.

    Returns the largest relative difference of any logits, and the oracle's least router gap.
    """
    config = tiny_config(**case.sizes)
    config._attn_implementation = attention
    oracle = random_oracle(config, case.seed)
    network = network_of(oracle)
    random = torch.Generator().manual_seed(case.seed + 1)
    vocab, length = network.config.vocab_size, network.config.canvas_length
    slots: list[Slot] = [network.new_slot(sum(row) + 1) for row in case.rows]
    caches: list[Any] = [None] * len(case.rows)
    largest_difference, nearest = 0.0, 1.0
    for turn in range(max(map(len, case.rows))):
        live = [i for i, row in enumerate(case.rows) if turn < len(row)]
        pieces = [tokens(random, vocab, case.rows[i][turn]) for i in live]
        ours = encode_logits(network, pieces, [slots[i] for i in live])
        with router_gaps(oracle) as gaps:
            for i, piece, logits in zip(live, pieces, ours, strict=True):
                theirs, caches[i] = oracle_encode_logits(oracle, piece, caches[i])
                largest_difference = max(largest_difference, relative(logits, theirs))
            steps = compare_steps(oracle, network, slots, caches, length, random)
        largest_difference, nearest = max(largest_difference, steps), min((nearest, *gaps))
    return largest_difference, nearest


def compare_steps(
    oracle: Any,
    network: Network,
    slots: list[Slot],
    caches: list[Any],
    length: int,
    random: torch.Generator,
) -> float:
    """A first step of all rows, then one in which every other row is self-conditioned."""
    canvases = [tokens(random, network.config.vocab_size, length) for _ in slots]
    before = [3 * torch.randn(length, network.config.vocab_size, generator=random) for _ in slots]
    largest_difference = 0.0
    for conditioned in (lambda i: False, lambda i: i % 2 == 0):
        softs = [
            network.head.soft_embedding(logits, torch.float32) if conditioned(i) else None
            for i, logits in enumerate(before)
        ]
        ours = network.head.logits(network.denoise(canvases, slots, softs)).split(length)
        for i, logits in enumerate(ours):
            previous = before[i] if conditioned(i) else None
            theirs = oracle_logits(oracle, canvases[i], caches[i], previous)
            largest_difference = max(largest_difference, relative(logits, theirs))
    return largest_difference


def largest(strategy: st.SearchStrategy[Case], examples: int) -> float:
    """The largest difference over so many examples, each of which is within the tolerance."""
    seen = [0.0]

    @settings(max_examples=examples)
    @given(strategy)
    def run(case: Case) -> None:
        difference, gap = compare(case)
        assume(gap > NEAREST_ROUTES)
        seen.append(difference)
        assert difference <= TOLERANCE

    run()
    return max(seen)


@pytest.mark.parametrize(
    ("rows", "examples"),
    [(4, 10), *(pytest.param(rows, 35, marks=pytest.mark.slow) for rows in (1, 4))],
)
def test_rows_of_unequal_length_in_one_call(
    rows: int, examples: int, note: Callable[[str], None]
) -> None:
    difference = largest(cases(most_rows=rows), examples)
    note(f"largest difference from transformers, at most {rows} rows: {difference:.1e}")


def test_sdpa() -> None:
    assert compare(Case({}, ((29, 8, 8),), 0), "sdpa")[0] <= TOLERANCE


@pytest.mark.parametrize("prefix", [1, 6, 7, 8, 9, 15, 16, 40])
def test_prefix_around_the_window(prefix: int) -> None:
    """With a window of 8 a sliding layer keeps 7 positions of the prefix."""
    assert compare(Case({"layer_types": [S, F]}, ((prefix,),), prefix))[0] <= TOLERANCE


def test_layer_scalars_differ_by_phase() -> None:
    """The comparison would not notice a swapped pair if the oracle's were equal."""
    oracle = random_oracle(tiny_config(), 0)
    decoder = oracle.model.decoder.layers
    encoder = oracle.model.encoder.language_model.layers
    scalars = [float(layer.layer_scalar) for layer in (*decoder, *encoder)]
    assert len(set(scalars)) == len(scalars)
    network = network_of(oracle)
    ours = [float(block.layer_scalar) for block in network.transformer.layers]
    ours += [float(block.encoder_layer_scalar) for block in network.transformer.layers]
    assert ours == scalars


@settings(max_examples=4)
@given(seed=st.integers(0, 2**31), prefix=st.integers(1, 40), window=st.integers(2, 20))
def test_chunks_of_a_prompt_do_not_matter(seed: int, prefix: int, window: int) -> None:
    oracle = random_oracle(tiny_config(sliding_window=window, num_experts=2), seed)
    network = network_of(oracle)
    random = torch.Generator().manual_seed(seed)
    prompts = [tokens(random, 97, prefix), tokens(random, 97, prefix // 3)]
    canvas = tokens(random, 97, 8)
    results = []
    for chunk in (1, 7, 512):
        slots = [network.new_slot(len(ids) + 1) for ids in prompts]
        network.encode(prompts, slots, chunk)
        assert [slot.length for slot in slots] == [len(ids) for ids in prompts]
        results.append(network.head.logits(network.denoise([canvas, canvas], slots)))
    for result in results[:-1]:
        assert relative(result, results[-1]) <= 1e-5
    expected = oracle_logits(oracle, canvas, oracle_encode(oracle, prompts[0]))
    assert relative(results[0][:8], expected) <= TOLERANCE


def test_ring_wraps_many_times() -> None:
    """Hundreds of positions through a ring of 7, in pieces that never divide it."""
    oracle = random_oracle(tiny_config(num_experts=2), 5)
    network, cache = network_of(oracle), None
    random = torch.Generator().manual_seed(5)
    slot = network.new_slot(400)
    while slot.room() >= 17:
        piece = tokens(random, 97, int(torch.randint(1, 18, (), generator=random)))
        network.encode([piece], [slot])
        cache = oracle_encode(oracle, piece, cache)
    canvas = tokens(random, 97, 8)
    ours = network.head.logits(network.denoise([canvas], [slot]))
    assert slot.length > 50 * 7
    assert relative(ours, oracle_logits(oracle, canvas, cache)) <= TOLERANCE


def test_a_step_writes_nothing() -> None:
    network = network_of(random_oracle(tiny_config(), 3))
    slot = network.new_slot(40)
    network.encode([torch.arange(20)], [slot])
    before = [(slot.read(i)[0].clone(), slot.read(i)[1].clone()) for i in range(3)]
    network.denoise([torch.arange(8)], [slot])
    assert slot.length == 20
    for i, (keys, values) in enumerate(before):
        assert torch.equal(slot.read(i)[0], keys) and torch.equal(slot.read(i)[1], values)
