"""The vocabulary head: all that a denoising step needs to know of 262144 scores per position.

One pass over chunks of the tied embedding, with running maxima and sums, gives the argmax, the
top few, one drawn token, the entropy and the soft embedding, exactly.  Memory is bounded by the
chunk (see `head_bytes`): never [positions, vocabulary].
The draws' uniforms, and all policy, come from `diffusion/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.config import ModelConfig
from sfumato.ops.reference import Weight

CHUNK = 8192  # vocabulary rows at a time
TOP = 8  # how many of the likeliest tokens are reported
BANNED = (
    -1e30
)  # stands for -inf: a finite score whose exponential is zero, but whose product is not NaN


def head_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The most that the pass of one canvas holds at a time: four float32 buffers of a chunk's
    scores (raw, in work, shifted, exponential), and the chunk of the embedding, in `dtype` and,
    while it is dequantized, in float32."""
    chunk = min(CHUNK, config.vocab_size)
    scores = 4 * config.canvas_length * chunk * torch.float32.itemsize
    return scores + chunk * config.hidden_size * (dtype.itemsize + torch.float32.itemsize)


Adjust = Callable[[Tensor, int], Tensor]
"""(softcapped logits float32 [positions, n], first token id) → the same shape; -inf bans."""


@dataclass(frozen=True)
class HeadStats:
    """What one pass found at each position; leading axes are those of the hidden states."""

    argmax: Tensor  # int64 [...]; of equal scores the lowest id
    drawn: Tensor  # int64 [...]; by inverse CDF from the uniform
    entropy: Tensor  # float32 [...], in nats
    top_ids: Tensor  # int64 [..., TOP], likeliest first
    top_probs: Tensor  # float32 [..., TOP]
    soft: Tensor  # [..., hidden]: Σ p · embedding · sqrt(hidden), in the hidden states' dtype
    logits: Tensor | None = None  # float32 [..., vocab], processed; only when asked for

    def __getitem__(self, index: int | slice) -> HeadStats:
        """The statistics of one row, or of some, along the first axis."""
        values = (getattr(self, field.name) for field in fields(self))
        return HeadStats(*(None if v is None else v[index] for v in values))  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabularyHead:
    """The tied embedding [vocab, hidden], read as output layer."""

    embedding: Weight
    softcap: float
    chunk: int = CHUNK

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows start..stop of the embedding as a float tensor."""
        return ops.dense(self.embedding[start:stop], dtype)

    def scores(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Softcapped logits: hidden [..., hidden], rows [n, hidden] → float32 [..., n]."""
        raw = ops.linear(hidden, rows).float()
        return raw.mul_(1 / self.softcap).tanh_().mul_(self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """All softcapped logits, before temperature: float32 [..., vocab]. For tests and samplers
        that cannot do without; its size is what `__call__` avoids."""
        parts = [self.scores(hidden, self.rows(a, b, hidden.dtype)) for a, b in self.spans()]
        return torch.cat(parts, dim=-1)

    def soft_embedding(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """softmax(logits) @ embedding · sqrt(hidden): [..., vocab] → [..., hidden] in `dtype`."""
        p = logits.softmax(dim=-1, dtype=torch.float32)
        soft = p.new_zeros(*p.shape[:-1], self.embedding.shape[1])
        for start, stop in self.spans():
            soft += (p[..., start:stop].to(dtype) @ self.rows(start, stop, dtype)).float()
        return (soft * soft.shape[-1] ** 0.5).to(dtype)

    def spans(self) -> list[tuple[int, int]]:
        """The chunks' bounds."""
        size = self.vocab_size
        return [(a, min(a + self.chunk, size)) for a in range(0, size, self.chunk)]

    def __call__(
        self,
        hidden: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        adjust: Adjust | None = None,
        keep_logits: bool = False,
    ) -> HeadStats:
        """One pass over the vocabulary.

        hidden [positions, hidden]; temperature float32 [positions], > 0; uniform float64
        [positions] in [0, 1); adjust acts on softcapped logits before the temperature.
        """

        def processed(rows: Tensor, start: int) -> Tensor:
            scores = self.scores(hidden, rows)
            if adjust is None:
                return scores / temperature[:, None]
            # Clamped after the division: a low temperature would make BANNED infinite again.
            return (adjust(scores, start) / temperature[:, None]).clamp(min=BANNED)

        tally = _Tally(hidden)
        kept = []
        for start, stop in self.spans():
            rows = self.rows(start, stop, hidden.dtype)
            scores = processed(rows, start)
            tally.add(scores, rows, start)
            if keep_logits:
                kept.append(scores)
        chunk, rest, peak = tally.locate(uniform)
        drawn = torch.empty_like(chunk)
        for index in chunk.unique().tolist():
            which = (chunk == index).nonzero()[:, 0]
            start, stop = self.spans()[index]
            rows = self.rows(start, stop, hidden.dtype)
            if adjust is None:
                scores = self.scores(hidden[which], rows) / temperature[which, None]
            else:
                # A product over fewer positions may round differently, and a top-k of one token
                # would then ban that very token: only the same product will do.
                scores = processed(rows, start)[which]
            drawn[which] = start + _inverse_cdf(scores, peak[which], rest[which])
        return tally.stats(drawn, torch.cat(kept, dim=1) if keep_logits else None)


def wide(x: Tensor) -> Tensor:
    """Float64, or the widest float that the device has (Apple's GPUs stop at float32)."""
    return x.float() if x.device.type == "mps" else x.double()


def _inverse_cdf(scores: Tensor, peak: Tensor, rest: Tensor) -> Tensor:
    """The first index whose cumulated mass exceeds `rest`: scores [n, c] → int64 [n]."""
    mass = wide((scores - peak[:, None]).exp())
    places = torch.searchsorted(mass.cumsum(dim=1), rest[:, None], right=True)[:, 0]
    # Rounding can put `rest` at or past the chunk's end: take the last token with any mass.
    last = mass.shape[1] - 1 - (mass > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(places, last)


class _Tally:
    """Running sums over the chunks, all relative to a running maximum (online softmax)."""

    def __init__(self, hidden: Tensor) -> None:
        count = len(hidden)
        self.peak = hidden.new_full((count,), 2 * BANNED, dtype=torch.float32)
        self.argmax = torch.zeros(count, dtype=torch.int64, device=hidden.device)
        self.moment = torch.zeros_like(self.peak)  # Σ e^(s - peak) · (s - peak)
        self.total = torch.zeros_like(self.peak)  # Σ e^(s - peak)
        self.soft = torch.zeros_like(hidden, dtype=torch.float32)
        self.top = hidden.new_empty((count, 0), dtype=torch.float32)
        self.top_ids = torch.empty((count, 0), dtype=torch.int64, device=hidden.device)
        self.sums: list[Tensor] = []  # per chunk, Σ e^(s - peak) by the peak of that time
        self.peaks: list[Tensor] = []
        self.dtype = hidden.dtype

    def add(self, scores: Tensor, rows: Tensor, start: int) -> None:
        """scores float32 [positions, n] of the token ids start.., rows [n, hidden]."""
        best, where = scores.max(dim=1)
        self._add_top(scores, best, start)
        self.argmax = torch.where(best > self.peak, where + start, self.argmax)
        peak = torch.maximum(self.peak, best)
        fade = (self.peak - peak).exp()
        shifted = scores - peak[:, None]
        mass = shifted.exp()
        here = mass.sum(dim=1)
        # The older moments were taken around the older peak: shift them, then let them fade.
        older = self.moment + self.total * (self.peak - peak).clamp(min=BANNED)
        self.moment = fade * older + shifted.mul_(mass).sum(dim=1)
        self.total = fade * self.total + here
        self.soft.mul_(fade[:, None]).add_(mass.to(self.dtype) @ rows)
        self.sums.append(here)
        self.peaks.append(peak)
        self.peak = peak

    def _add_top(self, scores: Tensor, best: Tensor, start: int) -> None:
        few = min(TOP, scores.shape[1])
        # Once a canvas settles, nobody here displaces anybody. On other devices the question would
        # cost a wait, and its answer saves little.
        full = self.top.shape[1] == TOP
        if full and scores.device.type == "cpu" and not (best > self.top[:, -1]).any():
            return
        values, ids = scores.topk(few, dim=1)
        values, ids = torch.cat((self.top, values), 1), torch.cat((self.top_ids, ids + start), 1)
        self.top, order = values.topk(min(TOP, values.shape[1]), dim=1)
        self.top_ids = ids.gather(1, order)

    def locate(self, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the draws fall: chunk int64 [positions], the mass that remains inside it
        float64, and the peak that the masses are relative to."""
        fades = (torch.stack(self.peaks, dim=1) - self.peak[:, None]).exp()
        mass = wide(torch.stack(self.sums, dim=1)) * wide(fades)
        ends = mass.cumsum(dim=1)
        # A uniform next to 1 may round up to the whole mass, past the last token that has any.
        below = torch.nextafter(ends[:, -1], torch.zeros_like(ends[:, -1]))
        target = torch.minimum(uniform.to(ends) * ends[:, -1], below)
        chunk = torch.searchsorted(ends, target[:, None], right=True).clamp(max=ends.shape[1] - 1)
        before = (ends - mass).gather(1, chunk)[:, 0]
        return chunk[:, 0], (target - before).clamp(min=0), self.peak

    def stats(self, drawn: Tensor, logits: Tensor | None) -> HeadStats:
        entropy = (self.total.log() - self.moment / self.total).clamp(min=0)
        soft = self.soft / self.total[:, None] * self.soft.shape[1] ** 0.5
        probs = (self.top - self.peak[:, None]).exp() / self.total[:, None]
        return HeadStats(
            self.argmax, drawn, entropy, self.top_ids, probs, soft.to(self.dtype), logits
        )
