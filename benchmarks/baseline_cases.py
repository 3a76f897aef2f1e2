"""The requests of `benchmarks.baselines`: several dozen of each kind, for any model.

A `Case` is one request as the engine takes it and, where the library can do the same, the call of
the library that does. The names that are no public ones stand in the first imports, so that a
module that moves changes this file in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfumato import Choice, Hole, Model, Request, SamplerConfig, Score, SoftTopK, YesNo
from sfumato.decisions import Calibration, Reading, schema_of
from sfumato.decisions.calibration import Temperature, wording
from sfumato.diffusion.canvas import GivenCanvas
from sfumato.diffusion.constraints.call_grammar import CallSource, CallTool
from sfumato.diffusion.constraints.grammar import (
    GrammarSource,
    choice_source,
    schema_source,
)
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler import (
    EntropyBound,
    FixedCount,
    LinearTemperature,
    LogitBias,
    Never,
    StableAndConfident,
    Threshold,
)
from sfumato.engine import DecisionRequest, Pooling, PromptScoring
from sfumato.text.tokenizer import Marker

Cancelled = Callable[[], bool]
Events = Iterable[Any]

CAPITAL = "What is the capital of France?"
PROMPTS = ("Who are you?", CAPITAL, "How do you work?", "name a color", "the sea and its ships")
CHAT = [
    {"role": "user", "content": CAPITAL},
    {"role": "assistant", "content": "The capital is Paris."},
    {"role": "user", "content": "And who are you?"},
]
LONG = [{"role": "system", "content": "You are brief and kind, and never unfriendly. " * 6}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
QUICK = SamplerConfig(max_steps=3)
BANS = float("-inf")
_OF_ENGINES = {
    *("ids", "opening", "continued", "max_thinking_tokens", "retry_empty", "grammar", "canvas"),
    *("scoring", "pooling"),
}
"""Fields of a request that the library's call has not."""


@dataclass(frozen=True)
class Case:
    """One request. alone: the events by the library's path, given what says that it is cancelled;
    None where the library has no such call. ends: what the client cancels it at, "queued", "draft"
    or "settled"; "" where it does not."""

    kind: str
    name: str
    request: Request | DecisionRequest
    alone: Callable[[Cancelled], Events] | None = None
    ends: str = ""


# Rules of a caller's own: they take the ways of steps that rules of ours never do.


@dataclass(frozen=True)
class EveryOther:
    """Accepts every second position, the other half at each step: a sampler that can be lifted."""

    def accept(self, view: Any) -> Tensor:
        places = torch.arange(view.tokens.shape[-1], device=view.tokens.device)
        return (places + view.step) % 2 == 0


