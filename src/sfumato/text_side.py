"""The text side of a model, where text and the ids of canvases meet.

`TextSide` has a checkpoint's tokenizer and chat template, from small files and metadata alone.
`Transcript` turns the canvases of one reply into what its caller reads, `ModelGrammars` compiles
grammars over the vocabulary, and `Fills` plans and reads texts with holes, for `Model.fill` and for
the engine, which so refuse the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Convergence, Draft
from sfumato.diffusion.constraints.call_grammar import CallSource, Source
from sfumato.diffusion.constraints.constrained_reply import Constraint
from sfumato.diffusion.constraints.decision_plan import Shown
from sfumato.diffusion.constraints.filling import (
    Closing,
    Filled,
    FillOutcome,
    FillPlan,
    make_filled,
    make_template,
)
from sfumato.diffusion.constraints.grammar import GrammarTokens
from sfumato.diffusion.constraints.hole import Hole, Part, check_parts
from sfumato.diffusion.constraints.read_template import ReadTemplate
from sfumato.diffusion.constraints.trials import GrammarCache
from sfumato.diffusion.limits import (
    Limits,
    Outcome,
    ReplyPlan,
    ReplyText,
    SettledCanvas,
    Stats,
    StopReason,
    plan_reply,
)
from sfumato.diffusion.prediction import PredictedText, Prediction
from sfumato.diffusion.sampler import LogitBias
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.verification import CanvasVerification
from sfumato.model.families import Family, ReadFormat, family_of
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.options import exclusions
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused
from sfumato.tasks.alone import alone
from sfumato.tasks.fill import FillTask, FillText
from sfumato.tasks.works import PlacedPicture, Prompt
from sfumato.text.aligned import AlignedTokens
from sfumato.text.calls import ToolCall
from sfumato.text.markers import ChatMarkers
from sfumato.text.prompt import empty_thought_ids, user_turn
from sfumato.text.reply import (
    Delta,
    Region,
    ReplyParser,
    Stop,
    StopCut,
    StopGate,
    StopStrings,
    parse_reply,
)
from sfumato.text.template import ChatTemplate, TemplateError
from sfumato.text.tokenizer import Detokenizer, Tokenizer
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import quoted

if TYPE_CHECKING:
    from sfumato.media.patches import Patches


@dataclass(frozen=True)
class PictureTokens:
    """The ids of a picture in a prompt: `soft` is what a template writes for it, and what each of
    its soft tokens replaces; `begin` and `end` come around them, where a model has such."""

    soft: int
    begin: int | None = None
    end: int | None = None

    def shown(self, patches: Patches) -> Shown:
        """A picture in a state."""
        ids = list[int]()
        return Shown(ids, self.add(ids, patches).start, patches, patches.key)

    def placed(self, ids: Sequence[int], pictures: Sequence[Patches]) -> Prompt:
        """The prompt in which each picture has the place of its soft tokens. Raises TemplateError
        where the template has shown another number of pictures."""
        if ids.count(self.soft) != len(pictures):
            raise TemplateError(
                f"chat template: shows {ids.count(self.soft)} pictures of {len(pictures)}; get the "
                "template again"
            )
        made, placed, rest = list[int](), list[PlacedPicture](), iter(pictures)
        for token in ids:
            if token != self.soft:
                made.append(token)
                continue
            placed.append(self.add(made, next(rest)))
        return Prompt(made, (), tuple(placed))

    def add(self, ids: list[int], patches: Patches) -> PlacedPicture:
        """The picture behind `ids`, which gets its tokens."""
        ids += [] if self.begin is None else [self.begin]
        placed = PlacedPicture(len(ids), patches)
        ids += [self.soft] * patches.soft_tokens
        ids += [] if self.end is None else [self.end]
        return placed


@dataclass(frozen=True)
class TextSide:
    """How a checkpoint reads and writes text."""

    tokenizer: Tokenizer
    template: ChatTemplate
    pictures: PictureTokens | None = None  # None: no token stands for a picture


def _picture_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> PictureTokens | None:
    """What config.json names, and else the family's markers that the tokenizer has."""
    markers, config = family_of(checkpoint).markers, checkpoint.metadata.get("config") or {}

    def token(key: str, marker: str) -> int | None:
        known = config[key] if key in config else tokenizer.token_id(marker)
        return known if isinstance(known, int) and 0 <= known < tokenizer.vocab_size else None

    soft = token("image_token_id", markers.picture)
    if soft is None:
        return None
    return PictureTokens(
        soft,
        token("boi_token_id", markers.picture_open),
        token("eoi_token_id", markers.picture_close),
    )


