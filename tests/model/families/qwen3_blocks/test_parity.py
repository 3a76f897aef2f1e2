"""Qwen3 networks of blocks beside `transformers`' with a four-dimensional mask: both phases, from
files of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.oracle import relative
from tests.support.qwen3_oracle import MASK, oracle_logits, random_oracle, save_oracle

from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.segments import PaddedRows, RowPart

CPU = torch.device("cpu")
TOLERANCE = 1e-4


def load(path: Path) -> Network:
    return load_network(open_checkpoint(path), CPU, torch.float32)


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(MASK, (count,), generator=torch.Generator().manual_seed(seed))


def encoded(network: Network, rows: list[torch.Tensor], offsets: list[int], chunk: int = 512):
    """Slots that hold the rows, which were encoded together."""
    slots = network.new_slots(len(rows), 128)
    for slot, offset in zip(slots, offsets, strict=True):
        slot.offset = offset
    assert network.encode(rows, slots, chunk)
    return slots


DENSE = [
    ("sdar", {}, 4),
    ("sdar", {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 1}, 8),
    ("a2d-qwen3", {"head_dim": 64, "rope_theta": 1e6, "num_attention_heads": 2}, 32),
]
EXPERTS = [
    ("sdar_moe", {}, 4),
    ("sdar_moe", {"norm_topk_prob": False, "num_experts": 1, "num_experts_per_tok": 1}, 8),
]
CASES = [pytest.param(*case, id=f"{case[0]}-{case[2]}") for case in (*DENSE, *EXPERTS)]


@pytest.mark.parametrize("model_type, changes, block", CASES)
def test_both_phases_are_those_of_transformers(
    tmp_path: Path, model_type: str, changes: dict, block: int
) -> None:
    """Rows of several lengths, in chunks of any size, with blocks from the front and from the back;
    and a canvas behind each."""
    model = random_oracle(1, model_type == "sdar_moe", **changes)
    network = load(save_oracle(model, tmp_path, model_type, block))
    assert network.config.mask_id == MASK and network.config.block == block
    lengths = [3 * block, 2 * block + 3, block - 1, 1]
    rows = [random_ids(length, length) for length in lengths]
    canvas = torch.full((block,), MASK)
    canvas[0] = 5
    for offsets in ([0] * len(rows), [length % block for length in lengths]):
        expected = [
            oracle_logits(model, row, canvas, block, offset)
            for row, offset in zip(rows, offsets, strict=True)
        ]
        for chunk in (512, 5 * block, 1):
            slots = encoded(network, rows, offsets, chunk)
            hidden = network.denoise([canvas] * len(rows), slots)
            logits = network.head.logits(hidden).split(block)
            for ours, theirs in zip(logits, expected, strict=True):
                assert relative(ours, theirs[-block:]) < TOLERANCE
            assert [slot.length for slot in slots] == lengths  # a step writes nothing
        slots = encoded(network, [row[:0] for row in rows], offsets)
        for ours, theirs in zip(network.encode_hidden(rows, slots), expected, strict=True):
            assert relative(network.head.logits(ours), theirs[:-block]) < TOLERANCE


def test_a_canvas_that_is_committed_sees_itself_in_both_directions(tmp_path: Path) -> None:
    """As a row of a step that commits, and encoded like a prompt, from a file in which blocks of 4
    begin at the first token: what comes after is that of one forward without a cache."""
    model, block = random_oracle(2), 4
    network = load(save_oracle(model, tmp_path, "sdar", block))
    prompt, done, canvas = random_ids(8, 1), random_ids(4, 2), torch.full((4,), MASK)
    expected = oracle_logits(model, torch.cat((prompt, done)), canvas, block, 0)[-block:]
    (slot,) = encoded(network, [prompt], [0])
    other = encoded(network, [prompt], [0])[0]
    network.encode([done], [other])
    width = torch.tensor([block])
    part = RowPart(slot.pool, torch.tensor([slot.index]), block, width, commits=width)
    network.denoise_batch(done, None, PaddedRows([part]))
    slot.advance(block)
    for each in (slot, other):
        ours = network.head.logits(network.denoise([canvas], [each]))
        assert relative(ours, expected) < TOLERANCE


def test_a_slot_keeps_where_its_blocks_begin(tmp_path: Path) -> None:
    network = load(save_oracle(random_oracle(3), tmp_path, "sdar", 4))
    (slot,) = encoded(network, [random_ids(7, 1)], [3])
    (copy,) = network.new_slots(1, 64)
    copy.restore(slot, 7)
    assert copy.offset == 3 and copy.whole_blocks(6, 20) == 4
    assert copy.whole_blocks(3, 20) == 4 and copy.whole_blocks(3, 2) == 2
    copy.reset()
    assert copy.offset == 0 and copy.whole_blocks(6, 20) == 4
