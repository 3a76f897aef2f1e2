"""`load()` makes one `Model` of a checkpoint: its network, its text side and its defaults.

This is the library's front door, and the seam between ids (`diffusion/`) and text (`text/`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Convergence, Draft
from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults
from sfumato.diffusion.checks import check_tensor
from sfumato.diffusion.limits import Limits, ReplyPlan, StopReason, plan_reply
from sfumato.diffusion.loop import run
from sfumato.diffusion.outcome import Outcome, SettledCanvas, Stats
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.cache import KVCache
from sfumato.model.families import Family, family_of, open_checkpoint
from sfumato.model.loading import Progress, config_of, expected_shapes, load_network
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.placement import pick_device, pick_dtype
from sfumato.model.quantize_on_load import quantized_on_load
from sfumato.options.limits import MOST_STEPS
from sfumato.text.markers import ChatMarkers
from sfumato.text.prompt import prompt_ids
from sfumato.text.reply import Delta, ReplyParser, ToolCall
from sfumato.text.stops import Stop, StopCut, StopGate, StopStrings
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Detokenizer, Tokenizer
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.errors import CheckpointError

EMBEDDED = Path(__file__).parent / "embedded"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Settled:
    """A canvas has settled: its text is final."""

    canvas: int  # 0, 1, … within the reply
    text: str  # what it adds to the answer
    thought: str  # what it adds to the thought
    token_ids: list[int]  # of the canvas, up to an end token; a stop string is still in them
    convergence: Convergence
    tool_calls: tuple[ToolCall, ...] = ()  # those that it completes
    # The most probable tokens of the canvas's last step at each of token_ids, and their
    # probabilities, int64 and float32 [n, top]; None where they are not known.
    top_ids: Tensor | None = field(default=None, compare=False)
    top_probs: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Reply:
    """A complete reply."""

    text: str
    thought: str | None
    tool_calls: tuple[ToolCall, ...]
    token_ids: list[int]  # without the end token
    stop_reason: StopReason
    stats: Stats
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """The last event of every stream."""

    reply: Reply


class Transcript:
    """The text of one reply, as its canvases settle."""

    def __init__(
        self, tokenizer: Tokenizer, markers: ChatMarkers, stop: Stop, ignore_ends: bool = False
    ) -> None:
        """stop: what ends the reply. Raises ValueError where it is nothing of the kind."""
        self.markers = markers
        stops = StopStrings(stop)
        self.cut = StopCut(tokenizer, stops, markers, ignore_ends)
        self.pieces = tokenizer.pieces
        self._decode = tokenizer.decode
        self._detokenizer = Detokenizer(tokenizer)
        self._gate = StopGate(stops, markers, ignore_ends)
        self._parser = ReplyParser(markers, ignore_ends=ignore_ends)

    def add(self, settled: SettledCanvas, last: Draft | None = None) -> Settled:
        """What a canvas adds; `last` is the draft of its last step, where the caller has it."""
        parts = self._parser.feed(self._gate.feed(self._detokenizer.pieces(settled.token_ids)))
        if settled.stop_reason is not None:
            parts += self._rest()
        texts = {"answer": "", "thought": ""}
        for part in parts:
            if isinstance(part, Delta):
                texts[part.kind] += part.text
        return Settled(
            settled.canvas,
            texts["answer"],
            texts["thought"],
            settled.token_ids,
            settled.convergence,
            tuple(part for part in parts if isinstance(part, ToolCall)),
            None if last is None else last.top_ids[: len(settled.token_ids)],
            None if last is None else last.top_probs[: len(settled.token_ids)],
        )

    def readable(self, draft: Draft) -> Draft:
        """The draft with its text."""
        return replace(draft, decode=self._decode)

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
        )

    def _rest(self) -> list[Delta | ToolCall]:
        """What was held back in case something followed."""
        rest = self._gate.feed(self._detokenizer.pieces((), last=True)) + self._gate.flush()
        return self._parser.feed(rest) + self._parser.flush()


def _events(
    run: Generator[Draft | SettledCanvas, None, Outcome], transcript: Transcript
) -> Iterator[Draft | Settled | Done]:
    last = None
    while True:
        try:
            event = next(run)
        except StopIteration as end:
            yield Done(transcript.finish(end.value))
            return
        if isinstance(event, Draft):
            last = transcript.readable(event)
            yield last
        else:
            yield transcript.add(event, last)


@dataclass(frozen=True)
class TextSide:
    """How a checkpoint reads and writes text."""

    tokenizer: Tokenizer
    template: ChatTemplate


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
    ) -> None:
        self.network, self.sampler_defaults, self.end_ids = network, sampler_defaults, end_ids
        self.tokenizer, self.template = text.tokenizer, text.template
        self.path, self.load_s, self.family = path, load_s, family

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    def generate(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> Reply:
        """The reply to a prompt or a conversation; `options` are those of `stream`."""
        for event in self.stream(prompt, messages=messages, **options):
            if isinstance(event, Done):
                return event.reply
        raise AssertionError("a stream ends with Done")

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        max_tokens: int = 256,
        seed: int = 0,
        sampler: SamplerConfig | None = None,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Stop = None,
        cancelled: Callable[[], bool] = lambda: False,
        **unknown: Never,
    ) -> Iterator[Draft | Settled | Done]:
        """Drafts at every denoising step, a `Settled` for every canvas, then one `Done`.

        max_tokens: visible tokens at most; seed: 0..2⁶⁴-1; sampler: what is None in it is the
        checkpoint's; tools: declarations as JSON schemas; stop: strings that end the reply and
        are not part of it (inside a thought they are text like any other), or special tokens, each
        as a `sfumato.text.tokenizer.Marker`; cancelled: called before every step and every chunk of
        a prefill, True ends the reply with what is committed.
        Raises ValueError, naming the argument, for what cannot be done, and TypeError for an
        argument that there is not. The stream itself raises FloatingPointError where the model's
        scores are no numbers, and ValueError where a sampler's or processor's answer is of no use.
        """
        _check_arguments(cancelled, unknown)
        ids = self.prompt_ids(prompt, messages, thinking=thinking, tools=tools)
        # What cannot be done is refused by this call, and not by the first `next`.
        plan, transcript = self.plan_reply(len(ids), max_tokens, seed, sampler, stop, cancelled)
        prefix = torch.tensor(ids, dtype=torch.int64)
        return _events(run(self.network, prefix, plan), transcript)

    def plan_reply(
        self,
        prompt_tokens: int,
        max_tokens: int,
        seed: int,
        sampler: SamplerConfig | None = None,
        stop: Stop = None,
        cancelled: Callable[[], bool] = lambda: False,
        most_steps: int = MOST_STEPS,
    ) -> tuple[ReplyPlan, Transcript]:
        """All checks of a reply to so many tokens, for `stream` and for the engine. most_steps:
        denoising steps per canvas. Raises ValueError, naming the argument, for what cannot be
        done."""
        check_sampler(sampler)
        config = (sampler or SamplerConfig()).over(self.sampler_defaults)
        transcript = Transcript(self.tokenizer, self.template.markers, stop, config.ignore_eos)
        limits = Limits(max_tokens, self.end_ids, transcript.cut, cancelled)
        plan = plan_reply(self.network, prompt_tokens, config, limits, seed, most_steps)
        return plan, transcript

    def prompt_ids(
        self,
        prompt: str | None = None,
        messages: Messages | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the chat prompt for a user's text, or for messages."""
        if (prompt is None) == (messages is None):
            raise ValueError("prompt, messages: give exactly one of them")
        if messages is None:
            messages = [{"role": "user", "content": prompt}]
        return prompt_ids(self.template, self.tokenizer, messages, thinking=thinking, tools=tools)

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
            raise ValueError(f"lengths: must lie in 0..{ids.shape[1]}, got {ends}")
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
                raise ValueError("soft: must be finite, but NaN or infinity is in it")
        self.network.check_ids(canvas.flatten(), "canvas")
        hidden = self.network.denoise(list(canvas), cache, None if soft is None else list(soft))
        return self.network.head.logits(hidden).view(*canvas.shape, -1)

    @torch.no_grad()
    def soft_embedding(self, processed_logits: Tensor) -> Tensor:
        """Float [rows, length, vocab], after temperature → [rows, length, hidden]."""
        shape = ("rows", "length", self.config.vocab_size)
        check_tensor(processed_logits, "processed_logits: must be", None, shape)
        if not processed_logits.amax(dim=-1).isfinite().all():
            raise ValueError(
                "processed_logits: must hold no NaN and no +inf, and a token that is not -inf at "
                "every position"
            )
        return self.network.head.soft_embedding(processed_logits, self.network.dtype)


