"""The causal mode in the engine: the plain loop's text, and the scores of prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked, outcome
from tests.support.scripted_engine import run
from tests.support.shallow_model import shallow_checkpoint

import sfumato
from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.diffusion.causal import log_likelihoods
from sfumato.diffusion.sampler import LogitBias
from sfumato.engine import Failed, Finished, PromptScores, PromptScoring, Settled

CAUSAL, STEPS = SamplerConfig(mode="causal"), SamplerConfig(max_steps=3)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Who are you?", "sampler": SamplerConfig(mode="causal", temperature=0)},
    {"prompt": "Who are you?", "sampler": SamplerConfig(mode="causal", temperature=4), "seed": 5},
    {"prompt": "name a color", "sampler": SamplerConfig(mode="causal", top_k=3, min_tokens=9)},
    {"prompt": "name a color", "sampler": SamplerConfig(mode="causal", top_p=0.7), "stop": "e"},
    {"prompt": "How do you work?", "sampler": SamplerConfig(mode="causal", ignore_eos=True)},
    {
        "prompt": "What is the meaning of life?",
        "sampler": SamplerConfig(mode="causal", processors=(LogitBias({40: 4.0}),)),
    },
    {"prompt": "What is the capital of France?", "sampler": STEPS},
)


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(shallow_checkpoint(), device="cpu")


def serving(model: Model, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**({"slots": 4, "context": 256} | config)))


def own_scores(model: Model, ids: list[int]) -> torch.Tensor:
    return log_likelihoods(model.network, model.network.new_slot(1), torch.tensor(ids))


def scored(finished: Any) -> PromptScores:
    assert isinstance(finished, Finished) and finished.scores is not None
    return finished.scores


def test_the_text_is_the_plain_loops(model: Model) -> None:
    """Beside other causal rows and beside canvases, prompts in small chunks."""
    plain = [model.generate(**each, max_tokens=10) for each in REQUESTS]
    engine = serving(model, prefill_chunk=16)
    handles = []
    for each in REQUESTS:
        how = {"max_tokens": 10, "retry_empty": False, "seed": 0} | each
        handles.append(engine.submit(Request(**how)))
        engine.step()
    run(engine)
    for handle, reply in zip(handles, plain, strict=True):
        ours = handle.result()
        assert (ours.token_ids, ours.stop_reason) == (reply.token_ids, reply.stop_reason)
        assert (ours.text, ours.warnings) == (reply.text, reply.warnings)
    texts = [reply.text for reply in plain]
    assert texts[0] != texts[1] and "e" not in texts[3] and len(plain[2].token_ids) >= 9
    assert len(plain[4].token_ids) == 10
    assert no_slot_is_leaked(engine)


def test_events_and_figures(model: Model) -> None:
    """Each token is an event; the account has one block of as many steps as tokens were drawn."""
    engine = serving(model)
    handle = engine.submit(Request("Who are you?", sampler=CAUSAL, max_tokens=6, drafts=True))
    run(engine)
    events = list(handle.events())
    settled = [event for event in events if isinstance(event, Settled)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert [i for event in settled for i in event.token_ids] == finished.reply.token_ids
    drawn = len(settled)
    assert len(events) == 2 * drawn + 1
    account = finished.account
    assert (account.steps, account.convergence) == ((drawn,), ())
    assert engine.state().totals.canvases == 0


def test_a_slot_gives_all_but_the_last_token_of_a_prompt(model: Model) -> None:
    """That token's hidden state is in no slot."""
    engine = serving(model, slots=1)
    request = Request("Who are you?", sampler=CAUSAL, max_tokens=8, seed=1)
    first, again = engine.submit(request), None
    run(engine)
    again = engine.submit(request)
    run(engine)
    assert again.result().token_ids == first.result().token_ids
    end = again.terminal
    assert isinstance(end, Finished) and end.account.cached_tokens == end.account.prompt_tokens - 1


@pytest.mark.parametrize("chunk", [512, 7])
def test_prompts_are_scored(model: Model, chunk: int) -> None:
    """As the library scores them, with any chunk, beside another row, for a reply of each kind."""
    ids = model.prompt_ids("What is the capital of France?")
    engine = serving(model, prefill_chunk=chunk)
    handles = [
        engine.submit(Request(ids=ids, scoring=PromptScoring(), max_tokens=0)),
        engine.submit(
            Request(ids=ids, scoring=PromptScoring(12, True), sampler=CAUSAL, max_tokens=2)
        ),
        engine.submit(Request("Who are you?", seed=0, sampler=STEPS, max_tokens=8)),
        engine.submit(Request(ids=ids[:20], scoring=PromptScoring(), sampler=STEPS, max_tokens=8)),
    ]
    run(engine)
    none, causal, _, canvas = (handle.terminal for handle in handles)
    expected = own_scores(model, ids)
    for end, count in ((none, len(ids)), (causal, len(ids)), (canvas, 20)):
        scores = scored(end)
        assert scores.ids == ids[:count] and scores.scores is not None
        torch.testing.assert_close(scores.scores.log_probs, expected[: count - 1])
    assert isinstance(none, Finished)
    assert (none.reply.token_ids, none.reply.stop_reason) == ([], "max_tokens")
    best = scored(causal).scores
    assert best is not None and best.top_ids.shape == (len(ids) - 1, 12)
    assert ((best.ranks == 1) == (best.log_probs == best.top_log_probs[:, 0])).all()
    plain = model.generate("Who are you?", sampler=STEPS, max_tokens=8)
    assert handles[2].result().text == plain.text


