"""The operations of the network: one signature each, whatever serves it.

Every operation has a specification in plain torch (`reference`, `online_softmax`).  Faster twins
register themselves (`registry`); callers never choose.  Whether compiled kernels serve on a CPU is
decided once, at import, and `reason` says why.  This module knows no layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sfumato.ops import layer_reference, phase_reference, read_reference, switched_off, torch_device
from sfumato.ops.cpu import attention as cpu_attention
from sfumato.ops.cpu import kernels as cpu_kernels
from sfumato.ops.cpu import library, torch_steady
from sfumato.ops.cpu import online_softmax as cpu_online_softmax
from sfumato.ops.cpu import row_operations as cpu_row_operations
from sfumato.ops.cpu.columns import column_bytes, pack_columns, packs_columns
from sfumato.ops.cpu.panels import ACTIVATIONS, rounding
from sfumato.ops.online_softmax import Bans, SoftmaxState
from sfumato.ops.packing import pack, packed_bytes, packs
from sfumato.ops.reads import Prefixes, Questions, read_attention
from sfumato.ops.reference import Causal, OwnKeys, SharedCausal, Weight
from sfumato.ops.registry import ANY, call, form_of
from sfumato.ops.rows import Rows, Rules, Statistics
from sfumato.ops.triton import prepare
from sfumato.ops.triton import serving as kernels_on
from sfumato.weights.blocks import QuantizedTensor

__all__ = [
    "ACTIVATIONS",
    "Bans",
    "Causal",
    "OwnKeys",
    "Prefixes",
    "Questions",
    "SharedCausal",
    "SoftmaxState",
    "after_attention",
    "after_layer",
    "attend",
    "attend_shared",
    "attention",
    "backend",
    "canvas_attention",
    "column_bytes",
    "dense",
    "embed",
    "experts",
    "geglu",
    "kernels_on",
    "linear",
    "move_rows",
    "multiplies_bf16",
    "own_scores",
    "pack",
    "pack_columns",
    "packed_bytes",
    "packs",
    "packs_columns",
    "phase_attention",
    "prepare",
    "prepare_heads",
    "read_attention",
    "reason",
    "rms_norm",
    "rotate",
    "rounding",
    "route",
    "step_noise",
    "update_softmax",
    "vocabulary_mass",
    "vocabulary_pass",
    "write_cache",
]

REFERENCES = (layer_reference, phase_reference, read_reference)
"""The files that register references beside `reference` and `online_softmax`."""

TWINS = (
    *(torch_steady, cpu_kernels, cpu_attention, cpu_online_softmax, cpu_row_operations),
    *(torch_device, switched_off),
)
"""The files that register twins, or turn them off."""

backend, reason = library.describe()
"""What serves the operations on a CPU, and why, for `sfumato doctor` and the logs."""

logging.getLogger(__name__).info("operations on a CPU: %s (%s)", backend, reason)

_CPU = torch.device("cpu")


def dense(weight: Weight, dtype: torch.dtype, spare: Tensor | None = None) -> Tensor:
    """The weight as a float tensor of `dtype`; a float tensor of that dtype is not copied.

    spare: memory of its shape and dtype, which may be taken for the result: fresh memory costs
    more than the work where weights are dequantized over and over.
    """
    device = getattr(weight, "device", _CPU)
    return cast(Tensor, call("dense", device, form_of(weight), weight, dtype, spare))


def linear(x: Tensor, weight: Weight, tile: int | None = None) -> Tensor:
    """`x @ weight.T`: x [..., in], weight [out, in] → [..., out] in x's dtype.

    tile: rows of each of torch's products on a CPU, such as `reference.ROWS` for a small number
    of rows; None: by the weight's size.
    """
    return cast(Tensor, call("linear", x.device, form_of(weight), x, weight, tile))


def embed(ids: Tensor, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding: ids int64 [...], weight [vocab, hidden] → [..., hidden]."""
    return cast(Tensor, call("embed", ids.device, form_of(weight), ids, weight, dtype))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis, in float32; x's dtype again."""
    return cast(Tensor, call("rms_norm", x.device, ANY, x, weight, eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2): x [..., heads, d]; cos and sin [..., d/2]."""
    return cast(Tensor, call("rotate", x.device, ANY, x, cos, sin))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) · up` of the same shape, where gelu is the tanh approximation."""
    return cast(Tensor, call("geglu", gate.device, ANY, gate, up))


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """A gated-GELU mixture of experts.

    x [tokens, hidden]; chosen int64 and shares float [tokens, k]; gate_up [experts, 2·m, hidden]
    with the gate first; down [experts, hidden, m] → [tokens, hidden].
    """
    form = form_of(gate_up, down)
    return cast(Tensor, call("experts", x.device, form, x, chosen, shares, gate_up, down))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of a batch with scale 1 and grouped heads.

    q [..., heads, n, d]; k and v [..., kv_heads, m, d]; mask [..., n, m], bool with True where a
    query may look, or what to add to the scores (None: everywhere) → [..., heads, n, d].
    """
    return cast(Tensor, call("attention", q.device, ANY, q, k, v, mask))


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal | None = None
) -> Tensor:
    """Softmax attention of one row's tokens, scale 1, grouped heads.

    q [tokens, heads, d]; keys and values in parts, one after another, each [kv_heads, n, d], whose
    dtypes may differ, or as a narrow cache stores them, [kv_heads, n, stored width]; causal None:
    every token sees every key → like q.  A compiled twin that multiplies bfloat16 serves where a
    part is stored in it, or narrow with queries in it.
    """
    return cast(Tensor, call("attend", q.device, ANY, q, keys, values, causal))


def attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own: Sequence[OwnKeys],
    causal: SharedCausal,
) -> Tensor:
    """Softmax attention of rows that follow one prefix: to the bit what `attend` makes of each.

    q [all queries, heads, d]; k and v [all new tokens, kv_heads, d], rows one after another; keys
    and values: the prefix's, in parts as `attend` takes them → like q.  A row sees the
    prefix's keys, its own, and its new ones, in this order.
    """
    arguments = (q, k, v, keys, values, own, causal)
    return cast(Tensor, call("attend_shared", q.device, ANY, *arguments))


def canvas_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    held: Tensor,
    width: Tensor,
) -> Tensor:
    """Softmax attention of canvases, one a row, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d]; keys and values [slots, kv_heads, size,
    d], stored; slots, held and width int64 [rows] → like q.  Each position sees the `held` first
    stored positions of its row's slot and the `width` first positions of its own canvas; the
    results at the positions after the width are finite and otherwise undefined.
    """
    arguments = (q, k, v, keys, values, slots, held, width)
    return cast(Tensor, call("canvas_attention", q.device, ANY, *arguments))


def phase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    width: Tensor,
    commits: Tensor,
    window: int | None,
) -> Tensor:
    """Softmax attention of rows that denoise and rows that commit, scale 1, grouped heads.

    q [rows, n, heads, d]; k and v [rows, n, kv_heads, d]; keys and values [slots, kv_heads, size,
    d], stored, position p at p mod size; slots, first (positions that the slot holds), width (those
    of the row that take part, 1 at least) and commits int64 [rows] → like q.  Where `commits` is 0,
    each position sees what `canvas_attention` has it see; elsewhere its own and earlier positions,
    at most `window` of them (None: all).  The results at the positions after the width are finite
    and otherwise undefined.
    """
    arguments = (q, k, v, keys, values, slots, first, width, commits, window)
    return cast(Tensor, call("phase_attention", q.device, ANY, *arguments))


def write_cache(stored: Tensor, new: Tensor, slots: Tensor, first: Tensor, count: Tensor) -> None:
    """Stores the first `count` entries of each row after the `first` positions of its slot, in
    place, and changes nothing else.

    stored [slots, kv_heads, size, d], position p at p mod size; new [rows, n, kv_heads, d]; slots,
    first and count int64 [rows], a count of 0 for rows that store nothing.  No two rows have one
    slot.
    """
    call("write_cache", new.device, ANY, stored, new, slots, first, count)


def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads of the projections of tokens: `rotate(norm(q))`, `rotate(norm(k))`, and
    v's norm without a weight.

    q [..., tokens, heads, d], k and v [..., tokens, kv_heads, d] (v None: k stands for it); the
    norms' weights [d]; cos and sin [..., tokens, d / 2] → q, k and v of the same shapes.
    """
    arguments = (q, k, v, q_weight, k_weight, cos, sin, eps)
    return cast(tuple[Tensor, Tensor, Tensor], call("prepare_heads", q.device, ANY, *arguments))


