"""Forwards of reads on a device that works by itself: as graphs where their rows allow it.

Served are rows of one width whose questions have places in the pool and whose slots are of one
pool.  Others go through the network as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sfumato import ops
from sfumato.diffusion.step.graphs import StepGraphs
from sfumato.diffusion.step.read_forward import ReadForward, ReadKind, ReadRoom
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.question_pool import QuestionPool
from sfumato.model.read_rows import Scratch


class ReadForwards:
    """The forwards of one network."""

    def __init__(self, network: Network, graphs: StepGraphs, questions: QuestionPool) -> None:
        self._network, self._graphs, self._questions = network, graphs, questions
        self._room = ReadRoom(network, room_tokens(network.config.canvas_length))

    def place(self, scratch: Scratch, tokens: int) -> None:
        """Gives a question of so many tokens places, if the pool has any."""
        scratch.place(self._questions, tokens)

    @torch.no_grad()
    def denoise_beside(
        self,
        canvases: Sequence[Tensor],
        scratches: Sequence[Scratch],
        wanted: Sequence[Sequence[int]],
        soft: Tensor | None = None,
    ) -> Tensor:
        """As `Network.denoise_beside`. What it returns may be overwritten by the next call."""
        if not self._serves(canvases, scratches):
            return self._network.denoise_beside(canvases, scratches, wanted, soft)
        width = len(canvases[0])
        starts = accumulate([width] * len(canvases), initial=0)
        only = [first + at for first, own in zip(starts, wanted, strict=False) for at in own]
        kind = ReadKind(len(canvases), width, len(only), soft is not None)
        pool = scratches[0].slot.pool
        step = self._graphs.find(
            lambda one: isinstance(one, ReadForward) and one.serves(pool, kind)
        )
        if not isinstance(step, ReadForward):
            step = ReadForward(self._network, pool, self._questions, kind, self._room)
            self._graphs.add(step)
        step.prepare_for_replay(torch.cat(list(canvases)), scratches, only, soft)
        self._graphs.run(step)
        return step.hidden

    def _serves(self, canvases: Sequence[Tensor], scratches: Sequence[Scratch]) -> bool:
        pool = scratches[0].slot.pool
        rows = len(canvases)
        # Torch gathers the slot of each row: a step, whose memory is counted, has no more of them.
        limit = rows if "read_attention" in ops.kernels_on(self._network.device) else len(pool)
        return (
            rows <= limit
            and len({len(canvas) for canvas in canvases}) == 1
            and rows * len(canvases[0]) <= self._room.tokens
            and all(scratch.slot.pool is pool for scratch in scratches)
            and all(
                scratch.span.pool is self._questions if scratch.span else not scratch.length
                for scratch in scratches
            )
        )


def room_tokens(canvas_length: int) -> int:
    """Tokens of a forward of reads at most."""
    return max(PREFILL_CHUNK, canvas_length)