@dataclass(frozen=True)
class Growing:
    """Accepts as many positions from the left as the step has tenths: one that reads on the host,
    and cannot be lifted."""

    def accept(self, view: Any) -> Tensor:
        accepted = torch.zeros(view.tokens.shape[-1], dtype=torch.bool)
        accepted[: int(view.step.item()) * accepted.numel() // view.max_steps] = True
        return accepted


@dataclass(frozen=True)
class SharpScores:
    """Accepts positions whose best score is far from the mean: a sampler that keeps the scores."""

    needs_logits = True

    def accept(self, view: Any) -> Tensor:
        logits: Tensor = view.stats.logits
        return logits.amax(-1) - logits.mean(-1) > 8


@dataclass(frozen=True)
class After:
    """Ends each canvas after so many steps."""

    steps: int

    def done(self, view: Any) -> Tensor:
        done: Tensor = view.step >= self.steps
        return done


@dataclass(frozen=True)
class Unlike:
    """Lowers the scores of what the canvas has now: a processor that looks at the canvas."""

    def process(self, scores: Tensor, first_id: int, view: Any) -> Tensor:
        ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
        return scores - 3 * (view.tokens[..., None] == ids)


# Replies.


def replies(model: Model) -> Iterator[Case]:
    """Replies of canvases, with every choice of decoding."""
    kind = "replies"
    how: dict[str, Any]
    for number, prompt in enumerate(PROMPTS):
        if number < 3:  # which the embedded model answers in few steps
            how = {"seed": 2**63 + number, "sampler": None, "max_tokens": 20}
            yield _reply(model, kind, f"prompt {number}, own steps", prompt, **how)
        yield _reply(model, kind, f"prompt {number}", prompt, seed=number)
    yield _reply(model, kind, "messages", messages=CHAT, seed=3)
    for tokens in (1, 10, 32, 33, 70):
        yield _reply(model, kind, f"{tokens} tokens", PROMPTS[4], max_tokens=tokens, seed=4)
    for name, config in _samplers(model):
        yield _reply(model, kind, name, PROMPTS[4], seed=9, sampler=config)
    for name, stop in _stops(model):
        more: dict[str, Any] = {"stop": stop, "sampler": _with(ignore_eos=True), "seed": 5}
        yield _reply(model, kind, f"stop {name}", PROMPTS[4], **more)
    yield _reply(model, kind, "stop at an end", CAPITAL, stop="a", seed=1)
    yield _reply(model, kind, "tools", CAPITAL, tools=TOOLS, seed=2)
    yield _reply(model, kind, "thinking", CAPITAL, thinking=True, seed=2)
    predicts = _with(max_steps=16)
    for strength in (0.0, 0.3, 1.0):
        text = PredictedText("The capital is Paris.", strength)
        name = f"prediction {strength}"
        yield _reply(model, kind, name, CAPITAL, prediction=text, sampler=predicts, seed=6)
    wrong = PredictedText("zq " * 20, 0.1)
    yield _reply(model, kind, "wrong prediction", PROMPTS[0], prediction=wrong, seed=6)
    yield from _openings(model, kind)


def _openings(model: Model, kind: str) -> Iterator[Case]:
    """What the library's call does not have: beginnings, budgets, retries and given canvases."""
    markers = model.template.markers
    thought = markers.thought_open + markers.thought_header
    free = _with(ignore_eos=True)
    yield _reply(model, kind, "opening", CAPITAL, opening="The ", seed=1)
    yield _reply(model, kind, "opened thought", CAPITAL, opening=thought, seed=1)
    for most in (0, 5, 30):
        how: dict[str, Any] = {"max_thinking_tokens": most, "thinking": True, "max_tokens": 60}
        name = f"thought of {most}"
        yield _reply(model, kind, name, CAPITAL, opening=thought + "Hm", seed=most, **how)
        yield _reply(model, kind, f"{name}, eos", CAPITAL, opening=thought, sampler=free, **how)
    yield _reply(model, kind, "continued", CAPITAL, continued="The capi", seed=2)
    yield _reply(model, kind, "ids", ids=_ids(model, "The sea is"), seed=2)
    ends = _with(processors=(LogitBias(dict.fromkeys(model.end_ids, 60.0)),))
    yield _reply(model, kind, "empty", CAPITAL, sampler=ends, retry_empty=True)
    yield _reply(model, kind, "empty, drawn once", CAPITAL, sampler=ends, retry_empty=False)
    seldom = _with(processors=(LogitBias(dict.fromkeys(model.end_ids, 9.0)),), temperature=3.0)
    for seed in range(3):
        how = {"sampler": seldom, "retry_empty": True, "seed": seed}
        yield _reply(model, kind, f"often empty, seed {seed}", PROMPTS[4], **how)
    length = model.config.canvas_length
    tokens = tuple(_ids(model, "The capital is Rome, and the sea is wide." * 4)[:length])
    for name, canvas in (
        ("canvas", GivenCanvas(tokens)),
        ("pinned canvas", GivenCanvas(tokens, (0, 1, 2, 5, length - 1))),
        ("read canvas", GivenCanvas(tokens, tuple(range(0, length, 3)), read_only=True)),
        ("read noise", GivenCanvas(read_only=True)),
    ):
        yield _reply(model, kind, name, CAPITAL, canvas=canvas, seed=7)


def _samplers(model: Model) -> Iterator[tuple[str, SamplerConfig]]:
    letters = _ids(model, "aeiou")
    yield "entropy bound", _with(sampler=EntropyBound(2.0), max_steps=5)
    yield "fixed count", _with(sampler=FixedCount(4), max_steps=5)
    yield "threshold", _with(sampler=Threshold(0.8), max_steps=5)
    yield "short canvas", _with(canvas_length=8)
    yield "top k", _with(top_k=3)
    yield "top p", _with(top_p=0.7)
    yield "top k and p", _with(top_k=9, top_p=0.9, temperature=2.0)
    yield "temperature 0", _with(temperature=0)
    yield "hot", _with(temperature=5.0)
    yield "schedule", _with(schedule=LinearTemperature(0.2, 1.5))
    yield "never", _with(stopping=Never(), max_steps=3)
    yield "early", _with(stopping=StableAndConfident(0, 5.0), max_steps=5)
    yield "settle at end", _with(settle_at_end=True, max_steps=5)
    yield "no soft embedding", _with(self_conditioning=False)
    yield "soft skip", _with(soft_skip=0.2)
    yield "soft top k", _with(soft_top_k=SoftTopK(16, 4))
    yield "top tokens", _with(top_tokens=12)
    yield "named tokens", _with(named_tokens=tuple(letters))
    yield "bias", _with(processors=(LogitBias({letters[0]: 5.0, letters[1]: -5.0}),))
    yield "ban", _with(processors=(LogitBias(dict.fromkeys(letters, BANS)),))
    yield "min tokens", _with(min_tokens=12, max_steps=5)
    yield "ignored ends", _with(ignore_eos=True)
    yield "repetition", _with(processors=(LogitBias({letters[0]: 90.0}),), ignore_eos=True)
    yield "own sampler", _with(sampler=EveryOther(), stopping=After(3))
    yield "own sampler on the host", _with(sampler=Growing())
    yield "own sampler of scores", _with(sampler=SharpScores())
    yield "own processor", _with(processors=(Unlike(), LogitBias({letters[2]: 2.0})))


def _stops(model: Model) -> Iterator[tuple[str, Any]]:
    yield "string", "e"
    yield "list", ["th", "e ", "no such text"]
    yield "unknown", "no such text"
    yield "marker", Marker(model.template.markers.turn_close)


def long_prompts(model: Model) -> Iterator[Case]:
    """Prompts that share a long beginning, and prompts that no slot of the engine holds."""
    kind = "long prompts"
    for number, prompt in enumerate(PROMPTS):
        messages = [*LONG, {"role": "user", "content": prompt}]
        yield _reply(model, kind, f"shared {number}", messages=messages, seed=number)
    for number in range(2):
        text = "A wide, wide sea. " * 40
        yield _reply(model, kind, f"larger {number}", f"{text}{number}", max_tokens=20, seed=3)
    ids = _ids(model, "The ships on the sea are old. " * 11)
    for seed in range(3):
        yield _reply(model, kind, f"one prompt, seed {seed}", ids=ids, seed=seed)
    likely = PromptScoring(ranks=True)
    yield _reply(model, kind, "scored", ids=ids, scoring=likely, max_tokens=0)


def causal(model: Model) -> Iterator[Case]:
    """Replies that are written token by token."""
    letters = _ids(model, "aeiou")
    ends = LogitBias(dict.fromkeys(model.end_ids, 60.0))
    configs: dict[str, dict[str, Any]] = {
        "plain": {},
        "temperature 0": {"temperature": 0},
        "hot": {"temperature": 4.0},
        "top k": {"top_k": 3},
        "top p": {"top_p": 0.7},
        "min tokens": {"min_tokens": 9},
        "ignored ends": {"ignore_eos": True},
        "bias": {"processors": (LogitBias({letters[0]: 4.0}),)},
        "ban": {"processors": (LogitBias(dict.fromkeys(letters, BANS)),)},
        "own processor": {"processors": (Unlike(),)},
        "top tokens": {"top_tokens": 12},
        "named tokens": {"named_tokens": tuple(letters)},
    }
    kind = "causal"
    for name, how in configs.items():
        config = SamplerConfig(mode="causal", **how)
        for seed in (1, 2):
            prompt, most = PROMPTS[seed * 2], 8
            more: dict[str, Any] = {"seed": seed, "sampler": config, "max_tokens": most}
            yield _reply(model, kind, f"{name}, seed {seed}", prompt, **more)
    plain = SamplerConfig(mode="causal")
    free = replace(plain, ignore_eos=True)
    for name, stop in _stops(model):
        how = {"stop": stop, "sampler": free, "max_tokens": 12}
        yield _reply(model, kind, f"stop {name}", PROMPTS[4], **how)
    markers = model.template.markers
    thought = markers.thought_open + markers.thought_header
    how = {"sampler": free, "opening": thought, "max_thinking_tokens": 4, "max_tokens": 40}
    yield _reply(model, kind, "thought", CAPITAL, **how)
    yield _reply(model, kind, "opening", CAPITAL, sampler=plain, opening="The ", max_tokens=12)
    yield _reply(model, kind, "continued", CAPITAL, sampler=plain, continued="The c", max_tokens=9)
    empty = replace(plain, processors=(ends,))
    yield _reply(model, kind, "empty", CAPITAL, sampler=empty, retry_empty=True, max_tokens=9)


def scores(model: Model) -> Iterator[Case]:
    """Scores of prompts, alone and before a reply, and vectors."""
    kind, plain = "scores", SamplerConfig(mode="causal")
    texts = (*PROMPTS[:4], "a", "The sea is wide and the ships are old. " * 4)
    for number, text in enumerate(texts):
        ids = _ids(model, text)
        for name, scoring in (
            ("scores", PromptScoring()),
            ("ranks", PromptScoring(0, True)),
            ("top", PromptScoring(12, True)),
        ):
            how: dict[str, Any] = {"ids": ids, "scoring": scoring, "max_tokens": 0}
            yield _reply(model, kind, f"{name} of text {number}", **how)
        for pooling in ("mean", "last"):
            how = {"ids": ids, "pooling": Pooling(pooling), "max_tokens": 0}
            yield _reply(model, kind, f"{pooling} of text {number}", **how)
    for number, config in enumerate((plain, QUICK)):
        how = {"scoring": PromptScoring(3), "sampler": config, "max_tokens": 8}
        yield _reply(model, kind, f"before a reply {number}", CAPITAL, **how)
        yield _reply(model, kind, f"one token {number}", **(how | {"ids": _ids(model, "a")}))


# Replies under a grammar.

SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "integer": {"type": "integer", "minimum": 10, "maximum": 99},
    "booleans": {"type": "array", "items": {"type": "boolean"}, "minItems": 8},
    "string": {"type": "string", "minLength": 20},
    "enum": {"enum": [first + second + "x" * 20 for first in "ab" for second in "ab"]},
    "boolean": {"type": "boolean"},
}


