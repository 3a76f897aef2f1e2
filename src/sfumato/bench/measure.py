"""Takes the figures of requests on this machine: `sfumato bench` without a server.

Requests are submitted to an engine, so that what is measured is what serves.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.bench.environment import PeakMemory
from sfumato.bench.report import PARTS, Case, CaseReport, Job, Prompt, Report, Values, Work, take
from sfumato.bench.step_cost import StepShape, beside_measured
from sfumato.bench.subject import Subject
from sfumato.diffusion.canvas import Canvas
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.diffusion.step import Denoiser
from sfumato.engine import (
    Account,
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    Request,
    Settled,
    own_engine,
)
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.model.network import Network
from sfumato.model.transformer import Attention, Experts, GatedMLP, Router
from sfumato.tasks.reply import ReplyTask
from sfumato.tasks.works import Prompt as PromptTokens

Progress = Callable[[int, int], None]
"""(number of the request that begins, requests in all)"""


def measure(
    subject: Subject,
    work: Work,
    cases: list[Case],
    sampler: SamplerConfig,
    memory: PeakMemory,
    where: bool = False,
    progress: Progress = lambda number, count: None,
) -> Report:
    """Every case, one after another; KeyboardInterrupt ends it with what is measured so far.

    sampler: laid over the subject's defaults; memory: entered before the subject was made; where:
    one canvas more in each case, with timers.  Raises ValueError, before anything is measured, for
    settings and prompts that the subject cannot do, and where every request fails.
    """
    config = sampler.over(subject.model.sampler_defaults)
    length = config.canvas_length or subject.network.config.canvas_length
    config = replace(config, canvas_length=length)
    for case in cases:
        _needed_context(subject, work, case, config)
    threads = torch.get_num_threads()

    def one(result: CaseReport, begin: Callable[[], None]) -> None:
        torch.set_num_threads(result.case.threads or threads)
        result.case = replace(result.case, threads=torch.get_num_threads())
        try:
            _measure_case(subject, work, result, config, begin)
            if where:
                prompt, seed = work.requests()[0]
                ids = subject.prompt_ids(prompt, seed, result.case.context)
                result.add(where_it_goes(subject, ids, config, seed))
        finally:
            result.values.update(memory.values())

    try:
        report = Report({**subject.about, "sampler": _described(config)})
        return take(report, work, cases, one, progress)
    finally:
        torch.set_num_threads(threads)


def _measure_case(
    subject: Subject,
    work: Work,
    result: CaseReport,
    config: SamplerConfig,
    begin: Callable[[], None],
) -> None:
    if subject.load_s is not None:
        result.values["load_s"] = [subject.load_s]
    case, length = result.case, config.canvas_length
    assert length
    prompts = [len(subject.prompt_ids(p, work.seed, case.context)) for p in work.prompts]
    # The middle of the longest reply: each canvas sees those before it.
    prefix = max(prompts) + case.max_tokens // 2
    result.values.update(
        beside_measured(subject.network, StepShape(case.concurrency or 1, length, prefix))
    )
    need = _needed_context(subject, work, case, config)
    layout = EngineConfig(case.concurrency or 1, need, snapshot_bytes=0)
    advice = "lower --concurrency, --max-tokens or --context, or free some memory"
    engine = own_engine(subject.model, layout, advice)

    def run(pairs: list[Job]) -> Iterator[Measurement]:
        makers = [partial(_request, subject, prompt, seed, case, config) for prompt, seed in pairs]
        return run_requests(engine, makers, case.concurrency or 1, length, begin)

    for _ in run(work.warmups()):
        pass
    began = time.perf_counter()
    for measured in run(work.requests()):
        result.add(measured.values)  # after Ctrl-C too: a reply without an end has steps
        if measured.interrupted:
            continue
        if measured.failure is None:
            result.finished(time.perf_counter() - began)
        else:
            result.failures.append(measured.failure)
    engine.close()


def _needed_context(subject: Subject, work: Work, case: Case, config: SamplerConfig) -> int:
    """Positions of a slot that holds each request. Raises ValueError for what cannot be done."""
    model, need = subject.model, 1
    points = snapshot_points_of(model)
    for prompt in work.prompts:
        request = _request(subject, prompt, work.seed, case, config, 0.0)
        job = prepare(model, request, model.config.context_length, points)
        need = max(need, job.task.claim.positions)
    return need


def _request(
    subject: Subject, prompt: Prompt, seed: int, case: Case, config: SamplerConfig, since: float
) -> Request:
    ids: list[int] = subject.prompt_ids(prompt, seed, case.context).tolist()
    return Request(
        made=PromptTokens(ids, ()),
        max_tokens=case.max_tokens,
        seed=seed,
        sampler=config,
        since=since,
        endpoint="bench",
    )


# Of SamplerConfig: the first four have other words in the line, the last has a field of its own.
_NAMED = ("max_steps", "sampler", "schedule", "stopping", "canvas_length")


def _described(config: SamplerConfig) -> str:
    """The sampler path in a line: rules, most steps, and what else is not the default."""
    parts = [f"{config.max_steps} steps at most"]
    parts += [repr(part) for part in (config.sampler, config.schedule, config.stopping)]
    for name, value in vars(config).items():
        if name not in _NAMED and value != getattr(SamplerConfig(), name):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


MakeRequest = Callable[[float], Request]
"""When the request began, by the engine's clock → the request. Making it is part of its time."""


