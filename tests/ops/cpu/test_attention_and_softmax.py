"""The compiled attention and online softmax against their plain twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ops.cpu.forced import compiled, each_isa, forced, normal, runs
from torch import Tensor

from sfumato import ops
from sfumato.ops import attention_reference, online_softmax, registry
from sfumato.ops.attention_reference import Causal, Own, Rows
from sfumato.ops.cpu import attention as compiled_attention
from sfumato.ops.cpu import kernels, library
from sfumato.ops.online_softmax import SoftmaxState


@pytest.fixture(params=("avx512", "avx512_vnni", "avx2", "neon"))
def error(request: pytest.FixtureRequest) -> Iterator[float]:
    """Every level that attends, and the most relative L2 error: of products rounded to bfloat16, or
    of sums in float32."""
    if not runs(request.param):
        pytest.skip(f"{request.param} does not run here")
    with forced(request.param):
        numbers = library.loaded().attention
        if numbers is None:
            pytest.skip(f"{request.param} does not attend here")
        yield 1e-2 if numbers == torch.bfloat16 else 1e-5


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(5, 4, 2, 32, 7), (100, 16, 8, 256, 1279), (33, 16, 2, 512, 777)]
)
def test_attend(sizes: tuple[int, ...], causal: bool, window: int | None, error: float) -> None:
    tokens, heads, kv_heads, d, held = sizes
    q = normal(0, tokens, heads, d) * 0.1
    keys = normal(1, kv_heads, held, d).bfloat16(), normal(2, tokens, kv_heads, d).transpose(0, 1)
    values = normal(3, kv_heads, held, d).bfloat16(), normal(4, tokens, kv_heads, d).transpose(0, 1)
    positions = torch.arange(held + tokens)
    who = Causal.of(positions[held:], positions, window) if causal else None
    out = compiled_attention.attend(q, keys, values, who)
    expected = attention_reference.attend.reference(q, keys, values, who)
    assert (out - expected).norm() < error * expected.norm()
    alone = Causal.of(positions[held : held + 1], positions, window) if causal else None
    assert torch.equal(compiled_attention.attend(q[:1], keys, values, alone)[0], out[0])


@pytest.mark.parametrize("several", [False, True])
def test_tokens_that_see_any_interval(several: bool, error: float) -> None:
    """Ahead of them too, as soft tokens of a picture do, and none at all; of one row, and of rows
    after one prefix."""
    q, keys, values, causal, own = shared_inputs(263, (30, 7, 16, 3), None)
    if not several:
        causal, own = causal.rows[0], [own[0]]
        q, keys, values = q[:30], (*keys, *own[0].keys), (*values, *own[0].values)
    random = torch.Generator().manual_seed(5)
    first = torch.randint(300, (len(q),), generator=random)
    last = first + torch.randint(-2, 90, (len(q),), generator=random)
    first[:2], last[:2] = torch.tensor([5, 5]), torch.tensor([4, 5])  # none, and one key
    given = q, keys, values, replace(causal, first=first, last=last), own if several else ()
    assert registry.choose("attend", q.device, registry.ANY, *given) is compiled_attention.attend
    out = compiled_attention.attend(*given)
    with registry.reference_only():
        expected = ops.attend(*given)
    assert not out[0].any() and out[1].any()
    assert (out - expected).norm() < error * expected.norm()


def attend_inputs(tokens: int = 5) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """q, and keys and values in two parts of 7 and 3."""
    parts = [normal(seed, 2, 7 if seed < 3 else 3, 32).bfloat16() for seed in range(1, 5)]
    return normal(0, tokens, 4, 32) * 0.1, parts[::2], parts[1::2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_attend_in_any_dtype(dtype: torch.dtype, error: float) -> None:
    """Queries, and one of the parts."""
    q, keys, values = attend_inputs()
    expected = attention_reference.attend.reference(q, keys, values)
    keys[0], values[0] = keys[0].to(dtype), values[0].to(dtype)
    out = compiled_attention.attend(q.to(dtype), keys, values, None)
    assert out.dtype == dtype
    error = error if dtype == torch.float64 else 1e-2
    assert (out.float() - expected).norm() < error * expected.norm()


def test_attention_in_float32_has_one_result() -> None:
    """The same sums in the same order, in registers of 256 and of 512 bits: the same bits."""
    q, outs = normal(0, 61, 6, 96) * 0.1, []
    keys = normal(1, 2, 1100, 96), normal(2, 2, 61, 96).bfloat16()
    values = normal(3, 2, 1100, 96), normal(4, 2, 61, 96).bfloat16()
    positions = torch.arange(1161)
    for isa in ("avx2", "avx512_vnni"):
        if not runs(isa):
            pytest.skip(f"{isa} does not run here")
        with forced(isa):
            assert library.loaded().attention == torch.float32
            who = Causal.of(positions[1100:], positions, 700)
            outs.append(compiled_attention.attend(q, keys, values, who))
    assert torch.equal(*outs)


@compiled
def test_who_attends() -> None:
    """The compiled operation where it is faster than torch's, by a table; a level that was
    never measured serves where it is asked for by name."""
    q, keys, _ = attend_inputs()

    def served(kernels: library.Kernels, *parts: Tensor) -> bool:
        before, library.kernels = library.kernels, kernels
        try:
            arguments = q, parts, parts, None, ()
            serves = registry.choose("attend", q.device, registry.ANY, *arguments)
        finally:
            library.kernels = before
        return serves is compiled_attention.attend

    code: Any = SimpleNamespace(sf_attends=lambda level: 1, sf_has_bf16=lambda: 0)
    with_bf16: Any = SimpleNamespace(sf_attends=lambda level: 1, sf_has_bf16=lambda: 1)
    wide = [part.float() for part in keys]
    for parts in (keys, wide, [keys[0], wide[1]]):
        assert served(library.Kernels(code, "avx2"), *parts)
        assert served(library.Kernels(code, "avx_vnni"), *parts)
        assert served(library.Kernels(code, "avx512"), *parts)
        assert not served(library.Kernels(code, "neon"), *parts)
        assert served(library.Kernels(code, "neon", by_name=True), *parts)
        assert served(library.Kernels(with_bf16, "avx512"), *parts) == (parts is not wide)
    assert not served(library.Kernels(code, "avx2"), wide[0].double())
    code.sf_attends = lambda level: 0
    assert not served(library.Kernels(code, "avx2", by_name=True), *wide)


@pytest.mark.usefixtures("error")
def test_attend_of_no_tokens() -> None:
    q, keys, values = attend_inputs(0)
    assert ops.attend(q, keys, values).shape == (0, 4, 32)


@pytest.mark.parametrize("window", [None, 0, 2])
def test_a_token_that_sees_no_key_gets_zeros(window: int | None, error: float) -> None:
    """All keys of the first token lie ahead of it; in a window of 0 no token sees a key."""
    q, keys, values = attend_inputs()
    who = Causal.of(torch.arange(5) * 3, torch.arange(1, 11), window)
    out, expected = (
        compiled_attention.attend(q, keys, values, who),
        attention_reference.attend.reference(q, keys, values, who),
    )
    assert not out[0].any()
    assert ((out == 0) == (expected == 0)).all()
    assert (out - expected).norm() <= error * expected.norm()


@pytest.mark.usefixtures("error")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("where", ["query", "key", "only key"])
def test_what_is_no_number_stays_so(bits: int, where: str) -> None:
    """In the rows that see it, and in no others, unlike torch's."""
    bad = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    q, keys, values = attend_inputs()
    sees = torch.zeros(5, 4, dtype=torch.bool)
    if where == "query":
        q[2, 1, 3] = bad
        sees[2, 1] = True
    else:
        keys[1] = keys[1].float()
        keys[1][0, 0, 3] = bad  # the eighth, of heads 0 and 1
        sees[3 : 4 if where == "only key" else 5, :2] = True
    window = 1 if where == "only key" else None
    who = Causal.of(torch.tensor([0, 1, 2, 7, 8]), torch.arange(10), window)
    out = compiled_attention.attend(q, keys, values, who)
    assert torch.equal(out.isnan(), sees[..., None].expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_padded_is_attend_of_each_row(dtype: torch.dtype, error: float) -> None:
    q, k, v = (normal(seed, 4, 48, heads, 32).to(dtype) for seed, heads in ((0, 4), (1, 2), (2, 2)))
    keys, values = (normal(seed, 5, 2, 300, 32).bfloat16() for seed in (3, 4))
    slots, held, width = (torch.tensor(x) for x in ([4, 0, 2, 2], [300, 0, 17, 9], [48, 7, 0, 33]))
    rows = Rows(keys, values, slots, held, None, width)
    got = compiled_attention.attend_padded(q * 0.1, k, v, rows)
    assert got.dtype == dtype
    most = error if dtype == torch.float32 else 1e-2
    with registry.reference_only():
        plain = ops.attend_padded(q * 0.1, k, v, rows)
    for row, (slot, count, n) in enumerate(zip(slots, held, width, strict=True)):
        parts = [[old[slot, :, :count], new[row, :n].transpose(0, 1)]
                 for old, new in ((keys, k), (values, v))]  # fmt: skip
        alone = compiled_attention.attend(q[row, :n] * 0.1, parts[0], parts[1])
        assert torch.equal(got[row, :n], alone) and not got[row, n:].any()
        gap = (alone.float() - plain[row, :n].float()).norm()
        assert gap <= most * plain[row, :n].float().norm()
    assert torch.equal(ops.attend_padded(q * 0.1, k, v, rows), got)
    past = replace(rows, first=held + 1)  # a full slot stores the first of them no more
    assert torch.equal(compiled_attention.attend_padded(q * 0.1, k, v, past)[0], got[0])
    for wrong in (
        {"slots": slots + 1}, {"slots": slots - 1}, {"first": held - 1}, {"width": width + 1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="refuses"):
            compiled_attention.attend_padded(q, k, v, replace(rows, **wrong))


@contextmanager
def forced_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shared_inputs(held: int, counts: tuple[int, ...], window: int | None) -> tuple[Any, ...]:
    """Rows after a prefix of so many keys in two parts, each with none or five keys before its new
    ones, and with a query for each of the new ones but the last row's, which has one."""
    rows, tokens = len(counts), sum(counts)
    queries = [*counts[:-1], 1]
    q = normal(0, sum(queries), 6, 32) * 0.3
    k, v = (normal(seed, tokens, 2, 32) for seed in (1, 2))
    parts = [
        [x[:, :3], x[:, 3:]] for x in (normal(seed, 2, held, 32).bfloat16() for seed in (3, 4))
    ]
    before = [normal(9 + row, 2, 5 * (row % 2), 32).bfloat16() for row in range(rows)]
    new = zip(before, k.split(counts), v.split(counts), strict=True)
    own = [
        Own((b, b[:, :0], rk.transpose(0, 1)), (b + 1, b[:, :0], rv.transpose(0, 1)))
        for b, rk, rv in new
    ]
    starts = [held + b.shape[1] for b in before]
    places = [torch.arange(held, start + n) for start, n in zip(starts, counts, strict=True)]
    query_positions = [each[-n:][:m] for each, n, m in zip(places, counts, queries, strict=True)]
    sizes = [(m, len(each)) for m, each in zip(queries, places, strict=True)]
    keys = torch.cat((torch.arange(held), *places))
    return q, *parts, Causal.of(torch.cat(query_positions), keys, window, sizes), own


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("held", "counts"), [(3, (4, 1)), (32, (9,)), (263, (30, 7, 16, 3)), (600, (200, 2, 40))]
)
def test_rows_after_one_prefix_have_what_they_have_alone(
    held: int, counts: tuple[int, ...], window: int | None, error: float
) -> None:
    inputs = shared_inputs(held, counts, window)
    q, keys, values, causal, own = inputs
    with forced_threads(2):
        got = compiled_attention.attend(*inputs)
    rows = zip(q.split([n for n, _ in causal.counts]), own, causal.rows, strict=True)
    alone = [
        compiled_attention.attend(rq, (*keys, *row.keys), (*values, *row.values), seen)
        for rq, row, seen in rows
    ]
    assert torch.equal(got, torch.cat(alone))
    assert torch.equal(got, ops.attend(*inputs))
    with registry.reference_only():
        plain = ops.attend(*inputs)
    assert (got - plain).norm() <= error * plain.norm()


def test_keys_of_several_windows(error: float) -> None:
    """More than are packed at a time: the state of each query is kept in between. One row ends in
    an earlier window than the other."""
    test_rows_after_one_prefix_have_what_they_have_alone(8100, (7, 200, 4), None, error)
    q, keys, values = (
        normal(0, 3, 4, 32) * 0.3,
        *([normal(seed, 2, 8500, 32).bfloat16(), normal(seed + 1, 2, 3, 32)] for seed in (1, 3)),
    )
    positions = torch.arange(8503)
    for causal in (None, Causal.of(positions[-3:], positions, 400)):
        out = compiled_attention.attend(q, keys, values, causal)
        expected = attention_reference.attend.reference(q, keys, values, causal)
        assert (out - expected).norm() < error * expected.norm()


@pytest.mark.usefixtures("error")
def test_attend_asks_for_fitting_rows() -> None:
    q, keys, values, causal, own = shared_inputs(7, (3, 2), None)
    short = replace(causal, keys=causal.keys[2:])
    lacking = Own(own[1].keys, own[1].values[1:])
    for wrong in (
        (q[:-1], keys, values, causal, own),
        (q, keys, [values[0]], causal, own),
        (q, keys, values, causal, own[:1]),
        (q, keys, values, short, own),
        (q, keys, values, causal, [own[0], lacking]),
        (q, keys, [part[:1] for part in values], causal, own),
    ):
        with pytest.raises((AssertionError, ValueError)):
            compiled_attention.attend(*wrong)


@pytest.mark.usefixtures("error")
def test_attend_asks_for_fitting_parts() -> None:
    q, keys, values = attend_inputs()
    positions = torch.arange(10)
    for wrong in (
        (keys, [values[0][..., :16], values[1]]),
        ([keys[0], keys[1][:1]], [values[0], values[1][:1]]),
        (keys, values, Causal.of(positions[:4], positions)),
        (keys, values, Causal.of(positions[:5], positions[:9])),
    ):
        with pytest.raises(AssertionError):
            compiled_attention.attend(q, *wrong[:2], *(wrong[2:] or (None,)))  # type: ignore[misc,arg-type]


@compiled
@each_isa
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_update(isa: str, softcap: float | None) -> None:
    """Chunk after chunk, one of them with bans and one with a ragged end."""
    temperature = torch.rand(9) + 0.4
    ours, plain = (SoftmaxState.empty(9, torch.device("cpu")) for _ in range(2))
    for index, count in enumerate((700, 512, 33)):
        raw = normal(index, 9, count) * 20
        if softcap is None and index == 1:
            raw[:, ::3] = -torch.inf
        with forced(isa):
            got = kernels.update_softmax(
                ours, raw.clone(), 700 * index, temperature, softcap, torch.float32
            )
        wanted = online_softmax.update_softmax.reference(
            plain, raw.clone(), 700 * index, temperature, softcap, torch.float32
        )
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name in ("max", "sum_exp", "sum_shifted", "top"):
        one, other = getattr(ours, name), getattr(plain, name)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax, plain.argmax) and torch.equal(ours.top_ids, plain.top_ids)


