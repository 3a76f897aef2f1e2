"""The vocabulary head, interpreted, against the pass in plain torch.

The interpreter takes a second for a position, so most tests read one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.kernels import close, interpreted
from torch import Tensor

from sfumato.model.head import HeadStats, VocabularyHead
from sfumato.model.most_probable import locate
from sfumato.model.scores import vocabulary_mass as mass_operation
from sfumato.ops import registry
from sfumato.ops.online_softmax import BLOCK, Bans

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
HIDDEN, SOFTCAP = 72, 30.0
VOCAB = 200  # two chunks, of which the second ends within a block
PLAIN, BANNED, EQUAL, ODD, AGAIN = range(5)
"""Positions: nothing special, bans, equal scores, NaN; and the second one again."""


@dataclass(frozen=True)
class Passed:
    """A pass of the five positions, and what it was asked."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # hidden, weight, temperature, uniform
    bans: Bans
    out: Any
    expected: HeadStats


@pytest.fixture(scope="module")
def small_tiles() -> Any:
    """Several tiles of each kind in two small chunks."""
    from sfumato.ops.triton import head, workspaces
    from sfumato.ops.triton.tiles import Tile, tile_for

    constants = {
        "score_chunk": {"TILE": 64, "POSITIONS": 2, "DEPTH": 64},
        "embed_chunk": {"TILE": 64, "POSITIONS": 4, "COLUMNS": 64, "SPLITS": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspaces, "CHUNK", 128)
        patch.setattr(head, "GROUP", 3)
        patch.setattr(
            head,
            "tile_for",
            lambda name, device: (
                Tile(constants[name], 4, 1) if name in constants else tile_for(name, device)
            ),
        )
        yield patch


@pytest.fixture(scope="module")
def passed(small_tiles: Any) -> Passed:
    from sfumato.ops.triton.head import vocabulary_head

    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, HIDDEN, generator=random)
    hidden[AGAIN] = hidden[BANNED]
    weight = torch.randn(VOCAB, HIDDEN, generator=random) * 0.3
    weight[[17, 40, 130, 199]] = hidden[EQUAL]
    hidden[ODD, 5] = float("nan")
    temperature = torch.tensor([0.4, 0.8, 1.0, 1.0, 0.8])
    uniform = torch.tensor([1 - 2.0**-53, 0.37, 0.5, 0.1, 0.37], dtype=torch.float64)
    inputs = hidden, weight, temperature, uniform
    best = int((hidden[BANNED] @ weight.T).argmax())
    banned = {best: 1, 199: 1}
    bans = Bans.of([{}, banned, {17: 0}, {}, banned], [1] * 5, torch.device("cpu"))
    with registry.reference_only():
        expected = VocabularyHead(weight, SOFTCAP, chunk=128)(
            hidden, temperature, uniform, bans=bans
        )
    return Passed(inputs, bans, vocabulary_head(*inputs, SOFTCAP, bans), expected)


@pytest.mark.parametrize("position", [PLAIN, BANNED, EQUAL])
def test_statistics_are_those_of_the_reference(passed: Passed, position: int) -> None:
    out, expected = passed.out, passed.expected
    assert out.drawn[position] == expected.drawn[position]
    for name in ("entropy", "top_probs", "soft", "drawn_probs"):
        close(getattr(out, name)[position], getattr(expected, name)[position], 1e-5)
    # Torch rounds equal rows of the embedding differently: their order is another.
    assert set(out.top_ids[position].tolist()) == set(expected.top_ids[position].tolist())
    assert out.argmax[position] == out.top_ids[position, 0]
    assert out.argmax[position] == expected.argmax[position] or position == EQUAL


def test_of_equal_scores_the_lowest_id_is_first(passed: Passed) -> None:
    assert passed.out.top_ids[EQUAL, :4].tolist() == [17, 40, 130, 199]


def test_scores_that_are_no_numbers_name_tokens_of_the_vocabulary(passed: Passed) -> None:
    """A token that does not exist would end the process on a GPU."""
    assert passed.out.entropy[ODD].isnan()
    for ids in (passed.out.argmax, passed.out.drawn, passed.out.top_ids):
        assert bool(((ids >= 0) & (ids < VOCAB)).all())


def test_a_position_has_the_same_result_beside_others_in_another_group(passed: Passed) -> None:
    for name, value in vars(passed.out).items():
        assert torch.equal(value[AGAIN], value[BANNED]), name


