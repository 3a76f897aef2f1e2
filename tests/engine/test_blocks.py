"""What networks of blocks do that others do not: drafts without the prompt's open block, masks as
likelihoods, given canvases of masks. What every family does is in test_every_family.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.scripted_engine import run
from tests.support.tiny_checkpoint import save_tiny_checkpoint

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig, YesNo
from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.causal import log_likelihoods, masked_log_likelihoods
from sfumato.diffusion.prediction import PredictedText
from sfumato.engine import Finished
from sfumato.model.families import BD3LM, SDAR
from sfumato.tasks.reply import ReplyTask

PROMPTS = [f"Say {'x' * n}" for n in range(4)]  # of four lengths: they end anywhere in a block of 4
FAST = SamplerConfig(max_steps=2)


@pytest.fixture(scope="module", params=[SDAR, BD3LM], ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("blocks") / request.param.name
    return sfumato.load(save_tiny_checkpoint(folder, request.param), device="cpu")


def engine(model: Model) -> Engine:
    return Engine(model, EngineConfig(slots=3, context=256, prefill_chunk=24))


def finished(handle: Any) -> Finished:
    *_, end = handle.events()
    assert isinstance(end, Finished), end
    return end


def test_drafts_are_of_the_reply_alone(model: Model) -> None:
    """The first canvas begins with the prompt's last tokens, which no draft shows."""
    block = model.config.canvas_length
    for prompt in PROMPTS:
        count = len(model.prompt_ids(prompt))
        *drafts, settled, _ = list(model.stream(prompt, max_tokens=1, sampler=FAST))
        opened = count - model.config.blocks(count).border(count)
        assert opened == (count % block if model.family is SDAR else 0)
        width = block - opened if model.family is SDAR else 1  # as the limit of the reply
        assert all(len(draft.token_ids) == width for draft in drafts)
        assert settled.token_ids == drafts[-1].token_ids[:1].tolist()[: len(settled.token_ids)]


def test_a_canvas_ends_with_what_the_reply_takes_of_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the tokens up to an end token, or to the limit, are revealed, they stay. The last canvas
    of BD3LM has no more positions than the limit leaves."""
    block, steps = model.config.canvas_length, [0, 0]
    for seed, prompt in enumerate(PROMPTS[:3]):
        *drafts, _, done = list(model.stream(prompt, max_tokens=block + 2, seed=seed))
        assert len(drafts[-1].token_ids) == (block if model.family is SDAR else 2)
        reply = done.reply
        with monkeypatch.context() as patch:
            patch.setattr(ReplyTask, "_revealed", lambda *given: None)
            unshortened = model.generate(prompt, max_tokens=block + 2, seed=seed)
        assert (unshortened.token_ids, unshortened.stop_reason) == (
            reply.token_ids,
            reply.stop_reason,
        )
        for at, each in enumerate((reply, unshortened)):
            steps[at] += sum(each.stats.steps)
    assert steps[0] <= steps[1] - (model.family is SDAR)


def test_the_likelihood_is_that_of_masks_revealed_from_left_to_right(model: Model) -> None:
    network, mask = model.network, model.config.mask_id
    slot, ids = network.new_slot(64), torch.tensor([30, 31, 32, 33])
    slot.offset = 0
    network.encode([torch.arange(40, 40 + 32)], [slot])
    scores = masked_log_likelihoods(network, slot, ids, 1)
    for at, score in zip(range(1, 4), scores.tolist(), strict=True):
        canvas = torch.full((model.config.canvas_length,), mask)
        canvas[:at] = ids[:at]
        logits = network.head.logits(network.denoise([canvas], [slot]))[at]
        assert score == pytest.approx(float(logits.log_softmax(0)[ids[at]]), abs=1e-4)
    with pytest.raises(ValueError, match="causal mode"):
        log_likelihoods(network, slot, ids)


def test_what_a_mask_cannot_do_is_refused(model: Model) -> None:
    for field, given in {
        "prediction": {"prediction": PredictedText("It is good.")},
        "canvas_length": {"sampler": SamplerConfig(canvas_length=2)},
    }.items():
        with pytest.raises(ValueError, match=f"^{field}: "):
            model.generate("Hi", **given)
    with pytest.raises(ValueError, match="steps: is 2"):
        model.decide("x", {"good": YesNo("Is it good?")}, steps=2)


def test_a_given_canvas_stands_behind_the_prompt(model: Model) -> None:
    serving, prompt = engine(model), PROMPTS[1]
    count = len(model.prompt_ids(prompt))
    width = model.config.canvas_length - (count - model.config.blocks(count).border(count))
    tokens = (50, *[model.config.mask_id] * (width - 1))
    given = GivenCanvas(tokens, pinned=(0,))
    handle = serving.submit(Request(prompt, max_tokens=width, canvas=given, sampler=FAST))
    run(serving)
    assert finished(handle).reply.token_ids[:1] == [50]
    read_only = GivenCanvas(tokens, pinned=(0,), read_only=True)
    handle = serving.submit(Request(prompt, max_tokens=64, canvas=read_only))
    run(serving)
    reply = finished(handle).reply
    assert len(reply.token_ids) == width and reply.stats.canvases == 1
    with pytest.raises(ValueError, match=f"the canvas has {width} positions"):
        serving.submit(Request(prompt, canvas=GivenCanvas((*tokens, 50))))
