"""What several rows of the tables of options share: commands, headings, kinds and names."""

from __future__ import annotations

from sfumato.options.limits import LAST_SEED, MOST_THREADS
from sfumato.options.settings import SAMPLERS
from sfumato.values import Flag, Number, Path, Size, Text, Whole

# Names that other modules define too, which need torch; tests hold them equal.
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("int8", "bf16")
CACHE_TYPES = ("bf16", "fp8", "q8_0")
OTHER_LAYERS = ("auto", "cpu", "stream")
ON_LOAD = ("q4_k", "q8_0", "fp8")
FORMATS = (
    *("q4_k_m", "q5_k_m", "q8_0", "q6_k", "q5_k", "q4_k", "q5_0"),
    *("bf16", "f16", "f32"),
)
DEVICES = "auto, cpu, cuda, cuda:1, mps, xpu"
POOLINGS = ("mean", "last")
SAMPLER_NAMES = ", ".join(SAMPLERS)

SERVE, BENCH = ("serve",), ("bench",)
TALK = ("run", "chat")
DECIDE, CALIBRATE = ("decide",), ("calibrate",)
FILL, EDIT = ("fill",), ("edit",)
WRITE = (*TALK, *FILL, *EDIT)
LOAD = (*WRITE, "serve", "decide", "calibrate", "perplexity")
EVERY = (
    *("run", "chat", "fill", "edit", "decide", "calibrate", "serve", "demo", "inspect"),
    *("convert", "doctor", "pull", "train", "eval", "bench", "perplexity"),
)

# The headings of --help.
MODEL, REPLY, ENGINE, HTTP, AUDIT = "model", "generation", "engine", "HTTP", "audit"
READS = "how questions are read"
SUBJECT, WORK, SAMPLING, REPORT = "what is measured", "work", "sampling", "report"
GROUP_NOTES = {
    REPLY: "defaults are the checkpoint's",
    SAMPLING: "defaults are the checkpoint's",
    WORK: "N,N,… measures every combination",
}

FLAG, TEXT, PATH, SIZE = Flag(), Text(), Path(), Size()
FROM_1, FROM_0 = Whole(1), Whole(0)
THREADS, SEED = Whole(1, MOST_THREADS), Whole(0, LAST_SEED)
SECONDS = Number(0, 10**9, unit="seconds")
QUANTIZE_HELP = "quantize float matrices as they are loaded; quantized ones stay as they are"
ROUNDED, ALL = "; default: what a CPU's rounding hides", "; default: all"
