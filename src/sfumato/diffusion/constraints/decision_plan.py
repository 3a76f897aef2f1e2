"""A decision before it begins: its settings, its checks, and the reads that it takes, as ids: which
prompts follow its state, and which canvases are read behind them.

`Model.decide` and the engine plan their decisions here, and so refuse the same ones and read the
same tokens.  A question is read by itself, or all of them together, as lines of one canvas.  Each
order of the options is a prompt of its own.  The canvases depend on the labels alone, so that
questions with the same labels share them: a thousand questions of 255 options would else keep a
hundred thousand tuples.  Knows no network.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from sfumato.diffusion.checks import is_whole
from sfumato.diffusion.constraints.questions import (
    MOST_QUESTIONS,
    Answer,
    ChoiceQuestion,
    Question,
    Reading,
    Sample,
    ScoreQuestion,
    YesNoQuestion,
    answer_of,
    check_question,
    check_reads,
    mean,
    softmax,
)
from sfumato.diffusion.constraints.read_template import (
    BETWEEN,
    NOISE,
    Label,
    Line,
    Listing,
    ReadCanvas,
    ReadTemplate,
    characters,
    joint_text,
    listing_orders,
    means_itself,
    most_orders,
    question_length,
    question_text,
)
from sfumato.diffusion.limits import check_seed
from sfumato.model.model_config import Blocks
from sfumato.options import exclusions
from sfumato.options.limits import MOST_READ_STEPS, MOST_READS
from sfumato.refused import Refused, TooLarge
from sfumato.weights.errors import quoted

MOST_CHARACTERS = 1 << 20
"""Characters of all questions of a decision, in all orders of their options: as many are tokenized
in about a second."""
MOST_TOKENS = 1 << 21
"""Tokens of all reads of a decision: more than its questions have, unless each is followed by the
state."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A part of a state that is no text, such as a picture."""

    ids: Sequence[int]  # that stand for it
    first: int  # of the ids, the one at which its content begins
    content: Any  # which plans pass on, and do not look at
    key: str  # equal for equal contents alone


StatePiece = str | Shown


@dataclass(frozen=True)
class DecisionSettings(Reading):
    """How the questions of one decision are read. label_mass: whether the whole vocabulary is
    scored too, for `Answer.label_mass`. verify: "abstain" lets the causal mode answer each question
    too, for `Answer.causal`."""

    seed: int = 0
    label_mass: bool = True
    verify: Literal["abstain"] | None = None

    def check(self) -> None:
        """Raises ValueError, naming the field."""
        check_seed(self.seed)
        limits = ("samples", MOST_READS), ("orders", MOST_READS), ("steps", MOST_READ_STEPS)
        for name, most in limits:
            value, word = getattr(self, name), ' or "auto"' if name == "samples" else ""
            if not (is_whole(value) and 1 <= value <= most) and not (word and value == "auto"):
                number = f"a whole number from 1 to {most}{word}"
                raise Refused(name, f"must be {number}, got {quoted(value)}")
        if self.order not in ("state", "schema"):
            raise Refused("order", f'must be "state" or "schema", got {quoted(self.order)}')
        if self.verify not in (None, "abstain"):
            raise Refused("verify", f'must be "abstain", got {quoted(self.verify)}')
        exclusions.check(exclusions.DECISION, {"joint": self.joint, "verify": self.verify})
        for name in ("joint", "label_mass"):
            if not isinstance(getattr(self, name), bool):
                got = quoted(getattr(self, name))
                raise Refused(name, f"must be true or false, got {got}")


