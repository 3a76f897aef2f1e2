"""The plain loop under a grammar: free where nothing breaks it; else guided, repaired, written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.diffusion.constraints.test_grammar import PERSON, ids
from tests.support.random_model import random_model
from tests.support.scripted_model import END, VOCABULARY, scripted, tokenizer

from sfumato.api import Draft, Model, Reply
from sfumato.diffusion.canvas import Draft as CanvasDraft
from sfumato.diffusion.constraints.constrained_reply import (
    MOST_CHOICES,
    REPAIRS,
    CausalWriting,
    ConstrainedReply,
    Constraint,
    ShortCompletion,
    written_draft,
)
from sfumato.diffusion.constraints.grammar import GrammarSource, GrammarState, schema_source
from sfumato.diffusion.sampler import LogitBias, MinTokens
from sfumato.diffusion.sampler_config import SamplerConfig

ROW = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}}
CLOSED = ROW | {"required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model()


def test_a_reply_that_agrees_is_the_free_one_to_the_bit() -> None:
    """Over several canvases, in drafts, steps and text; what is behind the end does not count."""
    text = '{"name": "Ann", "age": 7}'
    for end in ("<turn|>", "<eos>garbage"):
        model = scripted(text + end)
        runs = [
            [
                event
                for event in model.stream("x", seed=3, schema=schema)
                if isinstance(event, Draft)
            ]
            for schema in (None, PERSON)
        ]
        assert len(runs[0]) == len(runs[1])
        for free, held in zip(*runs, strict=True):
            assert free.token_ids.equal(held.token_ids) and free.accepted.equal(held.accepted)
            assert free.entropy.equal(held.entropy) and free.top_probs.equal(held.top_probs)
        reply = model.generate("x", schema=PERSON)
        assert (reply.text, reply.stop_reason) == (text, "eos")
        report = reply.stats.constraint
        assert report and (report.steps, report.repairs, report.causal_tokens) == (0, 0, 0)
    assert scripted(text + "<turn|>").generate("x").stats.constraint is None


def test_an_accepted_break_is_masked_and_what_is_forced_is_pinned() -> None:
    """The script insists on prose; each step the beginning that agrees grows."""
    model = scripted("Sure thing, here you are.<turn|>", length=32, hesitate=0)
    reply = model.generate("x", schema={"enum": ["Sure.", "Surely"]}, max_tokens=32)
    assert reply.stop_reason == "eos" and json.loads(reply.text) in ("Sure.", "Surely")
    report = reply.stats.constraint
    assert report is not None and report.steps > 0 and report.causal_tokens == 0


@pytest.mark.parametrize(
    ("schema", "seed"),
    [
        (PERSON, 0),
        (CLOSED, 1),
        (CLOSED, 2),
        ({"type": "array", "items": CLOSED, "minItems": 3}, 1),
        ({"enum": ["a b", 7, None]}, 0),
        ({"enum": ["a b", 7, None]}, 1),
    ],
)
def test_every_stop_validates(model: Model, schema: dict[str, Any], seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    reply = model.generate("x", schema=schema, max_tokens=120, seed=seed)
    assert reply.stop_reason == "eos", "what is open is closed in time"
    assert jsonschema.validator_for(schema).is_valid(json.loads(reply.text)), reply.text
    assert reply.token_ids == tokenizer().encode(reply.text) or len(reply.token_ids) <= 120


def test_what_cannot_be_closed_in_time_says_length(model: Model) -> None:
    reply = model.generate("x", schema=PERSON, max_tokens=12)
    assert reply.stop_reason == "max_tokens" and len(reply.token_ids) == 12
    assert '{"name":"","age":0}'.startswith(reply.text[:7].replace(" ", "")) or reply.text[0] == "{"


def test_the_text_of_a_thought_is_free(model: Model) -> None:
    """A model that thinks by chance alone does not, but may."""
    reply = model.generate("x", schema=CLOSED, thinking=True, max_tokens=60)
    assert reply.stop_reason == "eos" and json.loads(reply.text)["a"] <= 99


def test_cancelling_while_a_canvas_is_written(model: Model) -> None:
    calls = iter(range(10_000))
    most = 4 * (REPAIRS + 1) + 6  # prefill, steps of all attempts, some tokens
    reply = model.generate(
        "x", schema={"type": "string", "minLength": 60}, cancelled=lambda: next(calls) > most
    )
    assert reply.stop_reason == "cancelled"


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"stop": "x"}, "stop"),
        ({"sampler": SamplerConfig(ignore_eos=True)}, "ignore_eos"),
        ({"sampler": SamplerConfig(named_tokens=(5,))}, "named_tokens"),
        ({"schema": 5}, "schema"),
        ({"schema": {"not": {}}}, "schema"),
    ],
)
def test_what_does_not_go_together_is_named(model: Model, how: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        model.generate("x", **{"schema": PERSON} | how)


def test_min_tokens_yields(model: Model) -> None:
    sampler = SamplerConfig(min_tokens=50)
    reply = model.generate("x", schema={"const": "a"}, sampler=sampler, max_tokens=60)
    assert (reply.text, reply.stop_reason) == ('"a"', "eos")


def test_a_bias_counts_among_what_the_grammar_allows(model: Model) -> None:
    bias = {VOCABULARY[str(digit)]: float("-inf") for digit in range(9)}
    sampler = SamplerConfig(processors=(LogitBias(bias),))
    reply = model.generate(
        "x", schema={"type": "integer", "minimum": 0, "maximum": 9}, sampler=sampler
    )
    assert reply.text.strip("\x00") in {"9", *map(str, range(9))}  # of bytes too there are digits


def constraint(source: Any) -> Constraint:
    model = scripted("x<turn|>")
    made = source if isinstance(source, GrammarSource) else schema_source(source)
    return model.grammars.constraint(made)


def guided(source: Any, text: str, accepted: int, room: int = 64) -> Any:
    held = ConstrainedReply(constraint(source))
    tokens = ids(text)
    flags = [at < accepted for at in range(len(tokens))]
    return held.guide(tokens, flags, room, len(tokens))


def test_guidance() -> None:
    text = '{"name": "Ann", "age": x<turn|><turn|>'
    at = text.index("x")
    assert guided(PERSON, text, at) is None, "the position that breaks it is not accepted yet"
    assert guided(PERSON, text, 99, room=at) is None, "what is cut off does not count"
    guidance = guided(PERSON, text, at + 1)
    assert guidance.pins == dict(enumerate(ids(text[:at]))) and guidance.masked == at
    assert guidance.mask[VOCABULARY["7"]] and not guidance.mask[VOCABULARY["x"]]
    guidance = guided(PERSON, "Well, here it is", 16)
    assert guidance.pins == {0: VOCABULARY["{"]} and guidance.masked == 1
    assert guided(PERSON, '{"name": "Ann", "age": 7}<turn|>!!!!', 99) is None


def test_a_canvas_is_repaired_twice_and_then_written() -> None:
    held = ConstrainedReply(constraint(PERSON))
    canvas = ids('{"name": 3 and so on for ever...')
    for _ in range(REPAIRS):
        assert held.stopped(canvas, 500, len(canvas)) is None
        begin = held.begin(len(canvas))
        assert begin and begin.pins == dict(enumerate(canvas[:9]))
    writes = held.stopped(canvas, 500, len(canvas))
    assert isinstance(writes, CausalWriting) and writes.ids == canvas[:9]
    assert held.report.repairs == REPAIRS


def test_the_grammar_goes_from_canvas_to_canvas() -> None:
    held = ConstrainedReply(constraint(PERSON))
    first, second = ids('{"name": '), [*ids('"Ann", "age": 7}'), END]
    assert held.stopped(first, 500, len(first)) == first
    held.commit(first)
    assert held.stopped(second, 490, len(second)) == second
    other = ConstrainedReply(constraint(PERSON))
    assert other.stopped(second, 500, len(second)) is None


def test_what_is_complete_needs_no_end_token() -> None:
    held = ConstrainedReply(constraint(PERSON))
    done = ids('{"name":"","age":0}')
    settled = held.stopped([*done, *ids(" Is that good?")], 500, 40)
    assert isinstance(settled, list) and settled[:-1] == done and settled[-1] in (END, 1)


def test_a_limit_closes_what_is_open() -> None:
    held = ConstrainedReply(constraint(PERSON))
    canvas = ids('{"name": "A rather long name of which there is no end')
    room = 40
    settled = held.stopped(canvas, room, len(canvas))
    assert isinstance(settled, list) and len(settled) <= room + 1
    assert json.loads(tokenizer().decode(settled))["name"].startswith("A rather")
    assert held.report.closing_tokens > 0


def test_the_search_for_an_end_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all places to go back to, where none can be closed; where one can, it is found."""
    masks = 0
    original = GrammarState.bits

    def counted(state: GrammarState) -> bytes:
        nonlocal masks
        masks += 1
        return original(state)

    monkeypatch.setattr(GrammarState, "bits", counted)
    long = {"type": "string", "minLength": 400}
    held, canvas = ConstrainedReply(constraint(long)), ids('"' + "a" * 255)
    masks = 0
    assert held.stopped(canvas, 300, len(canvas)) == canvas
    assert 0 < masks <= MOST_CHOICES + 20
    nested = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    }
    held, canvas = ConstrainedReply(constraint(nested)), ids("[" * 64)
    masks = 0
    settled = held.stopped(canvas, 66, len(canvas))
    assert isinstance(settled, list) and settled[-1] in (END, 1)
    json.loads(tokenizer().decode(settled))
    assert masks <= MOST_CHOICES + 20


