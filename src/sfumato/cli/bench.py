"""`sfumato bench`: how fast a checkpoint, random weights or a server is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import sfumato
from sfumato.bench import environment, measure, remote, report, step_cost, subject
from sfumato.bench.report import QUESTIONS, Prompt, Report, Work, cases, conversation
from sfumato.bench.step_cost import StepShape
from sfumato.cli import INTERRUPTED, files
from sfumato.cli.arguments import COMMAND_LINE, origin_of, request_fields, sampler_options
from sfumato.diffusion.sampler_config import SamplerConfig, fixed_steps
from sfumato.model.devices import is_out_of_memory
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.model_config import ModelConfig
from sfumato.model.placement import pick_device
from sfumato.model.quantization import as_codes
from sfumato.ops import gpu
from sfumato.options import LAST_SEED, exclusions
from sfumato.options.table import options_of
from sfumato.refused import Refused
from sfumato.weights.checkpoint import Checkpoint

RANDOM_STEPS = 8  # of a canvas of random weights, which never settles by itself
SYNTHETIC = 256  # tokens of a prompt where no option says it and the model cannot read

PREFIX = 512  # tokens before the canvas of a step that is predicted, where no option says it

_FILES = ("json", "csv", "plot")  # options that name files to write
# Where the first option of a pair is given, the second has another meaning, or none.
_EITHER = (
    *(("url", "model"), ("random_weights", "model"), ("model", "random_weights")),
    *(("random_weights", "prompts"), ("prompts", "random_weights")),
    *(("random_weights", "quantize"), ("quantize", "random_weights")),
    *(("prompts", "prompt_tokens"), ("prompt_tokens", "prompts")),
)


def main(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit code. Raises ValueError or OSError for bad input."""
    _check(args)
    if args.predict:
        return _predict(args)
    work = Work(_prompts(args), args.warmup, args.repeats, args.seed)
    measured = _local(args, work) if args.url is None else _remote(args, work)
    _show_progress(0, 0)
    measured.work = {
        "prompts": args.prompts
        or ("synthetic" if isinstance(work.prompts[0], int) else "built-in"),
        "prompt_count": len(work.prompts),
        **{name: getattr(args, name) for name in ("warmup", "repeats", "seed", "fixed_steps")},
    }
    _write(measured, args)
    return INTERRUPTED if measured.interrupted else 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what cannot be measured, before anything slow."""
    _leave_out(args)
    given = {option.flag: _is_given(args, option.key) for option in options_of("bench")}
    given |= {"-m": args.model, "--url=none": args.url is None}
    given["--random-weights=none"] = not args.random_weights
    exclusions.check(exclusions.BENCH, given)
    if args.seed + args.repeats - 1 > LAST_SEED:
        raise Refused("seed", "each repeat takes the next one, and the last is above 2^64-1")
    if args.json == args.csv == "-":
        raise Refused(("json", "csv"), "only one of them can go to standard output")
    paths = {name: getattr(args, name) for name in _FILES}
    for name, path in paths.items():
        if path and (path != "-" or name == "plot"):
            files.check(path, args.force, name)
    real = [os.path.realpath(p) for p in paths.values() if p and not files.is_stream(p)]
    if len(set(real)) < len(real):
        raise Refused(_FILES, "two of them name one file", "name another")
    if args.plot:
        report.check_plot(Path(args.plot))


def _is_given(args: argparse.Namespace, key: str) -> bool:
    value = getattr(args, key)
    return value is not None and value is not False and value != "auto"


def _leave_out(args: argparse.Namespace) -> None:
    """Resets options that have no meaning in this run and are not on the command line: a variable
    or a file may set them for other commands and other runs."""
    meaningless = exclusions.REMOTE if args.url is None else exclusions.LOCAL
    for option in options_of("bench"):
        if option.flag in meaningless and origin_of(args, option.key).rank < COMMAND_LINE:
            setattr(args, option.key, option.default)
    for one, other in _EITHER:
        if (
            getattr(args, one) is not None
            and origin_of(args, other).rank < origin_of(args, one).rank
        ):
            setattr(args, other, None)


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompts:
        return report.read_prompts(files.read_text(args.prompts), args.prompts)
    if args.prompt_tokens is not None:
        return [args.prompt_tokens]
    if args.random_weights:
        return [SYNTHETIC if args.context is None else 0]  # --context fills it up
    return [conversation(question) for question in QUESTIONS]


def _local(args: argparse.Namespace, work: Work) -> Report:
    varied = cases(args.max_tokens, args.threads, args.context, args.concurrency)
    where = bool(args.where or args.plot)
    steps = args.fixed_steps or (RANDOM_STEPS if args.random_weights else None)
    sampler = (fixed_steps(steps) if steps else SamplerConfig()).options(**sampler_options(args))
    try:
        with environment.PeakMemory() as memory:
            model = _subject(args)
            measured = measure.measure(model, work, varied, sampler, memory, where, _show_progress)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the memory does not suffice ({why}); take fewer --layers, a smaller --format or "
            "--quantize, lower --concurrency, --max-tokens or --context, or free some memory"
        ) from error
    measured.environment = environment.environment() | {
        "cpu": environment.cpu_name(),
        "cpu_features": environment.cpu_features(),
        "cores": environment.usable_cores(),
        "memory_bytes": gpu.device_memory(torch.device("cpu")),
        "gpu": gpu.product(model.network.device),
    }
    return measured


def _subject(args: argparse.Namespace) -> subject.Subject:
    if args.threads:  # the first case's, for loading
        torch.set_num_threads(args.threads[0])
    how = {key: getattr(args, key) for key in ("device", "dtype", "cache_type")}
    how["activations"] = args.activations or "int8"
    if args.random_weights:
        format = args.format or ("q4_k_m" if pick_device(args.device).type == "cpu" else "bf16")
        return subject.random_subject(args.random_weights, format, args.layers, **how)
    model = sfumato.load(args.model, quantize=args.quantize, mmproj="none", **how)
    return subject.loaded(model, args.quantize)


def _remote(args: argparse.Namespace, work: Work) -> Report:
    endpoint = remote.Endpoint(args.url.rstrip("/"), args.api_key, args.timeout)
    models = [args.model] if args.model else endpoint.models()
    if not models:
        raise remote.ServerError(f"{args.url}: has no models; name one with -m")
    drafts = {"stream_drafts": True} if args.drafts else {}
    fields = {"model": models[0], **request_fields(args), **drafts}
    varied = cases(args.max_tokens, concurrency=args.concurrency or (1,))
    measured = remote.measure(endpoint, fields, work, varied, _show_progress)
    # The client's precision, backend and processor say nothing about the server.
    known = environment.environment()
    measured.environment = {name: known[name] for name in ("date", "sfumato", "commit")} | {
        "client": f"{environment.cpu_name()}, {environment.usable_cores()} cores",
        **dict.fromkeys(("precision", "backend", "cpu", "memory_bytes")),
    }
    return measured


def _predict(args: argparse.Namespace) -> int:
    """Prints a step's time on a device that need not be here. Runs no network."""
    limits = step_cost.limits_named(args.predict)
    config, stored, formats = _described(args)
    steps = []
    for rows, prefix in product(args.concurrency or (1,), args.context or (PREFIX,)):
        shape = StepShape(rows, config.canvas_length, prefix)
        costs = step_cost.step_costs(config, shape, stored, formats=formats)
        steps.append((shape, step_cost.step_time(costs, limits)))
    nbytes = sum(stored.values())
    if args.json:
        text = json.dumps(step_cost.to_document(steps, nbytes)) + "\n"
        if args.json == "-":
            print(text, end="")
            return 0
        files.write(args.json, text, args.force, "json")
    _print_tables(step_cost.to_tables(steps, Console().width))
    known = "measured" if limits.measured else "published, less what programs do not reach"
    print(f"Limits of {limits.name}: {known} ({limits.source}).")
    if nbytes >= limits.memory:
        print(
            f"The weights ({nbytes / 1e9:.1f} GB) do not fit its memory "
            f"({limits.memory / 1e9:.1f} GB)."
        )
    return 0


