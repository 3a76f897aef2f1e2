"""Products of 8-bit codes, interpreted, against the reference."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.support.kernels import close, counted_launches, interpreted, seen_as
from tests.support.live_bytes import LiveBytes

from sfumato import ops
from sfumato.ops import reference
from sfumato.ops.triton import self_test
from sfumato.ops.triton.kernel import LaunchError
from sfumato.ops.triton.planes import refusal
from sfumato.ops.triton.workspaces import expert_bytes
from sfumato.weights.formats import Kind, ScaledTensor, round_rows

KINDS = ("FP8", "INT8")
CPU = torch.device("cpu")


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, for NaN
@pytest.mark.parametrize("kind", KINDS)
def test_rows_become_the_codes_of_the_reference(kind: Kind) -> None:
    """Bit for bit; of zeros, of small and large numbers, and of rows that are not finite."""
    from sfumato.ops.triton import weights

    x = torch.randn(9, 1040) * torch.logspace(-12, 12, 9)[:, None]
    x[2], x[3, 5], x[4, 7] = 0, torch.nan, torch.inf
    ours, expected = weights.round_rows(x, kind), round_rows(x, kind)
    assert torch.equal(ours.scales.isnan(), expected.scales.isnan())
    finite = expected.scales.isfinite()
    assert torch.equal(ours.scales[finite], expected.scales[finite])
    both = (each.codes[finite].view(torch.uint8) for each in (ours, expected))
    assert torch.equal(*both)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_operations_pass_their_self_tests(kind: Kind) -> None:
    from sfumato.ops.triton import OPERATIONS, twins

    scaled_twins = {key: each for key, each in twins((kind,)).items() if key not in OPERATIONS}
    names = "linear", "linear_each", "linear_gated", "experts"
    assert set(scaled_twins) == {f"{name} {kind}" for name in names}
    for each in scaled_twins.values():
        each.check(self_test.Trial(CPU))


@pytest.fixture
def tiles_of_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tiles", "planes"):
        monkeypatch.setattr(f"sfumato.ops.triton.{module}.architecture", lambda device: "sm_80")


@interpreted
@pytest.mark.usefixtures("tiles_of_an_older_gpu")
def test_every_code_is_unpacked() -> None:
    """By integers, where a GPU knows no e4m3: a product with the unit matrix gives the numbers."""
    from sfumato.ops.triton import linear

    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:256].view(8, 32)
    codes = codes.masked_fill((codes & 0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)
    weight = ScaledTensor(codes, torch.arange(1, 9).float())
    out = linear.linear(torch.eye(32), weight)
    assert torch.equal(out.T, weight.dequantize())


@interpreted
@pytest.mark.usefixtures("tiles_of_an_older_gpu")
def test_experts_of_unpacked_codes() -> None:
    from sfumato.ops.triton import experts

    x, scores = torch.randn(5, 80), torch.randn(5, 3)
    gate_up = round_rows(torch.randn(3, 64, 80) * 0.1, "FP8")
    down = round_rows(torch.randn(3, 80, 32), "FP8")
    shares, chosen = scores.softmax(-1).topk(2)
    out = experts.experts(x, chosen, shares, gate_up, down)
    wide = (each.dequantize(torch.float64) for each in (gate_up, down))
    close(out, reference.experts.reference(x.double(), chosen, shares, *wide))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, of large gates
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_result_beside_others(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where others make the tiles those for many tokens, and have far larger numbers."""
    from sfumato.ops.triton import experts, linear, tiles

    monkeypatch.setattr(tiles, "FEW", 4)
    x, scores = torch.randn(9, 144), torch.randn(9, 3)
    x[6:] *= 1e3
    weight = round_rows(torch.randn(40, 144), kind)
    gate_up = round_rows(torch.randn(3, 64, 144), kind)
    down = round_rows(torch.randn(3, 144, 32), kind)
    shares, chosen = scores.softmax(-1).topk(2)
    some = slice(3, 6)
    assert torch.equal(linear.linear(x[some], weight), linear.linear(x, weight)[some])
    alone = experts.experts(x[some], chosen[some], shares[some], gate_up, down)
    assert torch.equal(alone, experts.experts(x, chosen, shares, gate_up, down)[some])


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_experts_take_no_more_memory_than_of_floats(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the prediction, which knows no kinds of weights, is right for these."""
    from sfumato.ops.triton import experts as module
    from sfumato.ops.triton import linear, weights
    from sfumato.ops.triton.kernel import launch

    def launched(*given: Any, **more: Any) -> None:
        launch(*given, **more)
        gc.collect()  # the interpreter's objects refer to each other, and to the tensors

    for each in (weights, module, linear):
        monkeypatch.setattr(each, "launch", launched)

    tokens, experts, inner, hidden = 24, 3, 32, 96
    x, scores = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    gate_up = round_rows(torch.randn(experts, 2 * inner, hidden) * 0.1, kind)
    down = round_rows(torch.randn(experts, hidden, inner), kind)
    shares, chosen = scores.softmax(-1).topk(2)
    given = x, chosen, shares, gate_up.codes, gate_up.scales, down.codes, down.scales
    with torch.no_grad(), LiveBytes(*given) as live:
        out = module.experts(x, chosen, shares, gate_up, down)
    taken = live.most - out.nbytes
    assert 0 < taken <= expert_bytes(tokens, 2, experts, inner, hidden, 4)


@interpreted
def test_the_registry_calls_them_and_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On torch's product of the codes: where a kernel does not run, once and for all."""
    from sfumato.ops.triton import linear as module

    x, weight = torch.randn(3, 48), round_rows(torch.randn(24, 48), "INT8")
    expected = reference.linear.reference(x, weight)
    monkeypatch.setattr(self_test, "_failed", {})
    monkeypatch.setattr(self_test, "_passed", {CPU: frozenset(("linear INT8", "linear FP8"))})
    monkeypatch.setattr("sfumato.ops.triton._refused", set())
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        close(ops.linear(x, weight), expected)
        assert launches.pop("linear_int8") == launches.pop("round_rows_int8") == 1
        odd = round_rows(torch.randn(24, 47), "INT8")
        close(ops.linear(x[:, :47], odd), reference.linear.reference(x[:, :47], odd))
        assert not launches

        def fails(*given: object, **more: object) -> None:
            raise LaunchError("linear_int8: too large")

        monkeypatch.setattr(module, "launch", fails)
        for _ in range(2):
            close(ops.linear(x, weight), expected)
    assert self_test.prepared(CPU) == {"linear FP8"}
    assert "linear INT8" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("F32", (4, 32)),
        ("FP8", (32,)),
        ("FP8", (4, 40)),
        ("INT8", (0, 32)),
        ("INT8", (1 << 16, 1 << 15, 32)),
        ("FP8", (1, 1 << 18)),
    ],
)
def test_hostile_sizes_are_refused(kind: str, shape: tuple[int, ...]) -> None:
    assert refusal(kind, shape) and not refusal("FP8", (4, 32))
