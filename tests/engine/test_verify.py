"""A second reader in the engine: the plain loop's numbers to the bit, beside any rows, and the text
of a reply that nothing reads."""

from __future__ import annotations

from dataclasses import replace
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

LONG = "tell me about the sea and do not stop"  # as a prompt of several chunks
ON = SamplerConfig(ignore_eos=True)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": LONG, "sampler": ON, "verify": "report", "max_tokens": 20},
    {"prompt": LONG, "sampler": ON, "max_tokens": 20},
    {"prompt": "Hello", "verify": "abstain", "max_tokens": 8},
    {"prompt": "How do you work?", "stop": "D", "verify": "report", "seed": 4},
    {"prompt": "Who are you?", "verify": "report", "seed": 2},
)


@pytest.fixture(scope="module")
def model() -> Model:
    """Writes the last end token by itself."""
    return random_model(canvas_length=8, end_ids=(*scripted_model.END_IDS, 79))


@pytest.fixture(scope="module")
def plain(model: Model) -> list[Reply]:
    return [model.generate(**{"max_tokens": 24} | each) for each in REQUESTS]


def causal_numbers(reply: Reply) -> list[tuple[Any, ...]]:
    canvases = () if reply.verification is None else reply.verification.canvases
    return [(each.token_ids, each.log_probs, each.ranks, each.preferred) for each in canvases]


@pytest.mark.parametrize("late", [False, True])
def test_the_same_bits_in_any_company(
    model: Model, plain: list[Reply], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in small chunks; also where commits are rows of steps, and after a forward that
    failed."""
    calls: list[Any] = []
    if late:
        monkeypatch.setattr("sfumato.engine.runner.graph_backend", lambda device: RepeatedCalls())
    else:
        encode = Network.encode_hidden

        def failing(*given: Any) -> list[torch.Tensor]:
            calls.append(given)
            if len(calls) in (5, 9):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return encode(*given)

        monkeypatch.setattr(Network, "encode_hidden", failing)
    engine = Engine(model, EngineConfig(slots=4, context=128, prefill_chunk=16))
    handles = []
    for each in REQUESTS:
        how = {"max_tokens": 24, "retry_empty": False, "seed": 0} | each
        handles.append(engine.submit(Request(**how)))
        engine.step()
    run(engine)
    assert late or len(calls) > 9
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
    assert plain[0].verification.doubts and plain[0].text == plain[1].text
    assert len(plain[0].verification.canvases) > 1
    assert plain[2].verification.undecided and plain[2].verification.other
    assert (plain[3].stop_reason, plain[4].stop_reason) == ("stop", "eos")
    assert plain[4].verification.canvases[-1].token_ids[-1] == 79
    assert no_slot_is_leaked(engine)
    engine.close()


def test_a_reply_under_a_grammar(model: Model) -> None:
    """Tokens that the causal mode has written under the grammar are verified as they are
    encoded."""
    schema = {"type": "integer"}
    how: dict[str, Any] = {"prompt": "x2", "max_tokens": 16, "sampler": SamplerConfig(max_steps=2)}
    plain = model.generate(**how, schema=schema, verify="report")
    assert plain.stats.constraint.causal_tokens > 0
    engine = Engine(model, EngineConfig(slots=2, context=128))
    unread = Request(**how, seed=0, grammar=schema_source(schema))
    handles = [engine.submit(replace(unread, verify="report", id="read")), engine.submit(unread)]
    run(engine)
    verified, alone = (handle.result() for handle in handles)
    assert verified.verification == plain.verification
    assert alone.text == verified.text == plain.text
    ids = model.prompt_ids("x2") + model.fills.empty_thought
    for canvas in plain.verification.canvases:
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


def test_what_has_a_second_reader() -> None:
    """The embedded model knows one of these capitals. Refused are replies of the causal mode, and a
    network of blocks, which has none."""
    model = sfumato.load(device="cpu")
    read = model.generate("What is the capital of France?", verify="report").verification
    assert (read.agreement, read.doubts, read.undecided) == (1, (), False)
    ask = "What is the capital of Bulgaria?"
    short = SamplerConfig(max_steps=2)
    read = model.generate(ask, sampler=short, verify="abstain").verification
    assert read.undecided and read.other and read.doubts
    masks = sfumato.load("embedded-masks", device="cpu")
    for tried, wrong, why in (
        (model, {"verify": "redo"}, "verify: must be"),
        (model, {"verify": "report", "mode": "causal"}, "causal mode has written the reply itself"),
        (masks, {"verify": "report"}, "verify: needs a causal mode"),
    ):
        with pytest.raises(ValueError, match=why):
            tried.generate("x", **wrong)
    with pytest.raises(ValueError, match="verify: needs a causal mode"):
        masks.decide("x", {"a": bool}, verify="abstain")
