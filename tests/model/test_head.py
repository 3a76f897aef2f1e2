"""The vocabulary head: its one pass over chunks against statistics of all logits."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.heads import CAP, ban, largest_tensor, random_head
from tests.support.gguf_files import encode
from torch import Tensor

from sfumato.model import most_probable as draw_module
from sfumato.model.head import Adjust, HeadStats, VocabularyHead
from sfumato.model.head import statistics as final_statistics
from sfumato.model.most_probable import locate
from sfumato.ops.online_softmax import TOP, SoftmaxState, update_softmax
from sfumato.weights.formats import FORMATS, QuantizedTensor


def full_logits(
    head: VocabularyHead, hidden: Tensor, temperature: Tensor, adjust: Adjust | None = None
) -> Tensor:
    """Processed logits float64 [positions, vocab] in one piece, without the head's code."""
    raw = (hidden.double() @ head.embedding.double().T) / CAP
    logits = raw.tanh() * CAP
    if adjust is not None:
        logits = adjust(logits, 0)
    return logits / temperature.double()[:, None]


def nearest_edge(logits: Tensor, tokens: Tensor, uniform: Tensor) -> Tensor:
    """How far outside a token's stretch of the cumulated probs its uniform lies; 0 inside."""
    cumulated = logits.double().softmax(dim=1).cumsum(dim=1)
    cumulated /= cumulated[:, -1:].clone()
    after = cumulated.gather(1, tokens[:, None])[:, 0]
    before = torch.cat((torch.zeros_like(cumulated[:, :1]), cumulated), 1).gather(
        1, tokens[:, None]
    )[:, 0]
    return torch.maximum(before - uniform, uniform - after).clamp(min=0)


shapes = st.fixed_dictionaries(
    {
        "vocab": st.integers(2, 400),
        "hidden": st.sampled_from((8, 16)),
        "chunk": st.sampled_from((1, 7, 64, 100, 8192)),
        "spread": st.sampled_from((0.0, 0.3, 3.0, 30.0)),
        "seed": st.integers(0, 2**31),
    }
)


@settings(max_examples=30)
@given(shape=shapes, positions=st.integers(1, 9))
def test_statistics_equal_those_of_whole_logits(shape: dict[str, Any], positions: int) -> None:
    head, random = random_head(**shape)
    hidden = torch.randn(positions, shape["hidden"], generator=random)
    temperature = torch.rand(positions, generator=random) + 0.4
    uniform = torch.rand(positions, generator=random, dtype=torch.float64)
    stats = head(hidden, temperature, uniform, keep_logits=True)
    assert stats.logits is not None
    expected = full_logits(head, hidden, temperature)
    torch.testing.assert_close(stats.logits.double(), expected, rtol=1e-5, atol=1e-4)
    # The rest is judged by the logits that the head itself saw: rounding makes and breaks ties.
    probs = stats.logits.double().softmax(dim=1)
    assert torch.equal(stats.argmax, stats.logits.argmax(dim=1))
    count = min(TOP, shape["vocab"])
    assert stats.top_ids.shape == stats.top_probs.shape == (positions, count)
    assert torch.equal(stats.logits.gather(1, stats.top_ids), stats.logits.topk(count, dim=1)[0])
    assert all(len(set(ids)) == count for ids in stats.top_ids.tolist())
    torch.testing.assert_close(
        stats.top_probs.double(), probs.gather(1, stats.top_ids), rtol=1e-5, atol=1e-6
    )
    entropy = -torch.special.xlogy(probs, probs).sum(dim=1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-4, atol=2e-5)
    soft = probs @ head.embedding.double() * shape["hidden"] ** 0.5
    size = 1e-6 * max(1.0, float(head.embedding.abs().max())) * shape["hidden"] ** 0.5
    torch.testing.assert_close(stats.soft.double(), soft, rtol=1e-5, atol=size)
    again = head.soft_embedding(stats.logits, torch.float32)
    torch.testing.assert_close(again.double(), soft, rtol=1e-5, atol=size)
    assert nearest_edge(stats.logits, stats.drawn, uniform).max() < 1e-6
    drawn_probs = probs.gather(1, stats.drawn[:, None])[:, 0]
    torch.testing.assert_close(stats.drawn_probs.double(), drawn_probs, rtol=1e-4, atol=1e-6)
    sure = stats.drawn == stats.argmax
    assert torch.equal(stats.drawn_probs[sure], stats.top_probs[sure, 0])