def test_a_vocabulary_smaller_than_the_named_tokens(passed: Passed) -> None:
    from sfumato.ops.triton.head import vocabulary_head

    hidden, weight, temperature, uniform = (each[:1] for each in passed.inputs)
    weight = passed.inputs[1][:5].contiguous()
    out = vocabulary_head(hidden, weight, temperature, uniform, SOFTCAP)
    with registry.reference_only():
        expected = VocabularyHead(weight, SOFTCAP, chunk=128)(hidden, temperature, uniform)
    assert torch.equal(out.top_ids[:, :5], expected.top_ids)
    assert torch.equal(out.drawn, expected.drawn)
    assert not out.top_probs[:, 5:].any() and not out.top_ids[:, 5:].any()


def test_what_is_not_read_is_left_out(passed: Passed) -> None:
    """Zeros, and not the NaN of these positions; the one beside them keeps every bit."""
    from sfumato.ops.triton.head import vocabulary_head

    which = [ODD, ODD, ODD, PLAIN]
    hidden, weight, temperature, uniform = passed.inputs
    inputs = hidden[which], weight, temperature[which], uniform[which]
    out = vocabulary_head(*inputs, SOFTCAP, None, torch.tensor([True, True, True, False]))
    for name in ("argmax", "drawn", "drawn_probs", "entropy", "top_ids", "top_probs", "soft"):
        value, expected = getattr(out, name), getattr(passed.out, name)
        assert not value[:3].any() and torch.equal(value[3], expected[PLAIN]), name


def test_the_mass_of_the_vocabulary(passed: Passed) -> None:
    from sfumato.ops.triton.head import vocabulary_mass

    hidden, weight, _, _ = passed.inputs
    ids = torch.tensor([[0, 199], [64, 64]])
    for count, softcap in ((2, SOFTCAP), (1, 0.0)):
        arguments = hidden[:count], weight, ids[:count], softcap, 128, None
        with registry.reference_only():
            expected = mass_operation.reference(*arguments)
        for ours, theirs in zip(vocabulary_mass(*arguments), expected, strict=True):
            close(ours, theirs, 1e-5)


def test_draws_are_equal_given_equal_masses() -> None:
    """Bit for bit the masses of the reference; among them uniforms on the edges of blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sfumato.ops.triton.head_kernels import finish_head

    blocks, positions = 5, 4
    sums = torch.rand(positions, blocks, generator=torch.Generator().manual_seed(3))
    sums[:, 2] = 0
    ends = sums.double().cumsum(1)
    uniform = torch.tensor([0.0, 1 - 2.0**-53, 0, 0], dtype=torch.float64)
    uniform[2:] = (ends / ends[:, -1:])[2:, 1]  # the next block with any mass is the fourth
    block, _ = locate(sums, uniform)
    numbers = {
        name: torch.empty(positions) for name in ("drawn_probs", "entropy", "peaks", "totals")
    }
    ids = {name: torch.zeros(positions, dtype=torch.int64) for name in ("argmax", "drawn")}
    empty = torch.empty(0, dtype=torch.int64)
    weight = torch.zeros(blocks * BLOCK, 8)  # all tokens of a block are equally probable
    finish_head[(positions,)](
        **dict.fromkeys(("ban_ids", "ban_limits", "ban_row", "ban_place"), empty),
        hidden=torch.zeros(positions, 8),
        temperature=torch.ones(positions),
        done=torch.zeros(positions, dtype=torch.bool),
        weight=TensorDescriptor.from_tensor(weight, [BLOCK, 16]),
        uniform=uniform,
        block_max=torch.zeros(positions, blocks),
        block_sum=sums,
        block_shifted=torch.zeros(positions, blocks),
        block_best=torch.zeros(positions, blocks, dtype=torch.int8),
        soft=torch.zeros(1, positions, 8),
        top=torch.zeros(positions, 8),
        top_ids=torch.arange(8, dtype=torch.int32).repeat(positions, 1),
        out_ids=torch.empty(positions, 8, dtype=torch.int64),
        out_probs=torch.empty(positions, 8),
        out_soft=torch.empty(positions, 8),
        **(numbers | ids),
        vocab=blocks * BLOCK,
        positions=positions,
        blocks=blocks,
        bans=0,
        softcap=SOFTCAP,
        root=1.0,
        HIDDEN=8,
        BLOCKS=8,
        SPLITS=1,
        TOP=8,
        DEPTH=16,
        FORMAT=0,
        MASSES=True,
        UPCAST=True,
        DESCRIPTORS=True,
    )
    assert torch.equal(ids["drawn"] // BLOCK, block)
