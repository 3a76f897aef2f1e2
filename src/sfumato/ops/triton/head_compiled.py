"""The kernels of a pass over the vocabulary, each for embeddings of floats and for those in planes,
with the sizes of the 26B-A4B."""

from __future__ import annotations

from dataclasses import replace

from sfumato.ops.online_softmax import TOP
from sfumato.ops.triton.head_finish import finish_head
from sfumato.ops.triton.head_kernels import embed_chunk, score_chunk
from sfumato.ops.triton.kernel import Kernel, register
from sfumato.ops.triton.planes import LAYOUTS
from sfumato.ops.triton.workspaces import CHUNK

_BANS = {**dict.fromkeys(("ban_ids", "ban_limits", "ban_row", "ban_place"), "*i64"), "bans": "i32"}
BLOCK_STATISTICS = {
    **dict.fromkeys(("block_max", "block_sum", "block_shifted"), "*fp32:16"),
    "block_best": "*i8:16",
}
_NUMBERS = {"vocab": "i32", "positions": "i32", "softcap": "fp32"}
_CHUNK = {"scores": "*fp32:16", "masses": "*bf16:16", "tile_max": "*fp32:16", "first_id": "i32"}
_TOP = {"top": "*fp32:16", "top_ids": "*i32:16", "soft": "*fp32:16"}

_DECIDE = {"decide": {"MASSES": False}}  # see `vocabulary_mass`

SCORE_CHUNK = register(
    Kernel(
        "score_chunk",
        score_chunk,
        {
            **(_BANS | BLOCK_STATISTICS | _NUMBERS | _CHUNK),
            "hidden": "tensordesc<bf16[{POSITIONS}, {DEPTH}]>",
            "weight": "tensordesc<bf16[{TILE}, {DEPTH}]>",
            "temperature": "*fp32",
            "done": "*u1",
            "blocks": "i32",
        },
        {"HIDDEN": 2816, "CHUNK": CHUNK, "FORMAT": 0, "MASSES": True},
        _DECIDE,
    )
)

EMBED_CHUNK = register(
    Kernel(
        "embed_chunk",
        embed_chunk,
        {
            "weight": "tensordesc<bf16[{TILE}, {COLUMNS}]>",
            "vocab": "i32",
            "positions": "i32",
            **_CHUNK,
            **_TOP,
            "peaks": "*fp32",
            "done": "*u1",
            "embedding_programs": "i32",
            "hidden_programs": "i32",
        },
        {"HIDDEN": 2816, "CHUNK": CHUNK, "TOP": TOP, "FORMAT": 0},
    )
)

FINISH_HEAD = register(
    Kernel(
        "finish_head",
        finish_head,
        {
            **(_BANS | BLOCK_STATISTICS | _NUMBERS | _TOP),
            "hidden": "*bf16:16",
            "temperature": "*fp32",
            "done": "*u1",
            "weight": "tensordesc<bf16[64, {DEPTH}]>",
            "uniform": "*fp64",
            "argmax": "*i64",
            "drawn": "*i64",
            "entropy": "*fp32",
            "peaks": "*fp32",
            "totals": "*fp32",
            "out_ids": "*i64",
            "out_probs": "*fp32",
            "out_soft": "*bf16:16",
            "blocks": "i32",
            "root": "fp32",
        },
        {"HIDDEN": 2816, "BLOCKS": 4096, "SPLITS": 3, "TOP": TOP, "FORMAT": 0, "MASSES": True},
        _DECIDE,
    )
)


def _of_planes(kernel: Kernel) -> Kernel:
    return register(
        replace(
            kernel,
            name=f"{kernel.name}_planes",
            types={**kernel.types, "weight": "*u8:16"},
            sizes={**kernel.sizes, "FORMAT": LAYOUTS["Q6_K"].number},
            columns="HIDDEN",
        )
    )


SCORE_PLANES, EMBED_PLANES, FINISH_PLANES = (
    _of_planes(kernel) for kernel in (SCORE_CHUNK, EMBED_CHUNK, FINISH_HEAD)
)
