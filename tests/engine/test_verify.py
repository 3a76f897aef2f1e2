"""A second reader in the engine: the plain loop's numbers to the bit, beside any rows, and the text
of a reply that nothing reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.faults import no_slot_is_leaked
from tests.support import scripted_model
from tests.support.random_model import random_model
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.scripted_engine import run

import sfumato
from sfumato import Engine, EngineConfig, Model, Reply, Request, SamplerConfig
from sfumato.diffusion.constraints.grammar import schema_source
from sfumato.diffusion.limits import SettledCanvas
from sfumato.diffusion.verification import CanvasVerification
from sfumato.engine import Settled
from sfumato.model.network import Network
from sfumato.text_side import Transcript

FEW = SamplerConfig(max_steps=2)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "What is the capital of France?", "verify": "report"},
    {"prompt": "tell me about the sea and do not stop", "sampler": FEW, "verify": "report"},
    {"prompt": "What is the capital of Bulgaria?", "sampler": FEW, "verify": "abstain"},
    {"prompt": "tell me about the sea and do not stop", "sampler": FEW},
    {"prompt": "How do you work?", "stop": "e", "verify": "report", "seed": 4},
    {"prompt": "Who are you?", "sampler": SamplerConfig(ignore_eos=True), "verify": "report"},
)


@pytest.fixture(scope="module")
def model() -> Model:
    return sfumato.load(device="cpu")


def causal_numbers(reply: Reply) -> list[tuple[Any, ...]]:
    canvases = () if reply.verification is None else reply.verification.canvases
    return [(each.token_ids, each.log_probs, each.ranks, each.preferred) for each in canvases]


@pytest.mark.parametrize("late", [False, True])
def test_the_same_bits_in_any_company(
    model: Model, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in small chunks; also where commits are rows of steps, and after a forward that
    failed."""
    plain = [model.generate(**each, max_tokens=40) for each in REQUESTS]
    if late:
        monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: RepeatedCalls())
    engine = Engine(model, EngineConfig(slots=4, context=256, prefill_chunk=16))
    if not late:
        encode, calls = Network.encode_hidden, []

        def once(*given: Any) -> list[torch.Tensor]:
            calls.append(given)
            if len(calls) in (9, 14):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return encode(*given)

        monkeypatch.setattr(Network, "encode_hidden", once)
    handles = []
    for each in REQUESTS:
        how = {"max_tokens": 40, "retry_empty": False, "seed": 0} | each
        handles.append(engine.submit(Request(**how)))
        engine.step()
    run(engine)
    for each, handle, reply in zip(REQUESTS, handles, plain, strict=True):
        ours = handle.result()
        assert (ours.text, ours.token_ids, ours.warnings) == (
            reply.text,
            reply.token_ids,
            reply.warnings,
        )
        assert causal_numbers(ours) == causal_numbers(reply)
        if not late:  # in another layout of a step the canvas's own numbers round otherwise
            assert ours.verification == reply.verification
        settled = [event for event in handle.events() if isinstance(event, Settled)]
        if "verify" not in each:
            assert ours.verification is None
            continue
        assert tuple(e.verification for e in settled) == ours.verification.canvases
        assert tuple(doubt for e in settled for doubt in e.doubts) == ours.verification.doubts
        for doubt in ours.verification.doubts:
            assert ours.text[doubt.start :].startswith(doubt.text) and doubt.text
    assert plain[0].verification.doubts == () and plain[0].verification.agreement == 1
    assert plain[1].verification.doubts and plain[1].text == plain[3].text
    assert len(plain[1].verification.canvases) > 1
    assert plain[2].verification.undecided and plain[2].verification.other
    assert no_slot_is_leaked(engine)
    engine.close()


def test_a_reply_under_a_grammar() -> None:
    """Tokens that the causal mode has written under the grammar are verified as they are
    encoded."""
    model = random_model(canvas_length=16)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 12}
    how: dict[str, Any] = {"prompt": "x2", "seed": 2, "max_tokens": 40}
    plain = model.generate(**how, schema=schema, verify="report")
    assert plain.stats.constraint.causal_tokens > 0
    assert plain.text == model.generate(**how, schema=schema).text
    engine = Engine(model, EngineConfig(slots=2, context=256))
    with_grammar = Request(**how, grammar=schema_source(schema), verify="report")
    handles = [engine.submit(with_grammar), engine.submit(Request("y", seed=1, max_tokens=40))]
    run(engine)
    verification = handles[0].result().verification
    assert verification == plain.verification
    ids = model.prompt_ids("x2") + model.fills.empty_thought
    for canvas in verification.canvases:
        slot, tokens = model.network.new_slot(1), torch.tensor(ids + list(canvas.token_ids))
        logs = sfumato.diffusion.causal.log_likelihoods(model.network, slot, tokens)
        torch.testing.assert_close(torch.tensor(canvas.log_probs), logs[len(ids) - 1 :])
        ids += canvas.token_ids
    with pytest.raises(ValueError, match="match no schema and no grammar"):
        model.generate("x", schema=schema, verify="abstain")


def test_doubts_are_parts_of_the_answer() -> None:
    """Not of thoughts and markers; of a character whose bytes are several tokens, the whole."""
    scripted = scripted_model.scripted("")
    tokenizer, markers = scripted.tokenizer, scripted.template.markers
    ids = tokenizer.encode("<|channel>thought\nHm.<channel|>Ab café €<turn|>")
    answer = "Ab café €"
    texts = [tokenizer.decode([token]) for token in ids]
    doubted = {at for at, text in enumerate(texts) if text in ("H", "b", "é") or "\ufffd" in text}
    logs = tuple(-3.0 - at / 100 if at in doubted else -0.1 for at in range(len(ids)))
    none = (None,) * len(ids)
    verification = CanvasVerification(
        0, tuple(ids), logs, (2,) * len(ids), tuple(ids), none, (0.0,) * len(ids)
    )
    transcript = Transcript(tokenizer, markers, None)
    canvas = SettledCanvas(0, ids[:-1], "converged", "eos", ids[-1], verification)
    settled = transcript.add(canvas)
    assert settled.text == answer
    spans = [(doubt.start, doubt.text) for doubt in settled.doubts]
    assert all(answer[start:].startswith(text) for start, text in spans)
    covered = {at for start, text in spans for at in range(start, start + len(text))}
    assert {answer[at] for at in covered} >= {"b", "é"} and "A" not in {
        answer[at] for at in covered
    }


def test_what_has_no_second_reader_is_refused(model: Model) -> None:
    for wrong, why in (
        ({"verify": "redo"}, "verify: must be"),
        ({"verify": "report", "mode": "causal"}, "causal mode has written the reply itself"),
    ):
        with pytest.raises(ValueError, match=why):
            model.generate("x", **wrong)
