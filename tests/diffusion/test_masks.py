"""Canvases of mask tokens: each step is that of the rules of SDAR and of dLLM, re-written here in
plain torch, on the scores of `transformers`' Qwen3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.diffusion.tiny import inverse_cdf
from tests.support.qwen3_oracle import MASK, oracle_logits, random_oracle, save_oracle
from tests.support.recorded_graphs import RecordedGraphs
from torch import Tensor
from transformers import PreTrainedModel

from sfumato.diffusion.canvas import Canvas, CanvasPlan, Draft, GivenCanvas, Guidance
from sfumato.diffusion.constraints.decision_plan import NoiseKey
from sfumato.diffusion.constraints.read import CanvasRow, read_canvases
from sfumato.diffusion.constraints.read_template import NOISE, ReadCanvas
from sfumato.diffusion.limits import Limits, of_process, plan_reply, resolve
from sfumato.diffusion.noise import Noise
from sfumato.diffusion.sampler import (
    EntropyBound,
    EvenPace,
    FixedCount,
    LinearPace,
    LowConfidence,
    Sequential,
    SoftTopK,
    StableAndConfident,
    StepView,
    Threshold,
)
from sfumato.diffusion.sampler_config import MASKS, REFERENCE, SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.batch import Commit, width_for
from sfumato.model.cache import Slot
from sfumato.model.devices import fetch_together
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.segments import Suffix
from sfumato.ops import registry
from sfumato.refused import Refused

VOCABULARY, LENGTH = 97, 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_oracle(0)


@pytest.fixture(scope="module")
def network(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = save_oracle(model, tmp_path_factory.mktemp("masks"), "sdar", LENGTH)
    return load_network(open_checkpoint(folder), CPU, torch.float32)


def config(**choices: Any) -> SamplerConfig:
    given = SamplerConfig(**({"canvas_length": LENGTH, "max_steps": LENGTH} | choices))
    return of_process(given.over(MASKS), MASK)


# The rules as the two projects write them, of one row. Both may draw the mask token; here it has
# no probability.


def probs_of(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """`sample_with_temperature_topk_topp` of SDAR, before the draw."""
    if temperature:
        logits = logits / temperature
    if top_k:
        lowest = logits.topk(top_k)[0][..., -1, None]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if top_p < 1:
        falling, order = logits.sort(descending=True)
        cut = falling.softmax(-1).cumsum(-1) > top_p
        cut[..., 1:] = cut[..., :-1].clone()
        cut[..., 0] = False
        cut = torch.zeros_like(cut).scatter(-1, order, cut)
        logits = logits.masked_fill(cut, float("-inf"))
    return logits.softmax(-1)


def even(length: int, steps: int) -> list[int]:
    """`get_num_transfer_tokens` of SDAR."""
    return [length // steps + (step < length % steps) for step in range(steps)]


def linear(length: int, steps: int) -> list[int]:
    """`get_num_transfer_tokens` of dLLM with `LinearAlphaScheduler`."""
    counts, left = [], length
    for t, s in zip(range(steps, 0, -1), range(steps - 1, -1, -1), strict=True):
        share = 1 - (s / steps) / (t / steps)
        count = min(left, int(torch.round(torch.tensor(left * share, dtype=torch.float64))))
        counts.append(count)
        left -= count
        if left == 0:
            break
    return [count for count in counts if count > 0]


@dataclass(frozen=True)
class Case:
    """One canvas. rule: a name of SDAR's, or dLLM's "low_confidence"."""

    rule: str
    seed: int = 0
    length: int = LENGTH
    steps: int = LENGTH
    threshold: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    pinned: tuple[int, ...] = ()  # tokens that the canvas begins with, as a prompt's last block

    @property
    def config(self) -> SamplerConfig:
        is_dynamic = self.rule == "low_confidence_dynamic"
        return config(
            canvas_length=self.length,
            max_steps=self.steps,
            sampler=Sequential()
            if self.rule == "sequential"
            else LowConfidence(self.threshold if is_dynamic else 1.0),
            pace=LinearPace() if self.rule == "low_confidence" else EvenPace(),
            temperature=self.temperature,
            top_k=self.top_k or None,
            top_p=self.top_p,
        )

    def plan(self) -> CanvasPlan:
        return CanvasPlan(self.config, Noise(self.seed, 0), pinned=dict(enumerate(self.pinned)))

    @property
    def prompt(self) -> Tensor:
        """One or two whole blocks."""
        random = torch.Generator().manual_seed(self.seed)
        return torch.randint(MASK, (LENGTH * (1 + self.seed % 2),), generator=random)


def reference(model: PreTrainedModel, case: Case) -> list[Tensor]:
    """The canvas after each step."""
    canvas = torch.full((case.length,), MASK)
    canvas[: len(case.pinned)] = torch.tensor(case.pinned, dtype=torch.int64)
    counts = (linear if case.rule == "low_confidence" else even)(case.length, case.steps)
    states = []
    for step, count in enumerate(counts):
        masked = canvas == MASK
        if not masked.any():
            break
        logits = oracle_logits(model, case.prompt, canvas, LENGTH, 0)[len(case.prompt) :].clone()
        logits[:, MASK] = float("-inf")
        probs = probs_of(logits, case.temperature, case.top_k, case.top_p)
        tokens = inverse_cdf(probs, Noise(case.seed, 0).uniforms(step + 1, case.length))
        if case.temperature == 0:
            tokens = logits.argmax(-1)
        confidence = probs.gather(1, tokens[:, None])[:, 0].masked_fill(~masked, -torch.inf)
        least = min(count, int(masked.sum()))
        chosen = torch.zeros_like(masked)
        if case.rule == "sequential":
            first = int(masked.nonzero()[0])
            chosen[first : first + least] = True
        else:
            chosen[confidence.topk(least)[1]] = True
            high = confidence > case.threshold
            if case.rule == "low_confidence_dynamic" and int(high.sum()) >= count:
                chosen = high
        canvas = torch.where(chosen, tokens, canvas)
        states.append(canvas)
    return states


CASES = [
    Case("low_confidence_dynamic", threshold=0.5),
    Case("low_confidence_dynamic", seed=1, threshold=0.3, steps=3, temperature=0.7),
    Case("low_confidence_dynamic", seed=2, threshold=0.4, temperature=0.0),
    Case("low_confidence_dynamic", seed=3, length=4, steps=4, threshold=0.1, pinned=(7, 9)),
    Case("low_confidence_dynamic", seed=4, threshold=0.4, temperature=0.6, top_k=3),
    Case("low_confidence_static", seed=5, steps=3, top_p=0.7),
    Case("low_confidence_static", seed=6, steps=20),
    Case("low_confidence_static", seed=7, length=4, steps=2, pinned=(11,)),
    Case("sequential", seed=8, steps=5, temperature=1.3),
    Case("sequential", seed=9, length=4, steps=4, pinned=(8, 9, 10)),
    Case("low_confidence", seed=10, steps=5, temperature=0.0),
    Case("low_confidence", seed=11, length=7, steps=16, temperature=0.0),
    Case("low_confidence", seed=12, length=3, steps=2, temperature=0.0),
]


def slots_of(network: Network, cases: list[Case]) -> list[Slot]:
    slots = network.new_slots(len(cases), 64)
    network.encode([case.prompt for case in cases], slots)
    return slots


def run(
    denoiser: Denoiser, canvases: list[Canvas], slots: list[Slot], launched: bool = False
) -> list[list[tuple[Tensor, Draft]]]:
    """The canvas after each step, and its draft, of each canvas: all together."""
    states: list[list[tuple[Tensor, Draft]]] = [[] for _ in canvases]
    while live := [i for i, canvas in enumerate(canvases) if not canvas.done]:
        members = [canvases[i] for i in live], [slots[i] for i in live]
        results = denoiser.launch(*members).results() if launched else denoiser.step(*members)
        if denoiser.graphs is not None:
            denoiser.graphs.capture_next()
        for i, draft in zip(live, results, strict=True):
            assert isinstance(draft, Draft)
            states[i].append((canvases[i].tokens, draft))
    return states


def test_every_step_is_that_of_the_projects(model: PreTrainedModel, network: Network) -> None:
    canvases = [Canvas.of(case.plan(), network) for case in CASES]
    states, steps = run(Denoiser(network, 4), canvases, slots_of(network, CASES)), set()
    for case, canvas, own in zip(CASES, canvases, states, strict=True):
        expected = reference(model, case)
        assert [tokens.tolist() for tokens, _ in own] == [each.tolist() for each in expected]
        assert canvas.convergence == "converged"
        for tokens, draft in own:
            shown = draft.accepted
            assert torch.equal(shown, tokens != MASK)
            assert torch.equal(draft.token_ids[shown], tokens[shown])
            assert not (draft.token_ids == MASK).any()
        assert torch.equal(own[0][1].noise, canvas.begun)  # type: ignore[arg-type]
        steps.add(len(own))
    assert len(steps) > 3  # of every kind


def test_a_row_has_the_same_bits_alone_and_in_company(network: Network) -> None:
    slots = slots_of(network, CASES)
    together = [Canvas.of(case.plan(), network) for case in CASES]
    batched = run(Denoiser(network, 2), together, slots)
    for case, slot, states in zip(CASES, slots, batched, strict=True):
        alone = run(Denoiser(network, 1), [Canvas.of(case.plan(), network)], [slot])
        for (tokens, draft), (other, same) in zip(states, alone[0], strict=True):
            assert torch.equal(tokens, other) and torch.equal(draft.accepted, same.accepted)
            assert torch.equal(draft.entropy, same.entropy)
            assert torch.equal(draft.token_ids, same.token_ids)


@pytest.fixture
def pure_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU the twins read numbers on the host."""
    monkeypatch.setattr("sfumato.diffusion.step.graphs.RUNS", 1)
    with registry.reference_only():
        yield


