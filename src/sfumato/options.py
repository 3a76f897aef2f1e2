"""Every option of every command, once: name, kind of value, range, default, one line of help.

The command line, environment variables, configuration files, shell completion and docs/options.md
derive from this table. A new option is one row. Knows what options are called and which values
they take, and not what they do; imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.values import (
    Choice,
    Each,
    Flag,
    Kind,
    Listed,
    Number,
    OneOrTwo,
    Path,
    Size,
    Text,
    Whole,
)

SAMPLERS = ("entropy-bound", "fixed-count", "threshold")  # written out: their module needs torch
DEVICES = "auto, cpu, cuda, cuda:1, mps, xpu"
DTYPES = ("auto", "float32", "bfloat16", "float16")  # written out likewise
LAST_SEED = 2**64 - 1  # the random numbers take 64 bits of it
MOST_THREADS = 1024  # far more crash OpenMP
MOST_STEPS, MOST_TOP_K = 4096, 1024  # written out likewise
ACTIVATIONS = ("int8", "bf16")  # written out likewise
ON_LOAD = ("q4_k", "q8_0")  # written out likewise
FORMATS = (  # written out likewise
    *("q4_k_m", "q5_k_m", "q8_0", "q6_k", "q5_k", "q4_k", "q5_0"),
    *("bf16", "f16", "f32"),
)
PREFIX = "SFUMATO_"


@dataclass(frozen=True)
class Option:
    """One option of one or more commands. A name may have several rows, for different commands."""

    name: str  # as on the command line: max-tokens
    kind: Kind
    commands: tuple[str, ...]
    help: str  # the default is added where there is one
    default: Any = None
    metavar: str = ""
    group: str = ""  # the heading that --help shows it under
    short: str = ""  # one letter
    required: bool = False
    secret: bool = False  # its value is shown nowhere

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """Its attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()

    @property
    def off(self) -> str:
        """What turns a flag off again on the command line: --strict has --no-strict."""
        plain = self.name.removeprefix("no-")
        return f"--{plain}" if plain != self.name else f"--no-{self.name}"

    @property
    def shown_default(self) -> str:
        """The default as somebody would write it; empty where there is none, or it says nothing."""
        nothing = self.default is None or self.default is False or self.default == ()
        return "" if nothing else self.kind.show(self.default)


_SERVE, _DEMO, _BENCH = ("serve",), ("demo",), ("bench",)
_TALK = ("run", "chat")
_LOAD = ("run", "chat", "serve")
_EVERY = (
    *("run", "chat", "serve", "demo", "inspect", "convert", "doctor", "pull", "train", "eval"),
    "bench",
)

# The headings of --help.
_MODEL, _REPLY, _ENGINE, _HTTP, _AUDIT = "model", "generation", "engine", "HTTP", "audit"
_WHAT, _WORK, _SAMPLING, _REPORT = "what is measured", "work", "sampling", "report"
GROUP_NOTES = {
    _REPLY: "defaults are the checkpoint's",
    _SAMPLING: "defaults are the checkpoint's",
    _WORK: "N,N,… measures every combination",
}

_FILE = "a GGUF file, a file or folder of safetensors, or hf:owner/name[:file]; default: embedded"
_FILE_OR_NAME = f"{_FILE}; with --url, the server's name of it"
_FLAG, _TEXT, _PATH, _SIZE, _FROM_1, _FROM_0 = Flag(), Text(), Path(), Size(), Whole(1), Whole(0)
_THREADS, _SEED = Whole(1, MOST_THREADS), Whole(0, LAST_SEED)
_STEPS, _TOP_K = Whole(1, MOST_STEPS), Whole(1, MOST_TOP_K)
_SECONDS = Number(0, 10**9, unit="seconds")
_TO = f"{', '.join(FORMATS)}; default: q4_k_m for GGUF, bf16 (of bf16, f16, f32) for a folder"
_FAST = "on a CPU, for products with quantized weights: int8, or bf16, more exact"
_ON_LOAD = "quantize float matrices as they are loaded; quantized ones stay as they are"
_SKIP = "self-conditioning may leave out this share of the probability; default: none"
_FEW = (
    "draw from, and self-condition on, the K most probable tokens, falling to K2 at the last "
    "step; entropy stays that of all; default: all"
)

