"""The plain loop of the causal mode against `transformers`' encoder forward and its tied head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import inverse_cdf
from tests.support.oracle import oracle_encode_logits

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.limits import Limits, Outcome, SettledCanvas, plan_reply
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.tasks.alone import alone, generate
from sfumato.tasks.reply import Policies, ReplyTask
from sfumato.tasks.works import Prompt

PROMPT = torch.tensor([5, 17, 80, 3, 44])
END = 7


def ended(events: Any) -> tuple[list[Draft], list[SettledCanvas], Outcome]:
    drafts: list[Draft] = []
    settled: list[SettledCanvas] = []
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return drafts, settled, end.value
        (drafts if isinstance(event, Draft) else settled).append(event)


def reply(network: Any, seed: int = 0, limits: Limits | None = None, **config: Any) -> Any:
    chosen = SamplerConfig(mode="causal", **config).over(REFERENCE)
    limits = limits or Limits(12, (END,))
    return ended(generate(network, PROMPT, chosen, limits, seed))


def run(network: Any, plan: Any, policies: Policies, opening: tuple[int, ...] = ()) -> Any:
    make = partial(Canvas.of, network=network)
    return alone(network, ReplyTask(plan, Prompt(PROMPT.tolist(), ()), make, policies, opening))


def reference(oracle: Any, ids: list[int]) -> torch.Tensor:
    """Scores of the token after the prompt and these: float32 [vocab]."""
    return oracle_encode_logits(oracle, torch.cat((PROMPT, torch.tensor(ids, dtype=int))))[0][-1]


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.6},
        {"ignore_eos": True},
        {"processors": (LogitBias({9: 6.0, 11: float("-inf")}),)},
    ],
    ids=str,
)
def test_each_token_is_the_references(oracle: Any, network: Any, config: dict[str, Any]) -> None:
    """Past the window of 8, drawn with the row's own noise."""
    drafts, settled, outcome = reply(network, seed=3, **config)
    ids = outcome.token_ids
    assert [i for each in settled for i in each.token_ids] == ids
    assert len(ids) == 12 or outcome.stop_reason == "eos"
    for number, draft in enumerate(drafts):
        scores = reference(oracle, ids[:number])
        if "processors" in config:
            scores[9], scores[11] = scores[9] + 6, float("-inf")
        if config.get("ignore_eos"):
            scores[[END, 0]] = float("-inf")
        if "top_k" in config:
            scores[scores < scores.topk(4)[0][-1]] = float("-inf")
        if "top_p" in config:
            ranked = scores.softmax(0).sort(descending=True)
            scores[ranked.indices[(ranked.values.cumsum(0) - ranked.values) >= 0.6]] = -torch.inf
        uniform = Noise(3, number).uniforms(1, 1)
        probs = (scores / (config.get("temperature") or 1)).softmax(0)[None]
        expected = (
            probs.argmax(1) if config.get("temperature") == 0 else inverse_cdf(probs, uniform)
        )
        assert draft.token_ids.tolist() == expected.tolist(), number


def test_named_tokens_have_the_models_own_probabilities(oracle: Any, network: Any) -> None:
    """Whatever the temperature; of the drawn token too, where it is not among the first."""
    drafts, _, outcome = reply(network, seed=1, temperature=3.0, top_tokens=10)
    for number, draft in enumerate(drafts):
        logs = reference(oracle, outcome.token_ids[:number]).log_softmax(0)
        assert draft.log_probs is not None and draft.top_ids.shape == (1, 10)
        torch.testing.assert_close(draft.log_probs, logs[draft.token_ids], rtol=0, atol=1e-4)
        torch.testing.assert_close(draft.top_probs[0], logs.exp().topk(10)[0], rtol=0, atol=1e-4)
    assert reply(network, seed=1)[0][0].log_probs is None


def test_the_end_token_is_named(network: Any) -> None:
    bias = LogitBias({END: 100.0})
    _, settled, outcome = reply(network, processors=(bias,))
    assert (outcome.token_ids, outcome.stop_reason, settled[0].end_id) == ([], "eos", END)
    _, settled, outcome = reply(network, processors=(bias,), min_tokens=3, seed=2)
    assert len(outcome.token_ids) == 3 and settled[-1].end_id == END
    assert [each.end_id for each in settled[:-1]] == [None] * 3


def test_openings_and_empty_answers(network: Any) -> None:
    """Tokens that the reply begins with are pinned; an empty answer is drawn again."""
    config = SamplerConfig(mode="causal", processors=(LogitBias({END: 100.0}),)).over(REFERENCE)
    plan = plan_reply(network, len(PROMPT), config, Limits(6, (END,)), 0)
    drafts, _, outcome = ended(run(network, plan, Policies(), (20, 21)))
    assert (outcome.token_ids, len(drafts)) == ([20, 21], 3)
    policies = Policies(is_empty=lambda ids: not ids)
    _, _, outcome = ended(run(network, plan, policies))
    assert len(outcome.token_ids) == 1 and outcome.stats.steps == [3, 1]
    assert "the answer was empty" in outcome.warnings[0]


def test_it_ends_where_it_is_cancelled(network: Any) -> None:
    calls = iter(range(100))
    limits = Limits(12, (), cancelled=lambda: next(calls) > 4)
    outcome = reply(network, limits=limits)[2]
    assert outcome.stop_reason == "cancelled" and 0 < len(outcome.token_ids) < 12


def test_a_prompt_has_a_token(network: Any) -> None:
    config = SamplerConfig(mode="causal").over(REFERENCE)
    with pytest.raises(ValueError, match="prompt: has no token"):
        generate(network, PROMPT[:0], config, Limits(4, ()), 0)
    with pytest.raises(ValueError, match="mode: must be canvas or causal, got 'both'"):
        SamplerConfig(mode="both")
