"""What is published: names of models, where their files are, how large they are, what they need.

One table of data, which names of models, `pull`, `doctor` and the docs share. Knows neither files
nor machines, and imports nothing heavy. The repositories are those that their publishers name;
sizes are the files', or follow from the number of parameters in bfloat16 where `about` says so.

DiffusionGemma: memory is `engine.memory.estimate`'s prediction for one request of 4,096 tokens on a
CPU with compiled operations. Seconds a step: docs/performance.md measured Q4_K_M on two cores with
AVX-512. The other formats are derived from that figure by `doctor`'s estimates for one machine
(BF16: by two layers of the real size), and so are the other machines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hf:"
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

SHARE = {"q4_k": 0.36, "q8_0": 0.55, "fp8": 0.55}
"""What quantizing while loading leaves of bfloat16, the embedding's two copies included."""

NOT_VERIFIED = "not yet verified on the published weights"


@dataclass(frozen=True)
class Published:
    """One published form of a model."""

    name: str  # what -m, `load` and `pull` take
    title: str
    format: str
    repo: str
    file: str | None  # None: the whole repository, which is safetensors
    nbytes: float  # to download
    licence: str
    good_for: str
    model_type: str  # of config.json
    about: bool = False  # nbytes is computed
    memory: float | None = None  # bytes to run it, where they were predicted from its shapes
    step_s: float | None = None  # on the first of MACHINES
    measured: bool = False  # step_s; otherwise it is derived
    verified: str = ""  # SHA-256 of the answers of `verify-model`, once a user has reported them

    @property
    def address(self) -> str:
        """The same by repository and format."""
        return f"{PREFIX}{self.repo}" + (f":{self.format}" if self.file else "")

    @property
    def command(self) -> str:
        return f"sfumato pull {self.name}"

    @property
    def size(self) -> str:
        return ("about " if self.about else "") + gigabytes(self.nbytes)

    @property
    def offer(self) -> str:
        """What it is, in a few words."""
        return f"{self.title}, {self.size}, {self.licence}"

    def needs(self, quantize: str | None = None) -> float:
        """Bytes of memory to run it. quantize: the format that floats become as they are loaded."""
        if quantize is not None and self.file is None:
            return self.nbytes * SHARE[quantize] + MARGIN
        return self.memory or self.nbytes + MARGIN


@dataclass(frozen=True)
class Machine:
    """A typical machine; `share` of the first one's time is what a step takes there."""

    name: str
    share: float
    bf16: bool  # whether its instructions multiply bfloat16, which the BF16 figure needs


def _gemma(
    format: str, gigabytes: float, memory: float, step_s: float, good_for: str = ""
) -> Published:
    tensors = format == "safetensors"
    return Published(
        "diffusiongemma" if tensors else f"diffusiongemma-{format.lower()}",
        MODEL,
        format,
        SAFETENSORS if tensors else GGUF,
        None if tensors else f"diffusiongemma-26B-A4B-it-{format}.gguf",
        gigabytes * 1e9,
        "Apache-2.0",
        good_for or "as q4_k_m, rounded less",
        "diffusion_gemma",
        memory=memory * 1e9,
        step_s=step_s,
        measured=format == "Q4_K_M",
    )


def _sdar(size: str, gigabytes: float, good_for: str, about: bool = False) -> Published:
    kind = "sdar_moe" if "A3B" in size else "sdar"
    return Published(
        f"sdar-{size.lower()}",
        f"SDAR {size}",
        "safetensors",
        f"JetLM/SDAR-{size}-Chat",
        None,
        gigabytes * 1e9,
        "MIT",  # of the project; the hub's pages of the weights say Apache-2.0
        good_for,
        kind,
        about,
    )


SMALL = (
    Published(
        "qwen3-0.6b-diffusion",
        "Qwen3 0.6B as block diffusion",
        "safetensors",
        "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",  # dllm-collection's, until it was renamed
        None,
        1.5e9,
        "Apache-2.0",
        "a first look at block diffusion; knows little",
        "a2d-qwen3",
        about=True,
    ),
    _sdar("1.7B", 4.1, "short answers and simple tasks on a laptop"),
    _sdar("4B", 8.8, "chat on a laptop with 16 GB", about=True),
    _sdar("8B", 16.4, "chat, in 16 GB with --quantize q8_0"),
    _sdar("30B-A3B", 61.1, "the largest; 3B of its weights work at a time", about=True),
)
"""Mask-token models of Qwen3's network, the smallest first."""