def writing(source: Any, kept: str, room: int, length: int = 64) -> CausalWriting:
    held = constraint(source)
    reply = held.begin().after(ids(kept))
    return CausalWriting(held, reply, ids(kept), room, length, ShortCompletion(held))


def scores(text: str) -> torch.Tensor:
    values = torch.zeros(len(VOCABULARY))
    values[VOCABULARY[text]] = 9.0
    return values


def test_writing_takes_the_best_of_what_is_allowed() -> None:
    canvas = writing(PERSON, '{"name": "', 60)
    for best in ("A", "n", "n", '"'):
        canvas.write(scores(best))
    assert tokenizer().decode(canvas.ids) == '{"name": "Ann"'
    canvas.write(scores("A"))  # which may not stand there
    assert tokenizer().decode(canvas.ids[14:])[0] in ", \n\t\r"
    biased = writing({"enum": ["ab", "ac"]}, '"a', 60)
    biased.write(scores("b"), (LogitBias({VOCABULARY["b"]: -20.0, VOCABULARY["c"]: 1.0}),))
    assert tokenizer().decode(biased.ids) == '"ac"' and biased.done
    late = writing({"type": "string"}, '"a', 60)
    late.write(scores('"'), (MinTokens(50, (END,)),))
    assert late.done and late.result[-1] in (END, 1)


