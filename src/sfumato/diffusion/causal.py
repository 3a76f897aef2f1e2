"""The causal mode: the encode phase with the vocabulary head is an autoregressive model of the same
weights.

`log_likelihoods` scores tokens that are given, `next_scores` gives the scores of the token to come.
Each token is scored from the hidden state of the token before it. A slot keeps keys and values and
no hidden state, so that what is scored begins with the last token of what is given: leave that
token out of the slot. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.model.cache import Slot
from sfumato.model.network import PREFILL_CHUNK, Network
from sfumato.model.segments import Scratch
from sfumato.model.token_scores import token_scores
from sfumato.refused import Refused

PIECE = 256
"""Tokens of a row that are scored at once."""


def log_likelihoods(network: Network, slot: Slot, ids: Tensor) -> Tensor:
    """The log probability, in nats, of each token but the first, given the prefix in the slot and
    the tokens before it: ids int64 [n from 1] → float32 [n - 1], on the network's device.

    The slot stays as it is. Raises ValueError for ids out of range or too many for the context,
    FloatingPointError where the model's scores are no numbers.
    """
    return row_log_likelihoods(network, [slot], [ids])[0]


@torch.no_grad()
def row_log_likelihoods(
    network: Network, slots: Sequence[Slot], rows: Sequence[Tensor], together: int = PREFILL_CHUNK
) -> list[Tensor]:
    """`log_likelihoods` of several rows, packed into few forwards of at most so many tokens
    `together`, or of one piece; rows[i] follows slots[i], and rows may share a slot. On a CPU no
    row's result depends on the others, to the bit."""
    for index, (slot, ids) in enumerate(zip(slots, rows, strict=True)):
        _check(network, slot, ids, f"row {index}")
    scratches = [Scratch(slot) for slot in slots]
    parts: list[list[Tensor]] = [[] for _ in rows]
    while group := _next_pieces(rows, scratches, together):
        pieces = [rows[row][a:b] for row, a, b in group]
        members = [scratches[row] for row, _, _ in group]
        hidden = torch.cat(network.encode_beside_hidden(pieces, members))
        following = torch.cat([rows[row][a + 1 : b + 1] for row, a, b in group])
        scores = token_scores(network.head, hidden, following.to(network.device)).log_probs
        split = scores.split([b - a for _, a, b in group])
        for (row, _, _), part in zip(group, split, strict=True):
            parts[row].append(part)
    empty = torch.zeros(0, device=network.device)
    results = [torch.cat(own) if own else empty for own in parts]
    for result in results:
        check_finite(result)
    return results


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
    _check_room(slot, ids)
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


@torch.no_grad()
def row_next_scores(
    network: Network, slots: Sequence[Slot], rows: Sequence[Tensor]
) -> list[Tensor | Exception]:
    """`next_scores` of several rows in one forward, copied to the host: rows[i] goes to slots[i];
    for each its scores, float32 [vocab], or what failed in it alone. No row's scores depend on the
    others: on a CPU to the bit. Raises what failed in all; then the slots may be empty."""
    failed: dict[int, Exception] = {}
    ready = []
    for row, (slot, ids) in enumerate(zip(slots, rows, strict=True)):
        try:
            _check(network, slot, ids, "ids")
            _check_room(slot, ids)
            ready.append(row)
        except ValueError as error:
            failed[row] = error
    if not ready:
        return list(failed.values())
    before = [row for row in ready if len(rows[row]) > 1]
    if before:  # of equal share in each chunk, whatever the number of rows
        chunk = len(before) * max(len(rows[row]) for row in before)
        network.encode([rows[row][:-1] for row in before], [slots[row] for row in before], chunk)
    last = [rows[row][-1:] for row in ready]
    hidden = network.encode_hidden(last, [slots[row] for row in ready])
    # One by one: a product of several positions rounds otherwise than one of each.
    scores = torch.cat([network.head.logits(own) for own in hidden]).cpu()
    given = dict(zip(ready, scores, strict=True))
    return [failed[row] if row in failed else _finite(given[row]) for row in range(len(rows))]


def _finite(scores: Tensor) -> Tensor | Exception:
    try:
        check_finite(scores)
    except FloatingPointError as error:
        return error
    return scores


def check_finite(scores: Tensor) -> None:
    """Raises FloatingPointError for scores or log probabilities that are no numbers."""
    if not scores.isfinite().all():
        raise FloatingPointError(
            "causal: the model's scores are not finite, as when its activations exceed the range "
            "of float16; load it with dtype='bfloat16' or 'float32'"
        )


def _check(network: Network, slot: Slot, ids: Tensor, where: str) -> None:
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


def _check_room(slot: Slot, ids: Tensor) -> None:
    if len(ids) > slot.room():
        raise Refused("ids", f"{len(ids)} tokens, and the slot has room for {slot.room()}")


def _next_pieces(
    rows: Sequence[Tensor], scratches: Sequence[Scratch], together: int
) -> list[tuple[int, int, int]]:
    """The next piece of each row, as far as one forward goes: row, first token, and the token after
    its last. The last token of a row has no token to score."""
    group: list[tuple[int, int, int]] = []
    total = 0
    for row, (ids, scratch) in enumerate(zip(rows, scratches, strict=True)):
        start, stop = scratch.length, min(scratch.length + PIECE, len(ids) - 1)
        if start >= stop:
            continue
        if group and total + stop - start > together:
            break
        group.append((row, start, stop))
        total += stop - start
    return group
