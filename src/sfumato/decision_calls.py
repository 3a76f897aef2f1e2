"""The calls of a `Model` that answer questions about a state: `decide` and what it stands on.

They are apart from api.py because that file has the calls that write.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from typing import Any, Literal, TypeVar, Unpack, overload

from sfumato.decisions import (
    Calibration,
    Decision,
    DecisionUsage,
    ModelIdentity,
    Reading,
    read_calibration,
    schema_of,
    state_text,
)
from sfumato.decisions.options import DecideOptions
from sfumato.diffusion.constraints.decide import decide
from sfumato.diffusion.constraints.decision_plan import DecisionPlan, plan_decision
from sfumato.diffusion.constraints.decision_progress import DecisionProgress
from sfumato.diffusion.constraints.decision_settings import DecisionSettings
from sfumato.diffusion.constraints.questions import Question
from sfumato.diffusion.constraints.template import ReadTemplate
from sfumato.model.families import Family
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.text_side import TextSide, read_template

T = TypeVar("T")


class DecisionCalls:
    """What `Model` is, among other things."""

    network: Network
    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family
    identity: ModelIdentity

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @overload
    def decide(
        self, state: Any, questions: type[T], **options: Unpack[DecideOptions]
    ) -> Decision[T]: ...

    @overload
    def decide(
        self, state: Any, questions: Mapping[str, Any], **options: Unpack[DecideOptions]
    ) -> Decision[dict[str, Any]]: ...

    def decide(
        self,
        state: Any,
        questions: Any,
        *,
        seed: int = 0,
        samples: int | Literal["auto"] = 1,
        orders: int = 1,
        order: Literal["state", "schema"] = "state",
        steps: int = 1,
        joint: bool = False,
        label_mass: bool = True,
        calibration: Calibration | str | PathLike[str] | None = None,
    ) -> Decision[Any]:
        """Answers questions about a state with probabilities, without writing text.

        state: a text, or a dict or list, which is read as JSON. questions: a mapping of names to
        bool, Literal, an Enum, `YesNo`, `Choice` or `Score`, or a pydantic model whose fields are
        such; a question without instructions is asked by its name. calibration: of `sfumato
        calibrate`, or the path of its file. `DecisionSettings` says what the others mean.
        Raises ValueError, naming the question or the argument, for what cannot be done, OSError for
        a calibration that cannot be read.
        """
        schema, text = schema_of(questions), state_text(state)
        settings = DecisionSettings(seed, samples, orders, steps, joint, order, label_mass)
        plan = self.plan_decision(text, schema.questions, settings)
        reading = Reading(samples, orders, order, steps, joint)
        if isinstance(calibration, str | PathLike):
            calibration = read_calibration(calibration)
        if calibration is not None:  # what it does not hold for is refused before it is read
            calibration.check(schema.questions, self.identity, reading)
        progress = decide(self.network, plan)
        answers = progress.answers()
        if calibration is not None:
            answers = calibration.apply(answers, schema.questions, self.identity, reading)
        usage = DecisionUsage(len(plan.prefix) + plan.question_tokens, 0, progress.canvases)
        return schema.decision(answers, usage)

    @cached_property
    def read_template(self) -> ReadTemplate:
        """How this model reads questions. Raises ValueError where its tokenizer or chat template
        cannot."""
        text = TextSide(self.tokenizer, self.template)
        return read_template(text, self.family.reads, self.config)

    def plan_decision(
        self,
        state: str,
        questions: Mapping[str, Question],
        settings: DecisionSettings | None = None,
        longest: int | None = None,
    ) -> DecisionPlan:
        """All checks of a decision, for `read_questions` and for the engine. longest: positions
        that a state and a question can have; None: the model's context. Raises as
        `sfumato.diffusion.constraints.decision_plan.plan_decision` does."""
        most = self.config.context_length
        room = most if longest is None else min(longest, most)
        return plan_decision(
            self.read_template, state, questions, settings or DecisionSettings(), room
        )

    def read_questions(
        self,
        state: str,
        questions: Mapping[str, Question],
        settings: DecisionSettings | None = None,
    ) -> DecisionProgress:
        """Reads questions about a state, without an engine: `answers()` of what it returns gives
        the answers by id. Raises as `plan_decision` does."""
        return decide(self.network, self.plan_decision(state, questions, settings))
