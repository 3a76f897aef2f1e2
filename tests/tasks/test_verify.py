"""The second reader of a reply against `transformers`' encoder forward of the whole text."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.oracle import oracle_encode_logits
from tests.tasks.test_causal_reply import END, PROMPT, ended

from sfumato.diffusion import causal
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.limits import Limits, plan_reply
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.verification import DOUBT
from sfumato.model.cache import Slot
from sfumato.tasks import alone as driver
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt


def verified(network: Any, verify: Any, limits: Limits, seed: int = 0, **config: Any) -> Any:
    chosen = SamplerConfig(max_steps=3, **config).over(REFERENCE)
    plan = replace(plan_reply(network, len(PROMPT), chosen, limits, seed), verify=verify)
    make = partial(Canvas.of, network=network)
    return driver.alone(network, ReplyTask(plan, Prompt(PROMPT.tolist(), ()), make))


@pytest.mark.parametrize("limits", [Limits(20, ()), Limits(40, (END, *range(20)))])
def test_scores_are_the_references(
    oracle: Any, network: Any, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of canvases that are committed and of the last one, past the window of 8, in pieces; the text
    is that without a reader, and what is read beside the prefix leaves rings as they are."""
    monkeypatch.setattr(causal, "PIECE", 3)
    slots: list[Slot] = []
    made = network.new_slot
    monkeypatch.setattr(network, "new_slot", lambda most: slots.append(made(most)) or slots[-1])
    _, plain, end = ended(verified(network, None, limits))
    _, settled, outcome = ended(verified(network, "report", limits))
    assert outcome.token_ids == end.token_ids and len(settled) == len(plain) > 1
    ids = PROMPT.tolist()
    for each in settled:
        verification = each.verification
        added = [*each.token_ids, *([] if each.end_id is None else [each.end_id])]
        assert verification.token_ids == tuple(added) and verification.canvas == each.canvas
        tokens = torch.tensor(ids + added)
        logs = oracle_encode_logits(oracle, tokens)[0].log_softmax(dim=-1)[len(ids) - 1 : -1]
        own = logs.gather(1, tokens[len(ids) :, None])
        torch.testing.assert_close(
            torch.tensor(verification.log_probs), own[:, 0], rtol=0, atol=1e-4
        )
        assert list(verification.ranks) == ((logs > own).sum(dim=1) + 1).tolist()
        assert list(verification.preferred) == logs.argmax(dim=1).tolist()
        assert verification.agreement == sum(rank == 1 for rank in verification.ranks) / len(added)
        assert {at for span in verification.doubted_runs for at in span} == {
            at for at, log in enumerate(verification.log_probs) if -log >= DOUBT
        }
        assert verification.log_likelihood == pytest.approx(float(own.sum()), abs=1e-3)
        ids += each.token_ids
    for layer in range(len(network.config.layers)):
        one, other = (slot.read(layer) for slot in slots)
        assert all(a.equal(b) for a, b in zip(one, other, strict=True)), "the last canvas is beside"


def test_an_answer_in_doubt_is_undecided(oracle: Any, network: Any) -> None:
    """The other answer is the most probable text from the first doubted token on. What no second
    reader doubts, and what is more than a canvas, is decided. A token's own probability is that of
    the canvas's last step."""
    drafts, (settled,), outcome = ended(verified(network, "abstain", Limits(8, ())))
    ids, other, verification = outcome.token_ids, outcome.other, settled.verification
    first = verification.doubted.index(True)
    assert len(other) == len(ids) and other[:first] == ids[:first] and other != ids
    tokens = torch.cat((PROMPT, torch.tensor(other)))
    preferred = oracle_encode_logits(oracle, tokens)[0].argmax(dim=-1).tolist()
    assert other[first:] == preferred[len(PROMPT) + first - 1 : -1]
    assert verification.canvas_entropy == tuple(drafts[-1].entropy.tolist())
    for at, log in enumerate(verification.canvas_log_probs):
        own = drafts[-1].top_probs[at, 0].item()
        assert log == math.log(own), "the argmax is the most probable"
    _, settled, outcome = ended(verified(network, "abstain", Limits(12, ())))
    assert len(settled) == 2 and outcome.other is None
    assert ended(verified(network, "report", Limits(8, ())))[2].other is None
