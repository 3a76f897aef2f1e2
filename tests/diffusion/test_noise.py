"""Noise: the published vectors of its generator, its distributions, and what it depends on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.diffusion.noise import Noise, philox, seed_words
from sfumato.diffusion.noise import noise as draw

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), torch.tensor(key))  # type: ignore[arg-type]
    assert tuple(words[:, 0].tolist()) == expected


def test_counters_side_by_side_do_not_mix() -> None:
    columns = [torch.tensor(column) for column in zip(*(c for c, _, _ in KNOWN), strict=True)]
    words = philox(tuple(columns), torch.zeros(2, dtype=torch.int64))  # type: ignore[arg-type]
    assert tuple(words[:, 0].tolist()) == KNOWN[0][2]


def uniforms(count: int = 40) -> torch.Tensor:
    """[count, 512] from several seeds, canvases and steps."""
    rows = [Noise(i % 7, i % 3).uniforms(1 + i, 512) for i in range(count)]
    return torch.stack(rows)


def test_uniforms_are_uniform() -> None:
    drawn = uniforms().flatten()
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0 and drawn.max() < 1
    n = len(drawn)
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    gap = (drawn.sort()[0] - ranks).abs().max()
    assert gap * n**0.5 < 1.63  # Kolmogorov-Smirnov at 1 %; the seeds are fixed
    low_bits = (drawn * 2**53).long() & 0xFF  # the second word's bits count too
    counts = low_bits.bincount(minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert chi2 < 311  # 255 degrees of freedom, 1 %


def test_neighbours_are_not_correlated() -> None:
    drawn = uniforms() - 0.5
    for a, b in ((drawn[:, 1:], drawn[:, :-1]), (drawn[1:], drawn[:-1])):
        correlation = (a * b).mean() / drawn.square().mean()
        assert abs(correlation) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize("vocabulary", [2, 97, 262144])
def test_tokens_are_uniform_over_the_vocabulary(vocabulary: int) -> None:
    tokens = torch.cat([Noise(3, canvas).tokens(0, 512, vocabulary) for canvas in range(40)])
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0 and tokens.max() < vocabulary
    cells = min(vocabulary, 97)
    counts = (tokens * cells // vocabulary).bincount(minlength=cells).double()
    expected = len(tokens) / cells
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < cells - 1 + 2.6 * (2 * cells) ** 0.5 + 5


def test_tokens_and_uniforms_of_a_step_are_independent() -> None:
    noise = Noise(11, 0)
    a = torch.cat([noise.uniforms(step, 512) for step in range(1, 20)]) - 0.5
    b = torch.cat([noise.tokens(step, 512, 1 << 20) for step in range(1, 20)]) / (1 << 20) - 0.5
    assert abs((a * b).mean() * 12) < 4 / len(a) ** 0.5


places = st.builds(
    Noise,
    seed=st.integers(-(2**70), 2**70),
    canvas=st.integers(0, 2**20),
    attempt=st.integers(0, 2**10),
)
steps = st.integers(0, 2**20)


@given(noise=places, step=steps, lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_a_position_does_not_know_the_length(
    noise: Noise, step: int, lengths: tuple[int, int]
) -> None:
    short, long = sorted(lengths)
    assert torch.equal(noise.uniforms(step, long)[:short], noise.uniforms(step, short))
    assert torch.equal(noise.tokens(step, long, 97)[:short], noise.tokens(step, short, 97))


@given(places, places, steps, steps)
def test_everything_that_should_tell_canvases_apart_does(
    one: Noise, other: Noise, step: int, other_step: int
) -> None:
    alike = (one.seed - other.seed) % 2**64 == 0 and (one.canvas, one.attempt, step) == (
        other.canvas,
        other.attempt,
        other_step,
    )
    same = torch.equal(one.uniforms(step, 8), other.uniforms(other_step, 8))
    assert same == alike


def test_each_coordinate_counts() -> None:
    base = Noise(seed=5, canvas=1, attempt=2)
    others = [
        *(Noise(s, 1, 2) for s in (6, -5, 5 + 2**32, 5 + 2**63)),
        *(Noise(5, canvas, 2) for canvas in (0, 2)),
        *(Noise(5, 1, attempt) for attempt in (0, 1)),
    ]
    drawn = [noise.uniforms(3, 16) for noise in (base, *others)] + [base.uniforms(4, 16)]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)
    assert len(set(drawn[0].tolist())) == 16  # and every position draws its own


def test_only_the_low_64_bits_of_a_seed_count() -> None:
    for seed in (0, 5, -1, -(2**63)):
        same = Noise(seed + 2**64, 0).uniforms(1, 4)
        assert torch.equal(Noise(seed, 0).uniforms(1, 4), same)
    assert torch.equal(Noise(-1, 0).uniforms(1, 4), Noise(2**64 - 1, 0).uniforms(1, 4))


def test_draws_are_those_of_earlier_versions() -> None:
    noise = Noise(2**63 + 12345, canvas=3, attempt=1)
    assert [u.hex() for u in noise.uniforms(7, 4).tolist()] == [
        "0x1.429e983f5d046p-1",
        "0x1.91d8ece54788ap-1",
        "0x1.61a3cdb0db24bp-1",
        "0x1.d361a8b01425cp-1",
    ]
    assert noise.tokens(7, 4, 262144).tolist() == [20969, 89797, 71601, 131243]


@given(rows=st.lists(st.tuples(places, steps), min_size=1, max_size=5), width=st.integers(1, 70))
def test_one_call_draws_what_each_row_draws_alone(
    rows: list[tuple[Noise, int]], width: int
) -> None:
    columns = (
        [n.canvas for n, _ in rows],
        [n.attempt for n, _ in rows],
        [step for _, step in rows],
    )
    seeds = torch.tensor([seed_words(noise.seed) for noise, _ in rows])
    uniforms, tokens = draw(seeds, *map(torch.tensor, columns), width, 97)
    for row, (noise, step) in enumerate(rows):
        assert torch.equal(uniforms[row], noise.uniforms(step, width))
        assert torch.equal(tokens[row], noise.tokens(step, width, 97))