def load_text(checkpoint: Checkpoint, rows: int = 0) -> TextSide:
    """The tokenizer and chat template of a checkpoint. rows: of the embedding; those that no token
    has are no text."""
    family = family_of(checkpoint)
    markers = family.markers
    if checkpoint.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, markers.tokens, rows)
        template = ChatTemplate.from_gguf(checkpoint.metadata, markers, family.template)
    else:
        tokenizer = Tokenizer.from_file(checkpoint.folder / "tokenizer.json", markers.tokens, rows)
        template = ChatTemplate.from_folder(checkpoint.folder, markers, family.template)
    return TextSide(tokenizer, template, _picture_tokens(checkpoint, tokenizer))


def end_ids(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a reply: those that the files list, and else the family's markers too."""
    generation = checkpoint.metadata.get("generation_config") or {}
    listed = generation.get("eos_token_id") if checkpoint.kind == "safetensors" else None
    if isinstance(listed, list):
        return config.eos_ids
    looked_up = (tokenizer.token_id(text) for text in family_of(checkpoint).markers.end_tokens)
    return tuple(dict.fromkeys((*config.eos_ids, *(i for i in looked_up if i is not None))))


def read_template(text: TextSide, form: ReadFormat, config: ModelConfig) -> ReadTemplate:
    """How a model with this text side reads questions. Raises ValueError, naming the token, where
    the tokenizer lacks one."""
    head, tail = user_turn(text.template, text.tokenizer, form.empty_thought)
    filler = config.filler_id
    return ReadTemplate(
        tuple(head),
        tuple(tail),
        lambda plain: text.tokenizer.encode(plain, special=False),
        _token(text.tokenizer, form.end),
        _token(text.tokenizer, form.filler) if filler is None else filler,
        config.canvas_length,
        text.tokenizer.longest_token,
        config.blocks,
        config.mask_id is not None,
    )


def _token(tokenizer: Tokenizer, marker: str) -> int:
    token = tokenizer.token_id(marker)
    if token is None:
        raise Refused(
            "tokenizer",
            f"has no token {marker!r}, without which no question can be read",
            "use the tokenizer that the model was trained with",
        )
    return token


@dataclass(frozen=True)
class Doubt:
    """A part of an answer that the causal mode doubts: adjacent tokens of one canvas."""

    start: int  # characters of the answer that come before it
    text: str
    nats: float  # of its token that is doubted most: minus the logarithm of the probability
    preferred: str  # the token that the causal mode would have written in the place of its first


@dataclass(frozen=True)
class Verification:
    """What the causal mode finds of a reply, as a second reader. A text that it does not doubt may
    be false."""

    canvases: tuple[CanvasVerification, ...]
    doubts: tuple[Doubt, ...]  # of the answer; thoughts and calls have only the numbers of tokens
    undecided: bool = False  # whether a short answer is in doubt, where that was asked
    other: str | None = None  # what the causal mode answers then

    @property
    def agreement(self) -> float:
        """The share of tokens that are the causal mode's most probable ones; 1 of none."""
        ranks = [rank for canvas in self.canvases for rank in canvas.ranks]
        return sum(rank == 1 for rank in ranks) / len(ranks) if ranks else 1.0


@dataclass(frozen=True)
class Settled:
    """A canvas has settled: its text is final."""

    canvas: int  # 0, 1, … within the reply
    text: str  # what it adds to the answer
    thought: str  # what it adds to the thought
    token_ids: list[int]  # of the canvas, up to an end token; a stop string is still in them
    convergence: Convergence
    tool_calls: tuple[ToolCall, ...] = ()  # those that it completes
    end_id: int | None = field(default=None, compare=False)  # the end token after token_ids
    # The most probable tokens of the canvas's last step at each of token_ids and at end_id, and
    # their probabilities, int64 and float32 [n, top]; None where they are not known.
    top_ids: Tensor | None = field(default=None, compare=False)
    top_probs: Tensor | None = field(default=None, compare=False)
    # Log probabilities of the config's named tokens, float32 [n, named], where it has some.
    named: Tensor | None = field(default=None, compare=False)
    # Of the causal mode: log probabilities of these tokens themselves, float32 [n]; see `Draft`.
    log_probs: Tensor | None = field(default=None, compare=False)
    # Where it was wanted, what the causal mode finds of these tokens, and the doubts in the text
    # that is complete with them.
    verification: CanvasVerification | None = field(default=None, compare=False)
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, repr=False)
class Reply:
    """A complete reply; `print` shows its text."""

    text: str
    thought: str | None
    tool_calls: tuple[ToolCall, ...]
    token_ids: list[int]  # without the end token
    stop_reason: StopReason
    stats: Stats
    warnings: tuple[str, ...] = ()
    filled: Filled | None = None  # of a text with holes, whose texts joined are `text` then
    stop: str | None = None  # the stop string that ended the reply, where one did
    schema: Any = field(default=None, compare=False)  # that it was asked to match, as given
    verification: Verification | None = None  # by a second reader, where one was wanted

    @property
    def parsed(self) -> Any:
        """The answer to a request with a schema: an instance of the pydantic model, or the value of
        the JSON. Raises ValueError where there was no schema, where the reply ended before its
        JSON did, and where the model's own checks fail."""
        if self.schema is None:
            raise Refused("parsed", "the reply was asked with no schema", "pass schema=…")
        try:
            if isinstance(self.schema, type):
                return self.schema.model_validate_json(self.text)  # type: ignore[attr-defined]
            return json.loads(self.text)
        except ValueError as error:
            if self.stop_reason == "eos":
                raise
            why = f"the reply is no whole JSON, as it ended by {self.stop_reason}"
            raise Refused("parsed", why, "raise max_tokens") from error

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        stats = self.stats
        calls = f", {len(self.tool_calls)} tool calls" if self.tool_calls else ""
        return (
            f"Reply({self.text!r}, {self.stop_reason}{calls}, {len(self.token_ids)} tokens, "
            f"{sum(stats.steps)} steps)"
        )


