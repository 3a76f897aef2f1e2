"""Pictures in prompts that the plain driver runs: against `transformers`, and from messages."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.vision.test_prefix import HIDDEN, encoded_by, oracle_with, prompt_of
from tests.support.oracle import network_of, relative
from tests.support.pictures import picture
from tests.support.seeing_model import seeing_model
from tests.support.vision_oracle import random_vision

import sfumato
from sfumato.media.patches import Cut, patches_of
from sfumato.model.vision.loading import load_tower, open_mmproj
from sfumato.model.vision.mask import IMAGE_MASKS, ImageMask
from sfumato.refused import Refused
from sfumato.tasks.alone import alone, finish
from sfumato.tasks.works import Claim, Encode, Figures, PlacedPicture, Prompt, prompt_work
from sfumato.text.template import TemplateError
from sfumato.text_side import PictureTokens
from sfumato.train import pictures as training


class AllStates:
    """Wants the hidden states of the last positions."""

    def __init__(self, least: int) -> None:
        self.least = least

    def begin(self, end: int) -> None:
        self.pieces: list[torch.Tensor] = []
        self.end = end

    def add(self, head: Any, start: int, hidden: torch.Tensor, together: int) -> None:
        if not self.pieces:
            self.start = start
        self.pieces.append(hidden)

    def result(self) -> tuple[int, torch.Tensor]:
        return self.start, torch.cat(self.pieces)


class Encoded:
    """A task that encodes a prompt."""

    figures = Figures()
    stats = None

    def __init__(self, prompt: Prompt, least: int) -> None:
        self.claim, self.want = Claim(prompt, len(prompt.ids)), AllStates(least)

    def run(self) -> Generator[Encode, Any, Any]:
        return (yield prompt_work(self.claim.prompt, self.want))

    def stopped(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("rule", IMAGE_MASKS)
def test_a_prompt_with_pictures_has_the_states_of_transformers(
    rule: ImageMask, tmp_path: Path
) -> None:
    vision = random_vision(HIDDEN)
    cut = Cut(vision.config.patch_size, vision.config.pooling_kernel_size, 9)
    patches = [patches_of(picture(*size), cut) for size in ((30, 30), (50, 20))]
    ids, spans = prompt_of(patches)
    model = oracle_with(vision)
    theirs, _ = encoded_by(model, patches, rule)
    vision.write_mmproj(tmp_path / "mmproj.gguf")
    network = network_of(model)
    opened = open_mmproj(tmp_path / "mmproj.gguf", HIDDEN)
    network.tower = load_tower(*opened, torch.device("cpu"), torch.float32)
    network.image_mask = rule
    placed = [PlacedPicture(a, each) for (a, _), each in zip(spans, patches, strict=True)]
    assert [each.end for each in placed] == [end for _, end in spans]
    prompt = Prompt(ids.tolist(), (), tuple(placed))
    for least in (1, len(ids) - spans[-1][0] - 2, len(ids)):
        start, states = finish(alone(network, Encoded(prompt, least)))
        assert start <= len(ids) - least and start + len(states) == len(ids)
        assert not any(a < start < b for a, b in spans)
        assert relative(states, theirs[start:]) < 1e-4


def test_cancelling_is_asked_before_each_picture(tmp_path: Path) -> None:
    calls: list[int] = []
    prompt = Prompt([1, 2], (), (PlacedPicture(0, patches_of(picture(9, 9), Cut(tokens=1))),))
    task, network = Encoded(prompt, 1), network_of(oracle_with(random_vision(HIDDEN)))
    with pytest.raises(NotImplementedError):  # stopped: no tower is run
        finish(alone(network, task, lambda: not calls.append(0)))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> sfumato.Model:
    """The embedded text network with a tower of random weights."""
    return seeing_model(tmp_path_factory.mktemp("sees") / "model")


def message(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


IMAGE = {"type": "image", "image": picture(40, 40)}
TEXT = {"type": "text", "text": "Which digit is this?"}


def test_a_message_with_a_picture_becomes_a_prompt(seeing: sfumato.Model) -> None:
    prompt = seeing.make_prompt(messages=message(IMAGE, TEXT))
    assert (prompt.ids, prompt.pictures[0].start) == training.prompt(TEXT["text"])
    assert prompt.pictures[0].patches.key == patches_of(picture(40, 40), training.CUT).key
    both = seeing.make_prompt(messages=message(IMAGE, TEXT, IMAGE))
    assert [each.start for each in both.pictures] == [
        prompt.pictures[0].start,
        prompt.pictures[0].end + 1,
    ]
    assert len(both.ids) == len(prompt.ids) + 26
    spoofed = seeing.make_prompt(messages=message({"type": "text", "text": "<mask>"}, IMAGE))
    assert spoofed.ids.count(training.PLACEHOLDER) == 25


def test_a_reply_depends_on_the_picture(seeing: sfumato.Model) -> None:
    def reply(seed: int) -> str:
        other = {"type": "image", "image": picture(40, 40, seed)}
        sampler = sfumato.SamplerConfig(max_steps=4)
        return seeing.generate(messages=message(other, TEXT), max_tokens=32, sampler=sampler).text

    first = reply(0)
    assert first == reply(0)
    assert any(reply(seed) != first for seed in range(1, 4))


def test_text_is_answered_as_without_a_tower(seeing: sfumato.Model) -> None:
    for question in ("Hello!", "sudoku\n1..4\n..1.\n.3..\n4..2"):
        with_tower = seeing.generate(question, seed=3)
        assert with_tower.text == sfumato.load().generate(question, seed=3).text


def test_what_cannot_be_seen_is_refused(seeing: sfumato.Model) -> None:
    with pytest.raises(Refused, match=r"messages\[0\]\.content\[0\]\.path: .*is no file"):
        seeing.generate(messages=message({"type": "image", "path": "/nowhere/x.png"}))
    with pytest.raises(Refused, match=r"messages\[0\]\.content\[0\]\.type: only 'text'"):
        sfumato.load(mmproj="none").generate(messages=message(IMAGE))
    with pytest.raises(Refused, match=r"messages\[0\]\.content\[0\]\.type: only 'text'"):
        seeing.make_prompt(messages=[{"role": "system", "content": [IMAGE]}, *message(TEXT)])


def test_a_template_that_drops_pictures_is_named() -> None:
    patches = patches_of(picture(9, 9), Cut(tokens=4))
    with pytest.raises(TemplateError, match="shows 0 pictures of 1"):
        PictureTokens(4).placed([1, 2], [patches])
    around = PictureTokens(4, 8, 9).placed([1, 4, 2, 4], [patches, patches])
    assert around.ids == [1, 8, 4, 4, 4, 4, 9, 2, 8, 4, 4, 4, 4, 9]
    assert [(each.start, each.end) for each in around.pictures] == [(2, 6), (9, 13)]