@compiled
@each_isa
def test_update_takes_temperatures_of_any_dtype_and_stride(isa: str) -> None:
    """As they are, not as memory that was theirs: enough of it that it is soon used again."""
    raw, temperature = normal(0, 256, 600), torch.linspace(0.4, 0.8, 256)

    def masses(temperature: Tensor) -> Tensor:
        state = SoftmaxState.empty(256, torch.device("cpu"))
        return kernels.update_softmax(state, raw.clone(), 0, temperature, 30.0, torch.float32)[0]

    with forced(isa):
        expected = masses(temperature)
        for other in (temperature.double(), temperature.repeat_interleave(2)[::2]):
            assert torch.equal(masses(other), expected)


@compiled
def test_update_asks_for_fitting_inputs() -> None:
    raw, ones = normal(0, 3, 40), torch.ones(3)
    for positions, temperature in ((3, ones[:1]), (3, torch.ones(())), (2, ones)):
        with pytest.raises(AssertionError):
            state = SoftmaxState.empty(positions, torch.device("cpu"))
            kernels.update_softmax(state, raw, 0, temperature, None, torch.float32)


@compiled
@each_isa
def test_update_of_no_positions(isa: str) -> None:
    state = SoftmaxState.empty(0, torch.device("cpu"))
    with forced(isa):
        got = ops.update_softmax(state, torch.empty(0, 70), 0, torch.empty(0), 30.0, torch.float32)
    assert [tuple(part.shape) for part in got] == [(0, 70), (0, 2), (0,)]


@compiled
@each_isa
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF])
def test_any_nan_shows_in_the_state(isa: str, softcap: float | None, bits: int) -> None:
    raw = normal(0, 2, 64)
    raw[1, 5] = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    state = SoftmaxState.empty(2, torch.device("cpu"))
    with forced(isa):
        mass, _, _ = kernels.update_softmax(state, raw, 0, torch.ones(2), softcap, torch.float32)
    assert mass[1, 5].isnan() and state.sum_exp.isnan().tolist() == [False, True]
