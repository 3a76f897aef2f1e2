"""A reply as text: `Transcript` turns the canvases of one reply into what its caller reads.

It knows how a reply's tokens become an answer, a thought and tool calls, and no network.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from sfumato.diffusion.canvas import Convergence, Draft
from sfumato.diffusion.constraints.filling import Filled
from sfumato.diffusion.limits import Outcome, SettledCanvas, Stats, StopReason
from sfumato.text.calls import ToolCall
from sfumato.text.markers import ChatMarkers
from sfumato.text.reply import Delta, ReplyParser, Stop, StopCut, StopGate, StopStrings
from sfumato.text.tokenizer import Detokenizer, Tokenizer


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


class Transcript:
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


def reply_events(
    run: Generator[Draft | Settled, None, Reply],
) -> Iterator[Draft | Settled | Done]:
    """What `Model.stream` yields, from what the driver of a reply yields."""
    reply = yield from run
    yield Done(reply)