class NoiseKey:
    """The source of one prompt's noise."""

    def __init__(self, seed: int, ids: Iterable[int]) -> None:
        """seed: 0..2⁶⁴-1; ids: of the prompt."""
        self._digest = hashlib.sha256(b"read" + seed.to_bytes(8, "little"))
        self._digest.update(_bytes(ids))

    def extended(self, ids: Iterable[int]) -> NoiseKey:
        """The source of a prompt that goes on with these ids."""
        longer = object.__new__(NoiseKey)
        longer._digest = self._digest.copy()
        longer._digest.update(_bytes(ids))
        return longer

    def _words(self, sample: int, step: int, place: int) -> Iterable[int]:
        """Unsigned words of 64 bits, without end."""
        counter = 0
        while True:
            digest = self._digest.copy()
            digest.update(_bytes((-1, sample, step, place, counter)))
            words = digest.digest()
            yield from (int.from_bytes(words[a : a + 8], "little") for a in range(0, 32, 8))
            counter += 1

    def token(self, sample: int, place: int, size: int, banned: Set[int]) -> int:
        """The token, of a vocabulary of `size`, with which one place of a canvas begins: uniform,
        and none of the banned ones."""
        assert len(banned) < size
        drawn = (word * size >> 64 for word in self._words(sample, 0, place))
        return next(token for token in drawn if token not in banned)

    def uniform(self, sample: int, step: int, place: int) -> float:
        """In [0, 1), with 53 random bits: what the token of one place is drawn with after a step,
        which is 1 or more."""
        word = next(iter(self._words(sample, step, place)))
        return float((word >> 11) / 2**53)


