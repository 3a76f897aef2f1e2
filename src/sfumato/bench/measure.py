"""Takes the figures of requests on this machine, one request at a time.

Requests run through `diffusion.loop.generate`, the library's path, with nothing put in its way: it
asks whether it is cancelled right before every step, and so tells when the step began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace

import torch

from sfumato.bench.memory import PeakMemory
from sfumato.bench.metrics import Values
from sfumato.bench.report import CaseReport, Report
from sfumato.bench.subject import Subject
from sfumato.bench.where import where_it_goes
from sfumato.bench.workload import Case, Prompt, Work
from sfumato.diffusion.canvas import Draft
from sfumato.diffusion.config import SamplerConfig
from sfumato.diffusion.limits import Limits
from sfumato.diffusion.loop import generate
from sfumato.diffusion.outcome import Outcome, SettledCanvas, Stats

Run = Generator[Draft | SettledCanvas, None, Outcome]
Tell = Callable[[int, int], None]
"""(number of the request that begins, requests in all)"""


def measure(
    subject: Subject,
    work: Work,
    cases: list[Case],
    sampler: SamplerConfig,
    memory: PeakMemory,
    where: bool = False,
    tell: Tell = lambda number, count: None,
) -> Report:
    """Every case, one after another; KeyboardInterrupt ends it with what is measured so far.

    sampler: laid over the subject's defaults; memory: entered before the subject was made; where:
    one canvas more in each case, with timers.  Raises ValueError, before anything is measured, for
    settings and prompts that the subject cannot do.
    """
    config = sampler.over(subject.defaults)
    length = config.canvas_length or subject.network.config.canvas_length
    config = replace(config, canvas_length=length)
    for case in cases:
        for prompt in work.prompts:
            _begin(subject, prompt, work.seed, case, config, lambda: False)
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
                _measure_case(subject, work, result, config, lambda: tell(next(numbers), count))
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
    return report


def _measure_case(
    subject: Subject,
    work: Work,
    result: CaseReport,
    config: SamplerConfig,
    tell: Callable[[], None],
) -> None:
    if subject.load_s is not None:
        result.values["load_s"] = [subject.load_s]
    for prompt, seed in work.warmups():
        tell()
        _request(subject, prompt, seed, result.case, config, {})
    began = time.perf_counter()
    for prompt, seed in work.requests():
        tell()
        values: Values = {}
        try:
            _request(subject, prompt, seed, result.case, config, values)
        finally:
            result.add(values)  # after Ctrl-C too: a reply without an end has steps
        result.finished(time.perf_counter() - began)


def _begin(
    subject: Subject,
    prompt: Prompt,
    seed: int,
    case: Case,
    config: SamplerConfig,
    cancelled: Callable[[], bool],
) -> Run:
    """All of a request that comes before its prefill."""
    ids = subject.prompt_ids(prompt, seed, case.context)
    limits = Limits(case.max_tokens, subject.end_ids, cancelled=cancelled)
    return generate(subject.network, ids, config, limits, seed)


def _request(
    subject: Subject,
    prompt: Prompt,
    seed: int,
    case: Case,
    config: SamplerConfig,
    values: Values,
) -> None:
    """Fills `values` with the figures of one request, as they come."""
    asked = 0.0  # when the loop last asked whether it is cancelled

    def cancelled() -> bool:
        nonlocal asked
        asked = time.perf_counter()
        return False

    start = time.perf_counter()
    run = _begin(subject, prompt, seed, case, config, cancelled)
    values["setup_s"] = [time.perf_counter() - start]
    values["step_ms"] = []
    last_token: list[float] = []
    while True:
        try:
            event = next(run)
        except StopIteration as end:
            outcome: Outcome = end.value
            break
        now = time.perf_counter()
        if isinstance(event, Draft):
            values["step_ms"].append((now - asked) * 1e3)
            values.setdefault("first_draft_s", [now - start])
            continue
        values.setdefault("first_commit_s", [now - start])
        if event.token_ids:
            values.setdefault("first_token_s", [now - start])
            last_token = [now - start]
    total = time.perf_counter() - start
    assert config.canvas_length
    values |= {"last_token_s": last_token, "total_s": [total]}
    values |= _figures(outcome.stats, config.canvas_length, total)


def _figures(stats: Stats, length: int, total: float) -> Values:
    """What a reply's own statistics tell; a quotient of nothing is left out."""
    denoised = stats.canvases * length
    quotients = {
        "prefill_tps": (stats.prompt_tokens, stats.prompt_tokens and stats.prefill_s),
        "commit_ms": (stats.commit_s * 1e3, stats.canvases - 1),
        "tokens_per_forward": (stats.output_tokens, sum(stats.steps)),
        "visible_tps": (stats.output_tokens, total),
        "canvas_tps": (denoised, stats.denoise_s),
        "blocks_per_s": (stats.canvases, stats.denoise_s + stats.commit_s),
    }
    found = {key: [over / under] for key, (over, under) in quotients.items() if under > 0}
    sizes = {"prompt_tokens": stats.prompt_tokens, "output_tokens": stats.output_tokens}
    steps = {"steps_per_canvas": [float(count) for count in stats.steps]}
    return found | steps | {key: [float(count)] for key, count in sizes.items()}


def _described(config: SamplerConfig) -> str:
    """The sampler path in a line: rules, most steps, and what else is not the default."""
    parts = [f"{config.max_steps} steps at most"]
    parts += [repr(part) for part in (config.sampler, config.schedule, config.stopping)]
    names = ("temperature", "top_k", "top_p", "soft_skip", "soft_top_k", "min_tokens", "ignore_eos")
    for name in names:
        if (value := getattr(config, name)) != getattr(SamplerConfig(), name):
            parts.append(f"{name} {value}")
    return ", ".join(parts)
