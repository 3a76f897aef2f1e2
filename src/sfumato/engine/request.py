"""What clients of an engine make and see: requests, and the model that it serves.

A request is for a reply, a text with holes, a decision, or a task of any kind. Loads no torch, and
nothing here has a network or a tensor, so that an engine may live in another process one day. Knows
no slots and no threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from sfumato.api import Model
    from sfumato.decisions import State
    from sfumato.diffusion.canvas import GivenCanvas
    from sfumato.diffusion.constraints.call_grammar import Source
    from sfumato.diffusion.constraints.hole import Part
    from sfumato.diffusion.constraints.questions import Question
    from sfumato.diffusion.limits import Verify
    from sfumato.diffusion.prediction import PredictedText
    from sfumato.diffusion.sampler_config import SamplerConfig
    from sfumato.media.patches import Cut
    from sfumato.model.model_config import ModelConfig
    from sfumato.tasks.wants import Pooling, PromptScoring
    from sfumato.tasks.works import Prompt
    from sfumato.text.reply import Stop
    from sfumato.text.template import ChatTemplate
    from sfumato.text.tokenizer import Tokenizer
    from sfumato.text_side import PictureTokens


def new_id(kind: str = "req") -> str:
    return f"{kind}-{secrets.token_hex(8)}"


_NO_CALL: Mapping[str, str] = {}
CALL: ContextVar[Mapping[str, str]] = ContextVar("sfumato_call", default=_NO_CALL)
"""What the audit says of the call that is being answered, by name: headers. The requests that are
made in its context take it with them, those that are refused before they are complete too."""


@dataclass(frozen=True, kw_only=True)
class AnyRequest:
    """What all requests have. By itself, a request for a task that its caller has made."""

    seed: int | None = None  # None: drawn at random; the account has it
    max_tokens: int = 0
    adapter: str | None = None  # the name of the one that answers; None: the model alone
    timeout_s: float | None = None  # from `since`; None: the engine's own
    since: float | None = None  # when the client sent it, by `Engine.now`; None: at its submission
    id: str = field(default_factory=new_id)
    endpoint: str = "api"  # where it came in, for the audit
    user: str | None = None  # whose it is, for the audit
    call: Mapping[str, str] = field(default_factory=CALL.get, compare=False)  # see `CALL`
    # Whether each event goes to the client at once: what has begun then cannot run again elsewhere.
    streams: bool = False
    background: bool = False  # whether it yields to requests that do not; see `Scheduler`

    def texts(self) -> dict[str, Any]:
        """What it asks, as plain values, for the audit; nothing where only the task knows."""
        return {}


@dataclass(frozen=True)
class Request(AnyRequest):
    """A request for one reply. Exactly one of prompt, messages and ids; `Model.stream` says what
    the fields mean that it has too."""

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    ids: Sequence[int] | None = None  # the prompt's tokens as they are, without a chat template
    made: Prompt | None = None  # from `Engine.prompt`, if it was called
    sampler: SamplerConfig | None = None
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    stop: Stop = None
    continued: str | None = None  # the reply's beginning, which the prompt ends in
    opening: str | None = None  # text, markers included, that the reply begins with
    max_thinking_tokens: int | None = None  # None: what leaves room for an answer
    retry_empty: bool = True  # an answer that settles as nothing is drawn again
    grammar: Source | None = None  # what the answer, or its calls, have to match
    canvas: GivenCanvas | None = None  # what the first canvas begins as; instead of an opening
    parts: Sequence[Part] | None = None  # of a text with holes, which follows the prompt
    prediction: PredictedText | None = None  # what the reply is expected to be
    verify: Verify | None = None  # what a second reader does
    drafts: bool = False  # whether Draft events are wanted
    # Whether the prompt's tokens are scored, in causal mode; max_tokens may then be 0.
    scoring: PromptScoring | None = None
    pooling: Pooling | None = None  # of the prompt's hidden states; max_tokens is then 0
    max_tokens: int = field(default=256, kw_only=True)

    def texts(self) -> dict[str, Any]:
        """What it asks, as plain values, for the audit."""
        texts = {
            "prompt": self.prompt,
            "messages": None if self.messages is None else without_pixels(list(self.messages)),
            "ids": None if self.ids is None else list(self.ids),
            "continued": self.continued,
            "opening": self.opening,
            "parts": None if self.parts is None else [_part(part) for part in self.parts],
            "prediction": None if self.prediction is None else self.prediction.text,
        }
        return {name: value for name, value in texts.items() if value is not None}


def without_pixels(value: Any) -> Any:
    """Messages in which a picture that was read is its hash."""
    if isinstance(value, Mapping):
        return {
            name: getattr(item, "key", item) if name == "patches" else without_pixels(item)
            for name, item in value.items()
        }
    return [without_pixels(item) for item in value] if isinstance(value, list) else value


def _part(part: Part) -> str | dict[str, Any]:
    """A text, or what a hole has."""
    if isinstance(part, str):
        return part
    return {name: value for name, value in asdict(part).items() if value is not None}


@dataclass(frozen=True)
class DecisionRequest(AnyRequest):
    """Questions about one state; `DecisionSettings` says what the fields mean that it has too."""

    state: State
    questions: Mapping[str, Question]  # by id, which never reaches the model
    samples: int | Literal["auto"] = 1
    orders: int = 1
    steps: int = 1
    joint: bool = False
    order: Literal["state", "schema"] = "state"
    label_mass: bool = True
    verify: Literal["abstain"] | None = None
    seed: int = field(default=0, kw_only=True)
    id: str = field(default_factory=partial(new_id, "dec"), kw_only=True)

    def texts(self) -> dict[str, Any]:
        """What it asks, as plain values, for the audit."""
        questions = {str(name): asdict(each) for name, each in self.questions.items()}
        state = self.state if isinstance(self.state, str) else without_pixels(list(self.state))
        return {"state": state, "questions": questions}


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as clients of its engine see it. Hashed by identity."""

    name: str  # of its file or folder
    packaged: str | None  # its name, if it comes with Sfumato; None: it is another
    family: str  # as people write it
    device: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    sampler_defaults: SamplerConfig
    end_ids: tuple[int, ...]
    written: float | None = None  # when its weights were, in seconds since 1970
    nbytes: int | None = None  # of its files of weights
    undecided: str | None = None  # why it cannot answer questions; None: it can
    cut: Cut | None = None  # how its pictures are cut; None: it reads none
    pictures: PictureTokens | None = None  # how a prompt has them

    @classmethod
    def of(cls, model: Model) -> ServedModel:
        """For the process that has the model."""
        return cls(
            model.path.name,
            model.packaged,
            model.family.title,
            str(model.network.device),
            model.config,
            model.tokenizer,
            model.template,
            model.sampler_defaults,
            model.end_ids,
            *_files(model.path),
            _undecided(model),
            *((model.cut, model.text.pictures) if model.reads_pictures else ()),
        )


def _undecided(model: Model) -> str | None:
    """Why no question can be read with this model: what its tokenizer or chat template lacks."""
    try:
        _ = model.read_template
    except ValueError as error:
        return str(error)
    return None


def _files(path: Path) -> tuple[float | None, int | None]:
    """When the newest file of weights was written, and bytes of all; None where the files are
    gone."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        states = [file.stat() for file in files or [path]]
    except OSError:
        return None, None
    return max(state.st_mtime for state in states), sum(state.st_size for state in states)
