"""The text side of a checkpoint: its tokenizer, its chat template, the tokens that end a reply; and
`Transcript`, which turns the canvases of one reply into what its caller reads.

It reads small files and metadata, and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from sfumato.diffusion.canvas import Convergence, Draft
from sfumato.diffusion.constraints.filling import Filled
from sfumato.diffusion.constraints.read_template import ReadTemplate
from sfumato.diffusion.limits import Outcome, ReplyText, SettledCanvas, Stats, StopReason
from sfumato.model.families import ReadFormat, family_of
from sfumato.model.model_config import ModelConfig
from sfumato.refused import Refused
from sfumato.text.calls import ToolCall
from sfumato.text.markers import ChatMarkers
from sfumato.text.prompt import user_turn
from sfumato.text.reply import Delta, ReplyParser, Stop, StopCut, StopGate, StopStrings
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Detokenizer, Tokenizer
from sfumato.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class TextSide:
    """How a checkpoint reads and writes text."""

    tokenizer: Tokenizer
    template: ChatTemplate


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
        config.vocab_size,
        text.tokenizer.longest_token,
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
    filled: Filled | None = None  # of a text with holes, whose texts joined are `text` then
    stop: str | None = None  # the stop string that ended the reply, where one did


@dataclass(frozen=True)
class Done:
    """The last event of every stream."""

    reply: Reply


class Transcript(ReplyText):
    """The text of one reply, as its canvases settle."""

    def __init__(
        self, tokenizer: Tokenizer, markers: ChatMarkers, stop: Stop, ignore_ends: bool = False
    ) -> None:
        """stop: what ends the reply. Raises ValueError for any other value."""
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
            stop=self._gate.stop if outcome.stop_reason == "stop" else None,
        )

    def _rest(self) -> list[Delta | ToolCall]:
        """What was held back in case something followed."""
        rest = self._gate.feed(self._detokenizer.pieces((), last=True)) + self._gate.flush()
        return self._parser.feed(rest) + self._parser.flush()
