"""The dense MLP beside the experts: what two streams share has an order, in a whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from tests.support.kernels import counted_launches, interpreted, seen_as
from tests.support.recorded_graphs import RepeatedCalls
from tests.support.stream_order import Unordered, checked_streams
from torch import Tensor

from sfumato import ops
from sfumato.bench.subject import random_config
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import Commit
from sfumato.model.adapters import Adapted
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.network import Network
from sfumato.model.transformer import NormedBlock, Transformer
from sfumato.ops import registry, torch_device
from sfumato.ops.triton import self_test
from sfumato.ops.triton.self_test import Trial

CPU = torch.device("cpu")
MAIN, SIDE = "the main stream", "the side stream"
WIDTH, VOCAB, LAYERS = 2, 64, 2
LAYERS_KERNELS = (
    *("after_attention", "after_layer", "experts", "linear", "linear_each", "linear_gated"),
    *("prepare_heads", "route", "write_cache"),
)
"""Operations of the layers."""


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    config = DIFFUSION_GEMMA.config.from_hf(random_config("tiny"), {})
    layer = replace(config.layers[0], kv_heads=1, head_dim=16, rope_pairs=8)
    config = replace(config, layers=(layer,) * LAYERS, num_heads=2, hidden_size=32)
    config = replace(config, intermediate_size=32, num_experts=2, experts_per_token=1)
    config = replace(config, expert_size=16, vocab_size=VOCAB, canvas_length=WIDTH)
    transformer = Transformer(config).requires_grad_(False)
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return Network(transformer, CPU, torch.float32, torch.float32, None)


@contextmanager
def kernels_serve(*operations: str) -> Iterator[None]:
    with seen_as("cpu", "cuda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "_passed", {CPU: frozenset(operations)})
        yield


def step(network: Network) -> list[Tensor]:
    """What a step leaves of a row that is denoised, beside one that commits."""
    slots = network.new_slots(2, 40)
    with registry.reference_only():
        network.encode([torch.arange(9), torch.arange(5)], slots)
    rules = replace(REFERENCE, canvas_length=WIDTH)
    rows = [Canvas(rules, Noise(1, 0), VOCAB, CPU), Commit(range(2), rules, network)]
    denoiser = Denoiser(network, 2, RepeatedCalls())
    denoiser.launch(rows, slots).results()
    (batch_rows,) = denoiser._batch_rows.values()
    batch = batch_rows.batch
    return [batch.tokens, batch.soft, *(x for slot in slots for x in slot.read(LAYERS - 1))]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("served", [("rms_norm",), LAYERS_KERNELS], ids=["torch", "kernels"])
def test_a_step_and_a_commit(
    network: Network, served: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of the step on one stream. Without the wait of either stream for the other it
    is found to be wrong, where the first operation reads what the other stream wrote."""
    with kernels_serve(*served):
        with checked_streams() as check:
            both = step(network)
        assert check.operations[SIDE] >= LAYERS * 4  # two products, and memory for each
        for deaf in (SIDE, MAIN):
            with checked_streams({deaf}), pytest.raises(Unordered, match=f"on {deaf} does not"):
                step(network)
        monkeypatch.setattr(registry, "_off", {"beside"})
        with checked_streams() as check:
            alone = step(network)
        assert check.operations.keys() == {MAIN}
    assert all(map(torch.equal, both, alone))


@interpreted
@pytest.mark.parametrize("format", ["FP8", "Q8_0"])
def test_products_of_codes_and_planes(format: str) -> None:
    """Whose inputs are rounded to codes, or whose weights are unpacked, on either stream."""
    x = torch.randn(3, 64)
    gate, up, down = (Trial(CPU).weight(format, 64, 64, number=number) for number in range(3))

    def mlp() -> Tensor:
        return ops.linear(ops.linear_gated(x, gate, up, "gelu"), down)

    served = [f"{name} {format}" for name in ("linear", "linear_gated")]
    serving, counted = kernels_serve("linear", *served), counted_launches()
    with torch.no_grad(), serving, checked_streams() as check, counted as launches:
        for _ in range(2):
            made, other = ops.beside(x, mlp, mlp)
            assert torch.equal(made, other)
    assert launches.total() >= 8 and check.operations[SIDE] >= 4, launches