@dataclass(frozen=True)
class Done:
    """The last event of every stream."""

    reply: Reply


class _Doubted(NamedTuple):
    """What the tokens of a span in doubt have in common."""

    place: int
    nats: float
    preferred: int


class Transcript(ReplyText):
    """The text of one reply, as its canvases settle."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: ChatMarkers,
        stop: Stop,
        ignore_ends: bool = False,
        begins: Region = Region.ANSWER,
    ) -> None:
        """stop: what ends the reply; begins: where the prompt ends. Raises ValueError for a stop of
        another type."""
        super().__init__(tokenizer.decode)
        self.markers, self.begins = markers, begins
        stops = StopStrings(stop)
        self.cut = StopCut(tokenizer, stops, markers, ignore_ends, begins)
        self.pieces = tokenizer.pieces
        self._detokenizer = Detokenizer(tokenizer)
        self._gate = StopGate(stops, markers, ignore_ends, begins)
        self._parser = ReplyParser(markers, begins, ignore_ends)
        # The doubts of the answer, by its tokens; its characters so far; and the canvases.
        self._aligned = AlignedTokens[_Doubted | None](tokenizer, markers, begins)
        self._shown, self._doubts = 0, list[Doubt]()
        self._verified: list[CanvasVerification] = []
        self._preferred = tokenizer.decode

    def add(self, settled: SettledCanvas, last: Draft | None = None) -> Settled:
        """What a canvas adds; `last` is the draft of its last step, where the caller has it."""
        parts = self._parser.feed(self._gate.feed(self._detokenizer.pieces(settled.token_ids)))
        if settled.stop_reason is not None:
            parts += self._rest()
        texts = {"answer": "", "thought": ""}
        for part in parts:
            if isinstance(part, Delta):
                texts[part.kind] += part.text
        ids = settled.token_ids + ([] if settled.end_id is None else [settled.end_id])
        count = len(ids)
        # Where a thought is ended, another token stands there than was drawn.
        is_cut = last is not None and last.token_ids[:count].tolist() != ids

        def first(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[:count]

        return Settled(
            settled.canvas,
            texts["answer"],
            texts["thought"],
            settled.token_ids,
            settled.convergence,
            tuple(part for part in parts if isinstance(part, ToolCall)),
            settled.end_id,
            None if last is None else first(last.top_ids),
            None if last is None else first(last.top_probs),
            None if last is None else first(last.named),
            None if last is None or is_cut else first(last.log_probs),
            settled.verification,
            self._doubted(settled, texts["answer"]),
        )

    def _doubted(self, settled: SettledCanvas, text: str) -> tuple[Doubt, ...]:
        """The doubts in the text that a canvas adds to the answer."""
        verification, is_last = settled.verification, settled.stop_reason is not None
        if verification is None:
            return ()
        self._verified.append(verification)
        by_place: dict[int, _Doubted] = {}
        for run in verification.doubted_runs:
            nats = max(-verification.log_probs[at] for at in run)
            doubted = _Doubted(run.start, nats, verification.preferred[run.start])
            by_place |= dict.fromkeys(run, doubted)
        self._aligned.push(verification.token_ids, lambda at, token: by_place.get(at))
        parts = self._aligned.take(text)
        return self._merged([*parts, *self._aligned.end()] if is_last else parts)

    def _merged(self, parts: Sequence[tuple[str, list[_Doubted | None]]]) -> tuple[Doubt, ...]:
        doubts = list[Doubt]()
        for doubt, run in groupby(parts, lambda part: next(filter(None, part[1]), None)):
            text = "".join(each for each, _ in run)
            if doubt is not None:
                preferred = self._preferred([doubt.preferred])
                doubts.append(Doubt(self._shown, text, doubt.nats, preferred))
            self._shown += len(text)
        self._doubts += doubts
        return tuple(doubts)

    def finish(self, outcome: Outcome) -> Reply:
        """The complete reply; called once."""
        # After a cancellation some text may still be held back; otherwise this adds nothing.
        self._rest()
        parsed = self._parser.finish()
        return Reply(
            parsed.text,
            parsed.thought,
            parsed.tool_calls,
            outcome.token_ids,
            outcome.stop_reason,
            outcome.stats,
            (*outcome.warnings, *parsed.warnings),
            stop=self._gate.stop if outcome.stop_reason == "stop" else None,
            verification=self._verification(outcome.other),
        )

    def _verification(self, other: list[int] | None) -> Verification | None:
        """other: what the causal mode answers, where it doubts the answer."""
        if not self._verified:
            return None
        text = None
        if other is not None:
            text = parse_reply(self.pieces(other), self.markers, self.begins).text
        canvases, doubts = tuple(self._verified), tuple(self._doubts)
        return Verification(canvases, doubts, other is not None, text)

    def _rest(self) -> list[Delta | ToolCall]:
        """What was held back in case something followed."""
        rest = self._gate.feed(self._detokenizer.pieces((), last=True)) + self._gate.flush()
        return self._parser.feed(rest) + self._parser.flush()


class ModelGrammars:
    """The grammars of one model. Any thread may use them."""

    def __init__(self, text: TextSide, end_ids: tuple[int, ...]) -> None:
        self._text = text
        self.cache = GrammarCache(_grammar_tokens(text.tokenizer, end_ids))

    def constraint(
        self, source: Source, thinking: bool = False, begins: Region = Region.ANSWER
    ) -> Constraint:
        """What a reply must satisfy that is to match a source, behind a thought where one may come
        or the prompt ends in one. Raises ValueError, naming the source's field, for what is no
        grammar or not supported."""
        quote = source.quote if isinstance(source, CallSource) else None
        in_thought = begins is Region.THOUGHT
        thought = self._thought if thinking or in_thought else None
        return Constraint(self.cache.grammar(source), thought, quote, in_thought)

    @property
    def _thought(self) -> tuple[int, int] | None:
        """The tokens that open and close a thought; None where the vocabulary has none."""
        markers, tokenizer = self._text.template.markers, self._text.tokenizer
        opens = tokenizer.token_id(markers.thought_open) if markers.thought_open else None
        closes = tokenizer.token_id(markers.thought_close) if markers.thought_close else None
        return None if opens is None or closes is None else (opens, closes)


def _grammar_tokens(tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> GrammarTokens:
    size = tokenizer.vocab_size

    def piece(token: int) -> bytes:
        byte = tokenizer.bytes_of(token)
        return tokenizer.token_text(token).encode() if byte is None else byte

    return GrammarTokens(
        lambda: [piece(token) for token in range(size)],
        frozenset(i for i in tokenizer.special_ids if i < size),
        tuple(token for token in end_ids if token < size),
        lambda plain: tokenizer.encode(plain, special=False),
    )


EDIT_ROOM = 64  # tokens that an edited text may have beyond twice those that it had


def edit_message(
    text: str, instruction: str, pictures: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The user's message that asks for a text to be changed. pictures: parts that come before it,
    which the instruction is about."""
    content = f"{instruction}\n\nAnswer with the complete changed text and nothing else.\n\n{text}"
    if not pictures:
        return {"role": "user", "content": content}
    return {"role": "user", "content": [*pictures, {"type": "text", "text": content}]}