def grammars(model: Model) -> Iterator[Case]:
    """Replies to a schema, a regular expression, a list of choices, a grammar, and tools."""
    kind = "grammars"
    for name, schema in SCHEMAS.items():
        for seed, steps in ((1, 3), (2, 1)):
            how: dict[str, Any] = {"schema": schema, "seed": seed, "max_tokens": 36}
            config, label = _with(max_steps=steps), f"{name}, {steps} steps"
            yield _reply(model, kind, label, PROMPTS[seed], sampler=config, **how)
    thinks: dict[str, Any] = {"schema": SCHEMAS["object"], "thinking": True, "max_tokens": 60}
    yield _reply(model, kind, "after a thought", CAPITAL, **thinks)
    yield _reply(model, kind, "biased", CAPITAL, schema=SCHEMAS["object"], sampler=_with(top_k=5))
    yield _reply(model, kind, "cut short", CAPITAL, schema=SCHEMAS["booleans"], max_tokens=12)
    sources: dict[str, Any] = {
        "regex": GrammarSource("regex", "[a-f]{3,20}-[0-9]{4}", "regex"),
        "choice": choice_source(["Paris is it", "Rome is it", "no"]),
        "gbnf": GrammarSource("grammar", 'root ::= "yes" | "no" [a-z]+ "."', "grammar"),
        "lark": GrammarSource("grammar", 'start: "a"+ ("b" | "cd")* "!"', "grammar"),
        **dict(_calls(model)),
    }
    for name, source in sources.items():
        for seed in (1, 2):
            how = {"grammar": source, "seed": seed, "max_tokens": 36}
            yield _reply(model, kind, f"{name}, seed {seed}", PROMPTS[seed], **how)