class Measurement:
    """One request on its way; its figures so far can be read at any time."""

    def __init__(self, engine: Engine, make: MakeRequest, canvas_length: int) -> None:
        """Submits the request. Raises what the engine raises."""
        self.values: Values = {}
        self.failure: str | None = None  # why there is no reply
        self.interrupted = False  # whether Ctrl-C has ended it
        self._began, self._length = engine.now(), canvas_length
        self.handle = engine.submit(make(self._began), self._take)

    def _take(self, event: Event) -> None:
        if isinstance(event, Settled):
            seconds = time.perf_counter() - self._began
            self.values.setdefault("first_commit_s", [seconds])
            if event.token_ids:
                self.values.setdefault("first_token_s", [seconds])
                self.values["last_token_s"] = [seconds]
        elif isinstance(event, Finished):
            self.values |= _of_steps(event.account) | _of_reply(event.account, self._length)
        elif isinstance(event, Failed):
            self.failure = f"{event.kind}: {event.message}"
            self.values.pop("last_token_s", None)  # the reply has no last token
            if event.account is not None:
                self.values |= _of_steps(event.account)


def run_requests(
    engine: Engine,
    requests: Iterable[MakeRequest],
    concurrency: int,
    canvas_length: int,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[Measurement]:
    """The figures of every request as it ends, `concurrency` at a time; where the consumer or a
    step is interrupted, those of the requests under way too. begin: called before each. Free slots
    are emptied before each request, so that each request encodes its own prompt."""
    waiting, running = deque(requests), list[Measurement]()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                begin()
                engine.reset_prefix_cache()
                running.append(Measurement(engine, waiting.popleft(), canvas_length))
            engine.step()
            for request in [r for r in running if r.handle.terminal is not None]:
                running.remove(request)
                yield request
    except KeyboardInterrupt:
        for request in running:
            request.interrupted = True
            yield request
        raise


def _of_steps(account: Account) -> Values:
    """Figures that a reply without an end has too."""
    values: Values = {"setup_s": [account.queue_s]}
    values["step_ms"] = [1e3 * seconds for seconds in account.step_s]
    if account.first_draft_s is not None:
        values["first_draft_s"] = [account.first_draft_s]
    return values


def _of_reply(account: Account, canvas_length: int) -> Values:
    """Figures of a complete reply; a quotient by zero is left out."""
    canvases, encoded = len(account.convergence), account.prompt_tokens - account.cached_tokens
    quotients = {
        "prefill_tps": (encoded, encoded and account.prefill_s),
        "commit_ms": (account.commit_s * 1e3, canvases - 1),
        "tokens_per_forward": (account.output_tokens, sum(account.steps)),
        "visible_tps": (account.output_tokens, account.total_s),
        "canvas_tps": (canvases * canvas_length, account.denoise_s),
        "blocks_per_s": (canvases, account.denoise_s + account.commit_s),
    }
    values = {key: [over / under] for key, (over, under) in quotients.items() if under > 0}
    values["total_s"] = [account.total_s]
    values["steps_per_canvas"] = [float(count) for count in account.steps]
    values["prompt_tokens"] = [float(account.prompt_tokens)]
    return values | {"output_tokens": [float(account.output_tokens)]}


_MODULES: dict[type[nn.Module], str] = {
    Attention: "attention_ms",
    GatedMLP: "dense_ms",
    Router: "experts_ms",
    Experts: "experts_ms",
}


@torch.no_grad()
def where_it_goes(subject: Subject, ids: Tensor, config: SamplerConfig, seed: int) -> Values:
    """The parts of every step of one canvas after the prompt ids int64 [n].

    config: complete. The steps are those of the `Denoiser` that serves, with clocks around it.
    """
    network = subject.network
    # The reply has room for one canvas, as far as its checks and processors go.
    plan, _ = subject.model.plan_reply(ids.tolist(), config.canvas_length or 1, seed, config)
    slot = network.new_slot(max(1, len(ids)))
    network.encode([ids], [slot])
    make = partial(Canvas.of, network=network)
    canvas = make(ReplyTask(plan, PromptTokens(ids.tolist(), ()), make).next_canvas())
    values: Values = {key: [] for key in ("where_step_ms", *PARTS)}
    denoiser = Denoiser(network, rows=1)
    with _timers(network) as (spent, forwards):
        while not canvas.done:
            spent.clear()
            start = _now(network)
            result = denoiser.forward([canvas], [slot])
            scored = _now(network)
            for row in denoiser.advance(result):
                if isinstance(row, Exception):
                    raise row
            end = _now(network)
            began, forward = forwards.pop()
            # What the step is drawn with is made before the network's forward.
            sampler = (began - start) + (end - scored)
            step = {"where_step_ms": end - start, "head_ms": scored - forward}
            step |= {"sampler_ms": sampler, "rest_ms": forward - began - sum(spent.values())}
            for key, milliseconds in (step | spent).items():
                values[key].append(milliseconds)
    return values


@contextmanager
def _timers(network: Network) -> Iterator[tuple[dict[str, float], list[tuple[float, float]]]]:
    """The milliseconds that modules needed since the mapping was last cleared, by metric; and when
    each forward of the network began and ended."""
    spent: dict[str, float] = defaultdict(float)
    began: list[float] = []
    forwards: list[tuple[float, float]] = []
    serve = network.denoise_batch

    def before(*_: Any) -> None:
        began.append(_now(network))

    def after(module: nn.Module, *_: Any) -> None:
        key = next(key for kind, key in _MODULES.items() if isinstance(module, kind))
        spent[key] += _now(network) - began.pop()

    def timed(*inputs: Any) -> Tensor:
        start = _now(network)
        hidden = serve(*inputs)
        forwards.append((start, _now(network)))
        return hidden

    with ExitStack() as ends:
        for module in network.transformer.modules():
            if isinstance(module, tuple(_MODULES)):
                ends.callback(module.register_forward_pre_hook(before).remove)
                ends.callback(module.register_forward_hook(after).remove)
        network.denoise_batch = timed  # type: ignore[assignment, method-assign]
        ends.callback(delattr, network, "denoise_batch")  # the class's own serves again
        yield spent, forwards


def _now(network: Network) -> float:
    """Milliseconds, once the device has done all that it was given."""
    network.synchronize()
    return time.perf_counter() * 1e3