def test_a_prompt_of_one_token(model: Model) -> None:
    engine = serving(model)
    end = engine.submit(Request(ids=[2], scoring=PromptScoring(), max_tokens=0))
    causal = engine.submit(Request(ids=[2], sampler=CAUSAL, max_tokens=3))
    run(engine)
    assert scored(end.terminal) == PromptScores([2], None)
    assert outcome(causal) in ("eos", "max_tokens")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError()])
def test_rows_start_over_after_a_failed_forward(
    model: Model, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt and in the reply: the same text and scores."""
    ids = model.prompt_ids("What is the capital of France?")
    wanted = [
        Request(ids=ids, sampler=CAUSAL, seed=3, max_tokens=7, scoring=PromptScoring()),
        Request("Who are you?", sampler=CAUSAL, seed=4, max_tokens=7),
    ]
    engine = serving(model, prefill_chunk=24)
    plain = []
    for request in wanted:
        plain.append(engine.submit(request))
        run(engine)
    engine = serving(model, prefill_chunk=24)
    network, calls = model.network, iter(range(1000))
    encode = network.encode_hidden

    def failing(rows: Any, slots: Any, *given: Any) -> Any:
        if next(calls) in (1, 8):
            for slot in slots:
                slot.reset()
            raise error
        return encode(rows, slots, *given)

    monkeypatch.setattr(network, "encode_hidden", failing)
    handles = [engine.submit(request) for request in wanted]
    run(engine)
    for handle, other in zip(handles, plain, strict=True):
        assert handle.result().token_ids == other.result().token_ids
    assert scored(handles[0].terminal).scores is not None
    torch.testing.assert_close(
        scored(handles[0].terminal).scores.log_probs,  # type: ignore[union-attr]
        scored(plain[0].terminal).scores.log_probs,  # type: ignore[union-attr]
    )
    assert no_slot_is_leaked(engine)


def test_what_fails_in_one_row_ends_that_row(model: Model) -> None:
    bans = LogitBias(dict.fromkeys(range(model.config.vocab_size), float("-inf")))

    class Broken:
        def process(self, scores: Any, first_id: int, view: Any) -> Any:
            raise RuntimeError("broken")

    configs = [
        SamplerConfig(mode="causal", processors=(bans,)),
        SamplerConfig(mode="causal", processors=(Broken(),)),
        CAUSAL,
    ]
    engine = serving(model)
    handles = [
        engine.submit(Request("Who are you?", sampler=each, max_tokens=6)) for each in configs
    ]
    run(engine)
    kinds = [outcome(handle) for handle in handles]
    assert isinstance(handles[0].terminal, Failed) and "ban every token" in str(handles[0].terminal)
    assert isinstance(handles[1].terminal, Failed) and kinds[2] in ("eos", "max_tokens")
    assert no_slot_is_leaked(engine)


def test_several_replies_to_one_prompt_encode_it_once(model: Model) -> None:
    engine = serving(model, slots=3)
    made = engine.prompt(Request("Who are you?"))
    handles = [
        engine.submit(Request("Who are you?", made=made, sampler=CAUSAL, seed=n, max_tokens=4))
        for n in range(3)
    ]
    run(engine)
    ends = [handle.terminal for handle in handles]
    assert [end.account.cached_tokens for end in ends if isinstance(end, Finished)] == [
        0,
        *[len(made.ids) - 1] * 2,
    ]


def test_cancelled(model: Model) -> None:
    engine = serving(model)
    handle = engine.submit(Request("Who are you?", sampler=CAUSAL, max_tokens=50))
    for _ in range(4):
        engine.step()
    handle.cancel()
    run(engine)
    assert outcome(handle) == "cancelled" and 0 < len(handle.result().token_ids) < 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be a whole number from 1"),
        ({"scoring": 3}, "scoring: must be a PromptScoring"),
        ({"sampler": SamplerConfig(mode="causal", max_steps=3)}, "mode: .* leave out max_steps"),
        ({"sampler": SamplerConfig(mode="causal", self_conditioning=False)}, "self_conditioning"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Model, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serving(model).submit(Request("Who are you?", **fields))
    with pytest.raises(ValueError, match="top: must be a whole number from 0 to 20"):
        PromptScoring(21)