def _calls(model: Model) -> Iterator[tuple[str, CallSource]]:
    markers, token_id = model.template.markers, model.tokenizer.token_id
    names = markers.call_open, markers.call_close, markers.quote
    ids = [token for name in names if name and (token := token_id(name)) is not None]
    if len(ids) < 3:
        return
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})
    tools = CallTool("weather", None, "tools[0]"), CallTool("count", schema, "tools[1]")
    yield "calls", CallSource(tools, *ids)
    yield "one call", CallSource(tools[1:], *ids, required=True, single=True)
    yield "calls or answer", CallSource(tools, *ids, answer=schema_source({"type": "boolean"}))


# Fills and edits.

PARTS: dict[str, list[Any]] = {
    "exact": ["The capital is ", Hole(5), "."],
    "one token": ["x", Hole(1)],
    "first": [Hole(4), " is the capital."],
    "two holes": ["I ", Hole(3), " you ", Hole(2), "."],
    "lengths": ["The ", Hole(at_most=4), " is Paris."],
    "choices": ["It is ", Hole(choices=["Rome", "Paris", "a town"]), "."],
    "choice and hole": ["It is ", Hole(choices=["Rome", "Paris"]), ", I ", Hole(3), "."],
    "two lengths": ["a ", Hole(at_most=2), " b ", Hole(at_most=3), "."],
    "cut": ["x", Hole(2), " and so on, as far as it goes, to the end of the canvas and beyond"],
}