@settings(max_examples=15)
@given(shape=shapes, other=st.sampled_from((1, 5, 33, 8192)))
def test_draws_do_not_depend_on_the_chunk(shape: dict[str, Any], other: int) -> None:
    head, random = random_head(**shape)
    hidden = torch.randn(50, shape["hidden"], generator=random)
    ones, uniform = torch.ones(50), torch.rand(50, generator=random, dtype=torch.float64)
    first = head(hidden, ones, uniform).drawn
    second = VocabularyHead(head.embedding, CAP, other)(hidden, ones, uniform).drawn
    differing = first != second
    logits = full_logits(head, hidden, ones)
    cumulated = logits.softmax(dim=1).cumsum(dim=1)
    edges = (cumulated - uniform[:, None]).abs().amin(dim=1)
    assert (edges[differing] < 1e-6).all()
    assert differing.sum() <= 2


@pytest.mark.parametrize("chunk", [5, 37, 100])
def test_draws_follow_the_distribution(chunk: int) -> None:
    """Chi-square over 37 tokens and 40000 draws, at a fixed seed."""
    head, random = random_head(37, 8, chunk, spread=1.5, seed=1)
    draws = 40_000
    hidden = torch.randn(1, 8, generator=random).expand(draws, -1)
    uniform = torch.rand(draws, generator=random, dtype=torch.float64)
    drawn = head(hidden, torch.full((draws,), 0.7), uniform).drawn
    expected = full_logits(head, hidden[:1], torch.tensor([0.7])).softmax(dim=1)[0] * draws
    counts = torch.bincount(drawn, minlength=37)
    rare = expected < 5
    observed = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("chunk", [3, 10, 64])
def test_uniforms_at_the_ends(spread: float, chunk: int) -> None:
    head, random = random_head(31, 8, chunk, spread, seed=3)
    hidden = torch.randn(6, 8, generator=random)
    low, high = torch.zeros(6, dtype=torch.float64), torch.full((6,), 1 - 2**-53).double()
    logits = full_logits(head, hidden, torch.ones(6))
    possible = (logits - logits.amax(dim=1, keepdim=True)).float().exp() > 0
    first = possible.int().argmax(dim=1)
    last = 30 - possible.flip(1).int().argmax(dim=1)
    assert torch.equal(head(hidden, torch.ones(6), low).drawn, first)
    drawn = head(hidden, torch.ones(6), high).drawn
    # The last of the possible tokens, or before it one after which no double precision is left.
    assert possible.gather(1, drawn[:, None]).all()
    assert (nearest_edge(logits, drawn, high) < 1e-6).all() and (drawn <= last).all()


def test_a_flat_distribution() -> None:
    vocab, positions = 1000, 200
    head = VocabularyHead(torch.zeros(vocab, 4), CAP, 64)
    uniform = (torch.arange(positions, dtype=torch.float64) + 0.5) / positions
    stats = head(torch.ones(positions, 4), torch.ones(positions), uniform)
    assert torch.equal(stats.drawn, (uniform * vocab).long())
    assert torch.equal(stats.argmax, torch.zeros(positions, dtype=torch.int64))
    torch.testing.assert_close(stats.entropy, torch.full((positions,), math.log(vocab)))


