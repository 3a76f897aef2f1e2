"""The whole way, from a picture to logits of both phases, against `transformers`.

Encoded plainly (`tests/support/pictured.py`).  "transformers" holds against the masks that
`generate` of DiffusionGemma makes; "model" against the same network with Google's masks.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.oracle import network_of, oracle_logits, random_oracle, relative, tiny_config
from tests.support.pictured import Pictured, encode_pictured
from tests.support.pictures import picture
from tests.support.vision_oracle import VisionOracle, random_vision
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from sfumato.media.patches import Cut, Patches, patches_of
from sfumato.model.vision.loading import load_tower, open_mmproj
from sfumato.model.vision.mask import IMAGE_MASKS, ImageMask, SoftTokens, Span, ahead_of_pictures
from sfumato.model.vision.tower import Encoding

IMAGE, WINDOW, HIDDEN = 90, 8, 64
PICTURES = {  # the budget of soft tokens, and the sizes
    "one": (7, [(40, 30)]),
    "three": (7, [(20, 60), (12, 12), (70, 20)]),
    "longer than the window": (30, [(60, 50), (30, 90)]),
}


def oracle_with(vision: VisionOracle, seed: int = 3) -> DiffusionGemmaForBlockDiffusion:
    """A model whose tower is that of `vision`."""
    config = tiny_config(hidden_size=HIDDEN, sliding_window=WINDOW)
    config.vision_config, config.image_token_id = vision.config, IMAGE
    model = random_oracle(config, seed)
    model.load_state_dict(vision.state(), strict=False)
    return model


def prompt_of(pictures: list[Patches]) -> tuple[Tensor, list[Span]]:
    """Ids with placeholders for the pictures, text before, between and behind them."""
    ids, spans = [2, 5, 7], []
    for number, patches in enumerate(pictures):
        ids.append(80)  # begins a picture
        spans.append((len(ids), len(ids) + patches.soft_tokens))
        ids += [IMAGE] * patches.soft_tokens + [81] + [10 + number, 20, 30][: number + 1]
    return torch.tensor([*ids, 40, 41, 42]), spans


def inputs_of(pictures: list[Patches]) -> dict[str, Tensor]:
    """What the reference's processor makes of them: padded to the longest."""
    most = max(len(patches.levels) for patches in pictures)
    pixels, places = torch.zeros(len(pictures), most, 48), torch.full((len(pictures), most, 2), -1)
    for row, patches in enumerate(pictures):
        at = torch.arange(len(patches.levels))
        pixels[row, : len(at)] = torch.from_numpy(patches.values())
        places[row, : len(at)] = torch.stack((at % patches.columns, at // patches.columns), -1)
    return {"pixel_values": pixels, "image_position_ids": places}


def masks_of(
    model: DiffusionGemmaForBlockDiffusion, ids: Tensor, spans: list[Span], rule: ImageMask
) -> dict[str, Tensor]:
    types = torch.zeros(1, len(ids), dtype=torch.long)
    for start, end in spans:
        types[0, start:end] = 1
    made = model.model.encoder.create_masks_for_generate(
        config=model.config.text_config,
        inputs_embeds=torch.zeros(1, len(ids), HIDDEN),
        attention_mask=torch.ones(1, len(ids), dtype=torch.bool),
        past_key_values=DynamicCache(config=model.config.text_config),
        position_ids=torch.arange(len(ids))[None],
        mm_token_type_ids=types if rule == "transformers" else None,
    )
    if rule == "model":
        q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))
        for start, end in spans:
            near = (q >= start) & (k >= start) & (k < end) & (q < end) & (k < q + WINDOW)
            made["sliding_attention"][0, 0][near & (k > q)] = 0
    return made


