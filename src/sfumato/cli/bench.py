"""`sfumato bench`: how fast a checkpoint, random weights or a server is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.bench.workload import QUESTIONS, Prompt, Work, cases, conversation, read_prompts
from sfumato.cli import output
from sfumato.cli.arguments import rank
from sfumato.cli.decoding import request_fields, sampler_options
from sfumato.cli.sources import COMMAND_LINE
from sfumato.options import LAST_SEED, exclusions
from sfumato.options.table import options_of

if TYPE_CHECKING:
    import torch

    from sfumato.bench.report import Report
    from sfumato.bench.subject import Subject
    from sfumato.diffusion.sampler_config import SamplerConfig

RANDOM_STEPS = 8  # of a canvas of random weights, which never settles by itself
SYNTHETIC = 256  # tokens of a prompt where no option says it and the model cannot read

# Options that have no meaning for a server, or for a local model.
_LOCAL = (
    *("random_weights", "format", "layers", "device", "dtype", "activations", "quantize"),
    *(
        "cache_type",
        "predict",
        "context",
        "threads",
        "fixed_steps",
        "soft_skip",
        "soft_top_k",
        "where",
    ),
)
_REMOTE = ("api_key", "drafts")
_RANDOM = ("format", "layers")
# Where the first option of a pair is given, the second has another meaning, or none.
_EITHER = (
    *(("url", "model"), ("random_weights", "model"), ("model", "random_weights")),
    *(("random_weights", "prompts"), ("prompts", "random_weights")),
    *(("random_weights", "quantize"), ("quantize", "random_weights")),
    *(("prompts", "prompt_tokens"), ("prompt_tokens", "prompts")),
)


def main(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit code. Raises ValueError or OSError for bad input."""
    from sfumato.cli import INTERRUPTED

    _check(args)
    if args.predict:
        from sfumato.cli import predict

        return predict.main(args)
    work = Work(_prompts(args), args.warmup, args.repeats, args.seed)
    report = _local(args, work) if args.url is None else _remote(args, work)
    _show_progress(0, 0)
    report.work = {
        "prompts": args.prompts
        or ("synthetic" if isinstance(work.prompts[0], int) else "built-in"),
        "prompt_count": len(work.prompts),
        **{name: getattr(args, name) for name in ("warmup", "repeats", "seed", "fixed_steps")},
    }
    _write(report, args)
    return INTERRUPTED if report.interrupted else 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what cannot be measured, before anything slow."""
    _leave_out(args)
    for name in _REMOTE if args.url is None else _LOCAL:
        if getattr(args, name) not in (None, False, "auto"):
            side = "a server, with --url" if args.url is None else "this machine, not for a server"
            raise ValueError(f"{_flag(name)}: is for measuring {side}; leave it out")
    for name in _RANDOM:
        if getattr(args, name) is not None and not args.random_weights:
            raise ValueError(f"{_flag(name)}: belongs to --random-weights")
    given = {"--random-weights": args.random_weights, "--quantize": args.quantize}
    given |= {"-m": args.model, "--prompts": args.prompts}
    given["--prompt-tokens"] = args.prompt_tokens is not None
    exclusions.check(exclusions.BENCH, given)
    if args.seed + args.repeats - 1 > LAST_SEED:
        raise ValueError("--seed: each repeat takes the next one, and the last is above 2^64-1")
    if args.json == args.csv == "-":
        raise ValueError("--json, --csv: only one of them can go to standard output")
    for name in ("json", "csv", "plot"):
        path = getattr(args, name)
        if path and (path != "-" or name == "plot"):
            output.check(path, args.force, _flag(name))
    paths = [getattr(args, name) for name in ("json", "csv", "plot")]
    files = [os.path.realpath(path) for path in paths if path and not output.is_stream(path)]
    if len(set(files)) < len(files):
        raise ValueError("--json, --csv, --plot: two of them name one file; name another")
    if args.plot:
        from sfumato.bench import plot

        plot.check(Path(args.plot))


def _leave_out(args: argparse.Namespace) -> None:
    """Resets options that have no meaning in this run and are not on the command line: a variable
    or a file may set them for other commands and other runs."""
    defaults = {option.key: option.default for option in options_of("bench")}
    for name in _REMOTE if args.url is None else _LOCAL:
        if rank(args, name) < COMMAND_LINE:
            setattr(args, name, defaults[name])
    for one, other in _EITHER:
        if getattr(args, one) is not None and rank(args, other) < rank(args, one):
            setattr(args, other, None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompts:
        return read_prompts(Path(args.prompts))
    if args.prompt_tokens is not None:
        return [args.prompt_tokens]
    if args.random_weights:
        return [SYNTHETIC if args.context is None else 0]  # --context fills it up
    return [conversation(question) for question in QUESTIONS]


def _local(args: argparse.Namespace, work: Work) -> Report:
    from sfumato.bench import measure
    from sfumato.bench.environment import environment
    from sfumato.bench.memory import PeakMemory
    from sfumato.cli import machine

    with PeakMemory() as memory, _memory_that_ends():
        subject = _subject(args)
        report = measure.measure(
            subject,
            work,
            cases(args.max_tokens, args.threads, args.context, args.concurrency),
            _sampler(args),
            memory,
            where=bool(args.where or args.plot),
            progress=_show_progress,
        )
    report.environment = environment() | {
        "cpu": machine.cpu_name(),
        "cpu_features": machine.cpu_features(),
        "cores": machine.usable_cores(),
        "memory_bytes": machine.total_memory(),
        "gpu": _gpu(subject.network.device),
    }
    return report


@contextmanager
def _memory_that_ends() -> Iterator[None]:
    """Raises ValueError in place of an error for want of memory."""
    from sfumato.model.out_of_memory import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the memory does not suffice ({why}); take fewer --layers, a smaller --format or "
            "--quantize, lower --concurrency, --max-tokens or --context, or free some memory"
        ) from error


def _gpu(device: torch.device) -> str | None:
    """The name of the GPU that was measured; None for a CPU."""
    from sfumato.ops import gpu

    return gpu.product(device)


def _subject(args: argparse.Namespace) -> Subject:
    import torch

    import sfumato
    from sfumato.bench import subject
    from sfumato.model.placement import pick_device

    if args.threads:  # the first case's, for loading
        torch.set_num_threads(args.threads[0])
    how = {key: getattr(args, key) for key in ("device", "dtype", "cache_type")}
    how["activations"] = args.activations or "int8"
    if args.random_weights:
        format = args.format or ("q4_k_m" if pick_device(args.device).type == "cpu" else "bf16")
        return subject.random_subject(args.random_weights, format, args.layers, **how)
    model = sfumato.load(args.model, quantize=args.quantize, **how)
    return subject.loaded(model, args.quantize)


def _sampler(args: argparse.Namespace) -> SamplerConfig:
    from sfumato.diffusion.sampler_config import SamplerConfig, fixed_steps

    steps = args.fixed_steps or (RANDOM_STEPS if args.random_weights else None)
    config = fixed_steps(steps) if steps else SamplerConfig()
    return config.options(**sampler_options(args))


def _remote(args: argparse.Namespace, work: Work) -> Report:
    from sfumato.bench import remote
    from sfumato.bench.client import Endpoint, ServerError
    from sfumato.bench.environment import environment
    from sfumato.cli import machine

    endpoint = Endpoint(args.url.rstrip("/"), args.api_key, args.timeout)
    models = [args.model] if args.model else endpoint.models()
    if not models:
        raise ServerError(f"{args.url}: has no models; name one with -m")
    fields = request_fields(args) | ({"stream_drafts": True} if args.drafts else {})
    report = remote.measure(
        remote.RemoteModel(endpoint, models[0], fields),
        work,
        cases(args.max_tokens, concurrency=args.concurrency or (1,)),
        _show_progress,
    )
    # The client's precision, backend and processor say nothing about the server.
    known = environment()
    report.environment = {name: known[name] for name in ("date", "sfumato", "commit")} | {
        "client": f"{machine.cpu_name()}, {machine.usable_cores()} cores",
        **dict.fromkeys(("precision", "backend", "cpu", "memory_bytes")),
    }
    return report


def _show_progress(number: int, count: int) -> None:
    """Shows the number of the request on a line that is erased at the end."""
    if sys.stderr.isatty():
        text = f"request {number} of {count}" if number else ""
        print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)


def _write(report: Report, args: argparse.Namespace) -> None:
    from rich.console import Console

    from sfumato.bench import plot
    from sfumato.bench import report as forms

    contents: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: forms.to_json(report) + "\n",
        "csv": lambda: forms.to_csv(report),
        "plot": lambda: plot.draw(report, Path(args.plot)),
    }
    # Files first: a reader of the table may close the pipe. All that can be written or printed is,
    # even where a file cannot: the measurement may have taken hours.
    printed, failure = None, None
    for name, content in contents.items():
        path = getattr(args, name)
        try:
            if path == "-":
                printed = content()
            elif path:
                output.write(path, content(), args.force, _flag(name))
        except (ValueError, OSError) as error:
            failure = failure or error
    if report.interrupted:
        print("sfumato: interrupted: the report has what was measured until then", file=sys.stderr)
    if printed is not None:
        sys.stdout.write(str(printed))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        for table in forms.to_tables(report):
            console.print(table)
    if failure is not None:
        raise failure