# A row is a line or two; the formatter would make it nine.
# fmt: off
OPTIONS = (
    # Name, kind, commands, help, default, metavar, group.
    Option("config", _PATH, _EVERY, "TOML file of options; docs/options.md", metavar="FILE"),
    # What a command prints.
    Option("json", _FLAG, ("run", "inspect", "doctor", "eval"), "print a JSON object", False),
    Option("tensors", _FLAG, ("inspect",), "list every tensor", False),
    # train and eval
    Option("recipe", _TEXT, ("train",), "name of the recipe", "embedded", "NAME"),
    Option("out", _PATH, ("train",), "folder for the checkpoint", metavar="DIR", required=True),
    Option("steps", _FROM_1, ("train",), "training steps; default: the recipe's", metavar="N"),
    Option("threads", _THREADS, ("train",), "CPU threads; default: all", metavar="N"),
    Option("count", _FROM_1, ("eval",), "tasks of each set at most", 200, "N"),
    # convert and pull
    Option("to", Choice(FORMATS), ("convert",), _TO, metavar="FORMAT"),
    Option("force", _FLAG, ("convert",), "replace what is there", False),
    Option("force", _FLAG, ("pull",), "even where disk or memory is short", False),
    # The model.
    Option("model", _PATH, (*_LOAD, "eval"), _FILE, None, "PATH", _MODEL, short="m"),
    Option("model", _PATH, _BENCH, _FILE_OR_NAME, None, "PATH", _WHAT, short="m"),
    Option("random-weights", _TEXT, _BENCH,
           "no checkpoint: 26b-a4b, 180m or tiny", None, "SIZE", _WHAT),
    Option("format", _TEXT, _BENCH,
           "of random weights: q4_k_m, q8_0, bf16, f32, …; default: q4_k_m", None, "NAME", _WHAT),
    Option("layers", _FROM_1, _BENCH,
           "of random weights; default: the real number", None, "N", _WHAT),
    Option("device", _TEXT, _LOAD, DEVICES, "auto", "NAME", _MODEL),
    Option("device", _TEXT, _BENCH, DEVICES, "auto", "NAME", _WHAT),
    Option("dtype", Choice(DTYPES), _LOAD, ", ".join(DTYPES), "auto", "NAME", _MODEL),
    Option("dtype", Choice(DTYPES), _BENCH, ", ".join(DTYPES), "auto", "NAME", _WHAT),
    Option("activations", Choice(ACTIVATIONS), _LOAD, _FAST, "int8", "", _MODEL),
    Option("activations", Choice(ACTIVATIONS), _BENCH,
           "with quantized weights, on a CPU; default: int8", None, "", _WHAT),
    Option("quantize", Choice(ON_LOAD), _LOAD, _ON_LOAD, None, "", _MODEL),
    Option("quantize", Choice(ON_LOAD), ("inspect",), _ON_LOAD),
    Option("quantize", Choice(ON_LOAD), _BENCH,
           "a checkpoint's float matrices, as they are loaded", None, "", _WHAT),
    Option("threads", _THREADS, _LOAD, "CPU threads; default: cores", None, "N", _MODEL),
    # bench: what is measured, and the work
    Option("url", _TEXT, _BENCH,
           "an OpenAI-compatible server instead, as http://localhost:8000/v1", None, "URL", _WHAT),
    Option("api-key", _TEXT, _BENCH,
           "the server's; better in SFUMATO_API_KEY", None, "KEY", _WHAT, secret=True),
    Option("timeout", _FROM_1, _BENCH, "of a silent server", 600, "S", _WHAT),
    Option("prompts", _PATH, _BENCH,
           "one a line, or JSON objects with messages or a text", None, "FILE", _WORK),
    Option("prompt-tokens", _FROM_0, _BENCH, "synthetic prompts of N tokens", None, "N", _WORK),
    Option("context", Listed(_FROM_0), _BENCH,
           "fill each prompt up to N tokens", None, "N,…", _WORK),
    Option("max-tokens", Listed(_FROM_1), _BENCH, "length limit", (256,), "N,…", _WORK),
    Option("threads", Listed(_THREADS), _BENCH,
           "CPU threads; default: torch's choice", None, "N,…", _WORK),
    Option("concurrency", Listed(_FROM_1), _BENCH,
           "requests to a server at a time; default: 1", None, "N,…", _WORK),
    Option("warmup", _FROM_0, _BENCH, "requests that do not count", 1, "N", _WORK),
    Option("repeats", _FROM_1, _BENCH, "of every prompt", 3, "N", _WORK),
    Option("seed", _SEED, _BENCH, "of the first repeat", 0, "N", _WORK),
    Option("fixed-steps", _FROM_1, _BENCH, "N per canvas; random weights: 8", None, "N", _SAMPLING),
    Option("ignore-eos", _FLAG, _BENCH, "end tokens do not end a reply", False, "", _SAMPLING),
    Option("min-tokens", _FROM_0, _BENCH, "no end token before N tokens", None, "N", _SAMPLING),
    Option("drafts", _FLAG, _BENCH,
           "ask a server for draft frames (stream_drafts)", False, "", _SAMPLING),
    # Generation.
    Option("system", _TEXT, _TALK, "system message", None, "TEXT", _REPLY),
    Option("thinking", _FLAG, _TALK, "let the model think before it answers", False, "", _REPLY),
    Option("max-tokens", _FROM_1, _TALK, "length limit", 256, "N", _REPLY),
    Option("stop", Each(_TEXT), _TALK,
           "end before this text; may be given several times", (), "TEXT", _REPLY),
    Option("seed", _SEED, _TALK, "random seed, 0 to 2^64-1", 0, "N", _REPLY),
    Option("seed", _SEED, _DEMO, "picks the puzzle, 0 to 2^64-1", 0, "N"),
    Option("seed", _SEED, ("train",), "random seed, 0 to 2^64-1", 0, "N"),
    Option("seed", _SEED, ("eval",), "draws the held-out tasks and the noise, 0 to 2^64-1", 0, "N"),
    Option("steps", _STEPS, _TALK,
           "denoising steps per canvas at most, 1 to 4096", None, "N", _REPLY),
    Option("sampler", Choice(SAMPLERS), _TALK, ", ".join(SAMPLERS), None, "NAME", _REPLY),
    Option("entropy-bound", Number(0), _TALK,
           "the entropy-bound sampler's budget", None, "NATS", _REPLY),
    Option("temperature", Number(0, 10**6), _TALK,
           "scales the temperature schedule; default: 1", None, "T", _REPLY),
    Option("top-k", _TOP_K, _TALK,
           "draw from the K most probable tokens, 1 to 1024", None, "K", _REPLY),
    Option("top-k", _TOP_K, _BENCH,
           "draw from the K most probable tokens, 1 to 1024", None, "K", _SAMPLING),
    Option("top-p", Number(0, 1, (0,)), _TALK,
           "draw from the most probable share P", None, "P", _REPLY),
    Option("soft-skip", Number(0, 1, (0, 1)), _TALK, _SKIP, None, "SHARE", _REPLY),
    Option("soft-skip", Number(0, 1, (0, 1)), ("eval", "bench"), _SKIP, None, "SHARE", _SAMPLING),
    Option("soft-top-k", OneOrTwo(_FROM_1), _TALK, _FEW, None, "K[:K2]", _REPLY),
    Option("soft-top-k", OneOrTwo(_FROM_1), ("eval", "bench"), _FEW, None, "K[:K2]", _SAMPLING),
    # bench: the report
    Option("where", _FLAG, _BENCH,
           "time the parts of a step, in a pass of their own", False, "", _REPORT),
    Option("json", _PATH, _BENCH,
           "write a line of JSON; for -, instead of the table", None, "FILE", _REPORT),
    Option("csv", _PATH, _BENCH,
           "write a row for each combination; for -, instead of the table", None, "FILE", _REPORT),
    Option("plot", _PATH, _BENCH,
           "draw a PNG or SVG (needs sfumato[plot]); implies --where", None, "FILE", _REPORT),
    # serve: the engine
    Option("slots", _FROM_1, _SERVE, "requests that run at a time", 4, "N", _ENGINE),
    Option("context", _FROM_1, _SERVE,
           "tokens of a slot; default: 8192, or fewer", None, "N", _ENGINE),
    Option("queue", _FROM_1, _SERVE, "requests that may wait", 64, "N", _ENGINE),
    Option("strict", _FLAG, _SERVE, "refuse what does not fit a slot", False, "", _ENGINE),
    Option("snapshot-memory", _SIZE, _SERVE,
           "host memory to come back to earlier prompts with", 2**30, "SIZE", _ENGINE),
    Option("memory-margin", Whole(0, 99), _SERVE,
           "of the memory there is, leave so much alone", 5, "PERCENT", _ENGINE),
    Option("prefill-chunk", _FROM_1, _SERVE,
           "tokens of prompts that are read between two steps of the others at most",
           512, "N", _ENGINE),
    Option("max-steps", _STEPS, _SERVE,
           "denoising steps per canvas that a request may ask for", 256, "N", _ENGINE),
    Option("request-timeout", _SECONDS, _SERVE,
           "a request fails after S seconds; 0: never", 21_600.0, "S", _ENGINE),
    Option("drain", _SECONDS, _SERVE, "at the end, wait for S", 30.0, "S", _ENGINE),
    # serve: HTTP
    Option("host", _TEXT, _SERVE, "0.0.0.0: all there are", "127.0.0.1", "ADDRESS", _HTTP),
    Option("port", Whole(0, 65535), _SERVE, "0: any free one", 8080, "N", _HTTP),
    Option("name", _TEXT, _SERVE,
           "what clients call the model; default: the file's name", None, "TEXT", _HTTP),
    Option("alias", Each(_TEXT), _SERVE,
           "another name of the model; may be given several times", (), "TEXT", _HTTP),
    Option("api-key", _TEXT, _SERVE,
           "ask clients for this key; better in SFUMATO_API_KEY", None, "KEY", _HTTP, secret=True),
    Option("api-key-file", _PATH, _SERVE, "the key stands in a file", None, "FILE", _HTTP),
    Option("cors-origin", Each(_TEXT), _SERVE,
           "let the pages of this origin call, as https://chat.example; may be given several times",
           (), "URL", _HTTP),
    Option("max-tokens", _FROM_1, _SERVE,
           "of a reply where a request does not say and the context has as many", 4096, "N", _HTTP),
    Option("max-body", _SIZE, _SERVE, "of a request", 8 * 2**20, "SIZE", _HTTP),
    Option("max-values", _FROM_1, _SERVE,
           "JSON values of a request, counted before they are made", 2**17, "N", _HTTP),
    Option("max-messages", _FROM_1, _SERVE, "of a request", 1024, "N", _HTTP),
    Option("max-choices", _FROM_1, _SERVE,
           "replies to a request: n, or n times the prompts", 128, "N", _HTTP),
    Option("lenient", _FLAG, _SERVE,
           "ignore unknown fields instead of refusing them", False, "", _HTTP),
    Option("open", _FLAG, _SERVE, "open the web page in a browser", False, "", _HTTP),
    # serve: the audit
    Option("audit-log", _PATH, _SERVE,
           "write a line of JSON for every request", None, "FILE", _AUDIT),
    Option("audit-text", _FLAG, _SERVE, "with prompts and answers in it", False, "", _AUDIT),
    Option("audit-max-bytes", _SIZE, _SERVE,
           "of the file, then a new one is begun; 0: never", 64 * 2**20, "SIZE", _AUDIT),
    Option("log-format", Choice(("text", "json")), _SERVE,
           "of the log, on standard error", "text", "", _AUDIT),
    # What people see.
    Option("no-visual", _FLAG, ("run", "chat", "demo"),
           "plain lines instead of the live canvas", False),
    Option("replay", _PATH, ("run",),
           "save how the reply was denoised, as a page that plays by itself", None, "FILE.html"),
    Option("slow", _FLAG, ("run",),
           "show the noise first, and hold the frame of each step for 0.4 s", False),
    Option("verbose", _FLAG, (*_LOAD, "demo", "doctor", "eval", "bench"),
           "tell more, on standard error", False, short="v"),
)
# fmt: on


def options_of(command: str) -> list[Option]:
    """The options of a command, in the table's order."""
    return [option for option in OPTIONS if command in option.commands]