@torch.no_grad()
def encoded_by(
    model: DiffusionGemmaForBlockDiffusion, pictures: list[Patches], rule: ImageMask
) -> tuple[Tensor, DynamicCache]:
    """The oracle's states [n, hidden] of the prompt of these pictures, and its cache."""
    ids, spans = prompt_of(pictures)
    cache = DynamicCache(config=model.config.text_config)
    masks = masks_of(model, ids, spans, rule)
    given = {"input_ids": ids[None], "attention_mask": masks, "past_key_values": cache}
    return model.model.encoder(**given, **inputs_of(pictures)).last_hidden_state[0], cache


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."), reason="of this version's generate"
)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("one", "transformers"),
        ("three", "model"),
        *product(["longer than the window"], IMAGE_MASKS),
    ],
)
def test_logits_of_both_phases(rule: ImageMask, name: str, tmp_path: Path) -> None:
    vision, (tokens, sizes) = random_vision(HIDDEN), PICTURES[name]
    cut = Cut(vision.config.patch_size, vision.config.pooling_kernel_size, tokens)
    pictures = [patches_of(picture(*size), cut) for size in sizes]
    ids, spans = prompt_of(pictures)
    assert all((end - start > WINDOW) == (tokens > WINDOW) for start, end in spans)
    model = oracle_with(vision)
    theirs, cache = encoded_by(model, pictures, rule)

    vision.write_mmproj(tmp_path / "mmproj.gguf")
    opened = open_mmproj(tmp_path / "mmproj.gguf", HIDDEN)
    tower = load_tower(*opened, torch.device("cpu"), torch.float32)
    soft = []
    for patches in pictures:
        with torch.no_grad():
            made = Encoding(tower, torch.from_numpy(patches.values()), patches.columns).advance()
        assert made is not None and len(made) == patches.soft_tokens
        soft.append(made)
    canvas = torch.arange(8) * 7 + 1
    after = oracle_logits(model, canvas, cache)
    network, row = network_of(model), Pictured(ids, list(zip(spans, soft, strict=True)))
    ends = sorted({2, *(start for start, _ in spans), *(end for _, end in spans)})
    for chunks in ([], ends, [spans[0][0]], [spans[-1][1]]):
        slot = network.new_slot(len(ids) + 8)
        assert relative(encode_pictured(network, slot, row, rule, chunks), theirs) < 1e-4
    network.image_mask = rule
    placed = [SoftTokens(start, each) for (start, _), each in zip(spans, soft, strict=True)]
    for chunk in (1, 5, 16, 512):
        slot.reset()
        assert network.encode([ids], [slot], chunk, pictures=[placed])
        assert relative(network.head.logits(network.denoise([canvas], [slot])), after) < 1e-4
    slot.reset()
    (hidden,) = network.encode_hidden([ids], [slot], [placed])
    assert relative(hidden, theirs) < 1e-4
    ours = network.head.logits(network.denoise([canvas], [slot]))
    assert relative(ours, after) < 1e-4
    (other,) = set(IMAGE_MASKS) - {rule}
    slot.reset()
    assert relative(encode_pictured(network, slot, row, other), theirs) > 1e-3


@pytest.mark.parametrize("rule", IMAGE_MASKS)
@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_with_different_pictures_have_what_each_has_alone(rule: ImageMask, chunk: int) -> None:
    network = network_of(random_oracle(tiny_config(hidden_size=HIDDEN, sliding_window=WINDOW), 3))
    network.image_mask = rule
    torch.manual_seed(5)
    lengths = [[(3, 12)], [], [(0, 5), (5, 30), (33, 37)], [(20, 29)]]
    pictures = [[SoftTokens(a, torch.randn(b - a, HIDDEN)) for a, b in row] for row in lengths]
    rows = [torch.randint(4, 80, (length,)) for length in (20, 31, 40, 29)]
    slots, canvas = network.new_slots(4, 64), torch.arange(8) + 1
    first = [torch.arange(3 + number) for number in range(4)]  # pictures behind other text
    network.encode(first, slots)
    network.encode(rows, slots, chunk, pictures=pictures)
    together = network.denoise([canvas] * 4, slots).view(4, 8, -1)
    for number, (ids, own) in enumerate(zip(rows, pictures, strict=True)):
        slot, row = network.new_slot(64), torch.cat((first[number], ids))
        spans = [each.moved(len(first[number])) for each in own]
        plain = Pictured(row, [((each.start, each.end), each.values) for each in spans])
        encode_pictured(network, slot, plain, rule)
        assert relative(together[number], network.denoise([canvas], [slot])) < 1e-5


def test_a_chunk_ends_before_a_picture_or_after_it() -> None:
    pictures = [SoftTokens(4, torch.zeros(3, 1)), SoftTokens(7, torch.zeros(5, 1))]
    ends = [ahead_of_pictures(end, 0, pictures) for end in range(1, 15)]
    assert ends == [1, 2, 3, 4, 4, 4, 7, 7, 7, 7, 7, 12, 13, 14]
    assert [ahead_of_pictures(end, 7, pictures) for end in range(8, 14)] == [12] * 5 + [13]
    assert [ahead_of_pictures(end, 4, pictures) for end in range(5, 8)] == [7] * 3
