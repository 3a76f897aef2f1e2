"""What the command line accepts. Knows names and ranges of options, and not what they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from sfumato import __version__

_MODEL = "checkpoint: a GGUF file, or a file or folder of safetensors; default: the embedded model"

SAMPLERS = ("entropy-bound", "fixed-count", "threshold")  # written out: their module needs torch
DEVICES = "auto, cpu, cuda, cuda:1, mps, xpu"
LAST_SEED = 2**64 - 1  # the random numbers take 64 bits of it
MOST_THREADS = 1024  # far more crash OpenMP
ACTIVATIONS = ("int8", "bf16")  # written out likewise
ON_LOAD = ("q4_k", "q8_0")  # written out likewise
FORMATS = (  # written out likewise
    *("q4_k_m", "q5_k_m", "q8_0", "q6_k", "q5_k", "q4_k", "q5_0"),
    *("bf16", "f16", "f32"),
)
_MARGIN = "of the memory there is, leave so much alone (5)"
_PREFILL = "tokens of prompts that are read between two steps of the others at most (512)"
_SNAPSHOTS = "host memory to come back to earlier prompts with (1G)"
_CORS = "let the pages of this origin call, as https://chat.example; may be given several times"
_REPLY = "of a reply where a request does not say and the context has as many (4096)"
_ROTATION = "of the file, then a new one is begun; 0: never (64M)"
_TO = f"{', '.join(FORMATS)}; default: q4_k_m for GGUF, bf16 (of bf16, f16, f32) for a folder"


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error of the command line does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sfumato: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; the chosen one's module name is in `args.module`."""
    parser = _Parser(
        prog="sfumato",
        description="Run, inspect and tune block-diffusion language models.",
        epilog="sfumato COMMAND --help tells more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"sfumato {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, module: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.set_defaults(module=module or name)
        return added

    _add_run(command("run", "answer one question"))
    _add_chat(command("chat", "hold a conversation"))
    _add_serve(command("serve", "serve a model over HTTP, to OpenAI's clients and as a web page"))
    _add_demo(command("demo", "watch the embedded model solve a Sudoku and answer questions"))
    _add_inspect(command("inspect", "tell what is in a checkpoint, without loading it"))
    _add_convert(command("convert", "turn a checkpoint into GGUF or safetensors, or quantize it"))
    doctor = command("doctor", "tell what this machine has, and how fast it may be")
    doctor.add_argument("--json", action="store_true", help="print a JSON object")
    _add_train(command("train", "train a model by a recipe", module="tune"))
    _add_eval(command("eval", "measure a model on its recipe's held-out tasks", module="tune"))
    _add_bench(command("bench", "measure how fast a model, or a server, is"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question", nargs="?", help="the question; without it, or for -, standard input is read"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    _add_generation(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_generation(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_loading(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--slots", type=whole(1), default=4, metavar="N", help="requests that run at a time (4)")
    add("--context", type=whole(1), metavar="N", help="tokens of a slot; default: 8192, or fewer")
    add("--queue", type=whole(1), default=64, metavar="N", help="requests that may wait (64)")
    add("--strict", action="store_true", help="refuse what does not fit a slot")
    add("--snapshot-memory", type=size, default=2**30, metavar="SIZE", help=_SNAPSHOTS)
    add("--memory-margin", type=whole(0, 99), default=5, metavar="PERCENT", help=_MARGIN)
    add("--prefill-chunk", type=whole(1), default=512, metavar="N", help=_PREFILL)
    add("--request-timeout", type=seconds, metavar="S", help="a request fails after S seconds")
    add("--drain", type=seconds, default=30.0, metavar="S", help="at the end, wait for S (30)")
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="0.0.0.0: all there are (127.0.0.1)")
    add("--port", type=whole(0, 65535), default=8080, metavar="N", help="0: any free one (8080)")
    add("--name", metavar="TEXT", help="what clients call the model; default: the file's name")
    add("--alias", action="append", default=[], metavar="TEXT", help="another name of the model")
    add("--api-key", metavar="KEY", help="ask clients for this key; default: SFUMATO_API_KEY")
    add("--api-key-file", metavar="FILE", help="the key stands in a file")
    add("--cors-origin", action="append", default=[], metavar="URL", help=_CORS)
    add("--max-tokens", type=whole(1), default=4096, metavar="N", help=_REPLY)
    add("--max-body", type=size, default=8 * 2**20, metavar="SIZE", help="of a request (8M)")
    add("--max-messages", type=whole(1), default=1024, metavar="N", help="of a request (1024)")
    add("--lenient", action="store_true", help="ignore unknown fields instead of refusing them")
    add("--open", action="store_true", help="open the web page in a browser")
    add = parser.add_argument_group("audit").add_argument
    add("--audit-log", metavar="FILE", help="write a line of JSON for every request")
    add("--audit-text", action="store_true", help="with prompts and answers in it")
    add("--audit-max-bytes", type=size, default=64 * 2**20, metavar="SIZE", help=_ROTATION)
    _add_verbose(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_seed(parser, "picks the puzzle")
    _add_display(parser)
    _add_verbose(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=_path, help="a GGUF file, or a file or folder of safetensors")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    _add_quantize(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a GGUF file, or a file or folder of safetensors")
    parser.add_argument("out", help="a file that ends in .gguf, or else a folder of safetensors")
    parser.add_argument("--to", choices=FORMATS, metavar="FORMAT", help=_TO)
    parser.add_argument("--force", action="store_true", help="replace what is there")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="train")
    parser.add_argument("--recipe", default="embedded", help="name of the recipe (embedded)")
    parser.add_argument(
        "--out", type=_path, required=True, metavar="DIR", help="folder for the checkpoint"
    )
    _add_seed(parser, "random seed")
    parser.add_argument("--steps", type=whole(1), help="training steps; default: the recipe's")
    parser.add_argument("--threads", type=whole(1, MOST_THREADS), help="CPU threads; default: all")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="evaluate")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--count", type=whole(1), default=200, help="tasks of each set (200)")
    _add_seed(parser, "draws the held-out tasks and the noise")
    _add_approximations(parser.add_argument_group("sampling (defaults are the checkpoint's)"))
    parser.add_argument("-m", "--model", type=_path, metavar="PATH", help=_MODEL)
    _add_verbose(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("-m", "--model", metavar="PATH", help=f"{_MODEL}; with --url, the server's name of it")
    add("--random-weights", metavar="SIZE", help="no checkpoint: 26b-a4b, 180m or tiny")
    add("--format", metavar="NAME", help="of random weights: q4_k_m, q8_0, bf16, f32, … (q4_k_m)")
    add("--layers", type=whole(1), metavar="N", help="of random weights; default: the real number")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (auto)")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16 (auto)")
    add("--activations", choices=ACTIVATIONS, help="with quantized weights, on a CPU (int8)")
    add("--quantize", choices=ON_LOAD, help="a checkpoint's float matrices, as they are loaded")
    add("--url", help="an OpenAI-compatible server instead, as http://localhost:8000/v1")
    add("--api-key", metavar="KEY", help="the server's; default: SFUMATO_API_KEY, if it is set")
    add("--timeout", type=whole(1), default=600, metavar="S", help="of a silent server (600)")
    add = parser.add_argument_group("work (N,N,… measures every combination)").add_argument
    add(
        "--prompts",
        type=_path,
        metavar="FILE",
        help="one a line, or JSON objects with messages or a text",
    )
    add("--prompt-tokens", type=whole(0), metavar="N", help="synthetic prompts of N tokens")
    add("--context", type=_wholes(0), metavar="N,…", help="fill each prompt up to N tokens")
    add("--max-tokens", type=_wholes(1), default=[256], metavar="N,…", help="length limit (256)")
    add(
        "--threads",
        type=_wholes(1, MOST_THREADS),
        metavar="N,…",
        help="CPU threads; default: torch's choice",
    )
    add("--concurrency", type=_wholes(1), metavar="N,…", help="requests to a server at a time (1)")
    add("--warmup", type=whole(0), default=1, metavar="N", help="requests that do not count (1)")
    add("--repeats", type=whole(1), default=3, metavar="N", help="of every prompt (3)")
    add("--seed", type=whole(0, LAST_SEED), default=0, metavar="N", help="of the first repeat (0)")
    group = parser.add_argument_group("sampling (defaults are the checkpoint's)")
    add = group.add_argument
    add("--fixed-steps", type=whole(1), metavar="N", help="N per canvas; random weights: 8")
    add("--ignore-eos", action="store_true", help="end tokens do not end a reply")
    add("--min-tokens", type=whole(0), metavar="N", help="no end token before N tokens")
    add("--top-k", type=whole(1), metavar="K", help="draw from the K likeliest tokens")
    _add_approximations(group)
    add("--drafts", action="store_true", help="ask a server for draft frames (stream_drafts)")
    add = parser.add_argument_group("report").add_argument
    add("--where", action="store_true", help="time the parts of a step, in a pass of their own")
    to_json = "write a line of JSON; for -, instead of the table"
    to_csv = "write a row for each combination; for -, instead of the table"
    to_plot = "draw a PNG or SVG (needs sfumato[plot]); implies --where"
    for name, what in (("--json", to_json), ("--csv", to_csv), ("--plot", to_plot)):
        add(name, type=_path, metavar="FILE", help=what)
    _add_verbose(parser)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """The options of everything that loads a model and generates."""
    _add_loading(parser)
    group = parser.add_argument_group("generation (defaults are the checkpoint's)")
    add = group.add_argument
    add("--system", metavar="TEXT", help="system message")
    add("--thinking", action="store_true", help="let the model think before it answers")
    add("--max-tokens", type=whole(1), default=256, metavar="N", help="length limit (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    _add_seed(group, "random seed")
    add("--steps", type=whole(1), metavar="N", help="denoising steps per canvas at most")
    add("--sampler", metavar="NAME", help=", ".join(SAMPLERS))
    add("--entropy-bound", type=float, metavar="NATS", help="the entropy-bound sampler's budget")
    add("--temperature", type=float, metavar="T", help="scales the temperature schedule (1)")
    add("--top-k", type=whole(1), metavar="K", help="draw from the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest share P")
    _add_approximations(group)
    _add_display(parser)
    _add_verbose(parser)


def _add_loading(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("-m", "--model", type=_path, metavar="PATH", help=_MODEL)
    model.add_argument("--device", default="auto", help=f"{DEVICES} (auto)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (auto)")
    model.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default="int8",
        help="on a CPU, for products with quantized weights: int8 (default), or bf16, more exact",
    )
    _add_quantize(model)
    model.add_argument(
        "--threads", type=whole(1, MOST_THREADS), metavar="N", help="CPU threads; default: cores"
    )


def _add_approximations(parser: argparse._ActionsContainer) -> None:
    """What lets the pass over the vocabulary be less than exact; docs/head.md."""
    parser.add_argument(
        "--soft-skip",
        type=float,
        metavar="SHARE",
        help="self-conditioning may leave out this share of the probability; default: none",
    )
    parser.add_argument(
        "--soft-top-k",
        type=_one_or_two(1),
        metavar="K[:K2]",
        help="draw from, and self-condition on, the K likeliest tokens, falling to K2 at the last "
        "step; entropy stays that of all; default: all",
    )


def _add_quantize(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--quantize",
        choices=ON_LOAD,
        help="quantize float matrices as they are loaded; quantized ones stay as they are",
    )


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="tell more, on standard error")


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-visual", action="store_true", help="plain lines instead of the live canvas"
    )


def _add_seed(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument(
        "--seed", type=whole(0, LAST_SEED), default=0, metavar="N", help=f"{what}, 0 to 2^64-1 (0)"
    )


def _path(text: str) -> str:
    if not text:  # which pathlib would take for the working directory
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`. It raises ArgumentTypeError."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            reach = f"from {low} on" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {reach}")
        return value

    return parse


def seconds(text: str) -> float:
    """A number of seconds from 0 on. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def size(text: str) -> int:
    """Bytes, as 4096, 512K, 8M or 1G. Raises ArgumentTypeError."""
    digits = text[:-1] if text[-1:].upper() in _UNITS else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 512K, 8M or 1G")
    return int(digits) * (1 if digits == text else _UNITS[text[-1].upper()])


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def _one_or_two(low: int) -> Callable[[str], tuple[int, ...]]:
    """A parser of one such number, or of two with a colon between them."""
    one = whole(low)

    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(":")
        if len(parts) > 2:
            raise argparse.ArgumentTypeError(f"{text!r} is more than two numbers")
        return tuple(one(part) for part in parts)

    return parse


def _wholes(low: int, high: int | None = None) -> Callable[[str], list[int]]:
    """A parser of such numbers with commas between them."""
    one = whole(low, high)
    return lambda text: [one(part) for part in text.split(",")]
