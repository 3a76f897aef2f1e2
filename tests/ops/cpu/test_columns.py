"""Sums of rows by products of int8, against float32."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.forced import blocks, compiled, each_isa, forced, normal, relative, runs

from sfumato import ops
from sfumato.model.head import VocabularyHead
from sfumato.ops.cpu import kernels
from sfumato.ops.cpu.panels import column_bytes, pack, pack_columns, packs_columns
from sfumato.weights.formats import of_files


@compiled
@each_isa
@pytest.mark.parametrize("name", sorted(of_files("blocks")))
def test_columns_are_the_values_transposed(isa: str, name: str) -> None:
    """Each rounded by 1/254 of the largest of its 32, and a little more by the scale's rounding."""
    weight = blocks(name, 70, 256)
    with forced(isa):
        packed = pack_columns(weight)
    assert packed.shape == (256, 70) and packed.nbytes == column_bytes((70, 256))
    wanted = weight.dequantize()
    padded = torch.nn.functional.pad(wanted, (0, 0, 0, 26)).unflatten(0, (3, 32))
    limit = padded.abs().amax(dim=1, keepdim=True).expand(padded.shape).flatten(0, 1)[:70] / 250
    assert ((packed.dequantize().T - wanted).abs() <= limit + 1e-7).all()


@compiled
@each_isa
@pytest.mark.parametrize("spread", [0.1, 5.0, 100.0])
def test_sums_of_rows(isa: str, spread: float) -> None:
    """Of masses from almost equal to almost all in one row; and each position by itself."""
    weight = blocks("Q6_K", 300, 256)
    masses = (normal(1, 20, 300) * spread).softmax(dim=1)
    with forced(isa):
        packed = pack_columns(weight, torch.empty(column_bytes((400, 256)), dtype=torch.uint8))
        sums = kernels.linear(masses, packed)
        alone = kernels.linear(masses[3:4], packed)
    assert relative(sums, masses @ weight.dequantize()) < 1e-2
    assert torch.equal(alone[0], sums[3])


@compiled
@each_isa
def test_what_is_no_number_stays_so(isa: str) -> None:
    masses = torch.rand(3, 64)
    masses[1, 5] = torch.nan
    with forced(isa):
        sums = kernels.linear(masses, pack_columns(blocks("Q8_0", 64, 32)))
    assert sums.isnan().all(dim=1).tolist() == [False, True, False]


@compiled
def test_one_arithmetic_has_one_result() -> None:
    weight, masses = blocks("Q4_K", 100, 512), torch.rand(9, 100)
    outs = []
    for isa in filter(runs, ("avx2", "avx_vnni", "avx512_vnni")):
        with forced(isa):
            outs.append(kernels.linear(masses, pack_columns(weight)))
    for out in outs[1:]:
        assert relative(out, outs[0]) < 1e-6


@compiled
@pytest.mark.parametrize("isa", ["avx2", "avx_vnni", "neon", "i8mm"])
def test_the_head_sums_without_float32_of_the_embedding(isa: str) -> None:
    if not runs(isa):
        pytest.skip(f"{isa} does not run here")
    weight = blocks("Q6_K", 500, 256)
    inputs = normal(1, 7, 256), torch.full((7,), 0.7), torch.rand(7, dtype=torch.float64)
    with forced(isa):
        chunks = [pack(weight[start : start + 128], "int8") for start in range(0, 500, 128)]
        assert packs_columns(weight, chunks[0]) and not packs_columns(weight, None)
        assert not packs_columns(weight, pack(weight, "bf16"))
        got = VocabularyHead(weight, 30.0, 128, chunks)(*inputs)
    assert packs_columns(weight, chunks[0]) == (not ops.multiplies_bf16(torch.device("cpu")))
    wanted = VocabularyHead(weight, 30.0, 128)(*inputs)
    assert relative(got.soft, wanted.soft) < 3e-2  # scores are rounded, too
    assert torch.equal(got.argmax, wanted.argmax)
