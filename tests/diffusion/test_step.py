"""One denoising step: each row's own distribution, whatever other rows are in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.diffusion.tiny import calm_oracle, inverse_cdf
from tests.support import one_row
from tests.support.oracle import network_of
from torch import Tensor
from torch.distributions import Categorical

from sfumato.diffusion import scoring
from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.processors import CanvasView, LogitBias, MinTokens
from sfumato.diffusion.sampler import EntropyBound, FixedCount, StepView, Threshold
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.diffusion.schedule import LinearTemperature, SoftTopK
from sfumato.diffusion.step import denoise_step
from sfumato.diffusion.stopping import Never, StableAndConfident
from sfumato.model.cache import Slot
from sfumato.model.head import HeadStats, VocabularyHead
from sfumato.model.network import Network

LENGTH, VOCABULARY = 12, 40
HEAT = 0.8  # of the reference's first step
CPU = torch.device("cpu")


def distribution(temperature: float = HEAT, sharpness: float = 4.0) -> tuple[Any, Tensor]:
    """A network of nothing but a head, and the scores that it will find, before temperature."""
    torch.manual_seed(0)
    head = VocabularyHead(torch.randn(VOCABULARY, 16), 30.0, chunk=9)
    hidden = torch.randn(LENGTH, 16) * sharpness / 4
    return SimpleNamespace(head=head, hidden=hidden), head.logits(hidden)


def score(network: Any, hidden: Tensor, rows: Sequence[Canvas]) -> HeadStats:
    """What `one_row.score` finds, of all rows together."""
    found = one_row.score(network.head, hidden, rows)
    parts = ([getattr(stats, part.name) for stats in found] for part in fields(HeadStats))
    return HeadStats(*(None if part[0] is None else torch.cat(part) for part in parts))


def canvas(length: int = LENGTH, reply: Sequence[int] = (), **choices: Any) -> Canvas:
    config = SamplerConfig(canvas_length=length, **choices).over(REFERENCE)
    return Canvas(config, Noise(7, 0), VOCABULARY, CPU, reply)


def check(network: Any, row: Canvas, processed: Tensor) -> HeadStats:
    """That the head found what the distribution `processed` [length, vocabulary] says."""
    stats = score(network, network.hidden, [row])
    probs = processed.softmax(-1)
    entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-4, rtol=1e-4)
    assert torch.equal(stats.argmax, processed.argmax(-1))
    assert torch.equal(stats.drawn, inverse_cdf(probs, row.uniforms()))
    soft = probs @ network.head.embedding * 4.0
    torch.testing.assert_close(stats.soft, soft, atol=1e-3, rtol=1e-3)
    return stats


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_scales_the_schedule(temperature: float) -> None:
    network, logits = distribution()
    check(network, canvas(temperature=temperature), logits / (HEAT * temperature))


def test_the_schedule_goes_down_step_by_step() -> None:
    network, logits = distribution()
    row = canvas(stopping=Never(), max_steps=4, schedule=LinearTemperature(0.2, 1.0))
    for heat in (1.0, 0.8, 0.6, 0.4):
        one_row.advance(row, check(network, row, logits / heat))
    assert row.convergence == "step_cap"


def test_at_temperature_0_the_draw_is_the_argmax_and_the_law_is_kept() -> None:
    network, logits = distribution(sharpness=1.0)
    row = canvas(temperature=0.0, sampler=EntropyBound(1e6))
    stats = check(network, row, logits / HEAT)  # entropy and soft embedding keep the schedule
    assert not torch.equal(stats.drawn, stats.argmax)
    draft = one_row.advance(row, stats)
    assert draft.accepted.all()
    assert torch.equal(row.tokens, stats.argmax)
    torch.testing.assert_close(row.soft, stats.soft)


def test_draws_follow_the_law() -> None:
    torch.manual_seed(1)
    head = VocabularyHead(torch.randn(VOCABULARY, 16), 30.0, chunk=9)
    count = 4000
    hidden = (torch.randn(1, 16) / 3).expand(count, -1).contiguous()
    network: Any = SimpleNamespace(head=head)
    drawn = score(network, hidden, [canvas(count)]).drawn
    expected = (head.logits(hidden[:1])[0] / HEAT).softmax(-1) * count
    chi2 = ((drawn.bincount(minlength=VOCABULARY) - expected) ** 2 / expected).sum()
    assert chi2 < 62  # 39 degrees of freedom, 1 %


@pytest.mark.parametrize("k", [1, 3, VOCABULARY, 1000])
def test_top_k(k: int) -> None:
    network, logits = distribution(sharpness=1.0)
    kept = logits.topk(min(k, VOCABULARY))[0][:, -1:]
    stats = check(network, canvas(top_k=k), (logits / HEAT).masked_fill(logits < kept, -1e30))
    if k == 1:
        assert stats.entropy.max() == 0 and torch.equal(stats.drawn, stats.argmax)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 1.0])
def test_top_p(p: float) -> None:
    network, logits = distribution(sharpness=1.0)
    ranked = logits.softmax(-1).sort(descending=True)  # before temperature
    before = ranked.values.cumsum(-1) - ranked.values
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ranked.indices, before >= p)
    stats = check(network, canvas(top_p=p), (logits / HEAT).masked_fill(outside, -1e30))
    assert (stats.entropy.max() == 0) == (p == 1e-6)


def test_what_a_row_skips_is_its_own_choice() -> None:
    """The last step's argmax is the guess, once there is one."""
    network, _ = distribution(sharpness=3.0)
    both = SimpleNamespace(head=network.head, hidden=network.hidden.repeat(2, 1))
    rows, plain = [canvas(), canvas(soft_skip=0.5)], [canvas(), canvas()]
    for _ in range(2):
        stats = score(both, both.hidden, rows)
        exact = score(both, both.hidden, plain)
        for name in ("argmax", "drawn", "entropy", "top_probs"):
            assert torch.equal(getattr(stats, name), getattr(exact, name))
        torch.testing.assert_close(stats.soft[:LENGTH], exact.soft[:LENGTH])
        change = (stats.soft[LENGTH:] - exact.soft[LENGTH:]).norm(dim=1)
        longest = network.head.embedding.norm(dim=1).max() * 4
        assert 0 < change.max() <= 0.5 * longest
        for row, at in ((rows[0], slice(LENGTH)), (rows[1], slice(LENGTH, None))):
            one_row.advance(row, stats[at])
        for row, at in ((plain[0], slice(LENGTH)), (plain[1], slice(LENGTH, None))):
            one_row.advance(row, exact[at])


