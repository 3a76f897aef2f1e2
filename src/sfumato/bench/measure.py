"""Takes the figures of requests on this machine: `sfumato bench` without a server.

Requests are submitted to an engine, so that what is measured is what serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from sfumato.bench.memory import PeakMemory
from sfumato.bench.predicted import beside_measured
from sfumato.bench.report import CaseReport, Report
from sfumato.bench.requests import INTERRUPTED, MakeRequest, RequestFigures, run_requests
from sfumato.bench.step_model.step_cost import StepShape
from sfumato.bench.subject import Subject
from sfumato.bench.where import where_it_goes
from sfumato.bench.workload import Case, Prompt, Work
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.engine import Engine, EngineConfig, EngineError, Request
from sfumato.engine import Prompt as PromptTokens
from sfumato.engine.prepare import prepare, snapshot_points_of
from sfumato.options.limits import MOST_STEPS

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
    config = sampler.over(subject.defaults)
    length = config.canvas_length or subject.network.config.canvas_length
    config = replace(config, canvas_length=length)
    for case in cases:
        _needed_context(subject, work, case, config)
    report = Report({**subject.about, "sampler": _described(config)})
    count = len(cases) * (work.warmup + len(work.requests()))
    numbers = iter(range(1, count + 1))
    threads = torch.get_num_threads()
    try:
        for case in cases:
            torch.set_num_threads(case.threads or threads)
            result = CaseReport(replace(case, threads=torch.get_num_threads()))
            report.cases.append(result)
            try:
                _measure_case(subject, work, result, config, lambda: progress(next(numbers), count))
                if where:
                    prompt, seed = work.requests()[0]
                    ids = subject.prompt_ids(prompt, seed, case.context)
                    result.add(where_it_goes(subject, ids, config, seed))
            finally:
                result.values.update(memory.values())
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        torch.set_num_threads(threads)
    failures = [failure for result in report.cases for failure in result.failures]
    if failures and not any(result.requests for result in report.cases):
        raise ValueError(f"all {len(failures)} requests failed, the first: {failures[0]}")
    return report


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
    engine = _engine(subject, work, case, config)

    def run(pairs: list[tuple[Prompt, int]]) -> Iterable[RequestFigures]:
        makers: list[MakeRequest] = [
            partial(_request, subject, prompt, seed, case, config) for prompt, seed in pairs
        ]
        return run_requests(engine, makers, case.concurrency or 1, length, begin)

    for _ in run(work.warmups()):
        pass
    began = time.perf_counter()
    for figures in run(work.requests()):
        result.add(figures.values)  # after Ctrl-C too: a reply without an end has steps
        if figures.failure is None:
            result.finished(time.perf_counter() - began)
        elif figures.failure != INTERRUPTED:
            result.failures.append(figures.failure)
    engine.close()


def _engine(subject: Subject, work: Work, case: Case, config: SamplerConfig) -> Engine:
    """With a slot for each request at a time. Raises ValueError where the memory does not hold
    them."""
    slots = case.concurrency or 1
    try:
        return Engine(
            subject.model,
            EngineConfig(
                slots=slots,
                context=_needed_context(subject, work, case, config),
                snapshot_bytes=0,
                max_steps=MOST_STEPS,
                request_timeout_s=None,
            ),
        )
    except EngineError as error:
        raise error.advising(
            "lower --concurrency, --max-tokens or --context, or free some memory"
        ) from error


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