@pytest.mark.usefixtures("pure_tensor_operations")
def test_a_captured_step_is_the_step(network: Network) -> None:
    """Of rows with other samplers, thresholds, paces, limits and lengths, and beside a commit."""
    cases = [case for case in CASES if not case.top_k and case.top_p == 1]
    slots = slots_of(network, cases)
    plain, captured = ([Canvas.of(case.plan(), network) for case in cases] for _ in range(2))
    backend = RecordedGraphs()
    eager, graphs = Denoiser(network, 16), Denoiser(network, 16, backend)
    expected = run(eager, plain, slots)
    for states, same in zip(expected, run(graphs, captured, slots, launched=True), strict=True):
        for (tokens, draft), (other, drawn) in zip(states, same, strict=True):
            assert torch.equal(tokens, other) and torch.equal(draft.accepted, drawn.accepted)
            assert torch.equal(draft.token_ids, drawn.token_ids)
    assert backend.captures >= 1 and backend.replays >= 1
    commit = Commit([9, 9], cases[0].config, network)
    canvas = Canvas.of(cases[0].plan(), network)
    pending = graphs.launch([canvas, commit], slots[:2])
    assert isinstance(pending.results()[0], Draft) and pending.results()[1] is None
    assert torch.equal(canvas.tokens, expected[0][0][0])