def beside(x: Tensor, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad(), kernels_serve("linear"):
        made, other = ops.beside(x, first, second)
    return made + other


def test_memory_that_one_stream_gives_back_while_the_other_uses_it() -> None:
    """What the side stream reads is kept until the join; what it made goes back to it alone, which
    then waits for what has read it."""
    x = torch.ones(8)
    with checked_streams() as check:
        kept, given = torch.ones(8), [torch.ones(8)]
        for _ in range(3):
            beside(x, lambda: kept * 2, lambda: torch.ones(8))
        assert check.operations[SIDE] == 3
        with pytest.raises(Unordered, match=r"ones.* main stream .* freed memory of .*mul.* side"):
            beside(x, lambda: given.pop() * 2, lambda: torch.ones(8))
    with checked_streams() as check:
        beside(x, lambda: torch.ones(8), lambda: torch.ones(8))
        check.deaf = {SIDE}
        with pytest.raises(Unordered, match=r"ones.* side stream .* freed memory of .*add.* main"):
            beside(x, lambda: torch.ones(8), lambda: torch.ones(8))


def test_memory_that_both_use() -> None:
    """They may read the same; neither may write what the other one uses."""
    x, shared = torch.ones(8), torch.zeros(8)
    for first, second in (
        (lambda: shared * 2, lambda: shared.add_(1)),
        (lambda: shared.view(2, 4).add_(1).view(8), lambda: shared * 2),
    ):
        with checked_streams(), pytest.raises(Unordered, match=r"main .* does not .* side"):
            beside(x, first, second)
    with checked_streams():
        beside(x, lambda: shared * 2, lambda: shared * 3)


def test_a_function_that_fails_is_joined_too() -> None:
    def fails() -> Tensor:
        raise ValueError("of one")

    x = torch.ones(8)
    for first, second in ((lambda: x * 2 + fails(), fails), (lambda: x * 2, fails)):
        with checked_streams() as check:
            with pytest.raises(ValueError, match="of one"):
                beside(x, first, second)
            assert check.current is check.streams[0]
            assert check.streams[0].clock[1] == 1, "the main stream is behind it"


def test_the_first_error_is_told_where_the_join_fails_too() -> None:
    """As it does in a capture that an operation has made invalid."""
    x = torch.ones(8)
    with checked_streams() as check:

        def fails() -> Tensor:
            check.streams[0].wait_stream = Mock(side_effect=RuntimeError("capture invalidated"))
            raise ValueError("of one")

        with pytest.raises(ValueError, match="of one"):
            beside(x, fails, fails)


@pytest.mark.parametrize("case", ["few", "many", "adapter", "elsewhere", "streamed", "refused"])
def test_when_there_are_two_streams(
    network: Network, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = network.transformer.blocks[0]
    assert isinstance(block, NormedBlock) and block.experts
    x = torch.randn(torch_device.BESIDE + (case == "many"), 32)
    if case == "elsewhere":
        monkeypatch.setattr(block.experts, "device", CPU)
    if case == "streamed":
        monkeypatch.setattr(block, "present", lambda: nullcontext())
    if case == "refused":
        monkeypatch.setitem(torch_device.one_stream, CPU, "it was wrong")
    adapted = (Adapted(1),) if case == "adapter" else ()
    with checked_streams() as check, kernels_serve("linear"), torch.no_grad():
        block._feed_forward(x, x, x, block.layer_scalar, adapted)
        assert len(check.streams) == 1 + (case == "few")
        with torch.enable_grad():
            block._feed_forward(x, x, x, block.layer_scalar, ())
    assert len(check.streams) == 1 + (case == "few")
