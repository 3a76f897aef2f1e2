"""Are the kernels that are compiled ahead of time those that the 26B-A4B launches on an H200?

A program, since it needs kernels that are not interpreted: it runs the steps of a warm-up with two
layers of the real sizes on a CPU, notes what each launch would compile, runs nothing, and prints as
JSON which of it `ahead_of_time` does not compile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from tests.support.kernels import seen_as
from torch import nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver

from sfumato import ops
from sfumato.bench.subject import random_config
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.diffusion.step import Denoiser
from sfumato.diffusion.step.captured import ReadForwards
from sfumato.engine.runner import warm_up
from sfumato.model.cache import QuestionPool
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.head import vocabulary_pass
from sfumato.model.loading import _kept_dtype
from sfumato.model.network import Network
from sfumato.model.scores import vocabulary_mass
from sfumato.model.transformer import Transformer
from sfumato.ops.triton import ahead_of_time, self_test, twins
from sfumato.ops.triton import kernel as kernels
from sfumato.ops.triton.kernel import Kernel, all_kernels
from sfumato.ops.triton.planes import PlaneTensor, plane_bytes
from sfumato.ops.triton.tiles import TARGETS, candidates
from sfumato.weights import formats
from sfumato.weights.formats import CODES, ScaledTensor

NAME = "sm_90"  # whose tiles a CPU has
TARGET = GPUTarget(TARGETS[NAME].backend, TARGETS[NAME].number, TARGETS[NAME].warp)
CPU = torch.device("cpu")

FORMATS = ("Q4_K", "Q5_0", "Q6_K")
"""Of weights in planes: those of a Q4_K_M file, where rows of 704 are Q5_0 and the embedding is
Q6_K."""

Key = tuple[str, str, str]


class Driver:
    """A driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0


