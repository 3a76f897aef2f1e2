"""What tokens of a prefix with pictures see: each rule by hand, and against the references.

"model" holds against Google's formulas, and against `transformers`' Gemma 4 where no picture is
longer than the window; "transformers" against `transformers`' DiffusionGemma.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.oracle import random_oracle, tiny_config
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaEncoderModel
from transformers.models.gemma4.modeling_gemma4 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from sfumato.model.vision.mask import IMAGE_MASKS, ImageMask, Span, mask_of, seen

UPSTREAM = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."), reason="shows what this one version does"
)


def mask(
    length: int, pictures: list[Span], window: int | None, rule: ImageMask = "model"
) -> Tensor:
    every = torch.arange(length)
    return mask_of(*seen(every, pictures, window, rule), every)


def drawn(text: str) -> Tensor:
    """A mask from rows of x (seen) and . (not)."""
    return torch.tensor([[sign == "x" for sign in row] for row in text.split()])


def test_text_is_causal() -> None:
    for rule in IMAGE_MASKS:
        assert torch.equal(mask(4, [], None, rule), drawn("x... xx.. xxx. xxxx"))
        assert torch.equal(mask(4, [], 2, rule), drawn("x... xx.. .xx. ..xx"))


def test_a_picture_sees_itself_both_ways_in_sliding_layers() -> None:
    rows = "x..... xxxx.. xxxx.. xxxx.. xxxxx. .xxxxx"
    for rule in IMAGE_MASKS:
        assert torch.equal(mask(6, [(1, 4)], 5, rule), drawn(rows))


def test_full_layers_stay_causal() -> None:
    assert torch.equal(mask(6, [(1, 4)], None), torch.ones(6, 6).tril().bool())


def test_transformers_overlays_full_layers_too() -> None:
    rows = "x..... xxxx.. xxxx.. xxxx.. xxxxx. xxxxxx"
    assert torch.equal(mask(6, [(1, 4)], None, "transformers"), drawn(rows))


def test_the_window_bounds_a_picture_on_both_sides() -> None:
    rows = "x..... xxx... .xxx.. ..xxx. ...xx. ....xx"
    assert torch.equal(mask(6, [(1, 5)], 2), drawn(rows))


def test_transformers_sees_a_picture_past_the_window() -> None:
    rows = "x..... xxxxx. .xxxx. .xxxx. .xxxx. ....xx"
    assert torch.equal(mask(6, [(1, 5)], 2, "transformers"), drawn(rows))


def test_pictures_see_earlier_ones_and_not_later_ones() -> None:
    rows = "xx...... xx...... xxx..... xxxxx... xxxxx... xxxxxx.. xxxxxxxx xxxxxxxx"
    for rule in IMAGE_MASKS:
        assert torch.equal(mask(8, [(0, 2), (3, 5), (6, 8)], 8, rule), drawn(rows))


def test_a_chunk_sees_what_the_whole_prefix_sees() -> None:
    pictures, every = [(2, 6), (8, 11)], torch.arange(14)
    for rule in IMAGE_MASKS:
        for window in (None, 3, 5):
            all_rows = mask(14, pictures, window, rule)
            for begin, end in ((0, 2), (2, 6), (6, 14), (7, 12)):
                first, last = seen(every[begin:end], pictures, window, rule)
                assert torch.equal(mask_of(first, last, every), all_rows[begin:end])


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """A length and pictures, between any two of which is a token of text, as templates have it."""
    pictures, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 3))):
        end = at + draw(st.integers(1, 9))
        pictures.append((at, end))
        at = end + draw(st.integers(1, 4))
    return at + draw(st.integers(1, 4)), pictures


def types_of(length: int, pictures: list[Span]) -> Tensor:
    """`mm_token_type_ids` [1, length]."""
    types = torch.zeros(1, length, dtype=torch.long)
    for start, end in pictures:
        types[0, start:end] = 1
    return types


@settings(max_examples=100, deadline=None)
@given(prefixes(), st.integers(1, 12))
def test_model_is_googles(prefix: tuple[int, list[Span]], window: int) -> None:
    """The package gemma: gm/utils/_attention_mask.py and, for windows, gm/nn/gemma4/_modules.py."""
    length, pictures = prefix
    q, k = torch.arange(length)[:, None], torch.arange(length)
    causal = k <= q
    number = get_block_sequence_ids_for_mask(types_of(length, pictures), torch.device("cpu"))[0]
    same = (number[:, None] == number) & (number >= 0)
    near = (k > q - window) & (k < q + window)
    assert torch.equal(mask(length, pictures, window), (causal | same) & near)
    assert torch.equal(mask(length, pictures, None), causal)


def theirs(length: int, pictures: list[Span], window: int, family: str) -> dict[str, Tensor]:
    """The masks of a `transformers` model, bool [length, length], by kind of layer."""
    config = tiny_config(sliding_window=window).text_config
    config._attn_implementation = "eager"
    types = types_of(length, pictures)
    shared = {
        "config": config,
        "inputs_embeds": torch.zeros(1, length, config.hidden_size),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "past_key_values": DynamicCache(config=config),
        "position_ids": torch.arange(length)[None],
    }
    if family == "gemma4":
        numbers = get_block_sequence_ids_for_mask(types, torch.device("cpu"))
        made = create_masks_for_vision_model(**shared, block_sequence_ids=numbers)
    else:
        make = DiffusionGemmaEncoderModel.create_masks_for_generate
        made = make(**shared, mm_token_type_ids=types)
    return {kind: each[0, 0] == 0 for kind, each in made.items()}


@settings(max_examples=50, deadline=None)
@given(prefixes(), st.integers(1, 12))
def test_model_is_transformers_gemma4_within_the_window(
    prefix: tuple[int, list[Span]], window: int
) -> None:
    length, pictures = prefix
    made = theirs(length, pictures, window, "gemma4")
    assert torch.equal(mask(length, pictures, None), made["full_attention"])
    ours = mask(length, pictures, window)
    if all(end - start <= window for start, end in pictures):
        assert torch.equal(ours, made["sliding_attention"])
    # Theirs has no bound ahead: what it sees more is ahead, in the same picture, past the window.
    more = made["sliding_attention"] & ~ours
    assert not (ours & ~made["sliding_attention"]).any()
    assert all(k - q >= window for q, k in more.nonzero().tolist())


@UPSTREAM
@settings(max_examples=50, deadline=None)
@given(prefixes(), st.integers(1, 12))
def test_transformers_is_what_its_generate_does(
    prefix: tuple[int, list[Span]], window: int
) -> None:
    length, pictures = prefix
    made = theirs(length, pictures, window, "diffusion_gemma")
    assert torch.equal(mask(length, pictures, None, "transformers"), made["full_attention"])
    assert torch.equal(mask(length, pictures, window, "transformers"), made["sliding_attention"])


@UPSTREAM
def test_transformers_forward_discards_its_mask() -> None:
    """The two lines of the report in docs/log.md, by what they do: without masks made beforehand
    the encoder sees pictures causally; with those of `generate`, both ways."""
    config = tiny_config(sliding_window=8)
    encoder = random_oracle(config, seed=1).model.encoder
    ids, types = torch.arange(12)[None] + 3, types_of(12, [(2, 7)])

    def states(**given: object) -> Tensor:
        cache = DynamicCache(config=config.text_config)
        out = encoder(input_ids=ids, past_key_values=cache, **given)
        return out.last_hidden_state

    masks = encoder.create_masks_for_generate(
        config=config.text_config,
        inputs_embeds=torch.zeros(1, 12, config.text_config.hidden_size),
        attention_mask=None,
        past_key_values=DynamicCache(config=config.text_config),
        position_ids=torch.arange(12)[None],
        mm_token_type_ids=types,
    )
    assert torch.equal(states(mm_token_type_ids=types), states())
    assert not torch.allclose(states(attention_mask=masks), states(), atol=1e-3)