def after_attention(
    x: Tensor,
    attended: Tensor,
    weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual after attention, `x + norm(attended)`, and two norms of it: what the dense MLP
    and the experts read. x and attended [..., hidden], the norms' weights [hidden] → like x."""
    arguments = (x, attended, weight, dense_weight, expert_weight, eps)
    return cast(tuple[Tensor, Tensor, Tensor], call("after_attention", x.device, ANY, *arguments))


def after_layer(
    x: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_weight: Tensor,
    mixed_weight: Tensor,
    weight: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """The residual after a layer, `(x + norm(norm(dense) + norm(mixed))) · scalar`.

    x, dense and mixed [..., hidden]; the norms' weights [hidden]; scalar [1], or of each token
    [..., 1] → like x.
    """
    arguments = (x, dense, mixed, dense_weight, mixed_weight, weight, scalar, eps)
    return cast(Tensor, call("after_layer", x.device, ANY, *arguments))


def route(
    x: Tensor, weight: Weight, scale: Tensor, per_expert: Tensor, active: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their shares, in float32: of the scores `norm(x) · scale /
    sqrt(hidden) @ weight.T` the highest, and their softmax times `per_expert`.

    x [tokens, hidden]; weight [experts, hidden]; scale [hidden]; per_expert [experts] → chosen
    int64 and shares float32 [tokens, active].
    """
    arguments = (x, weight, scale, per_expert, active, eps)
    form = form_of(weight)
    return cast(tuple[Tensor, Tensor], call("route", x.device, form, *arguments))


def vocabulary_pass(
    hidden: Tensor,
    weight: Tensor | QuantizedTensor,
    temperature: Tensor,
    uniform: Tensor,
    softcap: float,
    bans: Bans | None,
    chunk: int,
    packed: Sequence[Weight] | None,
    done: Tensor | None,
) -> tuple[Tensor, ...]:
    """One plain pass over the vocabulary: hidden [positions, hidden], weight [vocab, hidden],
    temperature float32 and uniform float64 [positions]; chunk: ids at a time, where no kernel
    serves; packed: the chunks of the weight as they are multiplied; done bool [positions]: those
    of rows that are done, whose results may be any tokens and finite numbers → the fields of
    `HeadStats` but the logits, in their order."""
    arguments = (hidden, weight, temperature, uniform, softcap, bans, chunk, packed, done)
    form = form_of(weight)
    return cast(tuple[Tensor, ...], call("vocabulary_pass", hidden.device, form, *arguments))


def vocabulary_mass(
    hidden: Tensor,
    weight: Tensor | QuantizedTensor,
    ids: Tensor,
    softcap: float,
    chunk: int,
    packed: Sequence[Weight] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pass over the vocabulary at temperature 1: hidden [positions, hidden], weight [vocab,
    hidden], ids int64 [positions, n]; chunk and packed as in `vocabulary_pass` → the scores s of
    each position's ids float32 [positions, n]; and of all ids the highest score and Σ e^(s -
    highest) float32, and the argmax int64 [positions]."""
    arguments = (hidden, weight, ids, softcap, chunk, packed)
    result = call("vocabulary_mass", hidden.device, form_of(weight), *arguments)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], result)


def own_scores(hidden: Tensor, weight: Tensor | QuantizedTensor, ids: Tensor) -> Tensor:
    """Products of each position with the rows of the weight that its ids name: hidden [n, hidden],
    weight [vocab, hidden], ids int64 [n, m] → [n, m] in the dtype of hidden."""
    return cast(Tensor, call("own_scores", hidden.device, form_of(weight), hidden, weight, ids))


def step_noise(
    seeds: Tensor,
    canvas: Tensor,
    attempt: Tensor,
    step: Tensor,
    max_steps: Tensor,
    temperatures: Tensor,
    width: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the next step of each row is drawn with: seeds int64 [rows, 2], canvas, attempt, step
    (done so far) and max_steps int64 [rows], temperatures float32 [rows, steps] → temperature
    float32, uniforms float64 in [0, 1) and new tokens int64 of step + 1, all [rows, width]."""
    arguments = (seeds, canvas, attempt, step, max_steps, temperatures, width, vocab_size)
    return cast(tuple[Tensor, Tensor, Tensor], call("step_noise", seeds.device, ANY, *arguments))


def move_rows(rows: Rows, rules: Rules, stats: Statistics, fresh: Tensor, words: Tensor) -> None:
    """Moves rows one step on, in place, and packs what the host is to learn.

    stats: of all positions of the rows, [R · W, ...]; fresh: new tokens int64 [R, W]; words int32
    [R, words], which are overwritten.  A row that is done stays as it is.
    """
    call("move_rows", words.device, ANY, rows, rules, stats, fresh, words)


def update_softmax(
    state: SoftmaxState,
    raw: Tensor,
    first_id: int,
    temperature: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes a chunk of scores into a state, in place; see `ops.online_softmax.update`."""
    arguments = (state, raw, first_id, temperature, softcap, dtype, bans)
    return cast(tuple[Tensor, Tensor, Tensor], call("update_softmax", raw.device, ANY, *arguments))


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the compiled twins use the processor's bfloat16 instructions."""
    return device.type == "cpu" and cpu_attention.multiplies_bf16()
