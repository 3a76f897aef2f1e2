"""The options of every command but `serve` and `bench`, and those that these share with others."""

from __future__ import annotations

from sfumato.options.kinds import (
    ACTIVATIONS,
    ALL,
    CACHE_TYPES,
    DEVICES,
    DTYPES,
    EDIT,
    EVERY,
    FILL,
    FLAG,
    FORMATS,
    FROM_1,
    LOAD,
    MODEL,
    ON_LOAD,
    OTHER_LAYERS,
    PATH,
    QUANTIZE_HELP,
    REPLY,
    ROUNDED,
    SAMPLER_NAMES,
    SAMPLING,
    SEED,
    TALK,
    TEXT,
    THREADS,
    WRITE,
)
from sfumato.options.limits import MOST_LAYERS, MOST_TOKENS
from sfumato.options.option import Option, decoding
from sfumato.values import Choice, Listed, Whole, WholeOr

FILE = "a GGUF file, a file or folder of safetensors, or hf:owner/name[:file]; default: embedded"
_TO = (
    f"{', '.join(FORMATS)}, or nearest for a narrow source; default: nearest for a narrow source, "
    "q4_k_m for another GGUF, bf16 (of bf16, f16, f32) for a folder"
)
_FAST = "on a CPU, for products with quantized weights: int8, or bf16, more exact"

# A row is a line or two; the formatter would make it nine.
# fmt: off
GENERAL = (
    # Name, kind, commands, help, default, metavar, group.
    Option("config", PATH, EVERY, "TOML file of options; docs/options.md", metavar="FILE"),
    # What a command prints.
    Option("json", FLAG,
           ("run", *FILL, *EDIT, "decide", "calibrate", "perplexity", "inspect", "doctor", "eval"),
           "print a JSON object", False),
    Option("tensors", FLAG, ("inspect",), "list every tensor", False),
    # train and eval
    Option("recipe", TEXT, ("train",), "name of the recipe", "embedded", "NAME"),
    Option("out", PATH, ("train",), "folder for the checkpoint", metavar="DIR", required=True),
    Option("steps", FROM_1, ("train",), "steps of each stage; default: the recipe's", metavar="N"),
    Option("from", PATH, ("train",), "begin a later stage with this one", metavar="DIR"),
    Option("stage", Whole(2, 3), ("train",), "the stage that --from begins", 2, "N"),
    Option("threads", THREADS, ("train",), "CPU threads; default: all", metavar="N"),
    Option("force", FLAG, ("train",), "replace a checkpoint that is at --out", False),
    Option("count", FROM_1, ("eval",), "tasks of each set at most", 200, "N"),
    # convert and pull
    Option("to", Choice((*FORMATS, "nearest")), ("convert",), _TO, metavar="FORMAT"),
    Option("force", FLAG, ("convert",), "replace an existing file or folder", False),
    Option("force", FLAG, ("pull",), "download even where disk or memory is short", False),
    # perplexity
    Option("context", Whole(2, MOST_TOKENS), ("perplexity",),
           "tokens of a window; default: 2048, or the model's context", None, "N"),
    Option("stride", FROM_1, ("perplexity",),
           "tokens by which a window goes on, which it scores; default: half a window", None, "N"),
    # The model.
    Option("model", PATH, (*LOAD, "eval"), FILE, None, "PATH", MODEL, short="m"),
    Option("device", TEXT, LOAD, DEVICES, "auto", "NAME", MODEL),
    Option("dtype", Choice(DTYPES), LOAD, ", ".join(DTYPES), "auto", "NAME", MODEL),
    Option("activations", Choice(ACTIVATIONS), LOAD, _FAST, "int8", "", MODEL),
    Option("quantize", Choice(ON_LOAD), LOAD, QUANTIZE_HELP, None, "", MODEL),
    Option("cache-type", Choice(CACHE_TYPES), (*LOAD, "inspect", "eval"),
           "how keys and values are stored; default: as --dtype says", None, "", MODEL),
    Option("quantize", Choice(ON_LOAD), ("inspect", "eval"), QUANTIZE_HELP),
    Option("experts-on-cpu", Whole(0, MOST_LAYERS), LOAD,
           "layers whose experts stay with the CPU, for a card that is too small", 0, "N", MODEL),
    Option("gpu-layers", WholeOr(Whole(0, MOST_LAYERS), "auto"), LOAD,
           "last layers that are on the card; auto: as many as fit; default: all",
           None, "N", MODEL),
    Option("other-layers", Choice(OTHER_LAYERS), LOAD,
           "layers that --gpu-layers leaves: cpu runs them, stream copies their weights to the "
           "card at each step, auto is the one that a trial finds faster", "auto", "", MODEL),
    Option("split", Listed(Whole(1, MOST_LAYERS)), LOAD,
           "layers of each of several cards, --device and those after it; default: all on one",
           None, "N,N", MODEL),
    Option("threads", THREADS, LOAD, "CPU threads; default: cores", None, "N", MODEL),
    # Generation.
    Option("system", TEXT, WRITE, "system message", None, "TEXT", REPLY),
    decoding("thinking", TALK, "", REPLY, False),
    decoding("max_tokens", TALK, "N", REPLY, 256),
    decoding("stop", TALK, "TEXT", REPLY, (), "; may be given several times"),
    decoding("seed", WRITE, "N", REPLY, 0),
    Option("seed", SEED, ("demo",), "picks the puzzle, 0 to 2^64-1", 0, "N"),
    Option("seed", SEED, ("train",), "random seed, 0 to 2^64-1", 0, "N"),
    Option("seed", SEED, ("eval",), "draws the held-out tasks and the noise, 0 to 2^64-1", 0, "N"),
    decoding("mode", TALK, "", REPLY, None, "; default: canvas"),
    decoding("max_steps", WRITE, "N", REPLY, None, ", 1 to 4096"),
    decoding("sampler", WRITE, "NAME", REPLY, None, f": {SAMPLER_NAMES}"),
    decoding("entropy_bound", WRITE, "NATS", REPLY, None, "; of the sampler entropy-bound"),
    decoding("temperature", WRITE, "T", REPLY, None, "; default: 1"),
    decoding("settle_at_end", TALK, "", REPLY, False),
    decoding("settle_at_end", ("eval",), "", SAMPLING, False),
    decoding("top_k", WRITE, "K", REPLY, None, ", 1 to 1024"),
    decoding("top_p", WRITE, "P", REPLY),
    decoding("soft_skip", WRITE, "SHARE", REPLY, None, ROUNDED),
    decoding("soft_skip", ("eval",), "SHARE", SAMPLING, None, ROUNDED),
    decoding("soft_top_k", WRITE, "K[:K2]", REPLY, None, ALL),
    decoding("soft_top_k", ("eval",), "K[:K2]", SAMPLING, None, ALL),
)

VISIBLE = (
    # What people see.
    Option("no-visual", FLAG, (*WRITE, "demo"),
           "plain lines instead of the live canvas", False),
    Option("replay", PATH, ("run",),
           "save how the reply was denoised, as a page that plays by itself", None, "FILE.html"),
    Option("force", FLAG, ("run",), "replace the file of --replay", False),
    Option("slow", FLAG, ("run", *FILL, *EDIT),
           "show the noise first, and hold the frame of each step for 0.4 s", False),
    Option("verbose", FLAG, (*LOAD, "demo", "doctor", "eval", "bench"),
           "print more messages on standard error", False, short="v"),
)
# fmt: on