@pytest.mark.parametrize("temperature", [1.0, 0.05, 1e-12])
@pytest.mark.parametrize("winner", [0, 63, 64, 99])
def test_a_peaked_distribution(winner: int, temperature: float) -> None:
    embedding = torch.full((100, 1), -1.0)
    embedding[winner] = 1.0
    head = VocabularyHead(embedding, CAP, 64)
    uniform = torch.tensor([1e-20, 0.3, 1 - 2**-53], dtype=torch.float64)
    stats = head(torch.full((3, 1), 100.0), torch.full((3,), temperature), uniform)
    assert stats.drawn.tolist() == stats.argmax.tolist() == [winner] * 3
    assert stats.top_ids[:, 0].tolist() == [winner] * 3
    assert (stats.entropy.abs() < 1e-5).all() and (stats.top_probs[:, 0] == 1).all()
    torch.testing.assert_close(stats.soft, torch.ones(3, 1))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-12])
@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_banned_tokens(chunk: int, temperature: float) -> None:
    """Whole chunks are banned too, the first, which has no peak yet, and the last."""
    head, random = random_head(50, 8, chunk, spread=2.0, seed=5)
    hidden = torch.randn(300, 8, generator=random)
    uniform = torch.rand(300, generator=random, dtype=torch.float64)
    uniform[0], uniform[1] = 0, 1 - 2**-53
    banned = [*range(12), 17, 25, 26, *range(40, 50)]
    temperatures = torch.full((300,), temperature)
    stats = head(hidden, temperatures, uniform, ban(*banned), keep_logits=True)
    for ids in (stats.drawn, stats.argmax, stats.top_ids):
        assert not torch.isin(ids, torch.tensor(banned)).any()
    assert stats.logits is not None and stats.logits.isfinite().all()
    allowed = [i for i in range(50) if i not in banned]
    fewer = VocabularyHead(head.embedding[allowed], CAP, 8192)  # as if the others did not exist
    other = fewer(hidden, temperatures, uniform)
    torch.testing.assert_close(stats.entropy, other.entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats.soft, other.soft, rtol=1e-4, atol=1e-5)
    names = torch.tensor(allowed)
    assert torch.equal(stats.argmax, names[other.argmax])
    assert (
        nearest_edge(fewer.logits(hidden) / temperatures[:, None], other.drawn, uniform).max()
        < 1e-5
    )
    assert (stats.drawn != names[other.drawn]).sum() <= 1


