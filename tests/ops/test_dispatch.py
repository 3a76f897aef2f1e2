"""Who serves an operation: compiled twins where they can, else the reference, with one result."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.forced import blocks, compiled, normal, relative, weights
from torch import Tensor

from sfumato import ops
from sfumato.ops import reference
from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "kernels", None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library's functions that computed something, in the order of their calls."""
    seen: list[str] = []
    run = library.Kernels.run

    def spied(self: library.Kernels, name: str, *arguments: int | float | None) -> None:
        if name not in ("sf_pack", "sf_unpack"):
            seen.append(name.removeprefix("sf_"))
        run(self, name, *arguments)

    monkeypatch.setattr(library.Kernels, "run", spied)
    return seen


def expert_inputs(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    chosen = torch.randint(4, (tokens, 2), generator=random)
    return normal(1, tokens, 64) / 8, chosen, torch.rand(tokens, 2, generator=random)


@compiled
def test_packed_weights_are_multiplied_by_the_library(calls: list[str]) -> None:
    packed, stored = weights("Q8_0", "bf16", 40, 64)
    x = normal(2, 5, 64)
    assert relative(ops.linear(x, packed), x @ stored.T) < 3e-3
    gate_up, _ = weights("Q8_0", "bf16", 4, 64, 64)
    down, _ = weights("Q8_0", "bf16", 4, 64, 32)
    inputs = expert_inputs()
    expected = reference.experts.reference(*inputs, gate_up.dequantize(), down.dequantize())
    assert relative(ops.experts(*inputs, gate_up, down), expected) < 4e-3
    assert calls == ["linear", "experts"]


@compiled
def test_experts_of_which_one_is_packed(calls: list[str]) -> None:
    gate_up, _ = weights("Q8_0", "int8", 4, 64, 64)
    down = normal(3, 4, 64, 32)
    inputs = expert_inputs()
    expected = reference.experts.reference(*inputs, gate_up.dequantize(), down)
    torch.testing.assert_close(ops.experts(*inputs, gate_up, down), expected)
    assert calls == []


@compiled
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_dequantized_by_the_library(
    calls: list[str], name: str, dtype: torch.dtype
) -> None:
    weight, x, ids = (
        blocks(name, 9, 256),
        normal(4, 3, 256).to(dtype),
        torch.tensor([[8, 0], [8, 3]]),
    )
    assert torch.equal(ops.dense(weight, dtype), weight.dequantize(dtype))
    assert relative(ops.linear(x, weight), reference.linear.reference(x, weight)) < 1e-3
    rows = ops.embed(ids, weight, dtype)
    assert torch.equal(rows, reference.embed.reference(ids, weight, dtype)) and rows.shape == (
        2,
        2,
        256,
    )
    assert calls == ["dequantize"] * 3


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_served_as_nothing(dtype: torch.dtype) -> None:
    weight, none = blocks("Q8_0", 9, 64), torch.empty(2, 0, dtype=torch.int64)
    rows = ops.embed(none, weight, dtype)
    assert rows.shape == (2, 0, 64) and rows.dtype == dtype
    rows = ops.dense(weight[3:3], dtype)
    assert rows.shape == (0, 64) and rows.dtype == dtype


@pytest.mark.usefixtures("no_library")
def test_without_the_library_torch_serves(calls: list[str]) -> None:
    weight = blocks("Q4_K", 9, 256)
    assert ops.pack(weight, "int8") is weight
    x = normal(4, 3, 256)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.dequantize().T)
    assert torch.equal(ops.embed(torch.tensor([2]), weight, x.dtype), weight[2:3].dequantize())
    assert calls == []


@compiled
def test_on_other_devices_torch_serves(calls: list[str]) -> None:
    weight = blocks("Q8_0", 9, 64).to("meta")
    assert not isinstance(ops.pack(weight, "int8"), PackedTensor)
    x = torch.empty(3, 64, device="meta")
    assert ops.dense(x, torch.bfloat16).device.type == "meta"
    assert calls == []