@dataclass(frozen=True)
class Nothing:
    """Reveals nothing by itself."""

    def accept(self, view: StepView) -> Tensor:
        return view.pinned


@pytest.mark.parametrize(
    ("choices", "steps", "ends"),
    [
        ({"sampler": EntropyBound(1e6)}, 1, "converged"),
        ({"sampler": EntropyBound(0.0)}, LENGTH, "converged"),
        ({"sampler": FixedCount(3)}, 3, "converged"),
        ({"sampler": Threshold(1.0)}, LENGTH, "converged"),
        ({"sampler": Nothing(), "max_steps": 3}, 3, "step_cap"),
        ({"sampler": Threshold(1.0), "max_steps": 2}, 2, "step_cap"),
        ({"sampler": Nothing(), "stopping": StableAndConfident(0, 50.0)}, 1, "converged"),
        ({"sampler": LowConfidence(0.0)}, 1, "converged"),
    ],
)
def test_each_sampler_ends_without_masks(
    network: Network, choices: dict[str, Any], steps: int, ends: str
) -> None:
    canvas = Canvas.of(CanvasPlan(config(**choices), Noise(3, 0)), network)
    states = run(Denoiser(network, 1), [canvas], slots_of(network, CASES[:1]))[0]
    assert len(states) == steps and canvas.convergence == ends
    for (before, _), (after, draft) in pairwise(states):
        kept = before != MASK
        assert torch.equal(after[kept], before[kept])
        assert not draft.entropy[kept].any()
    tokens, draft = states[-1]
    assert draft.accepted.all() and torch.equal(draft.token_ids, tokens)
    assert not (tokens == MASK).any()


def test_what_a_canvas_begins_as(network: Network) -> None:
    """A token that is no mask stands, pinned or not; a given mask is one."""
    given = GivenCanvas((9, MASK, 11, MASK, MASK, MASK, MASK, MASK), pinned=(2,))
    canvas = Canvas.of(CanvasPlan(config(), Noise(0, 0), given=given), network)
    assert canvas.begun.tolist() == list(given.tokens or ())
    final = run(Denoiser(network, 1), [canvas], slots_of(network, CASES[:1]))[0][-1][0]
    assert final[0] == 9 and final[2] == 11
    begins = Canvas.of(CanvasPlan(config(), Noise(0, 0), begins=(-1,) * 7 + (4,)), network)
    assert begins.begun.tolist() == [MASK] * 7 + [4]


def test_what_is_pinned_no_more_is_a_mask_again(network: Network) -> None:
    canvas = Canvas.of(CanvasPlan(config(sampler=FixedCount(5)), Noise(0, 0)), network)
    slots, denoiser = slots_of(network, CASES[:1]), Denoiser(network, 1)
    (draft,) = denoiser.step([canvas], slots)
    assert int(draft.accepted.sum()) == 5
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[40] = True
    canvas.guide(Guidance({0: 8}, 1, mask))
    (draft,) = denoiser.step([canvas], slots)
    assert draft.token_ids[0] == 8 and draft.token_ids[1] == 40
    assert int(draft.accepted.sum()) == 6  # the pinned one, and five masks of seven


