"""What kernels' operations allocate beside their results, against what interpreted calls do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.kernels import interpreted
from tests.support.live_bytes import LiveBytes
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sfumato.ops.attention_reference import Causal, Questions, Rows
from sfumato.ops.device_check import tensors_of
from sfumato.ops.triton import twins, workspaces

pytestmark = interpreted

CPU = torch.device("cpu")
FLOAT = torch.float32.itemsize


def workspace(operation: str, *arguments: Any) -> int:
    """The most bytes that live at a time in a call, but for the arguments and the result."""
    with torch.no_grad(), LiveBytes(*tensors_of(arguments)) as live:
        out = twins()[operation].function(*arguments)
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return live.most - sum(each.nbytes for each in results)


def test_attention() -> None:
    from sfumato.ops.triton import attention

    rows, n, heads, d, size = 2, 5, 2, 16, 4100  # three pieces of 2,048
    q, k, v = (torch.randn(rows, n, count, d) for count in (heads, 1, 1))
    stored = torch.randn(2, 1, size, d)
    slots, first, width = torch.tensor([[0, 1], [70, 0], [5, 5]])
    seen = Rows(stored, stored, slots, first, None, width)
    taken = workspace("attend_padded", q, k, v, seen)
    assert taken == workspaces.attention_bytes(rows * n, heads, d, size, CPU)
    assert taken == rows * 3 * n * heads * (d + 2) * 4
    assert workspaces.attention_bytes(1, heads, d, 2**18, CPU) == 4 * heads * (d + 2) * 4
    small = stored[:, :, :2048].contiguous()
    assert workspace("attend_padded", q, k, v, replace(seen, keys=small, values=small)) == 0
    assert workspaces.attention_bytes(rows * n, heads, d, 2048, CPU) == 0
    assert workspaces.kernel_of("attention", d) == attention.CANVASES[0].name
    assert workspaces.kernel_of("attention", 512) == attention.CANVASES[1].name


def test_reads() -> None:
    rows, n, heads, d, size = 2, 5, 4, 16, 2100  # three pieces of 1,024
    q, k, v = (torch.randn(rows, n, count, d) for count in (heads, 2, 2))
    stored, beside = torch.randn(2, 2, size, d), torch.randn(2, 40, d)
    slots, first, starts, counts = torch.tensor([[0, 1], [2100, 0], [0, 9], [9, 3]])
    questions = Questions(beside, beside, starts, counts, 10)
    seen = Rows(stored, stored, slots, first, 9, questions=questions)
    taken = workspace("attend_padded", q, k, v, seen)
    assert taken == workspaces.attention_bytes(rows * n, heads, d, size, CPU, "read")


def test_prefill() -> None:
    from sfumato.ops.triton import attention

    old, new = torch.randn(2, 2, 70, 16), torch.randn(2, 2, 9, 16)
    parts = [[old[index], new[index]] for index in (0, 1)]
    causal = Causal.of(torch.arange(70, 79), torch.arange(79))
    taken = workspace("attend", torch.randn(9, 4, 16), *parts, causal)
    # One zero stands for all of the padding.
    assert taken == workspaces.prefill_bytes(79, 2, 16, FLOAT, CPU) + FLOAT
    assert workspaces.kernel_of("prefill", 16) == attention.PREFILL[0].name
    assert workspaces.kernel_of("prefill", 512) == attention.PREFILL[1].name


def test_experts_and_router() -> None:
    tokens, chosen, experts, inner, hidden = 20, 2, 5, 24, 88
    shares, which = torch.randn(tokens, experts).softmax(-1).topk(chosen)
    weights = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    taken = workspace("experts", torch.randn(tokens, hidden), which, shares, *weights)
    assert taken == workspaces.expert_bytes(tokens, chosen, experts, inner, hidden, FLOAT)
    router = torch.randn(experts, hidden), torch.ones(hidden), torch.ones(experts), chosen, 1e-6
    taken = workspace("route", torch.randn(tokens, hidden), *router)
    assert taken == workspaces.route_bytes(tokens, experts)


def test_vocabulary_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary of two chunks. Further positions take the memory of the first ones."""
    monkeypatch.setattr(workspaces, "CHUNK", 128)
    positions, vocab, hidden = 3, 200, 72
    temperature, uniform = torch.ones(positions), torch.rand(positions, dtype=torch.float64)
    states, weight = torch.randn(positions, hidden), torch.randn(vocab, hidden)
    others = temperature, uniform, 30.0, None, 4096, None
    taken = workspace("vocabulary_pass", states, weight, *others)
    # Beside the results that the operation gives there are the peak and the total of each
    # position, and which positions are not read.
    predicted = workspaces.head_bytes(positions, vocab, hidden, FLOAT, CPU)
    assert taken == predicted + 2 * temperature.nbytes + positions
    mass = states, weight, torch.tensor([[1, 2]] * positions), 30.0, 4096, None
    assert workspace("vocabulary_mass", *mass) <= taken
    monkeypatch.setattr(workspaces, "GROUP", positions)
    assert workspaces.head_bytes(5 * positions, vocab, hidden, FLOAT, CPU) == predicted


def test_every_operation_that_allocates_is_counted() -> None:
    """The others allocate their results alone."""
    counted: dict[str, Callable[..., int]] = {
        "attend": workspaces.prefill_bytes,
        "attend_padded": workspaces.attention_bytes,
        "experts": workspaces.expert_bytes,
        "route": workspaces.route_bytes,
        "vocabulary_mass": workspaces.head_bytes,
        "vocabulary_pass": workspaces.head_bytes,
    }
    in_place = {"move_rows"}
    record = torch.ones(2, 6, dtype=torch.int64)  # seeds, canvas, attempt, step, most steps
    x, weight = torch.randn(6, 64), torch.randn(64)
    calls: dict[str, tuple[Any, ...]] = {
        "after_attention": (x, x.clone(), weight, weight, weight, 1e-6),
        "after_layer": (x, x.clone(), x.clone(), weight, weight, weight, torch.ones(1), 1e-6),
        "linear": (x, torch.randn(16, 64), None),
        "linear_each": (x, torch.randn(16, 64), torch.randn(8, 64)),
        "linear_gated": (x, torch.randn(16, 64), torch.randn(16, 64)),
        "own_scores": (x, torch.randn(30, 64), torch.randint(30, (6, 4))),
        "prepare_heads": (*[torch.randn(6, 4, 16)] * 3, *[torch.ones(16)] * 2,
                          *[torch.ones(6, 8)] * 2, 1e-6),
        "rms_norm": (x, weight, 1e-6),
        "step_noise": (record[:, :2], *record[:, 2:].unbind(1), torch.ones(2, 3), 4, 30),
        "write_cache": (torch.zeros(2, 2, 9, 16), torch.randn(2, 3, 2, 16),
                        *torch.tensor([[0, 1], [0, 0], [3, 0]])),
    }  # fmt: skip
    assert set(counted) | set(calls) | in_place == set(twins())
    assert {name: workspace(name, *call) for name, call in calls.items()} == dict.fromkeys(calls, 0)