def fills(model: Model) -> Iterator[Case]:
    """Texts with holes, as a reply and by themselves."""
    bos = model.tokenizer.bos_id
    for name, parts in PARTS.items():
        for seed in (1, 2):
            yield _fill(model, f"{name}, seed {seed}", parts, messages=CHAT[:1], seed=seed)
        if bos is not None:
            yield _fill(model, f"{name} by itself", parts, ids=[bos], seed=3)
    for name, config in (
        ("biased", _with(top_k=3, temperature=2.0)),
        ("cold", _with(temperature=0)),
        ("own sampler", _with(sampler=EveryOther())),
        ("named", _with(named_tokens=(5, 7))),
    ):
        yield _fill(model, name, PARTS["lengths"], messages=CHAT[:1], sampler=config, seed=4)
    for name in ("exact", "lengths"):
        how: dict[str, Any] = {"messages": CHAT[:1], "stop": list("aeiou"), "seed": 5}
        yield _fill(model, f"{name} with stops", PARTS[name], **how)


def _fill(model: Model, name: str, parts: list[Any], **how: Any) -> Case:
    how = {"sampler": QUICK} | how
    request = Request(parts=parts, drafts=True, **how)

    def alone(cancelled: Cancelled) -> Events:
        options = {key: how[key] for key in ("seed", "sampler")}
        return model.stream_fill(
            parts, messages=how.get("messages"), cancelled=cancelled, **options
        )

    return Case("fills", name, request, None if "stop" in how else alone)


def edits(model: Model) -> Iterator[Case]:
    """Texts that are changed as an instruction says."""
    for number, text in enumerate(("The capital is Rome.", "I am a ship on the wide, wide sea. ")):
        for strength in (None, 0.0, 0.3, 1.0):
            for seed in (1, 2):
                yield _edit(model, f"text {number}, {strength}, seed {seed}", text, strength, seed)


def _edit(model: Model, name: str, text: str, strength: float | None, seed: int) -> Case:
    wanted = "Write Paris instead."
    content = f"{wanted}\n\nAnswer with the complete changed text and nothing else.\n\n{text}"
    predicted = PredictedText(text) if strength is None else PredictedText(text, strength)
    request = Request(
        messages=[{"role": "user", "content": content}],
        prediction=predicted,
        max_tokens=24,
        seed=seed,
        sampler=_with(max_steps=8),
        retry_empty=False,
        drafts=True,
    )

    def alone(cancelled: Cancelled) -> Events:
        how: dict[str, Any] = {"max_tokens": 24, "seed": seed, "sampler": request.sampler}
        yield model.edit(text, wanted, strength=strength, cancelled=cancelled, **how)

    return Case("edits", name, request, alone)


# Decisions.

STATE = "I was charged twice, and this is my third mail. "
QUESTIONS: dict[str, Any] = {
    "urgent": YesNo("Urgent?", yes="money is moving"),
    "team": Choice({"billing": "pay", "tech": "", "?": ""}, "Which team?"),
    "anger": Score("calm", "annoyed", "furious", instructions="How angry?"),
    "sure": Choice(["only this"], "Which?"),
    "done": bool,
}


