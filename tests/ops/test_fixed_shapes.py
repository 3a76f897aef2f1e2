"""The references read nothing on the host, and make as many operations for many rows as for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.support.fake_device import DEVICE, traced
from torch import Tensor

from sfumato import ops
from sfumato.ops import registry
from sfumato.ops.online_softmax import Bans, SoftmaxState

VOCAB, HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, DIM, SIZE = 96, 64, 16, 4, 4, 2, 16, 40
BF16 = torch.bfloat16


def integers(size: int, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=DEVICE) + size


def floats(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def canvas_attention(rows: int) -> Tensor:
    new = (floats(rows, 24, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stored = (floats(9, KV_HEADS, SIZE, DIM) for _ in range(2))
    numbers = [integers(3, rows) for _ in range(3)]
    return ops.attend_padded(*new, ops.Rows(*stored, *numbers[:2], None, numbers[2]))


def read_attention(rows: int) -> Tensor:
    new = (floats(rows, 24, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stored = (floats(9, KV_HEADS, SIZE, DIM) for _ in range(2))
    beside = (floats(KV_HEADS, 50, DIM) for _ in range(2))
    numbers = [integers(3, rows) for _ in range(4)]
    questions = ops.Questions(*beside, *numbers[2:], 10)
    return ops.attend_padded(*new, ops.Rows(*stored, *numbers[:2], SIZE + 1, questions=questions))


def experts(rows: int) -> Tensor:
    chosen, shares = integers(1, rows * 24, 2), floats(rows * 24, 2, dtype=torch.float32)
    weights = floats(EXPERTS, 2 * INNER, HIDDEN), floats(EXPERTS, HIDDEN, INNER)
    return ops.experts(floats(rows * 24, HIDDEN), chosen, shares, *weights)


def own_scores(rows: int) -> Tensor:
    return ops.own_scores(
        floats(rows * 24, HIDDEN), floats(VOCAB, HIDDEN), integers(1, rows * 24, 64)
    )


def update_softmax(rows: int) -> Tensor:
    n = rows * 24
    bans = Bans(integers(3, rows, 5), integers(2, rows, 5), integers(0, n), integers(0, n))
    state = SoftmaxState.empty(n, DEVICE)
    raw, temperature = floats(n, 70), floats(n, dtype=torch.float32)
    ops.update_softmax(state, raw, 64, temperature, 30.0, BF16, bans)
    bans.covers(VOCAB)
    return bans.window(integers(0, n), 64)


def small(rows: int) -> Tensor:
    x = ops.embed(integers(0, rows * 24), floats(VOCAB, HIDDEN), BF16)
    x = ops.rms_norm(x, floats(HIDDEN), 1e-6)
    x = ops.gated(ops.linear(x, floats(HIDDEN, HIDDEN)), x)
    heads = x.view(rows * 24, HEADS, DIM)
    return ops.rotate(heads, floats(rows * 24, DIM // 2), floats(rows * 24, DIM // 2))


RUNS = (canvas_attention, read_attention, experts, own_scores, update_softmax, small)


@pytest.mark.parametrize("run", RUNS)
def test_references_have_a_fixed_shape(run: Callable[[int], Tensor]) -> None:
    counts = []
    for rows in (1, 8):
        with traced() as trace:
            run(rows)
        counts.append(trace.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(1),
        lambda x: torch.ones(1).to(x.device),
        lambda x: int(x.max()),
    ],
)
def test_the_trace_shows_what_asks_the_host(fault: Callable[[Tensor], object]) -> None:
    with pytest.raises(Exception), traced():  # noqa: B017
        fault(integers(0, 1))


def test_canvas_attention_is_that_of_each_row_alone() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 24, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    keys, values = (torch.randn(5, KV_HEADS, SIZE, DIM) for _ in range(2))
    slots, held, width = (torch.tensor(x) for x in ([4, 0, 2], [40, 0, 17], [24, 7, 20]))
    rows = ops.Rows(keys, values, slots, held, None, width)
    with registry.reference_only():
        plain = ops.attend_padded(q, k, v, rows)
        empty = ops.Rows(keys, values, slots, held * 0, None, width * 0)
        nothing = ops.attend_padded(q, k, v, empty)
    twin = ops.attend_padded(q, k, v, rows)
    assert not nothing.any() and plain.isfinite().all()
    for row, (slot, count, n) in enumerate(zip(slots, held, width, strict=True)):
        parts = [(old[slot, :, :count], new[row, :n].transpose(0, 1))
                 for old, new in ((keys, k), (values, v))]  # fmt: skip
        alone = ops.attend(q[row, :n], *parts)
        assert torch.equal(twin[row, :n], alone)
        torch.testing.assert_close(plain[row, :n], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("reference", [True, False])
def test_what_a_canvas_does_not_see_may_hold_anything(value: float, reference: bool) -> None:
    """Earlier requests' leftovers in a slot, and positions beyond a canvas's width."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 24, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    keys, values = (torch.randn(3, KV_HEADS, SIZE, DIM) for _ in range(2))
    slots, held, width = (torch.tensor(x) for x in ([2, 0], [11, 0], [24, 7]))

    def run() -> Tensor:
        with registry.reference_only() if reference else nullcontext():
            return ops.attend_padded(q, k, v, ops.Rows(keys, values, slots, held, None, width))

    clean = run()
    for stored in (keys, values):
        stored[2, :, 11:] = stored[0] = value
    for new in (q, k, v):
        new[1, 7:] = value
    stale = run()
    assert torch.equal(stale[0], clean[0]) and torch.equal(stale[1, :7], clean[1, :7])
    assert clean.isfinite().all()


def test_canvas_attention_has_gradients() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 3, h, 2, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))
    keys, values = (torch.randn(2, 1, 4, 2, dtype=torch.float64) for _ in range(2))
    slots, held, width = (torch.tensor([x]) for x in (1, 3, 2))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attend_padded(q, k, v, ops.Rows(keys, values, slots, held, None, width))

    with registry.reference_only():
        assert torch.autograd.gradcheck(run, (q, k, v))
