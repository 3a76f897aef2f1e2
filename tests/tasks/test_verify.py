"""The second reader of a reply against `transformers`' encoder forward of the whole text."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.oracle import network_of, oracle_encode_logits, random_oracle, tiny_config
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


@pytest.fixture(scope="module")
def oracle() -> Any:
    return random_oracle(tiny_config(), seed=5)


@pytest.fixture(scope="module")
def network(oracle: Any) -> Any:
    return network_of(oracle)


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
    reader doubts, and what is more than a canvas, is decided."""
    _, (settled,), outcome = ended(verified(network, "abstain", Limits(8, ())))
    ids, doubted = outcome.token_ids, settled.verification.doubted
    first = doubted.index(True)
    expected = ids[:first]
    while len(expected) < 8:
        tokens = torch.cat((PROMPT, torch.tensor(expected, dtype=torch.int64)))
        expected.append(int(oracle_encode_logits(oracle, tokens)[0][-1].argmax()))
    assert outcome.other == expected != ids
    _, settled, outcome = ended(verified(network, "abstain", Limits(12, ())))
    assert len(settled) == 2 and outcome.other is None
    assert ended(verified(network, "report", Limits(8, ())))[2].other is None


def test_the_canvases_own_probabilities(network: Any) -> None:
    """A token has that of the last step, where it is among the most probable ones."""
    drafts, (settled,), _ = ended(verified(network, "report", Limits(8, ())))
    last, verification = drafts[-1], settled.verification
    assert verification.canvas_entropy == tuple(last.entropy.tolist())
    for at, log in enumerate(verification.canvas_log_probs):
        assert log == math.log(last.top_probs[at, 0].item()), "the argmax is the most probable"