@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_a_device_without_double_precision(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the greatest uniform becomes 1, and must not fall past the last possible token."""
    monkeypatch.setattr(draw_module, "wide", Tensor.float)
    head, random = random_head(50, 8, chunk, spread=2.0, seed=6)
    hidden = torch.randn(40, 8, generator=random)
    uniform = torch.full((40,), 1 - 2**-53, dtype=torch.float64)
    drawn = head(hidden, torch.ones(40), uniform, ban(*range(30, 50))).drawn
    assert (drawn < 30).all()


def test_one_allowed_token() -> None:
    head, random = random_head(50, 8, 16)
    hidden = torch.randn(4, 8, generator=random)
    uniform = torch.tensor([0, 0.5, 0.99, 1 - 2**-53], dtype=torch.float64)
    stats = head(hidden, torch.ones(4), uniform, ban(*(i for i in range(50) if i != 33)))
    assert stats.drawn.tolist() == stats.argmax.tolist() == [33] * 4
    assert (stats.entropy == 0).all()
    torch.testing.assert_close(stats.soft, head.embedding[33].expand(4, -1) * 8**0.5)


def test_adjust_sees_softcapped_scores_and_first_ids() -> None:
    head, random = random_head(30, 8, 8, spread=40.0)
    hidden = torch.randn(3, 8, generator=random)
    seen: list[tuple[int, int]] = []

    def adjust(scores: Tensor, start: int) -> Tensor:
        assert scores.abs().max() <= CAP
        seen.append((start, scores.shape[1]))
        return scores + torch.arange(start, start + scores.shape[1]) * 0.1

    temperature, uniform = torch.tensor([0.5, 1.0, 2.0]), torch.full((3,), 0.4, dtype=torch.float64)
    stats = head(hidden, temperature, uniform, adjust, keep_logits=True)
    assert seen[:4] == [(0, 8), (8, 8), (16, 8), (24, 6)]
    expected = full_logits(
        head, hidden, temperature, lambda scores, _: scores + torch.arange(30) * 0.1
    )
    assert stats.logits is not None
    torch.testing.assert_close(stats.logits.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(stats.argmax, expected.argmax(dim=1))
    assert nearest_edge(expected, stats.drawn, uniform).max() < 1e-6
    probs = expected.softmax(dim=1).gather(1, stats.drawn[:, None])[:, 0]
    torch.testing.assert_close(stats.drawn_probs.double(), probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_of_equal_scores_the_lowest_id_wins(chunk: int) -> None:
    embedding = torch.tensor([[0.0], [1.0], [0.5], [1.0], [1.0], [0.0], [1.0], [0.2], [0.9], [1.0]])
    stats = VocabularyHead(embedding, CAP, chunk)(
        torch.ones(2, 1), torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64)
    )
    assert stats.argmax.tolist() == [1, 1]
    assert set(stats.top_ids[0, :5].tolist()) == {1, 3, 4, 6, 9}


def test_logits_are_kept_only_when_asked_for() -> None:
    head, random = random_head(100, 8, 32)
    hidden, ones = torch.randn(4, 8, generator=random), torch.full((4,), 2.0)
    uniform = torch.rand(4, generator=random, dtype=torch.float64)
    without, kept = head(hidden, ones, uniform), head(hidden, ones, uniform, keep_logits=True)
    assert without.logits is None and kept.logits is not None
    torch.testing.assert_close(kept.logits, head.logits(hidden) / 2)
    assert torch.equal(without.drawn, kept.drawn)


def test_rows_of_statistics() -> None:
    head, random = random_head(60, 8, 32)
    hidden, uniform = torch.randn(6, 8, generator=random), torch.rand(6, generator=random).double()
    stats = head(hidden, torch.ones(6), uniform)
    assert torch.equal(stats[3:].drawn, stats.drawn[3:])
    assert torch.equal(stats[3:][1].top_probs, stats.top_probs[4])
    assert stats[0].soft.shape == (8,) and stats[0].logits is None


@pytest.mark.parametrize("adjust", [None, ban(3)])
def test_all_logits_never_exist(adjust: Adjust | None) -> None:
    vocab, chunk, positions, width = 5000, 512, 64, 8  # as many rows as a product has
    head, random = random_head(vocab, width, chunk)
    hidden = torch.randn(positions, width, generator=random)
    uniform = torch.rand(positions, generator=random, dtype=torch.float64)
    with largest_tensor() as seen:
        head(hidden, torch.ones(positions), uniform, adjust)
    assert positions * chunk <= seen.numel < 2 * positions * chunk
    with largest_tensor() as seen:  # the recorder would have noticed
        head(hidden, torch.ones(positions), uniform, adjust, keep_logits=True)
    assert seen.numel == positions * vocab


@pytest.mark.parametrize("size", [1, 30, 1000, 8192])
def test_a_rows_sums_do_not_depend_on_other_rows(size: int) -> None:
    """Bit for bit, given the same scores: all reductions of the head but the soft embedding's,
    which is a matrix product."""
    random = torch.Generator().manual_seed(size)
    chunks = [torch.randn(9, size, generator=random) * 4 for _ in range(3)]
    uniform = torch.rand(9, generator=random, dtype=torch.float64)

    def statistics(which: slice) -> tuple[HeadStats, tuple[Tensor, Tensor]]:
        count = len(uniform[which])
        state, ones, sums, peaks = (
            SoftmaxState.empty(count, torch.device("cpu")),
            torch.ones(count),
            [],
            [],
        )
        for index, scores in enumerate(chunks):
            raw = scores[which].clone()
            taken = update_softmax.reference(state, raw, index * size, ones, None, torch.float32)
            sums.append(taken[1])
            peaks.append(state.max[:, None].expand_as(sums[-1]))
        fade = (torch.cat(peaks, 1) - state.max[:, None]).exp()
        places = locate(torch.cat(sums, 1) * fade, uniform[which])
        soft = torch.ones(count, 4)
        drawn = state.argmax, state.max
        return final_statistics(state, *drawn, soft, torch.float32, [], 3 * size), places

    together, places = statistics(slice(None))
    for row in range(9):
        alone, place = statistics(slice(row, row + 1))
        for name in ("argmax", "entropy", "top_ids", "top_probs"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name
        for one, all_ in zip(place, places, strict=True):
            assert torch.equal(one[0], all_[row])


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("chunk", [7, 100])
def test_quantized_embedding_equals_its_dequantized_self(name: str, chunk: int) -> None:
    random = torch.Generator().manual_seed(2)
    values = torch.randn(90, 256, generator=random) * 0.1
    data = torch.from_numpy(encode(values, name, seed=1))
    quantized = QuantizedTensor(data, FORMATS[name], (90, 256))
    hidden, uniform = torch.randn(5, 256, generator=random), torch.rand(5, generator=random)
    calls: list[Callable[[], HeadStats]] = [
        lambda weight=weight: VocabularyHead(weight, CAP, chunk)(
            hidden, torch.ones(5), uniform.double(), keep_logits=True
        )
        for weight in (quantized, quantized.dequantize())
    ]
    ours, plain = (call() for call in calls)
    for field in ("argmax", "drawn", "entropy", "top_ids", "top_probs", "soft", "logits"):
        assert torch.equal(getattr(ours, field), getattr(plain, field)), field


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    head, random = random_head(300, 32, 64, spread=3.0)
    head = VocabularyHead(head.embedding.to(dtype), CAP, 64)
    hidden = torch.randn(6, 32, generator=random).to(dtype)
    uniform = torch.rand(6, generator=random, dtype=torch.float64)
    stats = head(hidden, torch.ones(6), uniform, keep_logits=True)
    assert stats.soft.dtype == dtype and stats.entropy.dtype == torch.float32
    assert stats.logits is not None
    probs = stats.logits.double().softmax(dim=1)
    entropy = -torch.special.xlogy(probs, probs).sum(dim=1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    soft = probs @ head.embedding.double() * 32**0.5
    step = torch.finfo(dtype).eps * float(soft.abs().max())
    assert (stats.soft.double() - soft).abs().max() < 2 * step


PASS = """
import torch
from sfumato.model.head import CHUNK, VocabularyHead
from sfumato.model.head import head_bytes
from tests.support.gguf_files import gguf_config

def status(name):
    lines = open("/proc/self/status").read().split("\\n")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

torch.set_num_threads(1)
config = gguf_config(vocab_size=64 * CHUNK, canvas_length=128)
embedding = torch.randn(config.vocab_size, config.hidden_size)
hidden, temperature = torch.randn(128, config.hidden_size), torch.full((128,), 0.5)
uniform = torch.rand(128, dtype=torch.float64)
VocabularyHead(embedding[:CHUNK], 30.0)(hidden, temperature, uniform)  # what torch keeps allocated
before = status("RssAnon")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
VocabularyHead(embedding, 30.0)(hidden, temperature, uniform)
print(status("VmHWM") - status("RssFile") - before, head_bytes(config, torch.float32))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc")
def test_a_pass_does_not_pile_up_memory() -> None:
    """What is kept of each of 64 chunks must not keep that chunk's buffers: it used 30 times as
    much. Twice as much is what the allocator holds back."""
    done = subprocess.run([sys.executable, "-c", PASS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used, predicted = map(int, done.stdout.split())
    assert used < 3 * predicted
