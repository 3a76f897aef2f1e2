"""Runs one test on the emulated device, in a process of its own: `python -m
tests.support.emulated_gpu.tried NAME`. Prints one line of JSON, and ends with 1 where it failed."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.support.emulated_gpu import driver, machine

driver.activate()

import torch  # noqa: E402
from tests.support.kernels import counted_launches, in_turn, seen_as  # noqa: E402
from torch import Tensor  # noqa: E402

from sfumato import Engine, EngineConfig, Request, SamplerConfig, load  # noqa: E402
from sfumato.diffusion.sampler import Never  # noqa: E402
from sfumato.engine import runner  # noqa: E402
from sfumato.ops import triton as kernels  # noqa: E402
from sfumato.ops.attention_reference import Rows  # noqa: E402
from sfumato.ops.registry import reference_only  # noqa: E402
from sfumato.ops.triton import experts, head, linear, self_test  # noqa: E402
from sfumato.ops.triton.attention import attend_padded  # noqa: E402
from sfumato.ops.triton.planes import OPERATIONS  # noqa: E402
from sfumato.ops.triton.self_test import Sizes, Trial, whole_blocks  # noqa: E402

CPU = torch.device("cpu")
SIZES = Sizes(
    hidden=2816,
    products=((72, 2816), (24, 2112), (24, 4096), (24, 8192)),
    attention=((4, 2, 256, True), (2, 1, 512, False)),
    expert=704,
    router=(128, 8),
    vocabulary=8_200,
    tokens=(5, 70),
)
"""What is summed has the 26B-A4B's widths, tails of a tile included; what is only repeated
(outputs, heads, experts, tokens) is a tile and a part of one."""
_BOTH = {
    "experts": (replace(SIZES, expert=40), replace(SIZES, hidden=72)),
    **dict.fromkeys(
        ("vocabulary_pass", "vocabulary_mass"),
        (replace(SIZES, vocabulary=200), replace(SIZES, hidden=72)),
    ),
}
"""Operations of two products after each other, of which each has one of its widths real."""
_LINEAR = {
    "linear_each": replace(SIZES, attention=((6, 3, 12, True), (4, 1, 20, False))),
    "linear_gated": replace(SIZES, products=((2816, 72),)),
}
"""Several matrices of one input."""
_STORED = replace(SIZES, products=((72, 2816),))
"""For weights of other formats than floats, whose loop is that of floats."""


def every_format() -> tuple[str, ...]:
    """The formats of weights that kernels take."""
    return tuple(dict.fromkeys(name for known in OPERATIONS.values() for name in known))


def operations(formats: Sequence[str]) -> list[str]:
    """The names of all operations, and of those with weights of these formats."""
    return list(kernels.twins(formats))


def special_values() -> None:
    """What the emulator itself gets wrong."""
    from tests.support.emulated_gpu.special_values import wrong

    lines = list(wrong())
    assert not lines, "; ".join(lines)


def operation(name: str) -> None:
    """An operation's own test, against the reference in float64."""
    first, _, format = name.partition(" ")
    twin = kernels.twins([format])[name]
    one = _LINEAR.get(first, _STORED if first == "linear" and format else SIZES)
    for sizes in _BOTH.get(first, (one,)):
        twin.check(Trial(CPU, sizes))


COUNTS = (1, 16, 512, 600)
"""Rows among which each row has the same bits."""


def rows(name: str) -> None:
    """The bits of an operation's rows, which are the same among any number of others."""
    first, _, format = name.partition(" ")
    counts, results = ROWS[first](Trial(CPU, SIZES), format)
    every = results(counts[-1])
    for count in counts[:-1]:
        for own, right in zip(results(count), every, strict=True):
            same = (own == right[:count]).flatten(1).all(1)
            assert same.all(), f"of {count} rows, {(~same).nonzero().flatten().tolist()[:9]} differ"


Results = Callable[[int], Sequence[Tensor]]
"""The results of an operation for so many rows, the first ones."""


