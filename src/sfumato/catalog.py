"""What is published of DiffusionGemma 26B-A4B: where, how large, what it needs, how fast it is.

One table of data, which `pull`, `doctor` and the docs share. Knows
neither files nor machines, and imports nothing heavy. The repositories are those that their
publishers name; sizes are the files'. Memory is `engine.memory.estimate`'s prediction for one
request of 4,096 tokens on a CPU with compiled operations. Seconds a step: docs/performance.md
measured Q4_K_M on two cores with AVX-512. The other formats are derived from that figure by
`doctor`'s estimates for one machine (BF16: by two layers of the real size), and so are the other
machines.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "DiffusionGemma 26B-A4B"
GGUF = "unsloth/diffusiongemma-26B-A4B-it-GGUF"
SAFETENSORS = "google/diffusiongemma-26B-A4B-it"
STEPS = (12, 48)
"""Denoising steps of a canvas of 256 tokens: usual for an easy text, and the most there are."""

TOWER = 1.2e9
"""Bytes of the vision tower in BF16, by its shapes. `pull` gets one with a GGUF file; reading
pictures takes as much memory more."""

MARGIN = 0.6e9
"""Bytes that running takes beside the weights: a slot, the working buffers, libraries."""


@dataclass(frozen=True)
class Published:
    """One published form of the model."""

    format: str
    repo: str
    file: str | None  # None: the whole repository, which is safetensors
    nbytes: float  # to download
    memory: float  # bytes to run it
    step_s: float  # on the first of MACHINES
    measured: bool = False  # step_s; otherwise it is derived

    @property
    def name(self) -> str:
        """What `-m` and `pull` take."""
        return f"hf:{self.repo}" + (f":{self.format}" if self.file else "")

    @property
    def command(self) -> str:
        return f"sfumato pull {self.name}"


@dataclass(frozen=True)
class Machine:
    """A typical machine; `share` of the first one's time is what a step takes there."""

    name: str
    share: float
    bf16: bool  # whether its instructions multiply bfloat16, which the BF16 figure needs


def _gguf(format: str, gigabytes: float, memory: float, step_s: float) -> Published:
    file = f"diffusiongemma-26B-A4B-it-{format}.gguf"
    return Published(format, GGUF, file, gigabytes * 1e9, memory * 1e9, step_s, format == "Q4_K_M")


PUBLISHED = (
    _gguf("Q4_K_M", 16.8, 18.9, 6.0),
    _gguf("Q5_K_M", 19.1, 21.3, 6.3),
    _gguf("Q6_K", 22.6, 24.7, 7.0),
    _gguf("Q8_0", 26.9, 28.1, 5.8),
    _gguf("BF16", 50.5, 51.0, 9.3),
    Published("safetensors", SAFETENSORS, None, 51.6e9, 51.0e9, 9.3),
)
"""The smallest first. The last may be quantized while it is loaded: --quantize q4_k."""

MACHINES = (
    Machine("2 cores AVX-512", 1.0, True),
    Machine("8 cores AVX-512", 1 / 4, True),  # in proportion to the cores
    Machine("8 cores AVX2", 3.5 / 4, False),  # six layers took 3.5 times as long with AVX2
)


def find(repo: str, file: str | None) -> Published | None:
    """The entry of that repository and file, if it is listed."""
    listed = (entry for entry in PUBLISHED if entry.repo == repo)
    return next((entry for entry in listed if entry.file in (None, file)), None)


def step_seconds(entry: Published, machine: Machine) -> float | None:
    """What a step takes there; None where there is no basis for a figure."""
    if not machine.bf16 and entry.format in ("BF16", "safetensors"):
        return None
    return entry.step_s * machine.share


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def advice() -> str:
    """How to get the model, in lines for a user who has no checkpoint yet."""
    lines = [f"To get {MODEL}:"]
    for entry in PUBLISHED:
        steps = [step_seconds(entry, machine) for machine in MACHINES]
        shown = ["-" if seconds is None else f"{seconds:.1f}" for seconds in steps]
        shown[0] += "*" if entry.measured else ""
        size, memory = gigabytes(entry.nbytes), gigabytes(entry.memory)
        lines.append(f"  {entry.command}")
        lines.append(f"    {size}, needs {memory} of memory, a step: {' / '.join(shown)} s")
    return "\n".join(
        [
            *lines,
            f"Seconds a step on {' / '.join(machine.name for machine in MACHINES)}",
            "(* measured, the others derived from it); `sfumato doctor` estimates yours.",
            "The safetensors need the memory of Q4_K_M with --quantize q4_k. Then:",
            f'  sfumato run -m {PUBLISHED[0].name} "Who are you?"',
        ]
    )