def test_how_many_tokens_count_is_a_rows_own_choice() -> None:
    """And that of its step; the entropy stays that of all of them."""
    network, logits = distribution(sharpness=1.0)
    both = SimpleNamespace(head=network.head, hidden=network.hidden.repeat(2, 1))
    rows = [canvas(), canvas(soft_top_k=SoftTopK(9, 1), max_steps=3, stopping=Never())]
    for heat, few in ((HEAT, 9), (0.4 + 0.4 * 2 / 3, 3), (0.4 + 0.4 / 3, 1)):
        assert rows[1].soft_top_k() == few
        stats = score(both, both.hidden, rows)
        exact = score(both, both.hidden, [rows[0], rows[0]])
        for name in ("argmax", "drawn", "entropy", "top_probs"):
            assert torch.equal(getattr(stats[:LENGTH], name), getattr(exact[:LENGTH], name))
        torch.testing.assert_close(stats.soft[:LENGTH], exact.soft[:LENGTH])
        all_of_it = logits / heat
        cut = all_of_it.masked_fill(all_of_it < all_of_it.topk(few)[0][:, -1:], -torch.inf)
        probs = cut.softmax(-1)
        own = stats[LENGTH:]
        assert torch.equal(own.drawn, inverse_cdf(probs, rows[1].uniforms()))
        torch.testing.assert_close(own.soft, probs @ network.head.embedding * 4.0)
        torch.testing.assert_close(own.entropy, Categorical(logits=all_of_it).entropy())
        one_row.advance(rows[1], own)


def test_top_p_and_processors_act_before_the_few_are_chosen() -> None:
    network, logits = distribution(sharpness=1.0)
    favourite = int(logits[0].argmax())
    biased = logits.index_fill(1, torch.tensor([favourite]), -torch.inf)
    row = canvas(soft_top_k=3, top_k=20, processors=(LogitBias({favourite: float("-inf")}),))
    stats = score(network, network.hidden, [row])
    cut = biased.masked_fill(biased < biased.topk(3)[0][:, -1:], -torch.inf)
    probs = (cut / HEAT).softmax(-1)
    torch.testing.assert_close(stats.soft, probs @ network.head.embedding * 4.0)
    assert torch.equal(stats.drawn, inverse_cdf(probs, row.uniforms()))
    kept = biased.masked_fill(biased < biased.topk(20)[0][:, -1:], -torch.inf)
    entropy = Categorical(logits=kept / HEAT).entropy()
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [0, 2049, 2.5, None])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    class Odd:
        def k(self, step: int, max_steps: int) -> Any:
            return count

    network, _ = distribution()
    message = r"soft_top_k Odd: k must return a whole number from 1 to 2048, got .* at step 1"
    with pytest.raises(ValueError, match=message):
        score(network, network.hidden, [canvas(soft_top_k=Odd())])