def _linear(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    weight = trial.weight(format, 72, whole_blocks(format, 1408))
    (x,) = trial.random((COUNTS[-1], weight.shape[1]))
    return COUNTS, lambda count: [linear.linear(x[:count], weight)]


def _linear_each(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    """Beside the bits of each product alone."""
    weights = [trial.weight(format, rows, whole_blocks(format, 704)) for rows in (72, 40, 8)]
    (x,) = trial.random((COUNTS[-1], weights[0].shape[1]))
    alone = [linear.linear(x, weight) for weight in weights]

    def results(count: int) -> Sequence[Tensor]:
        outs = linear.linear_each(x[:count], *weights)
        pairs = zip(outs, alone, strict=True)
        assert all(torch.equal(out, right[:count]) for out, right in pairs), "other bits than alone"
        return outs

    return COUNTS, results


def _linear_gated(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    shape = 72, whole_blocks(format, 704)
    gate, up = (trial.weight(format, *shape, number=number) for number in (0, 1))
    (x,) = trial.random((COUNTS[-1], shape[1]))
    return COUNTS, lambda count: [linear.linear_gated(x[:count], gate, up)]


def _experts(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    hidden, inner = (whole_blocks(format, width) for width in (704, 40))
    gate_up, down = (
        trial.weight(format, 4, *shape) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x, scores = trial.random((COUNTS[-1], hidden), (COUNTS[-1], 4))
    shares, chosen = scores.float().softmax(-1).topk(2)

    def results(count: int) -> Sequence[Tensor]:
        given = (*(each[:count] for each in (x, chosen, shares)), gate_up, down)
        out = experts.experts(*given)
        if count in COUNTS[1:3]:
            with in_turn(3):
                assert torch.equal(experts.experts(*given), out), "other bits of tiles in turn"
        return [out]

    return COUNTS, results


def _route(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    x, *router = trial.random((COUNTS[-1], 704), (128, 704), (704,), (128,))
    weights = [each.float() for each in router]
    return COUNTS, lambda count: experts.route(x[:count], *weights, 8, 1e-6)


def _attend_padded(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    """Rows of a batch, with prefixes of four pieces, of two, of one and of none."""
    heads, kv_heads, d, _ = SIZES.attention[0]
    size, n, many = 8400, 5, 16
    q, k, v = trial.random(*((many, n, count, d) for count in (heads, kv_heads, kv_heads)))
    keys, values = trial.random(*[(many, kv_heads, size, d)] * 2)
    first = torch.tensor([8390, 0, 2090, 7] * 4)
    slots, width = torch.arange(many).flip(0), torch.tensor([5, 3, 1, 5] * 4)

    def results(count: int) -> Sequence[Tensor]:
        at = slice(0, count)
        own = Rows(keys, values, slots[at], first[at], None, width[at])
        out = attend_padded(q[at] * d**-0.5, k[at], v[at], own)
        return [out.where((torch.arange(n) < width[at, None])[..., None, None], 0)]

    return (1, 2, many), results


def _vocabulary_pass(trial: Trial, format: str) -> tuple[Sequence[int], Results]:
    weight = trial.weight(format, 200, whole_blocks(format, 704))
    (hidden,) = trial.random((COUNTS[-1], weight.shape[1]))
    uniform = torch.rand(COUNTS[-1], dtype=torch.float64)
    ones = torch.ones(COUNTS[-1])

    def results(count: int) -> Sequence[Tensor]:
        given = hidden[:count], weight, ones[:count], uniform[:count], 30.0, None, 0, None
        return [each.view(count, -1) for each in head.vocabulary_pass(*given)]

    return COUNTS, results


ROWS: dict[str, Callable[[Trial, str], tuple[Sequence[int], Results]]] = {
    "linear": _linear,
    "linear_each": _linear_each,
    "linear_gated": _linear_gated,
    "experts": _experts,
    "route": _route,
    "attend_padded": _attend_padded,
    "vocabulary_pass": _vocabulary_pass,
}


def reply() -> str:
    """Replies of the embedded model through the engine, with all kernels of encode, step and commit
    as machine code: a row denoises alone, then beside a second one, which joins and leaves before
    it. Their texts are those of torch on a CPU in the same dtype."""
    with seen_as("cpu", "cuda"):  # or its experts would be packed for a CPU
        model = load(device="cpu", dtype="bfloat16")
    for parameter in model.network.transformer.parameters():
        parameter.data = parameter.data.clone()  # aligned, as on a device: no view of a file
    long, short = SamplerConfig(max_steps=5, stopping=Never()), SamplerConfig(max_steps=5)
    given: list[dict[str, Any]] = [
        {"prompt": "Good morning!", "max_tokens": 40, "sampler": long},  # two canvases
        {"prompt": "What is the capital of France?", "max_tokens": 32, "sampler": short},
    ]
    with reference_only():
        right = [model.generate(**each).text for each in given]
    self_test.serve_only(CPU, frozenset(kernels.twins()))
    # What captures a step runs it again: with it the engine takes the steps of a GPU.
    runner.graph_backend = lambda device: SimpleNamespace(capture=lambda function: function)
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        engine = Engine(model, EngineConfig(slots=2, context=128))
        handles = [engine.submit(Request(**given[0]))]
        engine.step()
        engine.step()
        handles.append(engine.submit(Request(**given[1])))
        ended = [
            number
            for _ in iter(engine.step, False)
            for number in (0, 1)
            if handles[number].terminal
        ]
        texts = [handle.result().text for handle in handles]
    assert ended[0] == 1, "the first one ended before the second"
    assert not kernels._refused and not self_test.failures(CPU), kernels._refused
    assert texts == right, f"{texts}, and not {right}"
    return f"{texts}, launches: {dict(sorted(launches.items()))}"


TESTS: dict[str, Callable[..., str | None]] = {
    "special_values": special_values,
    "operation": operation,
    "rows": rows,
    "reply": reply,
}


def main(test: str, *arguments: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, error, note = time.process_time(), "", ""
    try:
        note = TESTS[test](*arguments) or ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    seconds = round(time.process_time() - start, 1)
    line = {"test": test, "of": arguments, "error": error, "note": note, "seconds": seconds}
    print(json.dumps({**line, "instructions": machine.executed, "pid": os.getpid()}))
    return bool(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
