"""`load()` makes one `Model` of a checkpoint: its network, its text side and its defaults.

The entry point of the library, where ids (`diffusion/`) and text (`text/`) meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from inspect import Parameter, signature
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Never, TypeVar, Unpack, overload

import torch
from torch import Tensor

from sfumato import catalog, embedded_questions, hub
from sfumato.decisions import (
    Calibration,
    Decision,
    DecisionUsage,
    ModelIdentity,
    State,
    read_calibration,
    schema_of,
    state_of,
)
from sfumato.decisions.calibration import DecideOptions
from sfumato.device_trial import try_device, try_network
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults
from sfumato.diffusion.checks import check_causal, check_tensor, check_verify
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.decision_plan import (
    DecisionPlan,
    DecisionSettings,
    StatePiece,
    plan_decision,
)
from sfumato.diffusion.constraints.filling import Filled
from sfumato.diffusion.constraints.grammar import schema_of_type, schema_source
from sfumato.diffusion.constraints.hole import Part
from sfumato.diffusion.constraints.questions import Answer, Question
from sfumato.diffusion.constraints.read_template import ReadTemplate
from sfumato.diffusion.limits import Limits, ReplyPlan, Stats, Verify, plan_reply
from sfumato.diffusion.prediction import PredictedText
from sfumato.diffusion.sampler_config import SamplerConfig, check_sampler
from sfumato.media.fetch import PORTS, fetch
from sfumato.media.part import source_of
from sfumato.media.patches import BUDGETS, Cut, Patches
from sfumato.media.picture import Limits as PictureLimits
from sfumato.model.adapter_files import read_adapter
from sfumato.model.adapters import Adapter
from sfumato.model.cache import KVCache
from sfumato.model.families import Family, family_of, open_checkpoint
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.loading import (
    Progress,
    config_of,
    expected_shapes,
    faster_other_layers,
    fits_float16,
    load_network,
    skeleton,
)
from sfumato.model.model_config import ModelConfig
from sfumato.model.named_adapters import NamedAdapter, NamedAdapters
from sfumato.model.network import Network
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantization import quantized_on_load
from sfumato.model.vision.loading import Tower, find_tower, load_tower
from sfumato.model.vision.loading import fits_float16 as tower_fits_float16
from sfumato.model.vision.loading import skeleton as tower_skeleton
from sfumato.model.vision.mask import IMAGE_MASKS, ImageMask
from sfumato.ops.registry import check_off, has_twins
from sfumato.options import exclusions
from sfumato.options.limits import MOST_STEPS
from sfumato.refused import Refused
from sfumato.tasks.alone import alone, finish
from sfumato.tasks.decide import Answers, DecideTask
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt
from sfumato.text.messages import PictureParts
from sfumato.text.prompt import prompt_ids, rewritten
from sfumato.text.reply import Stop, region_after
from sfumato.text_side import (
    EDIT_ROOM,
    Done,
    Fills,
    ModelGrammars,
    Reply,
    Settled,
    TextSide,
    Transcript,
    edit_message,
    end_ids,
    load_text,
    read_template,
)
from sfumato.weights.checkpoint import Checkpoint, fingerprint
from sfumato.weights.errors import CheckpointError, quoted
from sfumato.weights.files.tensorfile import FileSizes

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _takes_options_of(other: Callable[..., object]) -> Callable[[F], F]:
    """Makes `help` show a method, which passes its options on to another, with what that one's help
    says of them."""

    def decorate(method: F) -> F:
        parameters = signature(other).parameters.values()
        shown = [each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
        method.__signature__ = signature(method).replace(parameters=shown)  # type: ignore[attr-defined]
        _, blank, options = (other.__doc__ or "").partition("\n\n")
        method.__doc__ = f"{method.__doc__}{blank}{options}"
        return method

    return decorate


class Model:
    """A loaded checkpoint. One thread at a time."""

    def __init__(
        self,
        network: Network,
        text: TextSide,
        sampler_defaults: SamplerConfig,
        end_ids: tuple[int, ...],
        path: Path,
        family: Family,
        load_s: float = 0.0,
        identity: ModelIdentity | None = None,
    ) -> None:
        """identity: None for weights that are of no file, which their path then stands for."""
        self.network, self.sampler_defaults, self.end_ids = network, sampler_defaults, end_ids
        self.text, self.tokenizer, self.template = text, text.tokenizer, text.template
        self.path, self.load_s, self.family = path, load_s, family
        self.identity = identity or ModelIdentity(path.name, path.name, "", "", "")
        self.adapters = NamedAdapters(network)

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    def load_adapter(self, name: str, path: str | PathLike[str]) -> NamedAdapter:
        """Loads an adapter, a folder of PEFT or a GGUF file, which calls then may name. Where an
        engine runs the model, use the engine's method. Raises ValueError, naming the file and what
        is wrong in it."""
        return self.adapters.attach(name, self.read_adapter(path), str(path))

    def with_adapters(self, paths: Mapping[str, str | PathLike[str]]) -> Model:
        """The model, once these adapters are loaded too, by their names."""
        for name, path in paths.items():
            self.load_adapter(name, path)
        return self

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter. Raises ValueError where there is none of that name."""
        self.adapters.detach(self.adapters.take_off(name).number)

    def read_adapter(self, path: str | PathLike[str]) -> Adapter:
        """An adapter for this network, which is not attached yet. Raises as `load_adapter`."""
        if not isinstance(path, str | PathLike) or path == "":
            raise Refused("path", f"must name a folder or a GGUF file, got {path!r:.99}")
        return read_adapter(Path(path), self.family, self.config).changes

    def __repr__(self) -> str:
        config, network = self.config, self.network
        dtype = str(network.dtype).removeprefix("torch.")
        return (
            f"Model({self.path.name}, {self.family.title}: {len(config.layers)} layers of "
            f"{config.hidden_size}, canvas {config.canvas_length}, context "
            f"{config.context_length:,}, {dtype} on {network.device})"
        )

    def stream(
        self,
        prompt: str | Messages | None = None,
        *,
        messages: Messages | None = None,
        max_tokens: int = 256,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Stop = None,
        prediction: PredictedText | None = None,
        mode: Literal["canvas", "causal"] | None = None,
        schema: Any = None,
        adapter: str | None = None,
        verify: Verify | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        **unknown: Never,
    ) -> Iterator[Draft | Settled | Done]:
        """Drafts at every denoising step, a `Settled` for every canvas, then one `Done`.

        prompt: a text, or messages; max_tokens: visible tokens at most; seed: 0..2⁶⁴-1; sampler:
        what is None in it is the checkpoint's; tools: declarations as JSON schemas; stop: strings
        that end the reply and are not part of it (inside a thought they are text like any other),
        or special tokens, each as a `sfumato.text.tokenizer.Marker`; prediction: a text that the
        reply is expected to resemble, which its canvases begin as; mode: "causal" writes one token
        after another, each of them a canvas of its own in the events (None: the sampler's); schema:
        a pydantic model, or a JSON schema as a dict, that the answer matches as JSON (its thought
        is free), and that `Reply.parsed` reads it by; adapter: the name of one that was loaded,
        which replies (None: the model alone); verify: "report" lets the causal mode read what the
        canvases have written, for `Reply.verification` and `Settled.verification`, and "abstain"
        calls a short answer that it doubts undecided too; cancelled: called before every step and
        every chunk of a prefill, True ends the reply with what is committed.
        Raises ValueError, naming the argument, for what cannot be done, and TypeError for an
        argument that there is not. The stream itself raises FloatingPointError where the model's
        scores are no numbers, and ValueError where a sampler or processor returns a wrong tensor.
        """
        _check_arguments(cancelled, unknown)
        made = self.make_prompt(prompt, messages, thinking=thinking, tools=tools)
        if mode is not None:
            check_sampler(sampler)
            sampler = replace(sampler or SamplerConfig(), mode=mode)
        source = None if schema is None else schema_source(schema_of_type(schema))
        if source is not None:
            exclusions.check(exclusions.GRAMMAR, {"grammar": source, "prediction": prediction})
            made = made.followed_by([] if thinking else self.fills.empty_thought)
        # What cannot be done is refused by this call, and not by the first `next`.
        given = made.ids, max_tokens, seed, sampler, stop, cancelled
        how: dict[str, Any] = {"source": source, "thinking": thinking, "verify": verify}
        plan, transcript = self.plan_reply(*given, **how)
        plan = self.fills.with_prediction(plan, prediction, thinking)
        make = partial(Canvas.of, network=self.network)
        task = ReplyTask(plan, made, make, text=transcript)
        number = self.adapters.number(adapter)
        return _reply_events(alone(self.network, task, cancelled, number), schema)

    @_takes_options_of(stream)
    def generate(
        self,
        prompt: str | Messages | None = None,
        *,
        messages: Messages | None = None,
        **options: Any,
    ) -> Reply:
        """The reply to a prompt or a conversation; the arguments are those of `stream`."""
        return _last(self.stream(prompt, messages=messages, **options), Done).reply

    def plan_reply(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        seed: int,
        sampler: SamplerConfig | None = None,
        stop: Stop = None,
        cancelled: Callable[[], bool] = lambda: False,
        most_steps: int = MOST_STEPS,
        source: Source | None = None,
        thinking: bool = False,
        verify: Verify | None = None,
    ) -> tuple[ReplyPlan, Transcript]:
        """All checks of a reply to a prompt of these ids, for `stream` and for the engine.
        most_steps: denoising steps per canvas; source: what the reply has to match; thinking:
        whether a thought may come before that; verify: as in `stream`. Raises ValueError, naming
        the argument, for what cannot be done."""
        check_sampler(sampler)
        config = (sampler or SamplerConfig()).over(self.sampler_defaults)
        constraint, markers = None, self.template.markers
        begins = region_after(prompt, self.tokenizer, markers)
        check_verify(verify, self.config)
        given = {f"mode={config.mode}": True, f"verify={verify}": True, "grammar": source}
        exclusions.check(exclusions.VERIFY, given | {"verify": verify})
        if source is not None:
            exclusions.check(exclusions.GRAMMAR, {**config.beside_grammar, "stop": stop})
            constraint = self.grammars.constraint(source, thinking, begins)
        transcript = Transcript(self.tokenizer, markers, stop, config.ignore_eos, begins)
        limits = Limits(max_tokens, self.end_ids, transcript.cut, cancelled)
        plan = plan_reply(self.network, len(prompt), config, limits, seed, most_steps)
        return replace(plan, constraint=constraint, verify=verify), transcript

    @cached_property
    def grammars(self) -> ModelGrammars:
        """Grammars over this model's vocabulary."""
        return ModelGrammars(self.text, self.end_ids)

    def prompt_ids(
        self,
        prompt: str | Messages | None = None,
        messages: Messages | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the chat prompt for a user's text, or for messages."""
        return self.make_prompt(prompt, messages, thinking=thinking, tools=tools).ids

    def make_prompt(
        self,
        prompt: str | Messages | None = None,
        messages: Messages | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> Prompt:
        """The chat prompt for a user's text, or for messages, with their pictures. check: see
        `sfumato.text.prompt.prompt_ids`."""
        if (prompt is None) == (messages is None):
            raise Refused(("prompt", "messages"), "give exactly one of them")
        if isinstance(prompt, list | tuple):
            messages = prompt
        elif messages is None:
            messages = [{"role": "user", "content": prompt}]
        parts: PictureParts | None = [] if self.reads_pictures else None
        messages, notes = rewritten(self.template, messages, tools, check, parts is not None)
        ids = prompt_ids(
            self.template,
            self.tokenizer,
            messages,
            thinking=thinking,
            tools=tools,
            check=check,
            pictures=parts,
        )
        if not parts:
            return Prompt(ids, (), notes=notes)
        assert self.text.pictures is not None
        placed = self.text.pictures.placed(ids, [self.patches(part, at) for at, part in parts])
        return replace(placed, notes=notes)

    @property
    def packaged(self) -> str | None:
        """The name of a model that comes with Sfumato; None: it is another."""
        return catalog.packaged_name(self.path)

    @property
    def reads_pictures(self) -> bool:
        """Whether there are a tower, and a token that a template writes for a picture."""
        return self.network.tower is not None and self.text.pictures is not None

    @property
    def cut(self) -> Cut:
        """How pictures are cut for the model's tower. Raises Refused where it has none."""
        tower = self.network.tower if self.reads_pictures else None
        if tower is None:
            raise Refused(None, "this model reads no pictures", "load its mmproj file too")
        config = tower.config
        most = min(config.positions // config.pool, BUDGETS[-1])
        return Cut(config.patch, config.pool, min(config.soft_tokens, most), most)

    def patches(self, part: Mapping[str, Any], field: str) -> Patches:
        """The picture of a part of a message, which errors call `field`: its "patches", where a
        caller has read it already."""
        if isinstance(given := part.get("patches"), Patches):
            return given
        source, limits = source_of(part, field), PictureLimits()
        content = None
        if source.scheme in PORTS:
            content = fetch(str(source.given), ("*",), limits.nbytes, source.field)
        return source.patches(self.cut, limits, content)

    def fill(
        self,
        parts: Sequence[Part],
        *,
        messages: Messages | None = None,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        adapter: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Filled:
        """The text with its holes filled: `model.fill(["I am ", Hole(6), "."])`.

        parts: texts and holes. messages: a conversation that the text is the complete reply to;
        None: the text stands by itself, and may be a part of a longer one. The given texts come
        back unchanged. End tokens and markers never stand in a hole. What comes after the last
        hole is cut where it does not fit the canvas, which a warning says. adapter: as in
        `stream`. cancelled: called before every step; True raises `sfumato.text_side.Cancelled`.
        Raises ValueError, naming the argument, for what cannot be done.
        """
        events = self.stream_fill(
            parts,
            messages=messages,
            seed=seed,
            sampler=sampler,
            adapter=adapter,
            cancelled=cancelled,
        )
        return _last(events, Filled)

    def stream_fill(
        self,
        parts: Sequence[Part],
        *,
        messages: Messages | None = None,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        adapter: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Draft | Filled]:
        """The same with a draft at every denoising step before the filled text. Where several
        lengths are tried, the drafts are those of the longest; `Draft.canvas` counts rounds."""
        check_sampler(sampler)
        is_reply, prompt = messages is not None, Prompt(self.fills.no_prompt, ())
        if is_reply:
            prompt = self.make_prompt(messages=messages)
            prompt.ids.extend(self.fills.empty_thought)
        plan = self.fills.plan(prompt.ids, parts, is_reply=is_reply, seed=seed, sampler=sampler)
        return self.fills.stream(plan, cancelled, prompt, self.adapters.number(adapter))

    def edit(
        self,
        text: str,
        instruction: str,
        *,
        pictures: Sequence[Mapping[str, Any]] = (),
        strength: float | None = None,
        **options: Any,
    ) -> Reply:
        """The reply that has the text as the instruction changes it. pictures: parts of messages
        that the instruction is about. The reply's canvases begin as the text; strength: the share
        of their positions that begins as noise instead, by default 0.5. options: those of
        `stream`; max_tokens is by default twice the text's tokens, and 64 more.
        Raises ValueError, naming the argument."""
        for name, value in (("text", text), ("instruction", instruction)):
            if not isinstance(value, str) or not value.strip():
                raise Refused(name, f"must be text that is not empty, got {quoted(value)}")
        if "max_tokens" not in options:
            tokens = len(self.tokenizer.encode(text, special=False))
            options["max_tokens"] = 2 * tokens + EDIT_ROOM
        prediction = PredictedText(text) if strength is None else PredictedText(text, strength)
        messages = [edit_message(text, instruction, pictures)]
        return self.generate(messages=messages, prediction=prediction, **options)

    @cached_property
    def fills(self) -> Fills:
        """What plans and reads fills, for the engine too."""
        return Fills(self.network, self.text, self.family, self.sampler_defaults, self.end_ids)

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
        verify: Literal["abstain"] | None = None,
        calibration: Calibration | str | PathLike[str] | None = None,
        adapter: str | None = None,
    ) -> Decision[Any]:
        """Answers questions about a state with probabilities, without writing text.

        state: a text; a dict or list, which is read as JSON; or, with pictures, a list of parts
        {"type": "text", "text": …} and {"type": "image", …} as messages have them. questions: a
        mapping of names to bool, Literal, an Enum, `YesNo`, `Choice` or `Score`, or a pydantic
        model whose fields are such; a question without instructions is asked by its name.
        calibration: of `sfumato calibrate`, or the path of its file; adapter: as in `stream`, and
        not beside a calibration. `DecisionSettings` says what the others mean, of which
        order="schema" goes with no picture.
        Raises ValueError, naming the question or the argument, for what cannot be done, OSError for
        a calibration that cannot be read.
        """
        schema, shown = schema_of(questions), state_of(state)
        settings = DecisionSettings(samples, orders, order, steps, joint, seed, label_mass, verify)
        plan = self.plan_decision(shown, schema.questions, settings)
        if isinstance(calibration, str | PathLike):
            calibration = read_calibration(calibration)
        if calibration is not None:  # what it does not hold for is refused before it is read
            calibration.check(schema.questions, self.identity, settings)
        exclusions.check(exclusions.DECISION, {"calibration": calibration, "adapter": adapter})
        number = self.adapters.number(adapter)
        read: Answers = finish(alone(self.network, DecideTask(plan), adapter=number))
        answers = read.answers
        if calibration is not None:
            answers = calibration.apply(answers, schema.questions, self.identity, settings)
        usage = DecisionUsage(len(plan.prefix) + plan.question_tokens, 0, read.reads)
        return schema.decision(answers, usage)

    @cached_property
    def read_template(self) -> ReadTemplate:
        """How this model reads questions. Raises ValueError where its tokenizer or chat template
        cannot."""
        return read_template(self.text, self.family.reads, self.config)

    def plan_decision(
        self,
        state: State,
        questions: Mapping[str, Question],
        settings: DecisionSettings | None = None,
        longest: int | None = None,
    ) -> DecisionPlan:
        """All checks of a decision, for `read_questions` and for the engine. longest: positions
        that a state and a question can have; None: the model's context. Raises as
        `sfumato.diffusion.constraints.decision_plan.plan_decision` does."""
        most = self.config.context_length
        room = most if longest is None else min(longest, most)
        how = settings or DecisionSettings()
        if how.verify is not None:
            check_causal(self.config, "verify")
        return plan_decision(self.read_template, self._pieces(state), questions, how, room)

    def _pieces(self, state: State) -> str | list[StatePiece]:
        """The text of a state, or its pieces where it has pictures. Raises Refused, naming the
        part."""
        parts = state if isinstance(state, str) else state_of(state)
        if isinstance(parts, str):
            return parts
        pieces = list[StatePiece]()
        for i, part in enumerate(parts):
            if part["type"] == "image":
                where, tokens = str(part.get("field", f"state[{i}]")), self.text.pictures
                if self.network.tower is None or tokens is None:
                    raise Refused(where, "this model reads no pictures", "load its mmproj file too")
                pieces.append(tokens.shown(self.patches(part, f"state[{i}]")))
            elif pieces and isinstance(last := pieces[-1], str):
                pieces[-1] = last + part["text"]
            else:
                pieces.append(part["text"])
        return pieces

    def read_questions(
        self,
        state: State,
        questions: Mapping[str, Question],
        settings: DecisionSettings | None = None,
    ) -> Mapping[str, Answer]:
        """The answers to questions about a state, by id, without an engine. Raises as
        `plan_decision` does."""
        plan = self.plan_decision(state, questions, settings)
        read: Answers = finish(alone(self.network, DecideTask(plan)))
        return read.answers

    def new_cache(self, rows: int = 1, capacity: int = 4096) -> KVCache:
        """An empty cache: a slot of `capacity` positions for each row. Raises ValueError where
        that is more than the device's memory."""
        return self.network.new_cache(rows, capacity)

    def encode(self, ids: Tensor, cache: KVCache, lengths: Tensor | None = None) -> None:
        """Appends tokens to the cache: ids int64 [rows, n], of which lengths int64 [rows] count
        (None: all). Raises ValueError naming the argument, as the other raw calls do."""
        rows = len(cache)
        check_tensor(ids, "ids: for this cache must be", torch.int64, (rows, "n"))
        if lengths is not None:
            check_tensor(lengths, "lengths: must be", torch.int64, (rows,))
        ends = [ids.shape[1]] * rows if lengths is None else lengths.tolist()
        if not all(0 <= end <= ids.shape[1] for end in ends):
            raise Refused("lengths", f"must lie in 0..{ids.shape[1]}, got {ends}")
        self.network.encode([row[:end] for row, end in zip(ids, ends, strict=True)], cache)

    @torch.no_grad()
    def denoise_logits(self, canvas: Tensor, cache: KVCache, soft: Tensor | None = None) -> Tensor:
        """canvas int64 [rows, length], soft [rows, length, hidden] or None (first step) →
        float32 [rows, length, vocab], softcapped, before temperature."""
        rows = len(cache)
        check_tensor(canvas, "canvas: for this cache must be", torch.int64, (rows, "length"))
        if soft is not None:
            check_tensor(soft, "soft: must be", None, (*canvas.shape, self.config.hidden_size))
            if not soft.isfinite().all():
                raise Refused("soft", "must be finite, but NaN or infinity is in it")
        self.network.check_ids(canvas.flatten(), "canvas")
        hidden = self.network.denoise(list(canvas), cache, None if soft is None else list(soft))
        return self.network.head.logits(hidden).view(*canvas.shape, -1)

    @torch.no_grad()
    def soft_embedding(self, processed_logits: Tensor) -> Tensor:
        """Float [rows, length, vocab], after temperature → [rows, length, hidden]."""
        shape = ("rows", "length", self.config.vocab_size)
        check_tensor(processed_logits, "processed_logits: must be", None, shape)
        if not processed_logits.amax(dim=-1).isfinite().all():
            raise Refused(
                "processed_logits",
                "must hold no NaN and no +inf, and a token that is not -inf at every position",
            )
        return self.network.head.soft_embedding(processed_logits, self.network.dtype)


def _reply_events(
    run: Generator[Draft | Settled, None, Reply], schema: Any
) -> Iterator[Draft | Settled | Done]:
    reply = yield from run
    yield Done(replace(reply, schema=schema))


def _last(events: Iterator[object], kind: type[T]) -> T:
    """The event of a kind with which a stream ends."""
    return next(event for event in events if isinstance(event, kind))


def _check_arguments(cancelled: object, unknown: Collection[str]) -> None:
    """Raises messages that say more than Python's own would."""
    if unknown:
        name = next(iter(unknown))
        settings = {field.name for field in fields(SamplerConfig)}
        hint = f"sampler=SamplerConfig({name}=...)" if name in settings else "help(Model.stream)"
        raise TypeError(f"{name}: is no argument of generate() or stream(); see {hint}")
    if not callable(cancelled):
        raise Refused(
            "cancelled",
            "must be a function that returns True to end the reply, such as an Event's "
            f"is_set, got {cancelled!r}",
        )


def load(
    path: str | PathLike[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
    activations: str = "int8",
    quantize: str | None = None,
    cache_type: str | None = None,
    experts_on_cpu: int = 0,
    gpu_layers: int | None = None,
    split: Sequence[int] | None = None,
    other_layers: str = "auto",
    mmproj: str | PathLike[str] | None = None,
    image_mask: ImageMask = "model",
    adapters: Mapping[str, str | PathLike[str]] | None = None,
) -> Model:
    """Loads a checkpoint, file, folder or name of what was pulled; None is the embedded model.

    device: "auto" or a torch device; dtype: "auto", "float32", "bfloat16" or "float16", or
    torch's own, for activations, cache and unquantized weights; activations: what they become on a
    CPU for products with quantized weights, "int8" or, more exact and slower, "bf16"; quantize:
    "q4_k", "q8_0" or "fp8", what float matrices become while they are loaded (and what takes fewer
    bits badly, as in a converted file, a larger format; "fp8" leaves that as it is); what the file
    has quantized already stays as it is; cache_type: "bf16", "fp8" or "q8_0", as which keys and
    values are stored (None: as the model's dtype says); experts_on_cpu: of how many of the first
    layers the experts stay in the host's memory and compute there, for a small card; gpu_layers:
    how many of the last layers are on the card, with keys and values, while the first ones are
    `other_layers` (None: all); split: how many of these each of several cards has, the device and
    those numbered after it; other_layers: what runs the others, "cpu", "stream" (copied to the
    card), "auto" (a trial); mmproj: a GGUF file with the vision tower (None: safetensors' own, or
    the mmproj file beside a GGUF file; "none": no tower); image_mask: what soft tokens see, as the
    model was trained ("model") or as `generate` of `transformers` has it ("transformers");
    adapters: folders of PEFT or GGUF files of adapters, by the names that calls give them.
    Raises CheckpointError, ConfigError or ValueError, naming the file, field or argument."""
    start, checkpoint = time.perf_counter(), _opened(path)
    # What fails fast comes first, and all of it before the weights.
    check_off()
    config = config_of(checkpoint)
    checkpoint.check_tensors(expected_shapes(config))
    target, counts = pick_device(device), (experts_on_cpu, gpu_layers, split)
    placement = _placed(config, target, *counts, other_layers)
    if quantize is not None:
        checkpoint = quantized_on_load(checkpoint, quantize, target)
    weights, kind = fingerprint(checkpoint), pick_dtype(dtype, checkpoint, target)
    defaults, text = checkpoint_defaults(checkpoint), _fitting_text(checkpoint, config)
    opened = _opened_tower(checkpoint, config, text, mmproj, image_mask)
    if not has_twins(target):
        try_device(target, catalog.EMBEDDED)
    if placement.leaves_layers and other_layers == "auto":
        trial = checkpoint, config, target, kind, activations, cache_type
        placement = _placed(config, target, *counts, faster_other_layers(*trial))
    options = progress, activations, cache_type, placement
    network = _loaded(checkpoint, target, kind, dtype == "auto", *options)
    network.image_mask = image_mask
    _load_tower(network, opened, checkpoint, activations, dtype == "auto")
    ends, family = end_ids(checkpoint, network.config, text.tokenizer), family_of(checkpoint)
    names = _identity(checkpoint, weights, network, cache_type)
    identity = ModelIdentity(*names, activations, quantize or "", _sight(opened, image_mask))
    given = text, defaults, ends, checkpoint.path, family, time.perf_counter() - start, identity
    return Model(network, *given).with_adapters(adapters or {})


def load_outline(
    path: str | PathLike[str] | None = None, mmproj: str | PathLike[str] | None = None
) -> Model:
    """A model that makes prompts and checks requests as `load` makes it, and has no weights: its
    network is on torch's device "meta". For a process whose engine is in another one. The arguments
    are those of `load`, and so is what it raises."""
    checkpoint = _opened(path)
    config = config_of(checkpoint)
    defaults, text = checkpoint_defaults(checkpoint), _fitting_text(checkpoint, config)
    opened = _opened_tower(checkpoint, config, text, mmproj, "model")
    network = Network(skeleton(config), torch.device("meta"), torch.float32)
    network.tower = None if opened is None else tower_skeleton(opened[0])
    ends = end_ids(checkpoint, config, text.tokenizer)
    return Model(network, text, defaults, ends, checkpoint.path, family_of(checkpoint))


def _loaded(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, chosen: bool, *options: Any
) -> Network:
    """The network. chosen: whether its dtype was, for its speed: float32 where float16 is too
    narrow."""
    network = load_network(checkpoint, device, dtype, *options)
    if chosen and dtype == torch.float16 and not fits_float16(network):
        del network
        network = load_network(checkpoint, device, torch.float32, *options)
    try_network(network)
    return network


def _opened_tower(
    checkpoint: Checkpoint,
    config: ModelConfig,
    text: TextSide,
    mmproj: str | PathLike[str] | None,
    image_mask: str,
) -> Tower | None:
    """The tower that the model reads pictures with, not loaded; None where it reads none. Raises
    ValueError, naming the file or the argument."""
    if image_mask not in IMAGE_MASKS:
        raise Refused("image_mask", f"{image_mask!r} is none of {', '.join(IMAGE_MASKS)}")
    if not isinstance(mmproj, str | PathLike | None) or mmproj == "":
        raise Refused("mmproj", f"must name a GGUF file, got {mmproj!r}")
    if text.pictures is None and mmproj is None:
        return None
    opened = find_tower(checkpoint, config.hidden_size, mmproj)
    if text.pictures is None and opened is not None:
        raise Refused(
            "mmproj", "the model's tokenizer has no token for a picture", "leave the argument out"
        )
    return opened


def _sight(opened: Tower | None, image_mask: ImageMask) -> str:
    """The name of the tower and mask that answers about pictures depend on, beside the model; ""
    where it reads none."""
    return "" if opened is None else f"{fingerprint(opened[1])}, mask {image_mask}"


def _load_tower(
    network: Network, opened: Tower | None, checkpoint: Checkpoint, activations: str, chosen: bool
) -> None:
    """Loads the tower, where there is one, into the network. chosen: whether the network's dtype
    was, for its speed: the tower has float32 where float16 is too narrow."""
    if opened is None:
        return
    device, dtype = network.device, network.dtype
    tower = load_tower(*opened, device, dtype, activations)
    if chosen and dtype == torch.float16 and not tower_fits_float16(tower):
        tower = load_tower(*opened, device, torch.float32, activations)
    network.tower = tower
    network.files = FileSizes({**checkpoint.files, **opened[1].files}.values())


def _opened(path: str | PathLike[str] | None) -> Checkpoint:
    """The checkpoint of that path, or the embedded one. Raises ValueError for what is no path."""
    if not isinstance(path, str | PathLike | None) or path == "":
        raise Refused(
            "path",
            "must name a checkpoint, a file or a folder, or be None for the embedded "
            f"model, got {path!r}",
        )
    if isinstance(path, str) and catalog.is_name(path) and not Path(path).exists():
        path = hub.located(path)
    packaged = catalog.packaged_path(path) if isinstance(path, str) else None
    return open_checkpoint(packaged or (catalog.EMBEDDED if path is None else Path(path)))


def _placed(config: ModelConfig, device: torch.device, *counts: Any) -> Placement:
    """The placement that these arguments describe. Raises ValueError for a wrong count, and for a
    device that this machine does not have."""
    placement = make_placement(device, len(config.layers), *counts)
    for other in placement.devices[1:]:
        pick_device(other)
    return placement


def _identity(
    checkpoint: Checkpoint, weights: str, network: Network, cache_type: str | None
) -> tuple[str, str, str]:
    """Name, fingerprint and precision of a model, with all that its answers depend on."""
    kept = str(network.dtype).removeprefix("torch.")
    if cache_type is not None:
        kept += f", cache {cache_type}"  # answers differ, as with another dtype
    if summary := network.placement.summary:
        kept += f", {summary}"
    return checkpoint.path.name, weights, kept


def _fitting_text(checkpoint: Checkpoint, config: ModelConfig) -> TextSide:
    text = load_text(checkpoint, config.vocab_size)
    # The other way round is fine: embeddings are often padded with rows that no token uses.
    if text.tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {text.tokenizer.vocab_size} tokens and the "
            f"embedding {config.vocab_size}; use the tokenizer that the model was trained with"
        )
    if catalog.packaged_name(checkpoint.path) is not None:
        text.template.rewrites = embedded_questions.rewritten
    return text


__all__ = [
    "Done",
    "Draft",
    "Model",
    "Reply",
    "Settled",
    "Stats",
    "TextSide",
    "Transcript",
    "load",
    "load_outline",
    "load_text",
]
