"""Every option of every command, and the commands that have them: one row an option.

Knows what options are called and which values they take, and not what they do. A choice of decoding
is a row of `settings.py`, to which `decoding` adds what the command line says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sfumato.options.limits import (
    LAST_SEED,
    MOST_LAYERS,
    MOST_READ_STEPS,
    MOST_READS,
    MOST_STEPS,
    MOST_THREADS,
    MOST_TOKENS,
    STRENGTH,
)
from sfumato.options.settings import PACES, POOLINGS, SAMPLERS, setting
from sfumato.options.tuning import TUNING
from sfumato.values import (
    Choice,
    CountOf,
    Each,
    Flag,
    Kind,
    Listed,
    Number,
    Path,
    Size,
    Text,
    Whole,
    WholeOr,
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
    alone: str | None = None  # its value where it stands without one; None: it has to have one

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """The option's attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The option's environment variable."""
        return PREFIX + self.key.upper()

    @property
    def off(self) -> str:
        """What turns a flag off again on the command line: --strict has --no-strict."""
        plain = self.name.removeprefix("no-")
        return f"--{plain}" if plain != self.name else f"--no-{self.name}"

    @property
    def shown_default(self) -> str:
        """The default as a user writes it; empty where there is none, or it does nothing."""
        nothing = self.default is None or self.default is False or self.default == ()
        return "" if nothing else self.kind.show(self.default)


def decoding(
    name: str,
    commands: tuple[str, ...],
    metavar: str = "",
    group: str = "",
    default: Any = None,
    more: str = "",
    alone: str | None = None,
) -> Option:
    """The option of a setting: what the table of settings says of it, and `more` of its help."""
    chosen = setting(name)
    assert chosen.option
    words = chosen.help + more
    return Option(chosen.option, chosen.kind, commands, words, default, metavar, group, alone=alone)


OTHER_LAYERS = ("auto", "cpu", "stream")
"""What becomes of layers that a card has no room for: the CPU runs them, or they are streamed."""
ON_LOAD = ("q4_k", "q8_0", "fp8")
"""The targets that are offered for quantizing at load."""
# Names that other modules define too, which need torch; tests hold them equal.
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("int8", "bf16")
CACHE_TYPES = ("bf16", "fp8", "q8_0")
FORMATS = (
    *("q4_k_m", "q5_k_m", "q8_0", "q6_k", "q5_k", "q4_k", "q5_0"),
    *("bf16", "f16", "f32"),
)
DEVICES = "auto, cpu, gpu (the one there is), cuda, cuda:1, mps, xpu"
SAMPLER_NAMES = ", ".join(SAMPLERS)

ALONE, DEPLOY, BENCH, TUNE = ("serve",), ("deploy",), ("bench",), ("tune",)
SERVE, BATCH = (*ALONE, *DEPLOY), ("batch",)
WITH_ENGINE = (*SERVE, *BATCH)
TALK = ("run", "chat")
DECIDE, CALIBRATE = ("decide",), ("calibrate",)
FILL, EDIT = ("fill",), ("edit",)
WRITE = (*TALK, *FILL, *EDIT)
EVAL = ("eval",)
DECODE = (*WRITE, *EVAL)  # take the options of decoding
LOAD = (*WRITE, *SERVE, "mcp", "decide", "calibrate", "perplexity", *BATCH, *EVAL)
LOAD_ONE = tuple(command for command in LOAD if command not in ALONE)
WEIGHTS = (*LOAD, "verify-model")  # take the options of loading
TUNED = (*WEIGHTS, *TUNE)
EVERY = (
    *("run", "chat", "fill", "edit", "decide", "calibrate", *SERVE, "mcp", "demo", "inspect"),
    *("convert", "merge", "doctor", "pull", "list", "remove", "verify-model"),
    *("train", "eval", "bench", "perplexity", "tune", "batch"),
)

# The headings of --help.
MODEL, REPLY, ENGINE, HTTP, AUDIT = "model", "generation", "engine", "HTTP", "audit"
HARDWARE, REPLICAS = "hardware and memory", "replicas"
READS = "how questions are read"
LEARNING = "how it is tuned"
SUBJECT, WORK, SAMPLING, REPORT = "what is measured", "work", "sampling", "report"
GROUP_NOTES = {
    REPLY: "default: the checkpoint's",
    SAMPLING: "default: the checkpoint's",
    WORK: "N,N,… measures every combination",
}

FLAG, TEXT, PATH, SIZE = Flag(), Text(), Path(), Size()
FROM_1, FROM_0 = Whole(1), Whole(0)
THREADS, SEED = Whole(1, MOST_THREADS), Whole(0, LAST_SEED)
SECONDS = Number(0, 10**9, unit="seconds")
QUANTIZE_HELP = "quantize float matrices as they are loaded; quantized ones stay as they are"
ROUNDED, ALL = "; default: what a CPU's rounding hides", "; default: all"
FILE = (
    "a GGUF file, a file or folder of safetensors, a name of the catalogue (sdar-1.7b), or "
    "hf:owner/name[:file]; default: embedded"
)
MMPROJ = (
    "GGUF file of the vision tower; none: read no pictures; default: safetensors' own, or the file "
    "beside a GGUF model that has mmproj in its name"
)
_TO = (
    f"{', '.join(FORMATS)}, or nearest for a narrow source; default: nearest for a narrow source, "
    "q4_k_m for another GGUF, bf16 (of bf16, f16, f32) for a folder"
)
_FAST = "on a CPU, for products with quantized weights: int8, or bf16, more exact"
_COUNT = Whole(1, MOST_TOKENS)
_BOTH = (*DECIDE, *CALIBRATE)
_SAMPLES = WholeOr(Whole(1, MOST_READS), "auto")
_ORDER = Choice(("state", "schema"))
_FILE_OR_NAME = f"{FILE}; with --url, the server's name of it"

# A row is a line or two; the formatter would make it nine.
# fmt: off
GENERAL = (
    # Name, kind, commands, help, default, metavar, group.
    Option("config", PATH, EVERY, "TOML file of options; docs/options.md", metavar="FILE"),
    # What a command prints.
    Option("json", FLAG,
           ("run", *FILL, *EDIT, "decide", "calibrate", "perplexity", "inspect", "doctor", "list",
            "verify-model", "eval"),
           "print a JSON object", False),
    Option("tensors", FLAG, ("inspect",), "list every tensor", False),
    # train and eval
    Option("recipe", TEXT, ("train",), "name of the recipe", "embedded", "NAME"),
    Option("out", PATH, ("train",), "folder for the checkpoint", metavar="DIR", required=True),
    Option("steps", FROM_1, ("train",), "steps of each stage; default: the recipe's", metavar="N"),
    Option("from", PATH, ("train",), "begin a later stage with this one", metavar="DIR"),
    Option("stage", Whole(2, 4), ("train",), "the stage that --from begins", 2, "N"),
    Option("threads", THREADS, ("train",), "CPU threads; default: all", metavar="N"),
    Option("force", FLAG, ("train",), "replace a checkpoint that is at --out", False),
    Option("tasks", PATH, EVAL,
           "JSON Lines of questions with answers (docs/evaluating.md), or facts, which come with "
           "the package; default: the held-out tasks of the packaged models' recipe", None,
           "FILE"),
    Option("count", FROM_1, EVAL,
           "the first tasks of the file, at most; of held-out ones so many of each set; default: "
           "all, and 200", None, "N"),
    Option("curves", Listed(Whole(1, MOST_STEPS)), EVAL,
           "ask at each of these numbers of steps at most: right answers against forwards", None,
           "N,N,…"),
    Option("out", PATH, EVAL,
           "JSON Lines file for each answer; one that is not complete is taken up", None, "FILE",
           short="o"),
    Option("plot", PATH, EVAL, "draw an SVG of right answers against forwards", None, "FILE.svg"),
    Option("force", FLAG, EVAL, "replace the files of --out and --plot", False),
    Option("allow-code", FLAG, EVAL,
           "run the checks of the file, which are Python code of its author and may do all that "
           "you may", False),
    Option("timeout", SECONDS, EVAL, "a task fails after S seconds; 0: never", 600.0, "S"),
    Option("concurrency", Whole(1, 256), EVAL, "tasks at a time", 1, "N"),
    # convert, merge and pull
    Option("to", Choice((*FORMATS, "nearest")), ("convert",), _TO, metavar="FORMAT"),
    Option("model", PATH, ("convert",),
           "of an adapter: the model that it is for; default: embedded", None, "PATH", short="m"),
    Option("to", Choice(FORMATS), ("merge",),
           f"{', '.join(FORMATS)}; default: each tensor as it is in the base, for a folder as most "
           "are (of bf16, f16, f32)", metavar="FORMAT"),
    Option("out", PATH, ("merge",), "a file that ends in .gguf, or else a folder of safetensors",
           metavar="OUT", short="o", required=True),
    # batch
    Option("out", PATH, BATCH,
           "file for the results, a line each; one that is not complete is taken up",
           metavar="OUT", short="o", required=True),
    Option("force", FLAG, ("convert", "merge"), "replace an existing file or folder", False),
    Option("force", FLAG, ("remove",), "remove without a question", False),
    Option("force", FLAG, ("pull",), "download even where disk or memory is short", False),
    # perplexity
    Option("context", Whole(2, MOST_TOKENS), ("perplexity",),
           "tokens of a window; default: 2048, or the model's context", None, "N"),
    Option("stride", FROM_1, ("perplexity",),
           "tokens by which a window goes on, which it scores; default: half a window", None, "N"),
    # The model.
    Option("model", PATH, (*LOAD_ONE, *TUNE), FILE, None, "PATH", MODEL, short="m"),
    Option("model", Each(PATH), ALONE,
           f"{FILE}; NAME= before it is what clients call it; given several times: loaded one at a "
           "time, the first at the start", (), "[NAME=]PATH", MODEL, short="m"),
    Option("mmproj", PATH, TUNED, MMPROJ, None, "FILE", MODEL),
    Option("adapter", PATH, (*DECODE, *DECIDE), "adapter that answers: a folder of PEFT, or GGUF",
           None, "PATH", MODEL),
    Option("adapter", Each(TEXT), SERVE,
           "what clients call an adapter, and its folder of PEFT or GGUF file; NAME@MODEL= where "
           "several models are served; may be given several times", (), "NAME=PATH", MODEL),
    Option("quantize", Choice(ON_LOAD), ("inspect",), QUANTIZE_HELP),
    # Generation.
    Option("system", TEXT, DECODE, "system message", None, "TEXT", REPLY),
    decoding("thinking", (*TALK, *EVAL), "", REPLY, False),
    decoding("max_tokens", (*TALK, *EVAL), "N", REPLY, 256),
    decoding("stop", (*TALK, *EVAL), "TEXT", REPLY, (), "; may be given several times"),
    decoding("seed", WRITE, "N", REPLY, 0),
    Option("seed", SEED, ("demo",), "picks the puzzle, 0 to 2^64-1", 0, "N"),
    Option("seed", SEED, ("train",), "random seed, 0 to 2^64-1", 0, "N"),
    Option("seed", SEED, ("eval",), "draws the held-out tasks and the noise, 0 to 2^64-1", 0, "N"),
    decoding("mode", (*TALK, *EVAL), "", REPLY, None, "; default: canvas"),
    decoding("verify", (*TALK, *EVAL), "", REPLY, None, "; alone: report", "report"),
    decoding("max_steps", DECODE, "N", REPLY, None, ", 1 to 4096"),
    decoding("sampler", DECODE, "NAME", REPLY, None, f": {SAMPLER_NAMES}"),
    decoding("entropy_bound", DECODE, "NATS", REPLY, None, "; of the sampler entropy-bound"),
    decoding("threshold", DECODE, "P", REPLY, None, "; of threshold and low-confidence"),
    decoding("pace", DECODE, "NAME", REPLY, None, f": {', '.join(PACES)}"),
    decoding("temperature", DECODE, "T", REPLY, None, "; default: 1"),
    decoding("settle_at_end", (*TALK, *EVAL), "", REPLY, False),
    decoding("patience", DECODE, "N", REPLY, None, "; default: all positions together"),
    decoding("top_k", DECODE, "K", REPLY, None, ", 1 to 1024"),
    decoding("top_p", DECODE, "P", REPLY),
    decoding("soft_skip", DECODE, "SHARE", REPLY, None, ROUNDED),
    decoding("soft_top_k", DECODE, "K[:K2]", REPLY, None, ALL),
)

VISIBLE = (
    # What people see.
    Option("no-visual", FLAG, (*WRITE, "demo"),
           "plain lines instead of the live canvas", False),
    Option("image", Each(PATH), ("run",),
           "picture that the question is about; may be given several times", (), "FILE"),
    Option("replay", PATH, ("run",),
           "save how the reply was denoised, as a page that plays by itself", None, "FILE.html"),
    Option("force", FLAG, ("run",), "replace the file of --replay", False),
    Option("slow", FLAG, ("run", *FILL, *EDIT),
           "show the noise first, and hold the frame of each step for 0.4 s", False),
    Option("verbose", FLAG, (*TUNED, "demo", "doctor", "bench"),
           "print more messages on standard error", False, short="v"),
)



FILLING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("at", TEXT, FILL,
           "fill a file in at this line and column, both from 1", metavar="LINE:COLUMN"),
    Option("tokens", _COUNT, FILL, "of the text at --at, exactly", metavar="N"),
    Option("at-most", _COUNT, FILL, "of the text at --at; default: 32", metavar="N"),
    Option("reply-to", TEXT, FILL,
           "the text is the complete reply to this message", metavar="MESSAGE"),
    Option("write", FLAG, (*FILL, *EDIT),
           "write the file, and not only show what changes; a copy of it stays beside it", False),
    Option("force", FLAG, EDIT,
           "write even what the embedded model, or an unsettled reply, has made of it", False),
    Option("strength", Number(0, 1), EDIT,
           "share of the text that begins as noise", STRENGTH, "SHARE", REPLY),
    decoding("max_tokens", EDIT, "N", REPLY, None, "; default: twice the text's, and 64"),
)



DECIDING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("questions", PATH, _BOTH,
           "TOML file of questions; docs/decisions.md", metavar="FILE", short="q", required=True),
    Option("state", TEXT, DECIDE,
           "decide about this text, and not about a table; - is standard input", metavar="TEXT"),
    Option("image", Each(PATH), DECIDE,
           "picture to decide about, beside --state or alone; may be given several times",
           (), "FILE"),
    Option("out", PATH, DECIDE,
           "CSV, TSV or JSON Lines file for the answers; one that is not complete is taken up; "
           "default: standard output",
           metavar="FILE", short="o"),
    Option("force", FLAG, DECIDE, "replace the file of answers", False),
    Option("probabilities", FLAG, DECIDE, "write the probability of every option too", False),
    Option("calibration", TEXT, DECIDE,
           "temperatures of `sfumato calibrate`, by name or file", None, "NAME"),
    Option("labelled", PATH, CALIBRATE,
           "table with a column of labels for each question", metavar="FILE", required=True),
    Option("name", TEXT, CALIBRATE, "of the calibration", "default", "NAME"),
    Option("folds", Whole(2, 20), CALIBRATE, "parts of the labels, each held out once", 5, "N"),
    Option("force", FLAG, CALIBRATE, "replace the calibration of that name", False),
    Option("samples", _SAMPLES, _BOTH,
           "reads of different noise, averaged; auto: more where one is unsure", 1, "N", READS),
    Option("orders", Whole(1, MOST_READS), _BOTH,
           "orders of the options, averaged", 1, "N", READS),
    Option("order", _ORDER, _BOTH,
           "the state first, or, for schema, each question before it", "state", "", READS),
    Option("steps", Whole(1, MOST_READ_STEPS), _BOTH, "denoising steps of a read", 1, "N", READS),
    Option("joint", FLAG, _BOTH, "read all questions in one canvas", False, "", READS),
    Option("no-label-mass", FLAG, DECIDE,
           "score the labels alone, which is faster", False, "", READS),
    Option("verify", FLAG, DECIDE,
           "let the causal mode answer too, and show its answer where it is another", False, "",
           READS),
    Option("seed", SEED, DECIDE, "of the noise, 0 to 2^64-1", 0, "N", READS),
    Option("seed", SEED, CALIBRATE, "of the noise and the folds, 0 to 2^64-1", 0, "N", READS),
    Option("concurrency", Whole(1, 256), _BOTH, "rows at a time", 4, "N", READS),
)



MEASURING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("model", PATH, BENCH, _FILE_OR_NAME, None, "PATH", SUBJECT, short="m"),
    Option("random-weights", TEXT, BENCH,
           "no checkpoint: 26b-a4b, 180m, qwen3-0.6b, sdar-1.7b, tiny or tiny-qwen3",
           None, "SIZE", SUBJECT),
    Option("format", TEXT, BENCH,
           "of random weights: q4_k_m, bf16, fp8, int4, nvfp4, …; default: q4_k_m, on a GPU bf16",
           None, "NAME", SUBJECT),
    Option("layers", FROM_1, BENCH,
           "of random weights; default: the real number", None, "N", SUBJECT),
    Option("predict", TEXT, BENCH,
           "runs nothing: a step's time on a device that need not be here (h200, h100, …)", None,
           "NAME", SUBJECT),
    Option("device", TEXT, BENCH, DEVICES, "auto", "NAME", SUBJECT),
    Option("dtype", Choice(DTYPES), BENCH, ", ".join(DTYPES), "auto", "NAME", SUBJECT),
    Option("activations", Choice(ACTIVATIONS), BENCH,
           "with quantized weights, on a CPU; default: int8", None, "", SUBJECT),
    Option("quantize", Choice(ON_LOAD), BENCH,
           "a checkpoint's float matrices, as they are loaded", None, "", SUBJECT),
    Option("cache-type", Choice(CACHE_TYPES), BENCH,
           "how keys and values are stored; default: as --dtype says", None, "",
           SUBJECT),
    Option("url", TEXT, BENCH,
           "an OpenAI-compatible server instead, as http://localhost:8000/v1", None, "URL",
           SUBJECT),
    Option("api-key", TEXT, BENCH,
           "the server's; better in SFUMATO_API_KEY", None, "KEY", SUBJECT, secret=True),
    Option("timeout", FROM_1, BENCH, "seconds to wait for a silent server", 600, "S", SUBJECT),
    Option("prompts", PATH, BENCH,
           "one a line, or JSON objects with messages or a text", None, "FILE", WORK),
    Option("prompt-tokens", FROM_0, BENCH, "synthetic prompts of N tokens", None, "N", WORK),
    Option("context", Listed(FROM_0), BENCH, "fill each prompt up to N tokens", None, "N,…", WORK),
    Option("max-tokens", Listed(FROM_1), BENCH, "length limit", (256,), "N,…", WORK),
    Option("threads", Listed(THREADS), BENCH,
           "CPU threads; default: torch's choice", None, "N,…", WORK),
    Option("concurrency", Listed(FROM_1), BENCH,
           "requests at a time; default: 1", None, "N,…", WORK),
    Option("warmup", FROM_0, BENCH, "requests before the measured ones", 1, "N", WORK),
    Option("repeats", FROM_1, BENCH, "of every prompt", 3, "N", WORK),
    Option("seed", SEED, BENCH, "of the first repeat", 0, "N", WORK),
    Option("fixed-steps", FROM_1, BENCH, "N per canvas; random weights: 8", None, "N", SAMPLING),
    decoding("ignore_eos", BENCH, "", SAMPLING, False),
    decoding("min_tokens", BENCH, "N", SAMPLING),
    Option("drafts", FLAG, BENCH,
           "ask a server for draft frames (stream_drafts)", False, "", SAMPLING),
    decoding("top_k", BENCH, "K", SAMPLING, None, ", 1 to 1024"),
    decoding("soft_skip", BENCH, "SHARE", SAMPLING, None, ROUNDED),
    decoding("soft_top_k", BENCH, "K[:K2]", SAMPLING, None, ALL),
    Option("where", FLAG, BENCH,
           "time the parts of a step, in a pass of their own", False, "", REPORT),
    Option("json", PATH, BENCH,
           "write a line of JSON; for -, instead of the table", None, "FILE", REPORT),
    Option("csv", PATH, BENCH,
           "write a row for each combination; for -, instead of the table", None, "FILE", REPORT),
    Option("plot", PATH, BENCH,
           "draw a PNG or SVG (needs sfumato[plot]); implies --where", None, "FILE", REPORT),
    Option("force", FLAG, BENCH, "replace files that exist", False, "", REPORT),
)


TUNED_ON = (
    # Name, kind, commands, help, default, metavar, group.
    Option("data", PATH, TUNE,
           "JSON Lines of conversations, or a folder of `datasets`; docs/tuning.md",
           metavar="FILE", required=True),
    Option("out", PATH, TUNE, "folder for the run", metavar="DIR", required=True),
    Option("held-out", TEXT, TUNE,
           "share of the conversations that is held out, 0 for none, or a file of others", "0.1",
           "SHARE"),
    Option("resume", FLAG, TUNE, "go on with the run that is in --out", False),
    Option("force", FLAG, TUNE, "replace the run that is in --out", False),
    *(Option(each.name.replace("_", "-"), each.kind, TUNE, each.help, each.default,
             "" if each.kind == FLAG or isinstance(each.kind, Choice) else "N", LEARNING)
      for each in TUNING),
)


SERVING = (
    # Name, kind, commands, help, default, metavar, group.
    # The engine.
    Option("slots", FROM_1, WITH_ENGINE, "requests that run at a time", 4, "N", ENGINE),
    Option("context", FROM_1, WITH_ENGINE,
           "tokens of a slot; default: 8192, or fewer", None, "N", ENGINE),
    Option("queue", FROM_1, SERVE, "requests that may wait", 64, "N", ENGINE),
    Option("strict", FLAG, SERVE, "refuse what does not fit a slot", False, "", ENGINE),
    Option("snapshot-memory", SIZE, SERVE,
           "memory of the device for snapshots of earlier prompts", 2**30, "SIZE", ENGINE),
    Option("memory-margin", Whole(0, 99), SERVE,
           "share of the memory that stays free", 5, "PERCENT", ENGINE),
    Option("prefill-chunk", FROM_1, SERVE,
           "prompt tokens encoded between two steps of other requests, at most; default: 512 on a "
           "CPU, 2048 on a GPU", None, "N", ENGINE),
    Option("max-steps", Whole(1, MOST_STEPS), SERVE,
           "denoising steps per canvas that a request may ask for", 256, "N", ENGINE),
    Option("request-timeout", SECONDS, SERVE,
           "a request fails after S seconds; 0: never", 21_600.0, "S", ENGINE),
    Option("drain", SECONDS, SERVE,
           "at the end, wait S seconds for running requests", 30.0, "S", ENGINE),
    # Ray
    Option("replicas", Whole(1, 4096), DEPLOY,
           "engines, each in a process of its own", 1, "N", REPLICAS),
    Option("max-replicas", Whole(1, 4096), DEPLOY,
           "let Ray start up to N, where more requests wait or run than there are slots; default: "
           "--replicas", None, "N", REPLICAS),
    Option("replica-cpus", Number(0, 4096), DEPLOY,
           "processors of a replica, by which Ray places it", 1.0, "N", REPLICAS),
    Option("replica-gpus", Number(0, 64), DEPLOY,
           "cards of a replica, by which Ray places it", 0.0, "N", REPLICAS),
    Option("health-timeout", Number(0, 86_400, without=(0,), unit="seconds"), DEPLOY,
           "a replica is replaced that makes no step for S seconds, three times", 60.0, "S",
           REPLICAS),
    # HTTP
    Option("host", TEXT, SERVE, "address to listen on; 0.0.0.0: all", "127.0.0.1", "ADDRESS", HTTP),
    Option("port", Whole(0, 65535), SERVE, "0: any free one", 8080, "N", HTTP),
    Option("name", TEXT, SERVE,
           "what clients call the model; default: the file's name", None, "TEXT", HTTP),
    Option("alias", Each(TEXT), SERVE,
           "another name of the model; may be given several times", (), "TEXT", HTTP),
    Option("api-key", Each(TEXT), SERVE,
           "ask clients for this key; may be given several times; better in SFUMATO_API_KEY",
           (), "KEY", HTTP, secret=True),
    Option("api-key-file", PATH, SERVE, "file that has the keys, one a line", None, "FILE", HTTP),
    Option("public-models", FLAG, SERVE,
           "answer /v1/models without a key", False, "", HTTP),
    Option("public-metrics", FLAG, SERVE,
           "answer /metrics without a key, which gateways do not send", False, "", HTTP),
    Option("show-model-path", FLAG, SERVE,
           "show in /props where the model lies", False, "", HTTP),
    Option("cors-origin", Each(TEXT), SERVE,
           "let web pages of this origin call, as https://chat.example; may be given several times",
           (), "URL", HTTP),
    Option("max-tokens", FROM_1, SERVE,
           "of a reply whose request sets none, as far as the context allows", 4096, "N", HTTP),
    Option("pooling", Choice(POOLINGS), SERVE,
           "of embeddings: the mean of all tokens, or the last one", "mean", "", HTTP),
    Option("max-body", SIZE, SERVE, "size of a request's body", 8 * 2**20, "SIZE", HTTP),
    Option("max-values", FROM_1, SERVE,
           "JSON values of a request, counted before parsing", 2**17, "N", HTTP),
    Option("max-messages", FROM_1, SERVE, "messages of a request", 1024, "N", HTTP),
    Option("max-choices", FROM_1, SERVE,
           "replies to a request: n, or n times the prompts", 128, "N", HTTP),
    Option("limit-mm-per-prompt", CountOf("image"), SERVE, "pictures of a request", 8, "N", HTTP),
    Option("allow-image-urls", Each(TEXT), SERVE,
           "fetch pictures from this web server, as img.example or 10.0.0.7:8000; *: from all that "
           "are public; may be given several times", (), "HOST", HTTP),
    Option("allow-image-files", PATH, SERVE,
           "read pictures of file:// URLs in this folder", None, "FOLDER", HTTP),
    Option("allow-adapters", PATH, ALONE,
           "let clients load and unload adapters of this folder", None, "FOLDER", HTTP),
    Option("response-store", SIZE, SERVE,
           "memory for responses that clients may refer to later; 0: none are kept",
           64 * 2**20, "SIZE", HTTP),
    Option("batch-dir", PATH, ALONE,
           "take batches, and keep their files in this folder", None, "FOLDER", HTTP),
    Option("batch-space", SIZE, ALONE,
           "size of all files in --batch-dir together", 4 * 2**30, "SIZE", HTTP),
    Option("lenient", FLAG, WITH_ENGINE,
           "ignore unknown fields instead of refusing them", False, "", HTTP),
    Option("open", FLAG, ALONE, "open the web page in a browser", False, "", HTTP),
    # The audit log.
    Option("audit-log", PATH, ALONE,
           "write a line of JSON for every request", None, "FILE", AUDIT),
    Option("audit-text", FLAG, ALONE, "write prompts and answers too", False, "", AUDIT),
    Option("audit-max-bytes", SIZE, ALONE,
           "size at which a new file is begun; 0: never", 64 * 2**20, "SIZE", AUDIT),
    Option("log-format", Choice(("text", "json")), ALONE,
           "of the log, on standard error", "text", "", AUDIT),
)


ON_HARDWARE = (
    # Name, kind, commands, help, default, metavar, group. The last of --help.
    Option("device", TEXT, TUNED, DEVICES, "auto", "NAME", HARDWARE),
    Option("dtype", Choice(DTYPES), TUNED, ", ".join(DTYPES), "auto", "NAME", HARDWARE),
    Option("activations", Choice(ACTIVATIONS), WEIGHTS, _FAST, "int8", "", HARDWARE),
    Option("quantize", Choice(ON_LOAD), TUNED, QUANTIZE_HELP, None, "", HARDWARE),
    Option("cache-type", Choice(CACHE_TYPES), (*WEIGHTS, "inspect"),
           "how keys and values are stored; default: as --dtype says", None, "", HARDWARE),
    Option("experts-on-cpu", Whole(0, MOST_LAYERS), WEIGHTS,
           "layers whose experts stay with the CPU, for a card that is too small", 0, "N",
           HARDWARE),
    Option("gpu-layers", WholeOr(Whole(0, MOST_LAYERS), "auto"), WEIGHTS,
           "last layers that are on the card; auto: as many as fit; default: all",
           None, "N", HARDWARE),
    Option("other-layers", Choice(OTHER_LAYERS), WEIGHTS,
           "layers that --gpu-layers leaves: cpu runs them, stream copies their weights to the "
           "card at each step, auto is the one that a trial finds faster", "auto", "", HARDWARE),
    Option("split", Listed(Whole(1, MOST_LAYERS)), WEIGHTS,
           "layers of each of several cards, --device and those after it; default: all on one",
           None, "N,N", HARDWARE),
    Option("threads", THREADS, TUNED, "CPU threads; default: cores", None, "N", HARDWARE),
)
# fmt: on

OPTIONS = (*GENERAL, *FILLING, *DECIDING, *TUNED_ON, *MEASURING, *SERVING, *VISIBLE, *ON_HARDWARE)


def options_of(command: str) -> list[Option]:
    """The options of a command, in the table's order."""
    return [option for option in OPTIONS if command in option.commands]
