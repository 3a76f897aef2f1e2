"""The options of `sfumato bench`."""

from __future__ import annotations

from sfumato.options.general import FILE
from sfumato.options.kinds import (
    ACTIVATIONS,
    ALL,
    BENCH,
    CACHE_TYPES,
    DEVICES,
    DTYPES,
    FLAG,
    FROM_0,
    FROM_1,
    ON_LOAD,
    PATH,
    REPORT,
    ROUNDED,
    SAMPLING,
    SEED,
    SUBJECT,
    TEXT,
    THREADS,
    WORK,
)
from sfumato.options.option import Option, decoding
from sfumato.values import Choice, Listed

_FILE_OR_NAME = f"{FILE}; with --url, the server's name of it"

# A row is a line or two; the formatter would make it nine.
# fmt: off
MEASURING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("model", PATH, BENCH, _FILE_OR_NAME, None, "PATH", SUBJECT, short="m"),
    Option("random-weights", TEXT, BENCH,
           "no checkpoint: 26b-a4b, 180m or tiny", None, "SIZE", SUBJECT),
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
# fmt: on