PUBLISHED = (
    _gemma("Q4_K_M", 16.8, 18.9, 6.0, "chat, pictures and tools, in 24 GB"),
    _gemma("Q5_K_M", 19.1, 21.3, 6.3),
    _gemma("Q6_K", 22.6, 24.7, 7.0),
    _gemma("Q8_0", 26.9, 28.1, 5.8),
    _gemma("BF16", 50.5, 51.0, 9.3),
    _gemma("safetensors", 51.6, 51.0, 9.3, "what was trained; with --quantize q4_k in 24 GB"),
)
"""DiffusionGemma, the smallest first. The last may be quantized while it is loaded."""

CATALOGUE = {entry.name: entry for entry in (*SMALL, *PUBLISHED)}
"""All models that have a name, by name."""

FIRST = CATALOGUE["sdar-1.7b"]
"""The model that newcomers are pointed to."""

MACHINES = (
    Machine("2 cores AVX-512", 1.0, True),
    Machine("8 cores AVX-512", 1 / 4, True),  # in proportion to the cores
    Machine("8 cores AVX2", 3.5 / 4, False),  # six layers took 3.5 times as long with AVX2
)


EMBEDDED = Path(__file__).parent / "embedded"
"""The model that is meant where none is named."""

PACKAGED = {"embedded": EMBEDDED, "embedded-masks": EMBEDDED.with_name("embedded_masks")}
"""The models that the package has, by name."""


def packaged_name(path: Path) -> str | None:
    """The name of the model in the package whose folder that is; None where it is none of them."""
    folder = path.resolve()
    return next((name for name, each in PACKAGED.items() if each.resolve() == folder), None)


def packaged_path(given: str) -> Path | None:
    """The folder of the model of the package that a name means; None where it means none, or a
    file has that name."""
    return None if os.path.exists(given) else PACKAGED.get(given)


def shown_name(path: str | None) -> str:
    """Returns the name of the model of a file or folder that has no other; None: that of the first
    of PACKAGED."""
    packaged = next(iter(PACKAGED)) if path is None else packaged_name(Path(path))
    return f"sfumato-{packaged}" if packaged else Path(path or "").absolute().name


def is_name(given: str) -> bool:
    """Whether that is a name of a model: of the catalogue, or with `hf:`."""
    return given.startswith(PREFIX) or given.lower() in CATALOGUE


def find(repo: str, file: str | None) -> Published | None:
    """The entry of that repository and file, if it is listed."""
    listed = (entry for entry in CATALOGUE.values() if entry.repo == repo)
    return next((entry for entry in listed if entry.file in (None, file)), None)


def step_seconds(entry: Published, machine: Machine) -> float | None:
    """What a step takes there; None where there is no basis for a figure."""
    if entry.step_s is None or (not machine.bf16 and entry.format in ("BF16", "safetensors")):
        return None
    return entry.step_s * machine.share


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def advice() -> str:
    """How to get a model, in lines for a user who has no checkpoint yet."""
    lines = ["Small models, the first three for a laptop:"]
    for entry in SMALL:
        lines.append(f"  {entry.command}")
        lines.append(f"    {entry.size}, {entry.licence}: {entry.good_for}")
    lines.append(f"{MODEL} (Apache-2.0), which also reads pictures:")
    for entry in PUBLISHED:
        steps = [step_seconds(entry, machine) for machine in MACHINES]
        shown = ["-" if seconds is None else f"{seconds:.1f}" for seconds in steps]
        shown[0] += "*" if entry.measured else ""
        lines.append(f"  {entry.command}")
        lines.append(
            f"    {entry.size}, needs {gigabytes(entry.needs())} of memory, "
            f"a step: {' / '.join(shown)} s"
        )
    return "\n".join(
        [
            *lines,
            f"Seconds a step on {' / '.join(machine.name for machine in MACHINES)}",
            "(* measured, the others derived from it); `sfumato doctor` estimates yours.",
            "--quantize q8_0 or q4_k loads safetensors in half or a third of the memory.",
            f"Sfumato is {NOT_VERIFIED} of any of them:",
            "`sfumato verify-model NAME` prints what to report. Then:",
            f'  sfumato run -m {FIRST.name} "Who are you?"',
        ]
    )