def check_sampler(sampler: object) -> None:
    """Raises ValueError for what is no SamplerConfig."""
    if not isinstance(sampler, SamplerConfig | None):
        raise ValueError(
            "sampler: must be a SamplerConfig, such as SamplerConfig(temperature=0.7, "
            f"sampler=EntropyBound()), got {sampler!r}"
        )


def _check_arguments(cancelled: object, unknown: Collection[str]) -> None:
    """Raises messages that say more than Python's own would."""
    if unknown:
        name = next(iter(unknown))
        settings = {field.name for field in fields(SamplerConfig)}
        hint = f"sampler=SamplerConfig({name}=...)" if name in settings else "help(Model.stream)"
        raise TypeError(f"{name}: is no argument of generate() or stream(); see {hint}")
    if not callable(cancelled):
        raise ValueError(
            "cancelled: must be a function that returns True to end the reply, such as an "
            f"Event's is_set, got {cancelled!r}"
        )


def load(
    path: str | PathLike[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
    activations: str = "int8",
    quantize: str | None = None,
) -> Model:
    """Loads a checkpoint, file or folder, safetensors or GGUF; None is the embedded model.

    device: "auto" or a torch device; dtype: "auto", "float32", "bfloat16" or "float16", or
    torch's own, for activations, cache and unquantized weights; activations: "int8" or, more exact
    and slower, "bf16", what a CPU rounds them to for products with quantized weights; quantize:
    "q4_k" or "q8_0", what float matrices become while they are loaded (and what takes fewer bits
    badly, as in a converted file, a larger format); what the file has quantized already stays as
    it is.  Raises CheckpointError, ConfigError or ValueError, naming the file, field or argument.
    """
    start = time.perf_counter()
    if not isinstance(path, str | PathLike | None) or path == "":
        raise ValueError(
            "path: must name a checkpoint, a file or a folder, or be None for the embedded model, "
            f"got {path!r}"
        )
    checkpoint = open_checkpoint(EMBEDDED if path is None else Path(path))
    # What fails fast comes first, and all of it before the weights.
    config = config_of(checkpoint)
    checkpoint.check_tensors(expected_shapes(config))
    target = pick_device(device)
    if quantize is not None:
        checkpoint = quantized_on_load(checkpoint, quantize, target)
    kind = pick_dtype(dtype, checkpoint, target)
    defaults = checkpoint_defaults(checkpoint)
    text = _fitting_text(checkpoint, config)
    network = load_network(checkpoint, target, kind, progress, activations)
    ends = _end_ids(checkpoint, network.config, text.tokenizer)
    seconds, family = time.perf_counter() - start, family_of(checkpoint)
    return Model(network, text, defaults, ends, checkpoint.path, family, seconds)


def _fitting_text(checkpoint: Checkpoint, config: ModelConfig) -> TextSide:
    text = load_text(checkpoint)
    # The other way round is fine: embeddings are often padded with rows that no token uses.
    if text.tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has {text.tokenizer.vocab_size} tokens and the "
            f"embedding {config.vocab_size}; use the tokenizer that the model was trained with"
        )
    return text


def load_text(checkpoint: Checkpoint) -> TextSide:
    """The tokenizer and chat template of a checkpoint."""
    markers = family_of(checkpoint).markers
    if checkpoint.kind == "gguf":
        metadata = checkpoint.metadata
        return TextSide(Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata, markers))
    folder = checkpoint.folder
    return TextSide(
        Tokenizer.from_file(folder / "tokenizer.json"), ChatTemplate.from_folder(folder, markers)
    )


def _end_ids(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    generation = checkpoint.metadata.get("generation_config") or {}
    listed = generation.get("eos_token_id") if checkpoint.kind == "safetensors" else None
    if isinstance(listed, list):
        return config.eos_ids
    looked_up = (tokenizer.token_id(text) for text in family_of(checkpoint).markers.end_tokens)
    return tuple(dict.fromkeys((*config.eos_ids, *(i for i in looked_up if i is not None))))


__all__ = ["Done", "Draft", "Model", "Reply", "Settled", "Stats", "load"]
