"""The causal mode: the encode phase with the vocabulary head is an autoregressive model of the same
weights.

`log_likelihoods` scores tokens that are given, `perplexity` those of a whole text, `next_scores`
gives the scores of the token to come, and `draw_next` draws it. Each token is scored from the
hidden state of the token before it. A slot keeps keys and values and no hidden state, so that what
is scored begins with the last token of what is given: leave that token out of the slot.

A canvas of the causal mode has one position, whose scores come from the encode phase in place of a
denoising forward. All else is as for other canvases: rules of sampling, noise, pinned tokens. Knows
no requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.checks import check_causal
from sfumato.diffusion.scoring import Scoring, score
from sfumato.model.cache import Slot
from sfumato.model.devices import to_device
from sfumato.model.head import HeadStats
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.scores import TokenScores, token_scores
from sfumato.model.segments import Suffix
from sfumato.ops.gpu import widest_float
from sfumato.refused import Refused

PIECE = 256
"""Tokens of a row that are scored at once."""

Item = TypeVar("Item")


def log_likelihoods(network: Network, slot: Slot, ids: Tensor) -> Tensor:
    """The log probability, in nats, of each token but the first, given the prefix in the slot and
    the tokens before it: ids int64 [n from 1] → float32 [n - 1], on the network's device.

    The slot stays as it is. Raises ValueError for ids out of range or too many for the context,
    FloatingPointError where the model's scores are no numbers.
    """
    return row_log_likelihoods(network, [slot], [ids])[0]


def row_log_likelihoods(
    network: Network, slots: Sequence[Slot], rows: Sequence[Tensor], together: int = PREFILL_CHUNK
) -> list[Tensor]:
    """`log_likelihoods` of several rows, as `row_scores` packs them."""
    scored = row_scores(network, slots, rows, [None] * len(rows), together=together)
    empty = torch.zeros(0, device=network.device)
    return [empty if scores is None else scores.log_probs for scores in scored]


@torch.no_grad()
def row_scores(
    network: Network,
    slots: Sequence[Slot],
    rows: Sequence[Tensor],
    states: Sequence[Tensor | None],
    ranks: bool = False,
    together: int = PREFILL_CHUNK,
) -> list[TokenScores | None]:
    """The scores of each token of several rows, int64 [n from 1], packed into few forwards of at
    most so many tokens `together`, or of one piece; rows[i] follows slots[i], and rows may share a
    slot. states[i]: the hidden state [1, hidden] of the last token in slots[i]; None: the row's
    first token is not scored, and a row of one token has no scores. ranks: as `token_scores` has
    them. On a CPU no row's result depends on the others, to the bit.

    The slots stay as they are. Raises as `log_likelihoods` does."""
    for index, (slot, ids) in enumerate(zip(slots, rows, strict=True)):
        _check(network, slot, ids, f"row {index}")
    suffixes = [Suffix(slot) for slot in slots]
    parts: list[list[TokenScores]] = [[] for _ in rows]

    def count(row: int) -> int:
        """Tokens of its next piece. The last token of a row has no token to score, but behind a
        state a row of one token is a piece."""
        least = 0 if states[row] is None else 1
        return min(PIECE, max(least, len(rows[row]) - 1) - suffixes[row].length)

    while left := [row for row in range(len(rows)) if count(row) > 0]:
        for group in packed(left, count, together):
            ends = [(suffixes[row].length, suffixes[row].length + count(row)) for row in group]
            cuts = list(zip((rows[row] for row in group), ends, strict=True))
            pieces, members = [ids[a:b] for ids, (a, b) in cuts], [suffixes[row] for row in group]
            hidden = network.encode_beside_hidden(pieces, members)
            given = [None if a else states[row] for row, (a, _) in zip(group, ends, strict=True)]
            scored = [
                with_following(ids, a, own, state)
                for (ids, (a, _)), own, state in zip(cuts, hidden, given, strict=True)
            ]
            before, tokens = (torch.cat(each) for each in zip(*scored, strict=True))
            scores = token_scores(network.head, before, tokens.to(network.device), ranks=ranks)
            start = 0
            for row, (own, _) in zip(group, scored, strict=True):
                parts[row].append(scores[start : start + len(own)])
                start += len(own)
    results = [TokenScores.joined(own) if own else None for own in parts]
    for result in results:
        if result is not None:
            check_finite(result.log_probs)
    return results


def with_following(
    ids: Tensor, start: int, hidden: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What is scored once a piece of a row is encoded: hidden states, and the tokens that follow
    them. ids int64 [n]: the row; hidden [m, hidden]: of its tokens from `start` on; state [1,
    hidden]: of the token before the piece, where it scores the piece's first token."""
    first = start + (state is None)
    tokens = ids[first : start + len(hidden) + 1]
    before = hidden if state is None else torch.cat((state, hidden))
    return before[: len(tokens)], tokens


