from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sfumato.model.network import Network
from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasRow, collate
from sfumato.train.objective import LEAST_NOISE, PrefixAttention, logits, loss, mask_loss, noised
from sfumato.train.recipe import EMBEDDED, MASKS, initialised
from sfumato.weights.formats import FORMATS, quantize


@pytest.fixture
def network():
    """Random weights, large enough to make attention matter, in a network with a short window."""
    config = replace(EMBEDDED, sliding_window=9, canvas_length=8)
    made = initialised(config, torch.Generator().manual_seed(3))
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
        elif "norm" in name:
            parameter.data.uniform_(0.2, 0.6)
    return made


def batch(lengths, canvas=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    context = torch.randint(10, 100, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(context, lengths, strict=True):
        row[length:] = 0
    target = torch.randint(10, 100, (len(lengths), canvas), generator=generator)
    return context, torch.tensor(lengths), target


def rows_of(context, lengths, target):
    rows = zip(context, lengths, target, strict=True)
    return collate([CanvasRow("questions", c[:n].tolist(), t.tolist()) for c, n, t in rows])


def training_logits(network, context, lengths, canvas, soft=None):
    attend = PrefixAttention(network, lengths, context.shape[1])
    positions = torch.arange(context.shape[1]).expand_as(context)
    network.encode(context, positions, attend, torch.float32)
    attend.encoding = False
    positions = lengths[:, None] + torch.arange(canvas.shape[1])
    return logits(network, network.denoise(canvas, soft, positions, attend, torch.float32))


def test_masks_see_blocks_as_they_are_served_and_the_loss_is_of_masks_alone():
    made = initialised(replace(MASKS, canvas_length=8), torch.Generator().manual_seed(3))
    for parameter in made.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    context, lengths, target = batch([3, 21, 16])
    attend = PrefixAttention(made, lengths, context.shape[1], block=8)
    positions = torch.arange(context.shape[1]).expand_as(context)
    made.encode(context, positions, attend, torch.float32)
    attend.encoding = False
    positions = lengths[:, None] + torch.arange(8)
    trained = logits(made, made.denoise(target, None, positions, attend, torch.float32))

    made.requires_grad_(False)
    runtime = Network(made, torch.device("cpu"), torch.float32)
    slots = [runtime.new_slot(32) for _ in lengths]
    for slot, length in zip(slots, lengths.tolist(), strict=True):
        slot.offset = length % 8  # blocks end where the canvas begins
    runtime.encode([row[:n] for row, n in zip(context, lengths, strict=True)], slots)
    served = runtime.head.logits(runtime.denoise(list(target), slots))
    assert torch.allclose(trained.flatten(0, 1), served, atol=2e-3)

    seen = []
    made.denoise = lambda canvas, *rest: seen.append(canvas) or torch.zeros(3, 8, 128)
    even = mask_loss(made, rows_of(context, lengths, target), torch.Generator().manual_seed(1))
    (canvas,) = seen
    hidden = canvas == MASKS.mask_id
    assert (
        hidden.any(1).all() and not hidden.all() and torch.equal(canvas[~hidden], target[~hidden])
    )
    assert float(even["canvas"]) == pytest.approx(math.log(MASKS.vocab_size))


def test_the_padded_batches_of_training_compute_what_the_cached_rows_of_inference_do(network):
    context, lengths, canvas = batch([3, 21, 12])
    soft = torch.randn(3, 8, EMBEDDED.hidden_size)
    trained = training_logits(network, context, lengths, canvas, soft)

    network.requires_grad_(False)
    runtime = Network(network, torch.device("cpu"), torch.float32)
    slots = [runtime.new_slot(32) for _ in lengths]
    rows = [row[:n] for row, n in zip(context, lengths, strict=True)]
    runtime.encode(rows, slots)
    served = runtime.head.logits(runtime.denoise(list(canvas), slots, list(soft)))
    assert torch.allclose(trained.detach().flatten(0, 1), served, atol=2e-4)


def test_gradients_of_the_canvas_loss_flow_through_the_encoders_keys_and_values(network):
    context, lengths, target = batch([5, 9])
    context[:, 2], target[target == 7] = 7, 8  # a token that only the contexts hold

    def gradient():
        rows = rows_of(context, lengths, target)
        losses = loss(network, rows.prefixes(), torch.Generator().manual_seed(0))
        return torch.autograd.grad(losses["canvas"], network.embed_tokens.weight)[0][7]

    with_it = gradient()
    # As an output row, token 7 gets a gradient too; without its context it would be another one.
    context[:, 2] = 9
    without = gradient()
    assert (with_it - without).abs().max() > 1e-6


def test_the_canvas_never_sees_itself_in_the_context(network):
    """Only the noised canvas and the context go in: another target gives the same encoding."""
    context, lengths, target = batch([6, 6])
    canvas = torch.full_like(target, 11)
    one = training_logits(network, context, lengths, canvas)
    assert torch.equal(one, training_logits(network, context, lengths, canvas))
    seen = []
    original = network.denoise
    network.denoise = lambda tokens, *rest: seen.append(tokens) or original(tokens, *rest)
    loss(network, rows_of(context, lengths, target).prefixes(), torch.Generator().manual_seed(5))
    assert all((tokens != target).any() for tokens in seen)


def test_noise_replaces_tokens_with_each_rows_own_probability():
    generator = torch.Generator().manual_seed(0)
    target = torch.zeros(4000, 64, dtype=torch.int64)
    share = (noised(target, 1 << 20, generator) != target).float().mean(dim=1)
    assert abs(share.mean().item() - 0.5) < 0.02  # t is uniform …
    spread = torch.histc(share, bins=4, min=0, max=1) / len(share)
    assert (spread - 0.25).abs().max() < 0.03  # … over all of (0, 1)
    assert share.min() >= 0 and LEAST_NOISE > 0


def test_pads_do_not_change_the_losses(network):
    rows = rows_of(*batch([7, 4]))
    longer = rows._replace(context=rows.context.index_fill(1, torch.arange(7, 15), 9))
    losses = [
        loss(network, each.prefixes(), torch.Generator().manual_seed(1)) for each in (rows, longer)
    ]
    for short, padded in zip(*(each.values() for each in losses), strict=True):
        assert short.item() == pytest.approx(padded.item(), abs=1e-5)


@pytest.mark.parametrize("conditioned", [True, False])
def test_self_conditioning_is_used_in_about_half_of_the_passes(network, monkeypatch, conditioned):
    """A draw under one half runs a first pass and feeds its soft embedding to the second."""
    softs = []
    original = network.denoise
    monkeypatch.setattr(
        network,
        "denoise",
        lambda tokens, soft, *rest: softs.append(soft) or original(tokens, soft, *rest),
    )
    draw = torch.tensor(0.4 if conditioned else 0.6)
    real = torch.rand
    monkeypatch.setattr(
        objective.torch, "rand", lambda *shape, **kw: draw if shape == ((),) else real(*shape, **kw)
    )
    context, lengths, target = batch([4])
    loss(network, rows_of(context, lengths, target).prefixes())
    assert [soft is not None for soft in softs] == ([False, True] if conditioned else [False])
    assert all(soft is None or not soft.requires_grad for soft in softs)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_a_stored_vocabulary_has_the_losses_of_a_dequantized_one_by_ranges(cap, monkeypatch):
    random = torch.Generator().manual_seed(4)
    stored = quantize(torch.randn(100, 256, generator=random) * 0.2, FORMATS["Q6_K"])
    config = SimpleNamespace(vocab_size=100, logit_softcap=cap)
    hidden = torch.randn(7, 256, generator=random).requires_grad_()
    wanted, both = torch.randint(100, (7,), generator=random), []
    for weight, most in (stored.dequantize(), 700), (stored, 7 * 30):  # in one piece, and in four
        monkeypatch.setattr(objective, "MOST_SCORES", most)
        network = SimpleNamespace(config=config, output=weight)
        losses = objective.cross_entropies(network, hidden, wanted)
        both.append((losses, *torch.autograd.grad((losses * losses).sum(), hidden)))
    for theirs, ours in zip(*both, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) and ours.abs().max() > 0.1