def test_processors_act_on_all_that_is_found() -> None:
    network, logits = distribution(sharpness=1.0)
    biased = logits.clone()
    favourite = int(logits[0].argmax())
    biased[:, favourite] = -1e30
    biased[:, 11] += 2.5
    biased[:5, [3, 30]] = -1e30
    row = canvas(processors=(LogitBias({favourite: float("-inf"), 11: 2.5}), MinTokens(5, (3, 30))))
    stats = check(network, row, biased / HEAT)
    assert stats.argmax[0] != favourite
    assert one_row.advance(row, stats).token_ids[0] != favourite


def test_processors_change_when_a_canvas_stops() -> None:
    """A token that all positions are sure of, banned: neither stable nor sure any more."""
    head = VocabularyHead(torch.eye(VOCABULARY), 30.0)
    network: Any = SimpleNamespace(head=head)
    hidden = torch.zeros(LENGTH, VOCABULARY)
    hidden[:, 6] = 1e3
    for processors, steps in (((), 2), ((LogitBias({6: float("-inf")}),), 5)):
        row = canvas(processors=processors, max_steps=5)
        while not row.done:
            one_row.advance(row, score(network, hidden, [row]))
        assert row.step == steps


def test_min_tokens_counts_from_the_start_of_the_reply() -> None:
    network, logits = distribution(sharpness=1.0)
    banned = logits.clone()
    banned[:3, 5] = -1e30
    check(network, canvas(reply=[1] * 20, processors=(MinTokens(23, (5,)),)), banned / HEAT)
    check(network, canvas(reply=[1] * 23, processors=(MinTokens(23, (5,)),)), logits / HEAT)


def test_processors_see_the_canvas() -> None:
    seen: list[CanvasView] = []

    class Spy:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            seen.append(view)
            return scores

    network, _ = distribution()
    row = canvas(reply=[4, 8], processors=(Spy(),))
    went_in = row.tokens
    draft = one_row.advance(row, score(network, network.hidden, [row]))
    score(network, network.hidden, [row])
    first, second = seen[0], seen[-1]
    assert torch.equal(torch.stack((first.step, second.step)), torch.tensor([1, 2]))
    assert torch.equal(first.tokens, went_in) and torch.equal(second.tokens, row.tokens)
    assert first.history.tolist() == [[-1] * LENGTH]
    assert torch.equal(second.history[-1], draft.token_ids)
    assert first.reply.tolist() == second.reply.tolist() == [4, 8]


def test_third_party_parts() -> None:
    """Nothing but the methods counts: no base class, no registration."""

    class OnlyEven:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            odd = (torch.arange(scores.shape[-1]) + first_id) % 2 == 1
            return scores.masked_fill(odd, float("-inf"))

    class Constant:
        def temperature(self, step: int, max_steps: int) -> float:
            return 0.5

    class ByLogits:
        needs_logits: ClassVar[bool] = True

        def accept(self, view: StepView) -> Tensor:
            assert view.stats.logits is not None
            assert view.stats.logits.shape == (LENGTH, VOCABULARY)
            best = view.stats.logits.topk(2).values
            return best[:, 0] - best[:, 1] > 1.0

    class AtOnce:
        def done(self, view: StepView) -> Tensor:
            return view.step == 2

    network, logits = distribution(sharpness=1.0)
    processed = logits / 0.5
    processed[:, 1::2] = -1e30
    row = canvas(
        processors=(OnlyEven(),), schedule=Constant(), sampler=ByLogits(), stopping=AtOnce()
    )
    stats = check(network, row, processed)
    assert stats.logits is not None
    torch.testing.assert_close(stats.logits[:, ::2], processed[:, ::2])
    best = processed.topk(2).values
    draft = one_row.advance(row, stats)
    assert torch.equal(draft.accepted, best[:, 0] - best[:, 1] > 1.0)
    assert 0 < int(draft.accepted.sum()) < LENGTH
    one_row.advance(row, score(network, network.hidden, [row]))
    assert (row.convergence, row.step) == ("converged", 2)