@torch.no_grad()
def masked_log_likelihoods(
    network: Network, slot: Slot, ids: Tensor, first: int, together: int = PREFILL_CHUNK
) -> Tensor:
    """The log probability, in nats, of each of ids[first:], int64 [n] within one canvas, given the
    prefix in the slot and the ids before it, with masks from it on to the canvas's end: what a
    network gives that denoises canvases of masks, the tokens revealed from left to right.  float32
    [n - first], on the network's device. together: tokens of a forward at most, or of one canvas.

    The slot stays as it is. Raises FloatingPointError where the scores are no numbers.
    """
    length, mask = network.config.canvas_length, network.config.mask_id
    assert mask is not None and 0 <= first <= len(ids) <= length
    rows = torch.full((len(ids) - first, length), mask)
    for row, end in enumerate(range(first, len(ids))):
        rows[row, :end] = ids[:end]
    parts = [torch.zeros(0, device=network.device)]
    for group in range(0, len(rows), max(1, together // length)):
        some = rows[group : group + max(1, together // length)]
        hidden = network.denoise(some.unbind(), [slot] * len(some)).unflatten(0, some.shape)
        at = torch.arange(len(some), device=hidden.device)
        own = ids[first + group :][: len(some)].to(hidden.device)
        parts.append(token_scores(network.head, hidden[at, first + group + at], own).log_probs)
    result = torch.cat(parts)
    check_finite(result)
    return result


@torch.no_grad()
def next_scores(network: Network, slot: Slot, ids: Tensor, allowed: Tensor | None = None) -> Tensor:
    """One causal step: appends ids int64 [n from 1] to the slot's prefix and returns the softcapped
    logits of the token that follows, float32 [vocab], at temperature 1, on the network's device.

    allowed: bool [m], of the token ids 0..m - 1 those that may follow; others, and those from m on,
    are -inf. Raises ValueError for ids out of range, too few free positions, or a mask that allows
    no token, before anything is written; FloatingPointError where the scores are no numbers.
    """
    _check(network, slot, ids, "ids")
    vocab_size = network.config.vocab_size
    if allowed is not None and not (len(allowed) <= vocab_size and bool(allowed.any())):
        raise Refused(
            "allowed",
            f"must have at most {vocab_size} entries, as the vocabulary has tokens, and "
            "allow one of them at least",
            f"got {len(allowed)}, of which {int(allowed.sum())}",
        )
    if len(ids) > slot.room():
        raise Refused("ids", f"{len(ids)} tokens, and the slot has room for {slot.room()}")
    if len(ids) > 1:
        network.encode([ids[:-1]], [slot])
    (hidden,) = network.encode_hidden([ids[-1:]], [slot])
    scores = network.head.logits(hidden)[0]
    check_finite(scores)
    if allowed is None:
        return scores
    banned = torch.ones(vocab_size, dtype=torch.bool, device=scores.device)
    banned[: len(allowed)] = ~allowed.to(scores.device)
    return scores.masked_fill(banned, float("-inf"))


def check_finite(scores: Tensor) -> None:
    """Raises FloatingPointError for scores or log probabilities that are no numbers."""
    if not scores.isfinite().all():
        raise FloatingPointError(
            "causal: the model's scores are not finite, as when its activations exceed the range "
            "of float16; load it with dtype='bfloat16' or 'float32'"
        )


def _check(network: Network, slot: Slot, ids: Tensor, where: str) -> None:
    check_causal(network.config, where)
    if len(ids) < 1:
        raise Refused(where, "must hold one token at least, the last of what is given")
    network.check_ids(ids, where)
    longest = network.config.context_length
    if slot.length + len(ids) > longest:
        raise Refused(
            where,
            f"{len(ids)} tokens after a prefix of {slot.length} exceed the context of {longest}",
            "shorten them",
        )


def packed(items: Sequence[Item], tokens: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items in groups of at most so many tokens, one item at least."""
    group: list[Item] = []
    total = 0
    for item in items:
        count = tokens(item)
        if group and total + count > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += count
    if group:
        yield group


@torch.no_grad()
def draw_next(
    network: Network, canvases: Sequence[Canvas], hidden: Tensor
) -> list[Draft | Exception]:
    """The draft of each canvas, which is done then, or what failed in it alone: hidden [rows,
    hidden] of the token before it, from `Network.encode_hidden`. Raises what failed in all; then no
    canvas has changed.

    `token_ids` of a draft is the drawn token. Where the config names most probable tokens, these
    and the drawn token's log probability are the model's own: before temperature, biases and cuts.
    """
    device = hidden.device
    scoring = Scoring.of(canvases, network.head.vocab_size, device)
    temperature = to_device(torch.tensor([canvas.temperature() for canvas in canvases]), device)
    uniforms = torch.cat([canvas.uniforms() for canvas in canvases]).to(widest_float(device.type))
    drawn_with = temperature, to_device(uniforms, device)
    stats, extra = score(network.head, hidden, *drawn_with, scoring, canvases)
    cold = torch.tensor([canvas.config.temperature == 0 for canvas in canvases])
    drawn = torch.where(cold, stats.argmax.cpu(), stats.drawn.cpu())
    pinned = torch.cat([canvas.pinned for canvas in canvases])
    chosen = torch.where(pinned >= 0, pinned, drawn)
    scores = _own_scores(network, canvases, hidden, chosen)
    entropy = stats.entropy.cpu()
    results: list[Draft | Exception] = []
    for row, canvas in enumerate(canvases):
        try:
            canvas.check_entropy(entropy[row : row + 1], 1)
        except Exception as error:
            results.append(error)
            continue
        own = extra.get(row, stats[row : row + 1])
        results.append(_draft(canvas, chosen[row : row + 1], own, scores.get(row)))
    for canvas, result in zip(canvases, results, strict=True):
        if isinstance(result, Draft):
            canvas.learn(1, converged=True, done=True)
    return results


def _own_scores(
    network: Network, canvases: Sequence[Canvas], hidden: Tensor, chosen: Tensor
) -> dict[int, TokenScores]:
    """By row, on the host, where a row's config names most probable tokens."""
    counts = {
        row: canvas.config.top_tokens
        for row, canvas in enumerate(canvases)
        if canvas.config.top_tokens is not None
    }
    if not counts:
        return {}
    rows = torch.tensor(list(counts))
    on_device = to_device(rows, hidden.device)
    ids = to_device(chosen[rows], hidden.device)
    scores = token_scores(network.head, hidden[on_device], ids, top=max(counts.values())).to("cpu")
    return {row: scores[at : at + 1] for at, row in enumerate(counts)}


def _draft(canvas: Canvas, chosen: Tensor, stats: HeadStats, scores: TokenScores | None) -> Draft:
    named = None if stats.named is None else stats.named.cpu()
    if scores is None:
        top_ids, top_probs, log_probs = stats.top_ids.cpu(), stats.top_probs.cpu(), None
    else:
        top_ids, top_probs = scores.top_ids, scores.top_log_probs.exp()
        log_probs = scores.log_probs
    return Draft(
        canvas.noise.canvas,
        1,
        chosen,
        stats.entropy.cpu(),
        torch.ones(1, dtype=torch.bool),
        1,
        top_ids,
        top_probs,
        named=named,
        log_probs=log_probs,
    )


@dataclass(frozen=True)
class Perplexity:
    """Figures of one text."""

    tokens: int  # that were scored
    log_likelihood: float  # of all of them together, in nats

    @property
    def nats_per_token(self) -> float:
        return -self.log_likelihood / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the nats per token; infinite where float64 ends."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def bits_per(self, count: int) -> float:
        """Bits for each of so many parts of the text, as bytes."""
        return -self.log_likelihood / math.log(2) / count


@dataclass(frozen=True)
class Window:
    """A part of a text: tokens start..stop - 1, of which those from `scored` on are scored."""

    start: int
    scored: int
    stop: int


def windows(count: int, room: int, stride: int, first: int) -> Iterator[Window]:
    """The windows of a text of `count` tokens. room: tokens of it in a window; first: how many of
    its first tokens have nothing before them, and are not scored."""
    stop = min(room, count)
    yield Window(0, first, stop)
    while stop < count:
        scored, stop = stop, min(stop + stride, count)
        yield Window(max(0, stop - room), scored, stop)


def perplexity(
    network: Network,
    ids: Sequence[int],
    begin: int | None,
    context: int,
    stride: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """The perplexity of a text's tokens, 1 at least. begin: the token that stands before each
    window; None: there is none, and the first token of the text is not scored. context: tokens of a
    window, `begin` included; stride: from 1 to less than that. progress: called with the scored
    tokens and all.

    Raises ValueError for other numbers, ids out of range, or a text without a token to score;
    FloatingPointError where the model's scores are no numbers.
    """
    first = 0 if begin is not None else 1
    longest = network.config.context_length
    if not 2 <= context <= longest:
        raise Refused("context", f"must be from 2 to the model's {longest}, got {context}")
    if not 1 <= stride < context:
        raise Refused("stride", f"must be from 1 to {context - 1}, got {stride}")
    if len(ids) <= first:
        raise Refused("text", f"has {len(ids)} tokens, and none of them can be scored")
    opening = [] if begin is None else [begin]
    slot = network.new_slot(context)
    total, scored = 0.0, 0
    for window in windows(len(ids), context - len(opening), stride, first):
        tokens = torch.tensor([*opening, *ids[window.start : window.stop]])
        given = len(opening) + window.scored - window.start - 1  # all that the first score follows
        slot.reset()
        network.encode([tokens[:given]], [slot])
        logs = log_likelihoods(network, slot, tokens[given:])
        total += math.fsum(logs.tolist())
        scored += len(logs)
        progress(scored, len(ids) - first)
    return Perplexity(scored, total)
