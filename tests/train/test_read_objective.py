from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sfumato import ops
from sfumato.ops.fast_gradients import fast_ops, linear, rms_norm
from sfumato.train import decisions_data, recipe
from sfumato.train.decision_states import choice
from sfumato.train.objective import (
    LOOKING_HEADS,
    PrefixAttention,
    ReadAttention,
    logits,
    read_losses,
    slot_scores,
)


@pytest.fixture(scope="module")
def network():
    return recipe.initialised(recipe.EMBEDDED, torch.Generator().manual_seed(0))


@torch.no_grad()
def test_packed_reads_that_share_states_score_as_each_read_by_itself(network):
    rng = np.random.default_rng(1)
    groups = [decisions_data.sample(rng, 3) for _ in range(4)]
    batch = decisions_data.collate(groups, rng)
    slots, ends, *_ = slot_scores(network, batch)
    for number, row in enumerate(chain(*groups)):
        context = torch.tensor([row.state + row.question])
        lengths = torch.tensor([context.shape[1]])
        attend = PrefixAttention(network, lengths, context.shape[1])
        positions = torch.arange(context.shape[1])[None]
        encoded = network.encode(context, positions, attend, torch.float32)
        attend.encoding = False
        positions = lengths[:, None] + torch.arange(decisions_data.WIDTH)
        canvas = batch.canvas[number : number + 1]
        hidden = network.denoise(canvas, None, positions, attend, torch.float32)
        torch.testing.assert_close(slots[number], logits(network, hidden)[0, 0])
        torch.testing.assert_close(ends[number], logits(network, encoded)[0, -1])


def test_the_loss_asks_the_slot_for_the_known_probabilities(network):
    rng = np.random.default_rng(2)
    batch = decisions_data.collate([decisions_data.sample(rng, 2)], rng)
    losses = read_losses(network, batch)
    slots, ends, *_ = slot_scores(network, batch)
    torch.testing.assert_close(losses["slot"], F.cross_entropy(slots, batch.truth))
    torch.testing.assert_close(losses["end"], F.cross_entropy(ends, batch.truth))
    losses["options"].backward()
    assert network.layers[-2].mlp.up_proj.weight.grad.abs().sum() > 0
    assert network.layers[-1].mlp.up_proj.weight.grad is None  # the options are read before it


@torch.no_grad()
def test_no_question_of_a_kind_is_no_loss(network):
    rng = np.random.default_rng(3)
    row = decisions_data.row(choice("Words: sun, dog.", "Which word is there?", "xy", (1.0, 0.0)))
    losses = read_losses(network, decisions_data.collate([[row]], rng))
    assert losses["evidence"] == losses["subjects"] == 0 < losses["labels"]


def test_words_are_asked_for_their_place_in_the_state(network):
    """A query that equals one key, and differs from the others, looks there."""
    rng = np.random.default_rng(3)
    batch = decisions_data.collate([decisions_data.sample(rng, 2) for _ in range(2)], rng)
    attend = ReadAttention(network, batch.states, batch.questions, batch.owner)
    owner, place, target = batch.looks["words"].unbind(1)
    tokens, width = len(batch.ids), sum(index.shape[1] for index in attend.index.values())
    keys = torch.eye(width)[:, :width].expand(len(batch.questions), -1, -1)
    queries = torch.zeros(tokens, width)
    queries[attend.index["question"][owner, place]] = 40 * torch.eye(width)[target]
    layer, *_ = how = LOOKING_HEADS["words"]
    attend.taught[layer] = queries[:, None], {"question": keys[:, None]}
    assert float(attend.look_loss(batch.looks["words"], *how)) < 1e-6
    attend.taught[layer] = -queries[:, None], {"question": keys[:, None]}
    assert float(attend.look_loss(batch.looks["words"], *how)) > 10


def test_fast_operations_have_the_references_values_and_gradients():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 64, generator=generator, requires_grad=True)
    weight = torch.randn(64, generator=generator, requires_grad=True)
    matrix = torch.randn(32, 64, generator=generator, requires_grad=True)
    for plain, fast, inputs, near in (
        (lambda: ops.rms_norm(x, weight, 1e-3), lambda: rms_norm(x, weight, 1e-3), (x, weight), {}),
        (lambda: ops.rms_norm(x, None, 1e-3), lambda: rms_norm(x, None, 1e-3), (x,), {}),
        (lambda: ops.linear(x, matrix), lambda: linear(x, matrix), (x, matrix), ROUNDED),
    ):
        torch.testing.assert_close(fast(), plain(), **near)
        wanted = torch.autograd.grad(plain().square().sum(), inputs)
        gradients = torch.autograd.grad(fast().square().sum(), inputs)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, **(near or {"rtol": 1e-4, "atol": 1e-4}))


ROUNDED = {"rtol": 0.02, "atol": 2.0}  # bfloat16 operands, sums of 32 to 64 products


def test_fast_operations_serve_inside_of_their_context_and_only_with_a_gradient():
    x, weight = torch.randn(2, 64), torch.randn(32, 64, requires_grad=True)
    plain = ops.linear(x, weight)
    with fast_ops():
        assert not torch.equal(ops.linear(x, weight), plain)
        with torch.no_grad():
            torch.testing.assert_close(ops.linear(x, weight), plain)
    assert torch.equal(ops.linear(x, weight), plain)


def test_the_router_and_the_vocabulary_are_not_rounded():
    x, weight = torch.randn(4, 64), torch.randn(106, 64, requires_grad=True)
    assert torch.equal(linear(x, weight), ops.linear(x, weight))