class Fills:
    """Plans fills, runs them, and reads what they gave."""

    def __init__(
        self,
        network: Network,
        text: TextSide,
        family: Family,
        defaults: SamplerConfig,
        end_ids: tuple[int, ...],
    ) -> None:
        self._network, self._text, self._family = network, text, family
        self._make = partial(Canvas.of, network=network)
        self._defaults, self._end_ids = defaults, end_ids

    @property
    def no_prompt(self) -> list[int]:
        """Ids of what comes before a text that stands by itself: bos, where there is one."""
        bos = self._text.tokenizer.bos_id
        return [] if bos is None else [bos]

    @cached_property
    def empty_thought(self) -> list[int]:
        """Ids that a reply without a thought begins with, where the template does not write them
        itself."""
        marker = self._family.reads.empty_thought
        return empty_thought_ids(self._text.template, self._text.tokenizer, marker)

    @cached_property
    def closing(self) -> Closing | None:
        """What follows a complete reply on its canvas; None where the vocabulary has no such
        tokens."""
        form, config = self._family.reads, self._network.config
        end = self._text.tokenizer.token_id(form.end)
        filler = config.filler_id
        filler = self._text.tokenizer.token_id(form.filler) if filler is None else filler
        return None if end is None or filler is None else Closing(end, filler)

    def plan(
        self,
        prompt: Sequence[int],
        parts: Sequence[Part],
        *,
        is_reply: bool,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        most_steps: int = MOST_STEPS,
        check: Callable[[str, str], None] = lambda text, field: None,
    ) -> FillPlan:
        """All checks of a fill. prompt: ids of what comes before the text; is_reply: whether the
        text is a complete reply, and not a part of a longer text; check: called with each text
        and the name of its field before it is tokenized, and may raise.

        Raises ValueError, naming the argument, for what cannot be done, and TooLarge where the
        model's context does not hold the text."""
        parts = check_parts(parts)
        self._check_choices(parts)
        is_causal = sampler is not None and sampler.mode == "causal"
        exclusions.check(exclusions.PLAN, {"parts": True, "mode=causal": is_causal})
        config = (sampler or SamplerConfig()).over(self._defaults)
        longest = config.canvas_length or self._network.config.canvas_length
        closing = self.closing if is_reply else None

        def encode(text: str, field: str) -> list[int]:
            check(text, field)
            return self._text.tokenizer.encode(text, special=False)

        def room(prefix: int) -> int:
            return longest - (prefix - self._network.config.blocks(prefix).border(prefix))

        has_causal = self._network.config.block is None
        template = make_template(parts, encode, prompt, closing, room, has_causal)
        length = len(template.form({}).ids)
        # The most that a canvas can have; each trial has its own length.
        config = replace(
            config,
            canvas_length=length,
            ignore_eos=False,
            settle_at_end=False,
            min_tokens=0,
            processors=(*config.processors, self._ban),
        )
        limits = Limits(length, self._end_ids)
        tokens = len(template.prefix)
        plan = plan_reply(self._network, tokens, config, limits, seed, most_steps, divides=True)
        return FillPlan(template, plan.config, seed, plan.blocks)

    def _check_choices(self, parts: Sequence[Part]) -> None:
        """Raises ValueError for a choice that the vocabulary cannot write."""
        tokenizer = self._text.tokenizer
        for place, part in enumerate(parts):
            for number, text in enumerate((part.choices or ()) if isinstance(part, Hole) else ()):
                if tokenizer.decode(tokenizer.encode(text, special=False)) != text:
                    raise Refused(
                        f"parts[{place}].choices[{number}]",
                        f"{text[:80]!r} cannot be written with this model's vocabulary",
                    )

    @cached_property
    def _ban(self) -> LogitBias:
        """Markers are no text: none of them may stand in a hole, and no end token or padding."""
        tokenizer, markers = self._text.tokenizer, self._text.template.markers.tokens
        ids = {tokenizer.token_id(marker) for marker in markers}
        ids |= {*self._end_ids, self._network.config.pad_id, tokenizer.bos_id}
        return LogitBias(dict.fromkeys(sorted(i for i in ids if i is not None), float("-inf")))

    def with_prediction(
        self, plan: ReplyPlan, prediction: PredictedText | None, thinking: bool, begun: bool = False
    ) -> ReplyPlan:
        """The plan of a reply with what it is expected to be. thinking: whether a thought comes
        first; begun: whether the prompt ends within the answer. Raises ValueError."""
        if prediction is None:
            return plan
        if not isinstance(prediction, PredictedText):
            raise Refused("prediction", f"must be a PredictedText, got {quoted(prediction)}")
        if self._network.config.mask_id is not None:
            why = "this model writes in place of mask tokens, and changes no token that is there"
            raise Refused("prediction", why, "leave it out")
        given = {"prediction": True, "thinking": thinking}
        given["mode=causal"] = plan.config.mode == "causal"
        exclusions.check(exclusions.PLAN, given)
        closing = () if self.closing is None else (self.closing.end_id, self.closing.filler_id)
        opening = () if begun else tuple(self.empty_thought)
        ids = tuple(self._text.tokenizer.encode(prediction.text, special=False))
        predicted = Prediction(opening, ids, closing, prediction.strength)
        return replace(plan, prediction=predicted)

    def stream(
        self,
        plan: FillPlan,
        cancelled: Callable[[], bool],
        prompt: Prompt,
        adapter: int,
    ) -> Iterator[Draft | Filled]:
        """Drafts, and at last the filled text. prompt: the plan's; adapter: the number of the one
        that fills. Raises Cancelled
        where `cancelled` says so, and FloatingPointError where the model's scores are no
        numbers."""
        text = FillText(self._text.tokenizer.decode)
        task = FillTask(plan, self._make, text, self._family.name, prompt.pictures)
        outcome: FillOutcome = yield from alone(self._network, task, cancelled, adapter)
        if outcome.cancelled:
            raise Cancelled
        filled = make_filled(plan.template.parts, outcome, self._text.tokenizer.decode)
        yield replace(filled, warnings=(*prompt.notes, *filled.warnings))

    def task(self, plan: FillPlan, stop: Stop, prompt: Prompt) -> FillTask:
        """A fill whose outcome is a `Reply`: the text of its holes, up to a stop string. prompt:
        the plan's."""
        text = _FillReply(self._text, plan, StopStrings(stop), prompt.notes)
        return FillTask(plan, self._make, text, self._family.name, prompt.pictures)