def test_writing_keeps_tokens_to_close_with() -> None:
    canvas = writing({"type": "array", "items": {"type": "string"}}, "[", 20)
    while not canvas.done:
        canvas.write(scores("["))  # a long text of brackets
    text = tokenizer().decode(canvas.ids)
    assert isinstance(json.loads(text), list) and len(canvas.ids) <= 20
    full = writing({"type": "string"}, '"', 500, length=8)
    while not full.done:
        full.write(scores("a"))
    assert tokenizer().decode(full.result) == '"aaaaaaa', "a full canvas, and no end"


def test_a_written_canvas_has_a_draft() -> None:
    draft = CanvasDraft(
        0, 4, torch.tensor([5, 6, 7]), torch.ones(3), torch.zeros(3, dtype=torch.bool), 4,
        torch.tensor([[5, 6], [6, 7], [7, 8]]), torch.full((3, 2), 0.5),
    )  # fmt: skip
    assert written_draft(draft, [5, 6], {}) is draft
    scored = torch.full((10,), float("-inf"))
    scored[[3, 4]] = torch.tensor([2.0, 1.0])
    new = written_draft(draft, [5, 9, 3], {2: scored})
    assert new.token_ids.tolist() == [5, 9, 3] and new.accepted.tolist() == [False, True, True]
    assert new.top_ids[1:].tolist() == [[9, 6], [3, 4]]
    assert new.top_probs[1].tolist() == [1.0, 0.0] and new.top_probs[2, 0] > 0.7
    assert draft.token_ids.tolist() == [5, 6, 7]


def test_tokens_beyond_the_canvas_are_in_its_draft() -> None:
    draft = CanvasDraft(
        0, 4, torch.tensor([5, 6]), torch.ones(2), torch.zeros(2, dtype=torch.bool), 4,
        torch.tensor([[5, 6], [6, 7]]), torch.full((2, 2), 0.5),
        named=torch.full((2, 3), -1.0), log_probs=torch.full((2,), -0.7),
    )  # fmt: skip
    new = written_draft(draft, [5, 6, 8, 7], {})
    assert new.token_ids.tolist() == [5, 6, 8, 7] and new.accepted.tolist() == [
        *[False] * 2,
        *[True] * 2,
    ]
    assert new.top_ids.tolist() == [[5, 6], [6, 7], [8, 6], [7, 6]]
    assert new.top_probs[2:].tolist() == [[1.0, 0.0]] * 2 and new.entropy.tolist() == [1, 1, 0, 0]
    assert new.named is not None and new.named[2:].tolist() == [[float("-inf")] * 3] * 2
    assert new.log_probs is not None and new.log_probs[2:].tolist() == [0.0, 0.0]


def test_a_reply_is_the_same_at_every_seed_again(model: Model) -> None:
    def once() -> Reply:
        return model.generate("x", schema=PERSON, max_tokens=40, seed=5)

    one, two = once(), once()
    assert one.token_ids == two.token_ids and one.stats.steps == two.stats.steps
    assert replace(one.stats.constraint) == replace(two.stats.constraint)  # type: ignore[type-var]
