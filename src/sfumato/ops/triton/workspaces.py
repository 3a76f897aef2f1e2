"""What the kernels' operations allocate beside their results, from shapes alone.

A step's memory is predicted before anything is loaded, so this module needs no Triton. Tests hold
each number against what interpreted calls allocate.
"""

from __future__ import annotations

import torch

from sfumato.ops.online_softmax import BLOCK, TOP
from sfumato.ops.triton.tiles import Tile, tile_for

CHUNK = 8192
"""Ids of the vocabulary at a time: with 256 positions, 128 programs of 128 × 128 for the 132
multiprocessors of an H200; 4096 ids would leave half of them idle.  A constant, since a row's bits
must not depend on the number of positions."""
GROUP = 1024  # positions of the vocabulary's pass at a time, which bounds its memory
NARROW = 256  # the largest head_dim of the kernels that are named after it
_FLOAT, _INT, _LONG = 4, 4, 8  # bytes of float32, int32 and int64


def attention_bytes(
    tokens: int, heads: int, d: int, size: int, device: torch.device, kernel: str = "attention"
) -> int:
    """Bytes of `attend_padded` of so many tokens in rows of any length, over slots of `size`
    positions: the parts of a long prefix, in float32. kernel: "read" for rows with questions."""
    pieces = most_pieces(size, tile_for(kernel_of(kernel, d), device))
    return 0 if pieces <= 1 else pieces * tokens * heads * (d + 2) * _FLOAT


def most_pieces(size: int, tile: Tile) -> int:
    """How many pieces a prefix of at most so many positions has, with a tile of `attend_padded`."""
    return min(tile["PIECES"], rounded_up(size, tile["SHORTEST"]) // tile["SHORTEST"])


def prefill_bytes(keys: int, kv_heads: int, d: int, itemsize: int, device: torch.device) -> int:
    """Bytes of `attend` over so many keys: keys and values, joined, and their positions."""
    held = rounded_up(keys, tile_for(kernel_of("prefill", d), device)["KEYS"])
    return held * (2 * kv_heads * d * itemsize + _LONG)


def expert_bytes(
    tokens: int, chosen: int, experts: int, inner: int, hidden: int, itemsize: int
) -> int:
    """Bytes of `experts` where each token chooses so many: the order of the assignments, their
    activated products, and their parts of the result."""
    assignments = tokens * chosen
    order = (assignments + experts + 1) * _INT
    return order + assignments * (inner + hidden) * itemsize


def head_bytes(positions: int, vocab: int, hidden: int, itemsize: int, device: torch.device) -> int:
    """Bytes of `vocabulary_pass`: the scores and masses of a chunk, the statistics of all blocks of
    ids, the parts of the soft embedding, and the most probable tokens."""
    count = min(positions, GROUP)
    chunk = head_chunk(vocab)
    blocks = rounded_up(vocab, BLOCK) // BLOCK
    kernels = ("score_chunk", "score_chunk_planes")  # one of them serves
    tile = min(tile_for(kernel, device)["TILE"] for kernel in kernels)
    splits = tile_for("embed_chunk", device)["SPLITS"]
    statistics = blocks * (3 * _FLOAT + 1)
    scores = chunk * (_FLOAT + itemsize) + chunk // tile * _FLOAT
    best = TOP * (_FLOAT + _INT)
    peaks = 2 * _FLOAT
    return count * (statistics + scores + best + splits * hidden * _FLOAT + peaks)


def route_bytes(tokens: int, experts: int) -> int:
    """Bytes of `route`: the scores."""
    return tokens * experts * _FLOAT


def head_chunk(vocab: int) -> int:
    """How many ids a pass over a vocabulary takes at a time."""
    return min(CHUNK, rounded_up(vocab, 2 * BLOCK))


def kernel_of(operation: str, d: int) -> str:
    """The name of the kernel of this head_dim: of "attention", "prefill" or "read"."""
    return f"{operation}_{256 if d <= NARROW else 512}"


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-count // multiple) * multiple