class Returns:
    """A processor that gives back something else than it got."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Any:
        return self.change(scores)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda scores: None, "None, which is no tensor"),
        (lambda scores: scores.double(), r"float64 \[12, 9\]"),
        (lambda scores: scores[:-1], r"float32 \[11, 9\]"),
        (lambda scores: scores[0], r"float32 \[9\]"),
    ],
)
def test_a_processor_must_return_scores(change: Callable[[Tensor], Any], got: str) -> None:
    network, _ = distribution()
    row = canvas(processors=(LogitBias({3: 1.0}), Returns(change)))
    expected = rf"^processor Returns: process must return float32 \[12, 9\], got {got}$"
    with pytest.raises(ValueError, match=expected):
        score(network, network.hidden, [row])


@pytest.mark.parametrize("choices", [{}, {"top_k": 3}, {"temperature": 1e-6}])
def test_to_ban_every_token_is_refused(choices: dict[str, Any]) -> None:
    """Everywhere or at some positions; one token left at each is enough."""
    network, _ = distribution()

    class Some:
        def process(self, scores: Tensor, first_id: int, view: CanvasView) -> Tensor:
            return scores.index_fill(0, torch.tensor([3, 6]), -math.inf)

    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    for processor, name, position in ((every, "LogitBias", 0), (Some(), "Some", 3)):
        row = canvas(processors=(processor,), **choices)
        message = rf"the logit processors \({name}\) ban every token of position {position}; leave"
        with pytest.raises(ValueError, match=rf"^canvas 0, step 1: {message}"):
            one_row.advance(row, score(network, network.hidden, [row]))
    few = LogitBias(dict.fromkeys(range(1, VOCABULARY), -math.inf))
    row = canvas(processors=(few,), **choices)
    assert (
        one_row.advance(row, score(network, network.hidden, [row])).token_ids.tolist()
        == [0] * LENGTH
    )


def test_a_banned_position_may_be_pinned() -> None:
    network, _ = distribution()
    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    config = SamplerConfig(canvas_length=LENGTH, processors=(every,)).over(REFERENCE)
    pinned = dict.fromkeys(range(LENGTH), 7)
    row = Canvas(config, Noise(7, 0), VOCABULARY, CPU, pinned=pinned)
    assert (
        one_row.advance(row, score(network, network.hidden, [row])).token_ids.tolist()
        == [7] * LENGTH
    )


def test_one_rows_ban_is_no_other_rows_business() -> None:
    network, _ = distribution()
    every = LogitBias(dict.fromkeys(range(VOCABULARY), -math.inf))
    rows = [canvas(), canvas(processors=(every,)), canvas(processors=(LogitBias({3: 1.0}),))]
    stats = score(network, network.hidden.repeat(3, 1), rows)
    entropy = stats.entropy.view(3, LENGTH)
    assert entropy[1].isinf().all() and entropy[[0, 2]].isfinite().all()


# Rows in a batch.


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of(calm_oracle())


ROWS: list[tuple[int, dict[str, Any]]] = [  # prompt length, choices
    (5, {}),
    (17, {"temperature": 0.0, "max_steps": 20}),
    (1, {"top_k": 3, "canvas_length": 5}),
    (30, {"sampler": FixedCount(1), "stopping": StableAndConfident(2, 0.5)}),
    (
        9,
        {
            "top_p": 0.8,
            "temperature": 1.3,
            "processors": (LogitBias({4: 3.0}), MinTokens(14, (4,))),
        },
    ),
    (2, {"sampler": Threshold(0.7), "schedule": LinearTemperature(0.1, 0.3), "max_steps": 6}),
    (12, {"self_conditioning": False, "canvas_length": 1}),
    (8, {"stopping": Never(), "max_steps": 3}),
]


def begin(network: Network, index: int) -> tuple[Canvas, Slot]:
    length, choices = ROWS[index]
    config = SamplerConfig(**({"max_steps": 12, "canvas_length": 8} | choices)).over(REFERENCE)
    random = torch.Generator().manual_seed(index)
    slot = network.new_slot(64)
    network.encode([torch.randint(0, 97, (length,), generator=random)], [slot])
    return Canvas(config, Noise(index, index), 97, CPU, [5] * 3 * index), slot


def alone(network: Network, index: int) -> list[Draft]:
    canvas, slot = begin(network, index)
    drafts = []
    while not canvas.done:
        drafts += denoise_step(network, [canvas], [slot])
    return drafts


def together(network: Network, joins: Sequence[int]) -> list[list[Draft]]:
    """All rows in one batch; row i joins at step joins[i] and leaves when it is done."""
    found: list[list[Draft]] = [[] for _ in ROWS]
    live: list[tuple[int, Canvas, Slot]] = []
    step = 0
    while live or step <= max(joins):
        live += [(i, *begin(network, i)) for i, join in enumerate(joins) if join == step]
        canvases, slots = [row[1] for row in live], [row[2] for row in live]
        for (index, _, _), draft in zip(live, denoise_step(network, canvases, slots), strict=True):
            found[index].append(draft)
        live = [row for row in live if not row[1].done]
        step += 1
    return found


@pytest.mark.parametrize("joins", [[0] * 8, [3, 0, 2, 0, 1, 5, 0, 4]], ids=["at once", "staggered"])
def test_a_row_is_the_same_alone_and_in_any_batch(network: Network, joins: list[int]) -> None:
    for index, drafts in enumerate(together(network, joins)):
        expected = alone(network, index)
        assert len(drafts) == len(expected)
        for draft, one in zip(drafts, expected, strict=True):
            assert (draft.canvas, draft.step) == (one.canvas, one.step) == (index, draft.step)
            assert torch.equal(draft.token_ids, one.token_ids)
            assert torch.equal(draft.accepted, one.accepted)
            torch.testing.assert_close(draft.entropy, one.entropy, atol=1e-4, rtol=1e-4)


def test_the_rows_differ(network: Network) -> None:
    steps = [len(alone(network, index)) for index in range(len(ROWS))]
    assert len(set(steps)) > 3


def test_a_step_leaves_the_prefix_alone(network: Network) -> None:
    canvas, slot = begin(network, 0)
    before = [tensor.clone() for layer in range(3) for tensor in slot.read(layer)]
    denoise_step(network, [canvas], [slot])
    after = [tensor for layer in range(3) for tensor in slot.read(layer)]
    assert slot.length == ROWS[0][0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_another_seed_is_another_canvas(network: Network) -> None:
    canvas, slot = begin(network, 0)
    other = Canvas(canvas.config, replace(canvas.noise, seed=99), 97, CPU)
    one, two = denoise_step(network, [canvas, other], [slot, slot])
    assert not torch.equal(one.token_ids, two.token_ids)


def test_entropy_is_in_nats() -> None:
    network, logits = distribution()
    stats = score(network, network.hidden, [canvas()])
    torch.testing.assert_close(
        stats.entropy, Categorical(logits=logits / HEAT).entropy(), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("changed", [False, True])
def test_bans_are_minus_infinity_at_those_ids(changed: bool) -> None:
    """Whether they are counted with plain rows or, beside a bias, with changed ones."""
    network, logits = distribution(sharpness=1.0)
    few, end = (3, 17, 39, VOCABULARY + 5), 5
    processors = (LogitBias(dict.fromkeys(few, -math.inf)), MinTokens(9, (end, 3)))
    bias = (LogitBias({1: 0.5}),) if changed else ()
    row = canvas(reply=[8, 8], processors=(*processors, *bias))
    expected = logits.clone()
    expected[:, 1] += 0.5 * changed
    expected[:, list(few[:3])] = -1e30
    expected[:7, end] = -1e30  # nine tokens less the two that there are
    check(network, row, expected / HEAT)
    assert (scoring._bans(row) is None) == changed


def test_what_a_row_asks_for_changes_no_bit_of_another() -> None:
    """Bans, cutoffs, kept logits, more named tokens, skips and few tokens, in one batch."""

    class Whole(EntropyBound):
        needs_logits: ClassVar[bool] = True

    torch.manual_seed(1)
    asks: list[dict[str, Any]] = [
        {},
        {"processors": (LogitBias({4: -math.inf}),)},
        {"processors": (LogitBias({4: 2.0}),)},
        {"top_k": 3},
        {"top_p": 0.5, "length": 5},
        {"top_k": 30, "top_p": 0.8},
        {"soft_top_k": 4},
        {"soft_top_k": 9, "min_tokens": 3},
        {"soft_skip": 0.3, "length": 7},
        {"sampler": Whole(), "top_tokens": 20},
        {"top_tokens": 12},
    ]
    network, _ = distribution(sharpness=1.0)
    rows = [canvas(**ask) for ask in asks]
    hidden = [torch.randn(row.length, 16) for row in rows]
    alone = [
        one_row.score(network.head, own, [row])[0] for own, row in zip(hidden, rows, strict=True)
    ]
    for order in ([*range(11)], [10, 9, 0, 3], [8, 6, 7, 1], [5, 4, 2, 9]):
        whole = torch.cat([hidden[i] for i in order])
        together = one_row.score(network.head, whole, [rows[i] for i in order])
        for i, found in zip(order, together, strict=True):
            for part in fields(HeadStats):
                one, other = getattr(found, part.name), getattr(alone[i], part.name)
                assert (one is None and other is None) or torch.equal(one, other), (asks[i], part)
    assert [stats.top_ids.shape[1] for stats in alone] == [8] * 9 + [20, 12]
    assert [stats.logits is not None for stats in alone] == [False] * 9 + [True, False]