class Replayed:
    """A backend of graphs that captures nothing."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


def ahead() -> set[Key]:
    """What `make aot` compiles with every shape."""
    keys = set()
    for job in ahead_of_time.jobs([NAME], every=True, formats=FORMATS):
        kernel = all_kernels()[job.kernel].as_variant(job.variant)
        tile = candidates(job.kernel, NAME)[job.use][job.candidate]
        source, options = ahead_of_time.source_of(kernel, tile, TARGETS[NAME])
        parsed = make_backend(TARGET).parse_options(dict(options))
        keys.add((job.kernel, source.hash(), parsed.hash()))
    return keys


def source_of_launch(kernel: Kernel, given: dict[str, Any]) -> ASTSource:
    """What a launch with these parameters and options compiles."""
    function = kernel.function
    given = {**given, "debug": False}
    given["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    if hasattr(knobs.compilation, "fpsan_homomorphic_casts"):  # since Triton 3.9
        given["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
    _, _, _, backend, binder = function.device_caches[0]
    bound, kinds, options = binder(**given)
    packed = function._pack_args(backend, given, bound, kinds, options)
    return ASTSource(function, *packed[1:])


@contextmanager
def noted_launches(keys: set[Key]) -> Iterator[None]:
    """Notes what launches would compile, in place of them."""

    def take(kernel: Kernel, grid: Any, tile: Any, device: Any, parameters: Any) -> None:
        given = kernels.given(kernel, tile, device, parameters)
        options = {name: given[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        parsed = make_backend(TARGET).parse_options(options)
        keys.add((kernel.name, source_of_launch(kernel, given).hash(), parsed.hash()))
        for name in ("entropy", "words"):  # garbage would be an error of the model's
            if isinstance(tensor := given.get(name), torch.Tensor):
                tensor.zero_()

    before, kernels._run = kernels._run, take
    try:
        yield
    finally:
        kernels._run = before


def two_layers() -> Network:
    """A sliding and a full layer, whose large weights are memory that nothing touches."""
    config = DIFFUSION_GEMMA.config.from_hf(random_config("26b-a4b", layers=2), {})
    with torch.device("meta"):
        transformer = Transformer(config).requires_grad_(False)
    for path, module in transformer.named_modules():
        for name, value in module.named_parameters(recurse=False):
            make = torch.empty if value.numel() > 1 << 20 else torch.ones
            # The norms of the first layer are float32, as GGUF files have them.
            stored = torch.float32 if path.startswith("blocks.0.") else torch.bfloat16
            kept = _kept_dtype(f"{path}.{name}", value.dim(), stored, torch.bfloat16)
            own = make(value.shape, dtype=kept)
            setattr(module, name, nn.Parameter(own, requires_grad=False))
        for name, value in module.named_buffers(recurse=False):
            setattr(module, name, torch.ones(value.shape, dtype=value.dtype))
    return Network(transformer, CPU, torch.bfloat16, torch.bfloat16, None)


def planes(format: str, *shape: int) -> PlaneTensor:
    """Memory that nothing touches."""
    data = torch.empty(plane_bytes(format, shape), dtype=torch.uint8)
    return PlaneTensor(data, formats.FORMATS[format], shape, math.prod(shape[:-1]))


def multiply_planes() -> None:
    """Products with weights in planes, of few tokens and of many."""
    for tokens in (256, 4096):
        x = torch.ones(tokens, 2816, dtype=torch.bfloat16)
        q, k = (planes("Q4_K", width, 2816) for width in (4096, 2048))
        for format in ("Q4_K", "Q6_K"):
            ops.linear_each(x, q, k, planes(format, 2048, 2816))
        ops.linear_gated(x, *[planes("Q4_K", 2112, 2816)] * 2)
        ops.linear(torch.ones(tokens, 2112).bfloat16(), planes("Q5_0", 2816, 2112))
        chosen = torch.zeros(tokens, 8, dtype=torch.int64)
        gate_up, down = planes("Q4_K", 128, 1408, 2816), planes("Q5_0", 128, 2816, 704)
        ops.experts(x, chosen, chosen.float(), gate_up, down)
    hidden, ones = x[:256], torch.ones(256)
    inputs = hidden, planes("Q6_K", 262144, 2816), ones, ones.double(), 30.0, None, 0, None
    vocabulary_pass(*inputs, torch.zeros(256, dtype=torch.bool))
    vocabulary_mass(hidden, inputs[1], torch.zeros(256, 1, dtype=torch.int64), 30.0, 0, None)


def multiply_codes() -> None:
    """As `multiply_planes`, of weights of 8-bit codes, in all shapes."""
    for tokens in (256, 4096):
        for dtype in CODES.values():
            for outputs, inputs in ((2816, 4096), (2816, 8192), (2816, 2112)):
                ops.linear(torch.ones(tokens, inputs).bfloat16(), scaled(dtype, outputs, inputs))
            x = torch.ones(tokens, 2816, dtype=torch.bfloat16)
            for widths in ((4096, 2048, 2048), (8192, 1024)):
                ops.linear_each(x, *(scaled(dtype, width, 2816) for width in widths))
            ops.linear_gated(x, *[scaled(dtype, 2112, 2816)] * 2)
            x, chosen = torch.ones(tokens, 2816).bfloat16(), torch.zeros(tokens, 8).long()
            weights = scaled(dtype, 128, 1408, 2816), scaled(dtype, 128, 2816, 704)
            ops.experts(x, chosen, chosen.float(), *weights)


def scaled(dtype: torch.dtype, *shape: int) -> ScaledTensor:
    """Memory that nothing touches."""
    return ScaledTensor(torch.empty(shape, dtype=dtype), torch.empty(shape[:-1]))


def main() -> None:
    driver.set_active(Driver())
    known, launched = ahead(), set[Key]()
    network = two_layers()
    slots = network.new_slots(3, 4096 + 512)  # full layers read it in two pieces
    formats = *FORMATS, *CODES
    self_test.serve_only(CPU, frozenset(twins(formats)))
    # The read at the end of the warm-up takes numbers that no kernel has computed.
    with seen_as("cpu", "cuda"), noted_launches(launched), suppress(ArithmeticError):
        multiply_planes()
        multiply_codes()
        denoiser = Denoiser(network, len(slots), Replayed())
        assert denoiser.graphs
        questions = QuestionPool(network.config, 512, 256, torch.bfloat16, CPU)
        forwards = ReadForwards(network, denoiser.graphs, questions)
        warm_up(denoiser, slots, replace(REFERENCE, canvas_length=256), forwards)
    names = {name for name, *_ in launched}
    missing = sorted({name for name, *rest in launched if (name, *rest) not in known})
    findings = {"launched": len(launched), "names": sorted(names), "missing": missing}
    print(json.dumps(findings))


if __name__ == "__main__":
    main()