class Cancelled(Exception):
    """The caller has ended a fill, which has no result."""


class _FillReply(FillText):
    """A fill that is read as a reply of one canvas."""

    def __init__(
        self, text: TextSide, plan: FillPlan, stops: StopStrings, notes: tuple[str, ...]
    ) -> None:
        super().__init__(text.tokenizer.decode)
        self._notes = notes
        self._plan, self._stops, self._to_text = plan, stops, text.tokenizer.decode
        self._markers = text.template.markers
        self._cut = StopCut(text.tokenizer, stops, self._markers)

    def finish(self, outcome: FillOutcome) -> Reply:
        if outcome.cancelled:
            return Reply("", None, (), [], "cancelled", outcome.stats)
        reply = self._reply(outcome)
        outcome.stats.output_tokens = len(reply.token_ids)
        return reply

    def settled(self, outcome: FillOutcome) -> Sequence[Settled]:
        """What filled the holes, as a canvas that has settled."""
        text, ids = self._reply(outcome).text, list(chain(*outcome.holes))
        last: Convergence = (outcome.stats.convergence or ["converged"])[-1]
        top_ids, top_probs = _top(outcome)
        return [Settled(0, text, "", ids, last, top_ids=top_ids, top_probs=top_probs)]

    def _reply(self, outcome: FillOutcome) -> Reply:
        """The text of all holes before the first stop string that is complete, its tokens, and why
        it ends there: the rule of other replies."""
        filled = make_filled(self._plan.template.parts, outcome, self._to_text)
        text, ids = "".join(hole.text for hole in filled.holes), list(chain(*outcome.holes))
        holes = zip(self._plan.template.holes, outcome.holes, strict=True)
        is_full = any(hole.at_most == len(own) > 1 for hole, own in holes)
        reason: StopReason = "max_tokens" if is_full else "eos"
        gate = StopGate(self._stops, self._markers)
        pieces = [piece for piece in (*gate.feed([text]), *gate.flush()) if isinstance(piece, str)]
        if gate.stop is not None:
            text, ids, reason = "".join(pieces), ids[: self._cut([], ids)], "stop"
        stats, notes = outcome.stats, (*self._notes, *filled.warnings)
        return Reply(text, None, (), ids, reason, stats, notes, filled, gate.stop)


def _top(outcome: FillOutcome) -> tuple[Tensor | None, Tensor | None]:
    """The most probable tokens of all holes and their probabilities, [tokens, top]."""
    top = [each for each in outcome.top if each is not None]
    if len(top) < len(outcome.top):
        return None, None
    return torch.cat([ids for ids, _ in top]), torch.cat([probs for _, probs in top])