def _bytes(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()


def where_of(name: str) -> str:
    """How a message names a question: by its id, which may be of any length."""
    return f"questions.{name}" if len(name) <= 80 else f"questions.{name[:80]}…"


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Has what is raised within as a ValueError name a field."""
    try:
        yield
    except ValueError as error:
        raise Refused(where, str(error)) from error


def _check_questions(
    template: ReadTemplate,
    state: Sequence[StatePiece],
    questions: object,
    settings: DecisionSettings,
    room: int,
) -> None:
    """Raises ValueError, naming the field, for what is no state or no question, or has no room."""
    shown = [piece for piece in state if isinstance(piece, Shown)]
    exclusions.check(
        exclusions.DECISION, {"order=schema": settings.order == "schema", "pictures": shown}
    )
    if not isinstance(questions, Mapping):
        raise Refused("questions", f"must be a mapping of ids, got {quoted(questions)}")
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise Refused(
            "questions",
            f"must be 1 to {MOST_QUESTIONS:,}, got {len(questions):,}",
            "split them over several requests",
        )
    texts = sum(len(piece) for piece in state if isinstance(piece, str))
    beside = sum(len(piece.ids) for piece in shown)
    _check_length(texts, template.longest_token, room, "state", beside)
    lengths: list[tuple[int, int]] = []  # of each question, and how many orders it has
    for name, question in questions.items():
        if not isinstance(name, str):
            raise Refused("questions", f"an id must be text, got {quoted(name)}")
        where = where_of(name)
        if not isinstance(question, YesNoQuestion | ChoiceQuestion | ScoreQuestion):
            raise Refused(where, f"is no question: {quoted(question)}")
        check_question(question, where)
        _check_length(characters(question), template.longest_token, room, where)
        lengths.append((question_length(question), most_orders(question, settings.orders)))
    # Jointly, all questions are read as often as the one that has the most orders.
    most = max(orders for _, orders in lengths)
    total = sum(length * (most if settings.joint else orders) for length, orders in lengths)
    if total > MOST_CHARACTERS:
        raise TooLarge(
            "questions",
            f"with labels and in all their orders they have {total:,} characters, and one "
            f"decision has at most {MOST_CHARACTERS:,}",
            "ask for fewer questions, options or orders",
        )


def _check_length(
    characters: int, longest_token: int, most: int, where: str, beside: int = 0
) -> None:
    """Raises TooLarge for a text that has more tokens than `most` however it is cut. beside: tokens
    of pictures in it."""
    least = -(-characters // longest_token) + beside
    if least > most:
        pictures = " and its pictures" if beside else ""
        raise TooLarge(
            where,
            f"{characters:,} characters{pictures} are {least:,} tokens or more, and there is room "
            f"for {most:,}",
            "shorten it",
            least,
            most,
        )


Options = tuple[tuple[int, int | None], ...]
"""Where each option is on the canvases, see `Target.options`."""
_Canvases = tuple[tuple[ReadCanvas, ...], Options]


def _canvases(template: ReadTemplate, labels: Sequence[Label]) -> _Canvases:
    """The canvases of a question that is read by itself, and where its options are on them. Raises
    ValueError where the model's canvas is too short."""
    tokens = len(labels[0].ids)  # of every label
    firsts = list(dict.fromkeys(label.ids[0] for label in labels))
    made = [template.canvas([NOISE] * tokens, [0], [firsts])]
    options: Options = tuple((number, None) for number in range(len(labels)))
    if tokens > 1:
        seconds = [[label.ids[1] for label in labels if label.ids[0] == first] for first in firsts]
        for first, after in zip(firsts, seconds, strict=True):
            made.append(template.canvas([first, NOISE], [1], [after]))
        numbers = ((firsts.index(label.ids[0]), label.ids[1]) for label in labels)
        options = tuple((first, seconds[first].index(second)) for first, second in numbers)
    canvases = tuple(canvas for canvas in made if canvas is not None)
    if len(canvases) < len(made):
        raise Refused(
            "questions",
            f"a canvas of this model has {template.canvas_length} tokens, which is too "
            "short for an answer",
            "use another model",
        )
    return canvases, options


@dataclass(frozen=True)
class Target:
    """Where a read has the answer to a question.

    order: the number of the order in which the question's options are listed, of its own orders;
    slot: of the first canvas; options: for each option, in the caller's order, the number of its
    label among the slot's, and, for a label of two tokens, that of its second token among the
    labels of canvas 1 + the first number.
    """

    question: str
    order: int
    slot: int
    options: Options

    def sample(self, canvases: Sequence[Sequence[Sample]]) -> Sample:
        """canvases: of each canvas what was read at its slots."""
        first = canvases[0][self.slot]
        if all(second is None for _, second in self.options):
            chosen = tuple(first.probabilities[number] for number, _ in self.options)
            return Sample(chosen, first.label_mass, first.is_label)
        # The chain rule: P(label) = P(first token) · P(second token | first token).
        seconds = [slots[0] for slots in canvases[1:]]
        chosen = tuple(
            first.probabilities[number] * seconds[number].probabilities[second or 0]
            for number, second in self.options
        )
        if first.label_mass is None:
            return Sample(chosen)
        masses = (
            p * (each.label_mass or 0.0)
            for p, each in zip(first.probabilities, seconds, strict=True)
        )
        best = max(range(len(seconds)), key=first.probabilities.__getitem__)
        is_label = bool(first.is_label and seconds[best].is_label)
        return Sample(chosen, first.label_mass * sum(masses), is_label)


@dataclass(frozen=True, eq=False)
class Read:
    """A prompt that follows a prefix, and the canvases that are read behind it, all of them once
    for each sample. The result: of each sample a `Sample` for each target."""

    ids: array[int]  # int32
    canvases: tuple[ReadCanvas, ...]
    targets: tuple[Target, ...]
    key: NoiseKey  # of the prefix and the prompt
    settings: DecisionSettings

    @property
    def width(self) -> int:
        """Tokens of the widest canvas."""
        return max(len(canvas.ids) for canvas in self.canvases)

    @property
    def canvas_tokens(self) -> int:
        """Tokens of the canvases of one sample."""
        return sum(len(canvas.ids) for canvas in self.canvases)

    @property
    def labels(self) -> list[tuple[int, ...]]:
        """The ids of each option's label, in the caller's order, of a read of one question."""
        (target,) = self.targets
        firsts = self.canvases[0].labels[target.slot]
        return [
            (firsts[a],) if b is None else (firsts[a], self.canvases[1 + a].labels[0][b])
            for a, b in target.options
        ]

    @property
    def tokens(self) -> int:
        """Tokens that are encoded beside the prefix, those for the causal mode with them."""
        lines = [] if self.settings.verify is None else self.labels
        return len(self.ids) + sum(len(self.ids) + len(label) for label in lines)

    def on_blocks(self, before: Sequence[int], start: int, blocks: Blocks) -> Read:
        """The same where the prefix ends at `start`, before its last tokens `before`: whole blocks
        are encoded, what is behind them begins the canvases, and canvases end with their block.
        Raises ValueError where slots are in no one block."""
        ids = [*before, *self.ids]
        cut = blocks.border(start + len(ids)) - start
        encoded, rest = ids[:cut], ids[cut:]
        canvases = [canvas.following(rest) for canvas in self.canvases]
        # Blocks without a slot are encoded too.
        passed = min(min(canvas.slots) for canvas in canvases) // blocks.size * blocks.size
        parts = {canvas.ids[:passed] for canvas in canvases}
        ends = max(max(canvas.slots) for canvas in canvases)
        if len(parts) > 1 or ends - passed >= blocks.size:
            raise Refused(
                where_of(self.targets[0].question),
                f"this model's blocks of {blocks.size} tokens hold no such answer",
                "give fewer options, or leave joint out",
            )
        (passed_ids,) = parts
        made = tuple(canvas.cut(passed, passed + blocks.size) for canvas in canvases)
        return replace(self, ids=array("i", [*encoded, *passed_ids]), canvases=made)


class _Reads:
    """The reads of one decision. Makes each order of options, and its canvases, once for all
    questions that share it."""

    def __init__(
        self, template: ReadTemplate, state: Sequence[StatePiece], settings: DecisionSettings
    ) -> None:
        self._template, self._settings = template, settings
        self.prefix = [*template.head]  # what is encoded once
        self.shown: list[tuple[int, Shown]] = []  # where their contents begin in it
        self._after: list[int] = []  # what follows each question
        keys = b""
        with naming("state"):
            for piece in state:
                if isinstance(piece, Shown):
                    self.shown.append((len(self.prefix) + piece.first, piece))
                    self.prefix += piece.ids
                    keys += piece.key.encode()
                elif settings.order == "schema":
                    self._after += template.encode(BETWEEN + piece)
                else:
                    self.prefix += template.encode(piece)
        self._key = NoiseKey(settings.seed, [*self.prefix, *keys])

    def of(self, questions: Mapping[str, Question]) -> Iterator[Read]:
        """A read for each question and order of its options; jointly, reads of as many questions at
        a time as a canvas holds, in even parts, but for those whose labels have two tokens."""
        template, settings = self._template, self._settings
        made: dict[tuple[type[Question], int, bool], list[tuple[Listing, _Canvases]]] = {}
        joint: dict[str, Question] = {}
        for name, question in questions.items():
            labels = _labels(question, template.line("", ""), name)
            if settings.joint and all(len(label.ids) == 1 for label in labels):
                joint[name] = question
                continue
            key = type(question), len(labels), means_itself(question, labels)
            if key not in made:
                orders = listing_orders(question, labels, settings.orders)
                made[key] = [(order, _canvases(template, order.labels)) for order in orders]
            for number, (order, (canvases, options)) in enumerate(made[key]):
                text = question_text(question, order.texts, order.listed)
                target = Target(name, number, 0, options)
                yield self._read(text, canvases, (target,), where_of(name))
        for part in _even_parts(template, joint):
            yield from self._joint(part)

    def _read(
        self, text: str, canvases: tuple[ReadCanvas, ...], targets: tuple[Target, ...], where: str
    ) -> Read:
        begin = BETWEEN if self._settings.order == "state" else ""
        with naming(where):
            ids = array("i", self._template.encode(begin + text))
        ids.extend((*self._after, *self._template.tail))
        return Read(ids, canvases, targets, self._key.extended(ids), self._settings)

    def _joint(self, questions: Mapping[str, Question]) -> Iterator[Read]:
        """A read for each order; a question that has fewer orders than others has each several
        times less often or more, of which `DecisionPlan.answers` takes the mean."""
        template = self._template
        lines = _lines(template, len(questions))
        orders = [
            listing_orders(question, _labels(question, line, name), self._settings.orders)
            for line, (name, question) in zip(lines, questions.items(), strict=True)
        ]
        for number in range(max(map(len, orders))):
            chosen = [own[number % len(own)] for own in orders]
            texts = [
                question_text(question, order.texts, order.listed)
                for question, order in zip(questions.values(), chosen, strict=True)
            ]
            labels = [[label.ids[0] for label in order.labels] for order in chosen]
            canvas = _joint_canvas(template, lines, labels)
            assert canvas
            targets = tuple(
                Target(
                    name, number % len(own), slot, tuple((i, None) for i in range(len(labelled)))
                )
                for slot, (name, own, labelled) in enumerate(
                    zip(questions, orders, labels, strict=True)
                )
            )
            yield self._read(joint_text(texts), (canvas,), targets, "questions")


def _even_parts(
    template: ReadTemplate, questions: Mapping[str, Question]
) -> Iterator[dict[str, Question]]:
    """The questions in as few parts as canvases hold, of sizes that differ by one at most."""
    items = list(questions.items())
    if not items:
        return
    count = 1
    while _joint_canvas(template, _lines(template, -(-len(items) // count))) is None:
        count += 1
        if count > len(items):
            raise Refused(
                "joint",
                f"a canvas of {template.canvas_length} tokens holds no line of a question",
                "leave joint out",
            )
    for part in range(count):
        a, b = part * len(items) // count, (part + 1) * len(items) // count
        yield dict(items[a:b])


def _lines(template: ReadTemplate, count: int) -> list[Line]:
    """The lines of a canvas of so many questions; the last one has no line break behind it."""
    numbers = range(1, count + 1)
    return [template.line(f"{n}: ", "\n" if n < count else "") for n in numbers]


def _joint_canvas(
    template: ReadTemplate,
    lines: Sequence[Line],
    labels: Sequence[Sequence[int]] = (),
) -> ReadCanvas | None:
    """A canvas of lines, each tokenized by itself, so that no token reaches over two of them."""
    body: list[int] = []
    slots: list[int] = []
    for line in lines:
        slots.append(len(body) + line.position)
        body += line.ids
        body[slots[-1]] = NOISE
        if len(body) > template.canvas_length:
            return None
    return template.canvas(body, slots, labels)


def _labels(question: Question, line: Line, name: str) -> tuple[Label, ...]:
    with naming(where_of(name)):
        return line.labels(question)


@dataclass(frozen=True)
class DecisionPlan:
    """A decision that can be done."""

    prefix: list[int]  # what is encoded once
    reads: tuple[Read, ...]
    questions: Mapping[str, Question]
    settings: DecisionSettings
    blocks: Blocks  # of the prefix
    shown: tuple[tuple[int, Shown], ...] = ()  # where in the prefix their contents begin

    @property
    def question_tokens(self) -> int:
        """Tokens of all reads, which are encoded apart from the prefix."""
        return sum(read.tokens for read in self.reads)

    def answers(self, results: Sequence[Sequence[Sequence[Sample]]]) -> dict[str, Answer]:
        """The answers by question. results: of each read its samples, of each of them a `Sample`
        for each of the read's targets. Reads of a question in the same order count as samples of
        that order, so that all orders weigh the same."""
        orders: dict[str, dict[int, list[Sample]]] = {}
        for read, samples in zip(self.reads, results, strict=True):
            for number, target in enumerate(read.targets):
                own = orders.setdefault(target.question, {}).setdefault(target.order, [])
                own += [each[number] for each in samples]
        return {
            name: answer_of(question, [*orders[name].values()])
            if name in orders
            else question.answer((1.0,))  # it has one option: nothing was read
            for name, question in self.questions.items()
        }

    def verified(
        self, answers: Mapping[str, Answer], logs: Sequence[Sequence[float]]
    ) -> dict[str, Answer]:
        """The answers with those of the causal mode. logs: of each read, the log-likelihoods of
        its options' labels. All orders weigh the same."""
        orders: dict[str, list[tuple[float, ...]]] = {}
        for read, own in zip(self.reads, logs, strict=True):
            orders.setdefault(read.targets[0].question, []).append(softmax(own))
        return {
            name: replace(answer, causal=mean(orders[name])) if name in orders else answer
            for name, answer in answers.items()
        }


def plan_decision(
    template: ReadTemplate,
    state: str | Sequence[StatePiece],
    questions: Mapping[str, Question],
    settings: DecisionSettings,
    longest: int,
) -> DecisionPlan:
    """All checks of a decision before it begins, in an order in which nothing large is made of what
    is refused. longest: positions that a state, a question and its canvas can have together.
    The white space at both ends of a state is left out.

    Raises ValueError, naming the field or "questions.<id>", and TooLarge, a ValueError, for texts
    that have no room."""
    settings.check()
    if template.has_masks:
        settings = _without_noise(settings)
    if not isinstance(state, str | list | tuple):
        raise Refused("state", f"must be text, got {quoted(state)}")
    pieces = [state] if isinstance(state, str) else [*state]
    _check_questions(template, pieces, questions, settings, longest)
    check_reads(len(questions), settings.samples, settings.orders)
    unsure = {name: each for name, each in questions.items() if len(each.options) > 1}
    making = _Reads(template, _stripped(pieces) if unsure else [""], settings)
    blocks = template.blocks(len(making.prefix))
    start = blocks.border(len(making.prefix))
    reads: list[Read] = []
    tokens = 0
    for each in making.of(unsure):
        read = each
        if blocks.size > 1:
            read = each.on_blocks(making.prefix[start:], start, blocks)
        _check_room(len(making.prefix), read, longest)
        tokens += read.tokens
        if tokens > MOST_TOKENS:
            raise TooLarge(
                "questions",
                "in all their orders, with the state where it follows each, they have more "
                f"than {MOST_TOKENS:,} tokens",
                "ask for fewer questions or orders",
            )
        reads.append(read)
    shown = tuple(making.shown)
    return DecisionPlan(making.prefix[:start], tuple(reads), questions, settings, blocks, shown)


def _without_noise(settings: DecisionSettings) -> DecisionSettings:
    """The settings where open places are masks. Raises ValueError for several steps: what one draws
    the next would read."""
    if settings.steps > 1:
        raise Refused(
            "steps", f"is {settings.steps}, and masks are read in one step", "leave it out"
        )
    return replace(settings, samples=1) if settings.samples == "auto" else settings


def _stripped(state: list[StatePiece]) -> list[StatePiece]:
    """The pieces without the white space at both ends."""
    first = [piece.lstrip() if isinstance(piece, str) else piece for piece in state[:1]]
    state = [*first, *state[1:]]
    last = [piece.rstrip() if isinstance(piece, str) else piece for piece in state[-1:]]
    return [*state[:-1], *last]


def _check_room(prefix: int, read: Read, longest: int) -> None:
    need = prefix + len(read.ids) + read.width
    if need > longest:
        names = ", ".join(where_of(target.question) for target in read.targets[:3])
        raise TooLarge(
            None,
            f"{names}: state, question and canvas take {prefix:,} + {len(read.ids):,} + "
            f"{read.width} tokens, and there is room for {longest:,}",
            "shorten the state or the question",
            need,
            longest,
        )