def test_what_a_grammar_leaves_few_tokens_for_is_revealed(network: Network) -> None:
    """Drawn among these, whatever the sampler thinks of it; also at a canvas's first step."""
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[[40, 41]] = True
    slots, denoiser = slots_of(network, CASES[:1]), Denoiser(network, 1)
    plan = CanvasPlan(config(sampler=Nothing()), Noise(0, 0), guidance=Guidance({0: 8}, 1, mask))
    canvas, drawn = Canvas.of(plan, network), set()
    for place in range(1, 4):
        (draft,) = denoiser.step([canvas], slots)
        assert draft.accepted.nonzero()[:, 0].tolist() == [*range(place + 1)]
        drawn.add(int(draft.token_ids[place]))
        kept = dict(enumerate(draft.token_ids[: place + 1].tolist()))
        canvas.guide(Guidance(kept, place + 1, mask))
    assert drawn <= {40, 41} and not canvas.done


def test_a_draw_of_the_most_probable_tokens_alone(network: Network) -> None:
    """Of one it is the argmax, with the probability that it has among all."""
    for case in (CASES[0], CASES[10]):
        configs = (
            replace(case.config, temperature=0.0),
            replace(case.config, soft_top_k=SoftTopK(1)),
        )
        plans = [replace(case.plan(), config=each) for each in configs]
        canvases = [Canvas.of(plan, network) for plan in plans]
        cold, narrow = run(Denoiser(network, 2), canvases, slots_of(network, [case, case]))
        assert [tokens.tolist() for tokens, _ in cold] == [tokens.tolist() for tokens, _ in narrow]


def test_a_read_is_of_masks(model: PreTrainedModel, network: Network) -> None:
    """However many steps are asked for."""
    (slot,), labels = slots_of(network, CASES[:1]), (3, 40, 7)
    canvas = ReadCanvas((8, NOISE, 9, NOISE), (1, 3), (labels, labels))
    row = CanvasRow(Suffix(slot), canvas, NoiseKey(0, ()), 0, True)
    ids = torch.tensor([8, MASK, 9, MASK])
    logits = oracle_logits(model, CASES[0].prompt, ids, LENGTH, 0)[LENGTH:][[1, 3]]
    for steps in (1, 3):
        ((first, second),) = fetch_together([read_canvases(network, [row], steps)])[0]
        for sample, scores in zip((first, second), logits, strict=True):
            probs = scores[list(labels)].softmax(0).tolist()
            assert sample.probabilities == pytest.approx(probs, abs=1e-4)
            mass = float(scores.softmax(0)[list(labels)].sum())
            assert sample.label_mass == pytest.approx(mass, abs=1e-4)


def test_what_is_refused(network: Network) -> None:
    limits = Limits(8, ())
    random: Any = SimpleNamespace(config=replace(network.config, mask_id=None))
    for given, field in (
        (SamplerConfig(sampler=LowConfidence()), "sampler"),
        (SamplerConfig(sampler=Sequential()), "sampler"),
        (SamplerConfig(pace=EvenPace()), "pace"),
    ):
        with pytest.raises(Refused, match="begin as random tokens") as refused:
            resolve(random, given.over(REFERENCE), limits)
        assert refused.value.fields == (field,)
    wrong: Any = SimpleNamespace(count=lambda *_: -1)
    with pytest.raises(Refused, match="pace SimpleNamespace"):
        plan_reply(network, 3, SamplerConfig(pace=wrong).over(MASKS), limits, 0)
    with pytest.raises(Refused, match="'count'"):
        SamplerConfig(pace=3)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="threshold: must be"):
        LowConfidence(1.5)
    plan = plan_reply(network, 3, SamplerConfig(max_steps=2).over(MASKS), limits, 0)
    assert plan.config.self_conditioning is False and plan.config.pace == EvenPace()


def test_widths_are_those_of_blocks() -> None:
    """A canvas of a block runs at the block's width; a shorter one at the next width."""
    assert [width_for(length, 4) for length in (1, 3, 4)] == [4, 4, 4]
    assert [width_for(length, 32) for length in (4, 16, 17, 32)] == [16, 16, 32, 32]


def test_the_samplers_serve_several_rows_at_once(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be lifted over the rows of a batch is logged."""
    with caplog.at_level(logging.WARNING):
        cases = [CASES[0], CASES[9], CASES[0]]
        canvases = [Canvas.of(case.plan(), network) for case in cases]
        run(Denoiser(network, 4), canvases, slots_of(network, cases))
    assert not caplog.records
