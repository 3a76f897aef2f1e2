"""Fills: the template, the search for lengths, and the plain loop on the embedded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.denoise import denoise_step
from tests.support.soft_of import soft_of

import sfumato
from sfumato import Draft, Filled, Hole, Model, SamplerConfig
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.constraints.filling import (
    Closing,
    FillTemplate,
    HoleSearch,
    Tried,
    first_lengths,
    lengths_beside,
    make_template,
)
from sfumato.diffusion.constraints.read_template import NOISE
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import Never
from sfumato.options.limits import TRIALS
from sfumato.text_side import Cancelled
from sfumato.train import sudoku

MESSAGES = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu", dtype="float32")


def encode(text: str, field: str) -> list[int]:
    return [ord(character) for character in text]


def template(
    parts: list[Any],
    prompt: str = "p",
    closing: Closing | None = None,
    length: int = 32,
    **more: Any,
) -> FillTemplate:
    return make_template(parts, encode, encode(prompt, ""), closing, lambda _: length, **more)


def test_a_short_text_stands_on_the_canvas() -> None:
    made = template(["ab", Hole(2), "c"])
    form = made.form({})
    assert made.prefix == [ord("p")]
    assert form.ids == (97, 98, NOISE, NOISE, 99)
    assert (form.holes, form.content) == ((slice(2, 4),), 5)
    assert form.pins == {0: 97, 1: 98, 4: 99}


def test_a_reply_is_closed_and_filled_up_to_a_width() -> None:
    form = template(["ab", Hole(2)], closing=Closing(1, 0)).form({})
    assert form.ids == (97, 98, NOISE, NOISE, 1, *[0] * 11) and form.content == 5
    # Without room for an end token, none stands there.
    assert len(template(["a" * 31, Hole(1)], closing=Closing(1, 0)).form({}).ids) == 32


def test_a_long_text_is_prefix_before_and_cut_after() -> None:
    made = template(["a" * 40, Hole(2), "b", Hole(2), "c" * 40], closing=Closing(1, 0))
    form = made.form({})
    assert len(made.prefix) == 41 and len(form.ids) == 32 and made.closing is None
    assert [hole.start for hole in form.holes] == [0, 3]
    assert "27 of 40 tokens were read" in made.warnings[0]
    with pytest.raises(ValueError, match="holes and the text between them take 36 tokens"):
        template(["a", Hole(2), "b" * 32, Hole(2), "c"])


def test_a_hole_that_varies_has_a_token_before_it() -> None:
    made = template([Hole(at_most=3), "b"], prompt="pq")
    assert made.prefix == [ord("p")] and made.form({}).ids == (113, *[NOISE] * 3, 98)
    assert made.form({0: 1}).ids == (113, NOISE, 98)
    assert made.form({0: (5, 6)}).ids == (113, 5, 6, 98)
    assert template([Hole(at_most=3)], prompt="p").prefix == [ord("p")]
    masks = template([Hole(at_most=3), "b"], prompt="pq", is_causal=False)
    assert masks.prefix == encode("pq", ""), "no hidden state is read"
    with pytest.raises(ValueError, match="must begin with text"):
        template([Hole(2), "b"], prompt="")


@given(most=st.integers(1, 300), best=st.integers(1, 300))
def test_the_search_finds_the_length_with_one_highest_score(most: int, best: int) -> None:
    best = min(best, most)
    search = HoleSearch(Hole(at_most=most), ())
    assert len(first_lengths(most)) <= TRIALS
    rounds = 0
    while not search.is_decided and (lengths := search.next()):
        rounds += 1
        assert len(lengths) <= TRIALS
        for length in lengths:
            assert isinstance(length, int)
            search.tried.append(Tried((7,) * length, -abs(length - best)))
    assert search.best == best and rounds <= 5


def test_lengths_between_neighbours() -> None:
    assert lengths_beside(4, {2, 4, 6}) == [3, 5]
    assert lengths_beside(2, {1, 2}) == []
    assert len(lengths_beside(64, {1, 64, 128})) == TRIALS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hole(), "exactly one"),
        (lambda: Hole(1, at_most=2), "exactly one"),
        (lambda: Hole(0), "tokens: must be a whole number from 1"),
        (lambda: Hole(True), "tokens: must"),
        (lambda: Hole(at_most=10**9), "at_most: must"),
        (lambda: Hole(choices=[]), "choices: must be 1 to 64"),
        (lambda: Hole(choices="ab"), "choices: must be a list"),
        (lambda: Hole(choices=["a", ""]), r"choices\[1\]: must be text"),
        (lambda: Hole(choices=["a", "a"]), "the same text"),
    ],
)
def test_holes_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ("I am", {}, "parts: must be a list"),
        (["I am"], {}, "parts: must have 1 to 256 holes"),
        ([3, Hole(1)], {}, r"parts\[0\]: must be text or a Hole"),
        ([Hole(1)] * 257, {}, "parts: must have 1 to 256"),
        ([Hole(at_most=2)] * 17, {}, "at most 16 holes of an open length"),
        ([Hole(33)], {}, "holes and the text between them take 33"),
        (["a", Hole(choices=["b", "日"])], {}, r"parts\[1\].choices\[1\]: '日' cannot be written"),
        (["a", Hole(1)], {"seed": -1}, "seed: must be"),
        (["a", Hole(1)], {"sampler": 3}, "sampler: must be"),
        (["a" * 20_000, Hole(1)], {}, "prompt: the prompt is 20001 tokens"),
    ],
)
def test_what_cannot_be_filled_is_named(
    model: Model, parts: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.fill(parts, **options)


def test_the_given_text_comes_back(model: Model) -> None:
    parts = ["The capital ", Hole(2), " France", Hole(3), "."]
    filled = model.fill(parts, seed=3)
    first, second = filled.holes
    assert filled.text == f"The capital {first.text} France{second.text}."
    assert [len(hole.token_ids) for hole in filled.holes] == [2, 3]
    for hole in filled.holes:
        assert len(hole.probabilities) == len(hole.token_ids)
        assert 0 <= hole.probability <= min(hole.probabilities) <= 1
    assert filled.stats.output_tokens == 5 and filled.stats.canvases == 1
    assert model.fill(parts, seed=3).text == filled.text


def test_markers_never_fill_a_hole(model: Model) -> None:
    bans = set(model.tokenizer.special_ids)
    for seed in range(3):
        filled = model.fill(["?", Hole(20)], seed=seed, sampler=SamplerConfig(max_steps=2))
        assert bans.isdisjoint(filled.holes[0].token_ids)


def test_drafts_come_before_the_text(model: Model) -> None:
    events = list(model.stream_fill(["The capital is ", Hole(5), "."], messages=MESSAGES))
    *drafts, last = events
    assert isinstance(last, Filled) and drafts
    for draft in drafts:
        assert isinstance(draft, Draft) and draft.text.startswith("The capital is ")
        assert (draft.entropy[:15] == 0).all() and draft.accepted[:15].all()


def test_a_cancelled_fill_has_no_result(model: Model) -> None:
    calls = iter([False, False, True])
    with pytest.raises(Cancelled):
        model.fill(["a", Hole(9)], cancelled=lambda: next(calls))


def test_a_sudoku_by_pinning(model: Model) -> None:
    """The given digits are pinned, and the grid fills around them."""
    import numpy as np

    rng = np.random.default_rng(5)
    solved = 0
    for _ in range(4):
        cells = sudoku.puzzle(int(rng.choice(sudoku.split()[1])), 8, rng)
        text = sudoku.to_text(cells)
        parts = [Hole(1) if character == "." else character for character in text]
        filled = model.fill(parts, messages=[{"role": "user", "content": sudoku.prompt(cells)}])
        assert all(c in (".", d) for c, d in zip(text, filled.text, strict=True))
        solved += sudoku.is_solution(text, filled.text)
    assert solved >= 3


@pytest.mark.parametrize("bare", [True, False])
def test_no_pinned_position_ever_changes(model: Model, bare: bool) -> None:
    """In 64 random canvases, at every step: in the draft, and in what the next step reads."""
    generator = torch.Generator().manual_seed(3 + bare)
    vocab = model.config.vocab_size
    config = SamplerConfig(max_steps=3, stopping=Never()).over(model.sampler_defaults)
    canvases, pinned = [], []
    for seed in range(64):
        length = (3, 16, 20, 32)[seed % 4]
        share = torch.rand((), generator=generator)
        tokens = torch.randint(vocab, (length,), generator=generator)
        tokens[torch.rand(length, generator=generator) < share] = -1
        pins = {place: token for place, token in enumerate(tokens.tolist()) if token >= 0}
        own = replace(config, canvas_length=length)
        noise = Noise(seed, 0)
        canvases.append(Canvas(own, noise, vocab, torch.device("cpu"), (), pins, hard_pins=bare))
        pinned.append(tokens)
    slot = model.network.new_slot(1)
    model.network.encode([torch.tensor([2])], [slot])

    def changed(tokens: torch.Tensor, given: torch.Tensor) -> bool:
        return bool((tokens != given)[given >= 0].any())

    for _ in range(3):
        for canvas, given_tokens in zip(canvases, pinned, strict=True):
            assert not changed(canvas.tokens, given_tokens)
        drafts = denoise_step(model.network, canvases, [slot] * len(canvases))
        for canvas, draft, given_tokens in zip(canvases, drafts, pinned, strict=True):
            assert not changed(draft.token_ids, given_tokens)
            assert not changed(canvas.tokens, given_tokens)
            assert (draft.entropy[given_tokens >= 0] == 0).all()
            assert not bare or (soft_of(canvas)[given_tokens >= 0] == 0).all()