def _described(args: argparse.Namespace) -> tuple[ModelConfig, dict[str, int], dict[str, str]]:
    """The network, the bytes of its tensors as a GPU holds them, and their formats: of random
    weights or of a checkpoint's headers."""
    checkpoint: Checkpoint
    if args.random_weights:
        given = args.random_weights, args.format or "bf16", args.layers
        checkpoint = subject.random_checkpoint(*given)
    elif args.model:
        checkpoint = as_codes(open_checkpoint(args.model))
    else:
        raise Refused("predict", "of what: give --random-weights 26b-a4b, or -m with a file")
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    return config_of(checkpoint), step_cost.held_bytes(checkpoint.tensors), formats


def _show_progress(number: int, count: int) -> None:
    """Shows the number of the request on a line that is erased at the end."""
    if sys.stderr.isatty():
        text = f"request {number} of {count}" if number else ""
        print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)


def _write(measured: Report, args: argparse.Namespace) -> None:
    contents: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: report.to_json(measured) + "\n",
        "csv": lambda: report.to_csv(measured),
        "plot": lambda: report.draw(measured, Path(args.plot)),
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
                files.write(path, content(), args.force, name)
        except (ValueError, OSError) as error:
            failure = failure or error
    if measured.interrupted:
        print("sfumato: interrupted: the report has what was measured until then", file=sys.stderr)
    if printed is not None:
        sys.stdout.write(str(printed))
    else:
        _print_tables(report.to_tables(measured))
    if failure is not None:
        raise failure


def _print_tables(tables: Iterable[Table]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    for table in tables:
        console.print(table)
