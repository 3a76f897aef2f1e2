"""Steps that compute a part of a canvas: what they compute and keep, and when they may not."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diffusion.head_only import CPU
from tests.diffusion.tiny import calm_oracle
from tests.support.oracle import network_of
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import LogitBias
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig, fixed_steps
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.recompute import Kept
from sfumato.diffusion.turbo import Turbo
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats
from sfumato.model.network import Network
from sfumato.ops.narrow_cache import FP8

LENGTH = 8
EAGER = Turbo(first=1, partial=2, settled=5.0, near=0)


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


def in_fp8(network: Network) -> Network:
    """The same weights, with a cache in fp8."""
    narrow = copy.copy(network)
    narrow.cache_dtype = FP8
    return narrow


def begin(network: Network, config: SamplerConfig, seed: int = 0) -> tuple[Canvas, Slot]:
    slot = network.new_slot(64)
    network.encode([torch.arange(20 + seed)], [slot])
    complete = replace(config, canvas_length=LENGTH).over(REFERENCE)
    return Canvas(complete, Noise(seed, 0), 97, CPU), slot


def drafts_of(network: Network, config: SamplerConfig, seed: int = 0) -> tuple[list[Draft], Canvas]:
    (canvas, slot), drafts = begin(network, config, seed), []
    denoiser = Denoiser(network, 1)
    while not canvas.done:
        drafts += denoiser.step([canvas], [slot])
    return drafts, canvas


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """The places of each step of all canvases; None: a whole one."""
    places: list[Tensor | None] = []
    took = Kept.took

    def spy(self: Kept, *args: Any) -> None:
        places.append(args[-1])
        took(self, *args)

    monkeypatch.setattr(Kept, "took", spy)
    return places


def test_whole_steps_give_the_bits_of_steps_without_it(network: Network) -> None:
    plain, _ = drafts_of(network, SamplerConfig(max_steps=12))
    turbo, canvas = drafts_of(network, SamplerConfig(max_steps=12, turbo=Turbo(first=12)))
    assert len(plain) == len(turbo) > 2
    for one, other in zip(plain, turbo, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.entropy, other.entropy)
        assert torch.equal(one.top_probs, other.top_probs)
    assert canvas.kept is not None and canvas.kept.computed == LENGTH * len(turbo)


def test_a_cache_in_fp8_is_read_by_partial_steps_too(
    network: Network, taken: list[Tensor | None]
) -> None:
    drafts, _ = drafts_of(in_fp8(network), replace(fixed_steps(12), turbo=EAGER))
    assert any(places is not None for places in taken)
    assert all(draft.entropy.isfinite().all() for draft in drafts)


def test_what_is_left_out_has_the_statistics_of_the_step_before(
    network: Network, taken: list[Tensor | None]
) -> None:
    drafts, canvas = drafts_of(network, replace(fixed_steps(12), turbo=EAGER))
    left_out = 0
    for before, after, places in zip(drafts[:-1], drafts[1:], taken[1:], strict=True):
        if places is None:
            continue
        others = torch.ones(LENGTH, dtype=torch.bool).index_fill(0, places, False)
        left_out += int(others.sum())
        assert torch.equal(before.token_ids[others], after.token_ids[others])
        assert torch.equal(before.entropy[others], after.entropy[others])
        assert not torch.equal(before.entropy[places], after.entropy[places])
    assert left_out > 0
    assert canvas.kept is not None and canvas.kept.computed == LENGTH * 12 - left_out


def test_a_partial_step_of_an_unchanged_canvas_gives_what_the_whole_one_gave(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept keys and values are then those that a whole step would compute."""
    config = replace(fixed_steps(12), turbo=EAGER, processors=(LogitBias({3: float("-inf")}),))
    canvases = [begin(network, config, seed) for seed in (0, 1)]
    denoiser = Denoiser(network, 2)
    inputs = [canvas for canvas, _ in canvases], [slot for _, slot in canvases]
    first = denoiser.forward(*inputs)
    assert first.turbo is not None
    for kept, stats in zip(first.turbo.kept, first.turbo.stats_of_rows(), strict=True):
        kept.stats = stats
    places = iter([torch.tensor([1, 4, 5]), torch.tensor([7])])
    monkeypatch.setattr(Kept, "places", lambda self: next(places))
    again = denoiser.forward(*inputs)
    assert torch.equal(again.stats.argmax, first.stats.argmax)
    assert torch.equal(again.stats.drawn, first.stats.drawn)
    torch.testing.assert_close(again.stats.entropy, first.stats.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.stats.soft, first.stats.soft, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_no_canvas_ends_after_a_partial_step(
    network: Network, taken: list[Tensor | None], seed: int
) -> None:
    drafts, canvas = drafts_of(network, SamplerConfig(max_steps=30, turbo=EAGER), seed)
    assert canvas.done and len(taken) == len(drafts)
    assert taken[-1] is None


def test_partial_steps_come_between_whole_ones(
    network: Network, taken: list[Tensor | None]
) -> None:
    drafts_of(network, replace(fixed_steps(12), turbo=EAGER))
    is_partial = "".join("w" if places is None else "p" for places in taken)
    assert is_partial.startswith("w") and is_partial.endswith("w")
    assert "p" in is_partial and "ppp" not in is_partial


def kept_of(turbo: Turbo, settled: str, steps: int = 5) -> Kept:
    """settled: "x" where a position has."""
    config = network_of(calm_oracle()).config
    kept = Kept(config, len(settled), 48, turbo)
    kept.settled = torch.tensor([mark == "x" for mark in settled])
    kept.steps = steps
    return kept


@pytest.mark.parametrize(
    ("settled", "near", "places"),
    [
        ("xxxxxx..", 0, [6, 7]),
        ("xxxxxx..", 2, [4, 5, 6, 7]),
        ("x.xxxxxx", 1, [0, 1, 2]),
        ("x.xx....", 1, None),  # 8 of 8 places
        ("xxxxxxxx", 1, None),  # whether it stays so is for a whole step to say
    ],
)
def test_the_places_of_a_step(settled: str, near: int, places: list[int] | None) -> None:
    chosen = kept_of(Turbo(near=near), settled).places()
    assert (None if chosen is None else chosen.tolist()) == places


@pytest.mark.parametrize("steps", [0, 2, 47])
def test_the_first_steps_and_the_last_are_whole(steps: int) -> None:
    assert kept_of(Turbo(first=3), "xxxxxx..", steps).places() is None


def test_a_position_settles_once_it_is_accepted_sure_and_the_same() -> None:
    kept = kept_of(Turbo(settled=0.1), "....")

    def stats(argmax: list[int], entropy: list[float]) -> HeadStats:
        ids = torch.tensor(argmax)
        return HeadStats(ids, ids, torch.tensor(entropy), ids, ids.float(), ids.float())

    kept.took(stats([1, 2, 3, 4], [0, 0, 0, 0]), torch.ones(4, dtype=torch.bool), False, None)
    assert not kept.settled.any()
    accepted = torch.tensor([True, True, False, True])
    kept.took(stats([1, 9, 3, 4], [0, 0, 0, 0.2]), accepted, False, None)
    assert kept.settled.tolist() == [True, False, False, False]


def test_a_canvas_that_a_constraint_guides_is_whole_for_good(network: Network) -> None:
    from sfumato.diffusion.constraints.guidance import Guidance

    canvas, _ = begin(network, replace(fixed_steps(12), turbo=EAGER))
    assert canvas.is_turbo
    canvas.guide(Guidance(pins={0: 5}))
    assert not canvas.is_turbo


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"first": 0}, "turbo.first: must be a whole number from 1"),
        ({"partial": 1.5}, "turbo.partial: must be a whole number"),
        ({"near": -1}, "turbo.near: must be a whole number from 0"),
        ({"settled": float("nan")}, "turbo.settled: must be from 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Turbo(**values)


@pytest.mark.parametrize(
    "other",
    [
        {"top_k": 5},
        {"top_p": 0.5},
        {"soft_top_k": 5},
        {"named_tokens": (5,)},
        {"top_tokens": 20},
        {"processors": (LogitBias({5: 1.0}),)},
    ],
)
def test_what_needs_whole_steps_is_refused_beside_it(other: dict[str, Any]) -> None:
    name = next(iter(other))
    with pytest.raises(ValueError, match=f"turbo: a step with {name}"):
        SamplerConfig(turbo=Turbo(), **other)
    with pytest.raises(ValueError, match="turbo: must be a Turbo"):
        SamplerConfig(turbo=True)  # type: ignore[arg-type]