def decisions(model: Model) -> Iterator[Case]:
    """Questions about a state, read in every way."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "samples": {"samples": 3},
        "auto": {"samples": "auto"},
        "orders": {"orders": 2},
        "steps": {"steps": 3},
        "joint": {"joint": True},
        "schema first": {"order": "schema"},
        "no mass": {"label_mass": False},
        "auto and orders": {"samples": "auto", "orders": 2},
        "joint steps": {"joint": True, "steps": 2, "samples": 2},
        "joint, schema first": {"joint": True, "order": "schema"},
    }
    for name, how in ways.items():
        for seed in (0, 5):
            label = f"{name}, seed {seed}"
            yield _decision(model, label, STATE * 2, QUESTIONS, seed=seed, **how)
    for name, question in QUESTIONS.items():
        yield _decision(model, f"only {name}", "Hello!", {name: question})
    many = {f"q{number}": YesNo(f"Is it {number}?") for number in range(24)}
    yield _decision(model, "many questions", STATE, many)
    several = {"which": Choice([f"option {number}" for number in range(30)], "Which one?")}
    yield _decision(model, "many options", STATE, several, orders=3)
    longer = {"long": YesNo("Is it so? " + "Consider all of it. " * 16), **QUESTIONS}
    yield _decision(model, "long question", STATE, longer)
    yield _decision(model, "long state", STATE * 8, QUESTIONS)
    yield _decision(model, "empty state", "", {"urgent": QUESTIONS["urgent"]})
    for joint in (False, True):
        questions = {name: QUESTIONS[name] for name in ("urgent", "team")}
        calibration = _calibration(model, questions, joint)
        how = {"joint": joint, "calibration": calibration}
        yield _decision(model, f"calibrated, joint {joint}", STATE, questions, **how)


def _decision(
    model: Model, name: str, state: str, questions: Mapping[str, Any], **how: Any
) -> Case:
    """The engine gives answers as they are read: a calibration is the library's."""

    def alone(cancelled: Cancelled) -> Events:
        yield model.decide(state, questions, **how)

    fields = {key: value for key, value in how.items() if key != "calibration"}
    request = DecisionRequest(state, schema_of(questions).questions, **fields)
    return Case("decisions", name, request, alone)


def _calibration(model: Model, questions: Mapping[str, Any], joint: bool) -> Calibration:
    wanted = schema_of(questions).questions
    temperatures = {
        name: Temperature(1.5 + number, wording(question, wanted, joint))
        for number, (name, question) in enumerate(wanted.items())
    }
    return Calibration(model.identity, Reading(joint=joint), temperatures)


# Requests that their clients cancel.


def cancelled(model: Model) -> Iterator[Case]:
    """Requests of each kind, cancelled in the queue, at a draft, and at a settled canvas."""
    free = _with(ignore_eos=True)
    wholes = (
        _reply(model, "", "reply", PROMPTS[4], max_tokens=70, sampler=free),
        _reply(model, "", "hot reply", PROMPTS[2], max_tokens=70, sampler=_with(temperature=4.0)),
        _reply(
            model,
            "",
            "causal reply",
            PROMPTS[4],
            max_tokens=20,
            sampler=SamplerConfig(mode="causal", ignore_eos=True),
        ),
        _reply(model, "", "grammar", CAPITAL, schema=SCHEMAS["string"], max_tokens=40),
        _fill(model, "fill", PARTS["lengths"], messages=CHAT[:1], seed=1),
        _decision(model, "decision", STATE, QUESTIONS),
        _reply(
            model, "", "scores", ids=_ids(model, CAPITAL), scoring=PromptScoring(), max_tokens=0
        ),
    )
    for case in wholes:
        for ends in ("queued", "draft", "settled"):
            named = replace(case, kind="cancelled", name=f"{case.name} at {ends}", ends=ends)
            if isinstance(case.request, DecisionRequest) or case.name == "fill":
                named = replace(named, alone=None)  # raised, and not answered
            if ends == "queued" or case.name not in ("decision", "scores"):
                yield named


KINDS: dict[str, Callable[[Model], Iterator[Case]]] = {
    "replies": replies,
    "long prompts": long_prompts,
    "causal": causal,
    "scores": scores,
    "grammars": grammars,
    "fills": fills,
    "edits": edits,
    "decisions": decisions,
    "cancelled": cancelled,
}


def _with(**how: Any) -> SamplerConfig:
    return replace(QUICK, **how)


def _ids(model: Model, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, special=False)
    return ids


def _reply(
    model: Model,
    kind: str,
    name: str,
    prompt: str | None = None,
    *,
    schema: Any = None,
    **how: Any,
) -> Case:
    """A reply of two canvases at most, of 3 steps, where nothing else is wanted."""
    most = model.config.canvas_length + 8
    how = {"prompt": prompt, "seed": 1, "max_tokens": most, "sampler": QUICK} | how
    fields = {"retry_empty": False, "drafts": True} | how
    if schema is not None:
        fields["grammar"] = schema_source(schema)

    def alone(cancelled: Cancelled) -> Events:
        return model.stream(schema=schema, cancelled=cancelled, **how)

    only_engine = _OF_ENGINES & how.keys()
    return Case(kind, name, Request(**fields), None if only_engine else alone)
