"""A training of adapters on a stored network: the gradients of its dequantized weights, whether
layers are kept or computed a second time, and what either keeps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.support.kernels import close
from torch import Tensor

from sfumato.bench.subject import random_checkpoint
from sfumato.model.adapters import Adapted, Adapter, LowRank
from sfumato.model.loading import config_of, expected_shapes, place, skeleton
from sfumato.model.transformer import Transformer
from sfumato.train.objective import PrefixAttention
from sfumato.weights.formats import Stored, tensors_of

CHANGED = (
    *("layers.0.self_attn.k_proj", "layers.1.mlp.up_proj", "self_conditioning.down_proj"),
    *("layers.0.experts.gate_up_proj", "layers.1.experts.down_proj", "layers.1.router.proj"),
)
WIDTH, LENGTHS, RANK = 24, torch.tensor([24, 17]), 4


def stored_network(dtype: torch.dtype, is_stored: bool = True) -> tuple[Transformer, list[Tensor]]:
    """Of random Q4_K_M weights, as they are stored, or dequantized; and its tensors."""
    checkpoint, held = random_checkpoint("tiny", "q4_k_m"), []
    transformer = skeleton(config_of(checkpoint))
    for name in expected_shapes(transformer.config):
        value, (path, _, leaf) = checkpoint.read(name), name.rpartition(".")
        if not (is_stored and isinstance(value, Stored)):
            value = value.to(torch.float32 if ".router." in name else dtype)
        held += tensors_of(value)
        place(transformer.get_submodule(path), leaf, value)
    return transformer, held


@cache
def network(is_stored: bool) -> Transformer:
    return stored_network(torch.float32, is_stored)[0]


def adapter_for(shapes: dict[str, tuple[int, ...]]) -> Adapter:
    """Changes of the weights in CHANGED, which learn."""
    generator, changes = torch.Generator().manual_seed(1), {}
    for path in CHANGED:
        *count, out, inputs = shapes.get(path) or shapes[f"{path}.weight"]
        pair = (*count, RANK, inputs), (*count, out, RANK)
        down, up = (torch.randn(shape, generator=generator) * 0.1 for shape in pair)
        changes[path] = LowRank(down.requires_grad_(), up.requires_grad_(), 1.0)
    return changes


def gradients(transformer: Transformer) -> tuple[dict[str, Tensor], int]:
    """The gradients of an adapter and of the soft embedding, through both phases; and the bytes of
    the tensors that the forward keeps."""
    config, generator = transformer.config, torch.Generator().manual_seed(2)
    adapter = adapter_for(expected_shapes(config))
    transformer.attach(1, adapter)
    attend = PrefixAttention(transformer, LENGTHS, WIDTH)
    attend.adapted = (Adapted(1),)
    ids = torch.randint(config.vocab_size, (2, WIDTH + config.canvas_length), generator=generator)
    context, canvas = ids.split([WIDTH, config.canvas_length], 1)
    soft = torch.randn(*canvas.shape, config.hidden_size, generator=generator).requires_grad_()
    places = torch.arange(WIDTH + config.canvas_length).expand_as(ids)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoded = transformer.encode(context, places[:, :WIDTH], attend, torch.float32)
        attend.encoding = False
        hidden = transformer.denoise(
            *(canvas, soft, LENGTHS[:, None] + places[:, : canvas.shape[1]]),
            *(attend, torch.float32),
        )
        weights = (torch.randn(x.shape, generator=generator) for x in (encoded, hidden))
        loss = sum((x * w).sum() for x, w in zip((encoded, hidden), weights, strict=True))
    leaves = {"soft": soft}
    for path, change in adapter.items():
        leaves |= {f"{path}.down": change.down, f"{path}.up": change.up}
    results = torch.autograd.grad(loss, list(leaves.values()))
    transformer.detach(1)
    return dict(zip(leaves, results, strict=True)), sum(kept.values())


def test_gradients_of_a_stored_network_are_those_of_its_dequantized_weights() -> None:
    (ours, _), (theirs, _) = gradients(network(True)), gradients(network(False))
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        close(ours[name], gradient, 1e-4)


@pytest.mark.parametrize("is_stored", [True, False])
def test_layers_that_are_computed_again_have_the_same_gradients_and_keep_less(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, all_kept = gradients(network(is_stored))
    monkeypatch.setattr(network(is_stored), "recomputes_layers", True)
    again, kept = gradients(network(is_stored))
    for name, gradient in expected.items():
        assert torch.equal(again[name], gradient), name
    assert kept < all_kept / 3
