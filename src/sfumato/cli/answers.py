"""Questions about the rows of a table: what is asked, by one engine a few rows at a time, and the
columns of the answers. Knows no files of rows.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sfumato.cli.rows import Row
from sfumato.cli.terminal import rows_progress
from sfumato.decisions.calibration import Calibration, ModelIdentity, Reading
from sfumato.decisions.question_file import QuestionFile, json_text
from sfumato.decisions.results import Decision, TypedAnswer, shown
from sfumato.decisions.schema import Choice, YesNo
from sfumato.diffusion.constraints.decision_plan import DecisionSettings
from sfumato.diffusion.constraints.questions import Question, ScoreQuestion, YesNoQuestion
from sfumato.engine.errors import EngineDead, NotReady
from sfumato.engine.events import RequestFailed
from sfumato.engine.request import DecisionRequest

if TYPE_CHECKING:
    from sfumato.api import Model
    from sfumato.engine import Engine
    from sfumato.engine.events import Decided, Handle

T = TypeVar("T")
CONTEXT = 4_096  # positions of a slot; a larger one is made for a state that needs it
ERROR = "error"
_DIGITS = 6
_FIELDS = {
    "yes/no": ("answer", "probability"),
    "choice": ("answer", "confidence"),
    "score": ("answer", "score", "confidence"),
}
"""The columns that answers to a kind of question always have."""


@dataclass(frozen=True)
class Asking:
    """Questions of a file, and how they are read."""

    file: QuestionFile
    questions: Mapping[str, Question]  # those of the file that are read
    reading: Reading
    seed: int
    label_mass: bool
    calibration: Calibration | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What `Model.decide`, `DecisionSettings` and `DecisionRequest` take besides the texts."""
        return {**asdict(self.reading), "seed": self.seed, "label_mass": self.label_mass}

    def check(self, model: Model) -> None:
        """Raises ValueError for questions that cannot be asked about any state at all, and for a
        calibration that is not for them."""
        model.plan_decision("", self.questions, DecisionSettings(**self.options))
        if self.calibration is not None:
            self.calibration.check(self.questions, model.identity, self.reading)

    def request(self, row: Row) -> DecisionRequest:
        """The request about a row."""
        return DecisionRequest(row_state(self.file, row.cells), self.questions, **self.options)

    def decision(self, decided: Decided, model: ModelIdentity) -> Decision[dict[str, Any]]:
        """The typed answers to all questions of the file. model: for the calibration."""
        answers = decided.answers
        if self.calibration is not None:
            answers = self.calibration.apply(answers, self.questions, model, self.reading)
        return self.file.schema.decision(answers, decided.usage)

    def columns(self, probabilities: bool) -> Columns:
        """The columns of the answers."""
        kinds = {YesNo: "yes/no", Choice: "choice"}
        named = {name: kinds.get(type(each), "score") for name, each in self.file.questions.items()}
        spread = self.reading.samples != 1 or self.reading.orders > 1
        return Columns(named, probabilities, self.label_mass, spread)


def reading_of(args: argparse.Namespace) -> Reading:
    """How the options say that questions are read."""
    return Reading(args.samples, args.orders, args.order, args.steps, args.joint)


@dataclass(frozen=True)
class Columns:
    """Which columns each question has."""

    questions: Mapping[str, str]  # names, with "yes/no", "choice" or "score"
    probabilities: bool
    label_mass: bool
    spread: bool

    def names(self, table: Collection[str]) -> list[str]:
        """The columns of the answers, to stand behind the columns of the table. Raises ValueError,
        naming the column, where two are the same or the table has it already."""
        made = [*(f"{name}_{field}" for name, field in self._fields()), ERROR]
        name, count = Counter(made).most_common(1)[0]
        if count > 1:
            raise ValueError(f"two columns would have the name {name!r}; rename a question")
        for name in made:
            if name in table:
                raise ValueError(
                    f"the table has a column {name!r} already, where answers would stand; rename "
                    "the column or the question"
                )
        return made

    def _fields(self) -> list[tuple[str, str]]:
        """Each column as its question, and the field of the answer that it shows."""
        more = ["label_mass"] * self.label_mass + ["spread", "order_spread"] * self.spread
        more += ["probabilities"] * self.probabilities
        own = [(name, field) for name, kind in self.questions.items() for field in _FIELDS[kind]]
        return own + [(name, field) for field in more for name in self.questions]

    def cells(self, decision: Decision[Any] | None, error: str) -> dict[str, Any]:
        """The cells of a row. Where there is no decision all are empty but the error."""
        cells = {
            f"{name}_{field}": None if decision is None else _value(decision[name], field)
            for name, field in self._fields()
        }
        return {**cells, ERROR: error or None}


