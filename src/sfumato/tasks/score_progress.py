"""A `Score` under way: which of its items are done, which are open, and what goes next.

Both drivers take its chunks: as many tokens of a step as they can spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sfumato.diffusion.causal import masked_log_likelihoods, row_log_likelihoods, row_scores
from sfumato.diffusion.constraints.read import PIECE, OpenRead, ReadChunk, next_chunk
from sfumato.model.cache import Slot
from sfumato.model.network import Network
from sfumato.tasks.works import Likelihood, Rank, Score


class ScoreProgress:
    """The items of a score, taken in order."""

    def __init__(self, work: Score) -> None:
        self._items = work.items
        self.results: list[Any] = [None] * len(self._items)  # of each item, once all are done
        self._begun = 0  # items
        self._open: dict[int, OpenRead] = {}  # by number
        # That the last chunks score, by number.
        self._lines: dict[int, Likelihood | Rank] = {}

    @property
    def holds_long(self) -> bool:
        """Whether a read is open whose question has more than one piece: these are worth memory."""
        return any(len(read.ids) > PIECE for read in self._open.values())

    @property
    def begins_long(self) -> bool:
        """Whether such a read is next."""
        following = self._items[self._begun : self._begun + 1]
        return not self._open and any(len(item.ids) > PIECE for item in following)

    @property
    def done(self) -> bool:
        return self._begun == len(self._items) and not (self._open or self._lines)

    def chunks(self, slot: Slot, tokens: int) -> list[ReadChunk]:
        """What is read next, of at most so many tokens or of one item. slot: holds the prefix."""
        chunks: list[ReadChunk] = []
        left = tokens
        for begun in self._open.values():
            if not chunks or left > 0:
                chunks.append(next_chunk(begun, left))
                left -= chunks[-1].tokens
        while self._begun < len(self._items) and (not (chunks or self._lines) or left > 0):
            number, item = self._begun, self._items[self._begun]
            size = len(item.ids)
            is_first = not (chunks or self._lines)
            if isinstance(item, Likelihood | Rank):
                if not is_first and size > left:
                    break
                self._lines[number], left = item, left - size
            else:
                if not is_first and (size > PIECE or size + item.canvas_tokens > left):
                    break
                read = self._open[number] = OpenRead(item, slot)
                chunks.append(next_chunk(read, left))
                left -= chunks[-1].tokens
            self._begun += 1
        return chunks

    @property
    def line_tokens(self) -> int:
        """Tokens of the likelihoods and ranks that belong to the last chunks."""
        return sum(len(line.ids) for line in self._lines.values())

    def score_lines(self, network: Network, slot: Slot, prefix: Sequence[int]) -> None:
        """Scores the likelihoods and ranks that belong to the last chunks; prefix: what the slot
        holds. Raises FloatingPointError where the model's scores are no numbers. May be called
        again where it raised."""
        slots, rows, firsts = [], [], []
        lines = {n: line for n, line in self._lines.items() if isinstance(line, Likelihood)}
        ranked = {n: line for n, line in self._lines.items() if isinstance(line, Rank)}
        if network.config.block is not None:
            for number, line in lines.items():
                ids = torch.tensor(line.ids)
                logs = masked_log_likelihoods(network, slot, ids, line.first)
                self.results[number] = float(logs.sum())
            self._lines.clear()
            return
        for line in lines.values():
            # A slot has no hidden state of its last token, from which the token after it is scored.
            before = prefix if line.first == 0 else []
            slots.append(_empty(network, slot) if before else slot)
            rows.append(torch.tensor([*before, *line.ids]))
            firsts.append(len(before) + line.first - 1)  # the row's first token is not scored
        scores = row_log_likelihoods(network, slots, rows) if rows else []
        for number, row, first in zip(lines, scores, firsts, strict=True):
            self.results[number] = float(row[first:].sum())
        if ranked:
            rows = [torch.tensor(line.ids) for line in ranked.values()]
            states = [line.state for line in ranked.values()]
            by_row = row_scores(network, [slot] * len(rows), rows, states, ranks=True)
            for number, of_row in zip(ranked, by_row, strict=True):
                assert of_row is not None
                self.results[number] = of_row.to("cpu")
        self._lines.clear()

    def collect(self) -> int:
        """Closes the reads that are done; returns how many canvases these had. Those that go on
        keep their own tokens' memory alone."""
        canvases = 0
        for number, read in list(self._open.items()):
            if read.done:
                self.results[number] = read.samples
                canvases += len(read.samples) * len(read.read.canvases)
                del self._open[number]
            else:
                read.suffix.own()
        return canvases


def _empty(network: Network, like: Slot) -> Slot:
    """An empty slot, with the adapter of another."""
    slot = network.new_slot(1)
    slot.adapter = like.adapter
    return slot