def _value(answer: TypedAnswer, field: str) -> Any:
    """The field of an answer as a plain value."""
    if field == "answer":
        return shown(answer.value)
    if field == "probabilities":
        return {shown(v): round(p, _DIGITS) for v, p in answer.probabilities.items()}
    value = answer.probabilities.get(True) if field == "probability" else getattr(answer, field)
    return None if value is None else round(value, _DIGITS)


def row_state(file: QuestionFile, cells: Mapping[str, Any]) -> str:
    """The state of a row: the file's template filled, or else all columns as JSON, but those that
    have the name of a question: they are labels. Raises ValueError where the template names a
    column that is not there, or nothing is left."""
    if file.state is not None:
        return file.state.fill(cells)
    left = {name: value for name, value in cells.items() if name not in file.questions}
    if not left:
        raise ValueError("every column has the name of a question, so no state is left")
    return json_text(left)


def label_number(question: Question, text: str) -> int | None:
    """The number of the option that a label's cell names; None for an empty cell.

    An option's own name comes first, then other words for yes and no, then a level's number from 0.
    Raises ValueError."""
    text = text.strip()
    if not text:
        return None
    names = [option.name for option in question.options]
    if text in names:
        return names.index(text)
    word = text.lower()
    if isinstance(question, YesNoQuestion):
        for number, words in enumerate((("yes", "true", "1"), ("no", "false", "0"))):
            if word in words:
                return number
    elif isinstance(question, ScoreQuestion) and word in map(str, range(len(names))):
        return int(word)
    raise ValueError(f"{text!r:.80} is none of {', '.join(names)[:200]}")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A row with its answers, or with why there are none."""

    row: T
    decided: Decided | None
    error: str = ""


def outcomes(
    engine: Engine,
    rows: Iterable[T],
    request: Callable[[T], DecisionRequest],
    at_a_time: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome[T]]:
    """Each row's outcome, in order. stopped: when it returns True nothing more comes, and what is
    under way is cancelled. Raises ValueError where the engine does not go on."""
    waiting = iter(rows)
    under_way: deque[tuple[T, Handle[Decided] | str]] = deque()
    try:
        while not stopped():
            while len(under_way) < at_a_time and (row := next(waiting, None)) is not None:
                under_way.append((row, _submitted(engine, request(row))))
            if not under_way:
                return
            row, pending = under_way.popleft()
            try:
                error = pending if isinstance(pending, str) else ""
                outcome = Outcome(
                    row, None if isinstance(pending, str) else pending.result(), error
                )
            except RequestFailed as failed:
                outcome = Outcome(row, None, str(failed))
            if stopped():
                return
            yield outcome
    finally:
        for _, pending in under_way:
            if not isinstance(pending, str):
                pending.cancel()


def _submitted(engine: Engine, request: DecisionRequest) -> Handle[Decided] | str:
    """The request under way, or why it is refused."""
    try:
        return engine.decide(request)
    except ValueError as error:
        return str(error)
    except (EngineDead, NotReady) as error:
        raise ValueError(f"the engine has stopped: {error}; the same command goes on") from error


@contextmanager
def running(model: Model, at_a_time: int) -> Iterator[Engine]:
    """An engine for so many states at a time. Raises ValueError where the memory is too small."""
    from sfumato.engine import EngineConfig, own_engine

    context = min(CONTEXT, model.config.context_length)
    layout = EngineConfig(at_a_time, context, queue=2 * at_a_time)
    engine = own_engine(model, layout, "lower --concurrency, or free some memory").start()
    try:
        yield engine
    finally:
        engine.close(drain_s=0)


def ask_rows(
    args: argparse.Namespace,
    asking: Asking,
    model: Model,
    rows: Iterable[Row],
    total: int,
    before: int = 0,
) -> Iterator[Outcome[Row]]:
    """The outcomes of a table's rows, with their progress on standard error; after Ctrl-C no more
    come. total, before: see `rows_progress`."""
    from sfumato.cli.generation import counted

    with (
        counted() as presses,
        running(model, args.concurrency) as engine,
        rows_progress(total, before) as show,
    ):
        at_a_time = 2 * args.concurrency  # so that none of the engine's slots waits for this thread
        results = outcomes(engine, rows, asking.request, at_a_time, lambda: presses.count > 0)
        for done, outcome in enumerate(results, 1):
            yield outcome
            show(done)
