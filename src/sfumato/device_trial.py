"""Trials of a device before it serves: on one without kernels of ours, what a small reply calls is
computed there too; on one with kernels, layers and a whole step of the model that was loaded.

Apple's and Intel's GPUs run torch's own operations, none of which has been seen there; one that is
wrong would make texts of noise.  Kernels were tried one by one when they were prepared
(`ops/triton/tries.py`); here they meet the model's weights, and each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults
from sfumato.diffusion.limits import Limits
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network, skeleton
from sfumato.model.network import Network
from sfumato.model.scores import label_mass
from sfumato.model.segments import Suffix
from sfumato.ops import torch_device
from sfumato.ops.device_check import Call, check, copied
from sfumato.ops.registry import PANELS, reference_only, watched
from sfumato.ops.triton import self_test
from sfumato.tasks.alone import generate
from sfumato.weights.formats import QuantizedTensor, of_files

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_EACH = 3
"""Calls of an operation that are kept, each with shapes of its own."""
_PROMPT, _TOKENS = 48, 40
"""Tokens of the trial's prompt and reply: more than one canvas of the embedded model."""


@cache
def try_device(device: torch.device, small: Path) -> dict[str, str]:
    """Checks the operations on a device, once; why the CPU serves some of them there, by operation.
    small: a checkpoint whose reply takes a moment on a CPU."""
    start = time.perf_counter()
    wrong = check(device, [*_calls(small), *_dequantizations()])
    log.info("operations on %s: checked in %.1f s", device, time.perf_counter() - start)
    return wrong


TIMES = 4.0
"""The error of a layer or a step with kernels, in units of torch's own in the same dtype, that
passes: where two experts are nearly equal, either may choose the other one."""


def try_network(network: Network) -> None:
    """Compares the first layer of each kind, and all layers, with torch: the hidden states of a
    canvas behind a prompt, and its soft embedding, where float32 activations are taken for exact.
    Where kernels are wrong together, the operation without which they are right is off from then
    on, or all are. Where layers have other bits on two streams, they have one from then on."""
    device = network.device
    if network.is_mixed or not self_test.prepared(device):
        return
    start, every = time.perf_counter(), range(len(network.config.layers))
    kinds = {network.config.layers[at].sliding: at for at in reversed(every)}
    try:
        _try_two_streams(network)
        for layers in (sorted(kinds.values()), every):
            _switch_off_what_is_wrong(network_of(network, layers))
    except torch.OutOfMemoryError as error:
        log.info("kernels were not compared with torch in a whole step: %s", str(error)[:120])
    log.info("layers on %s: compared in %.1f s", device, time.perf_counter() - start)


def _try_two_streams(network: Network) -> None:
    reasons, two = torch_device.one_stream, _step(network)
    device = two[0].device
    if device in reasons:
        return
    reasons[device] = "a model is being compared"
    try:
        one = _step(network)
    finally:
        reasons.pop(device, None)
    # Numbers that a wrong kernel makes NaN are those of that kernel, which is found next.
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two, strict=True)):
        reasons[device] = "two streams gave other bits when a model was loaded"
        log.warning("layers run on one stream of %s: two gave other bits", device)


def _switch_off_what_is_wrong(network: Network) -> None:
    """Compares the network with torch, without one operation after another where it is wrong."""
    with reference_only():
        torchs = _step(network)
        exact = _step(Network(network.transformer, network.device, torch.float32, torch.float32))

    served = self_test.prepared(network.device) or frozenset()

    def error(without: str = "") -> AssertionError | None:
        self_test.serve_only(network.device, served - {without})
        try:
            for each in zip(_step(network), torchs, exact, strict=True):
                self_test.assert_near(*each, TIMES)
        except AssertionError as wrong:
            return wrong
        finally:
            self_test.serve_only(network.device, served)
        return None

    if (seen := error()) is None:
        return
    wrong = next((name for name in sorted(served) if error(name) is None), "")
    what = f"{len(network.config.layers)} layers are wrong with its kernels"
    for name in [wrong] if wrong else sorted(served):
        self_test.switch_off(name, network.device, seen, what)


@torch.no_grad()
def _step(network: Network) -> tuple[Tensor, Tensor]:
    """The hidden states of a canvas, all tokens of which differ, behind a prompt, and the soft
    embedding that the pass over the vocabulary makes of them."""
    vocabulary, length = network.config.vocab_size, network.config.canvas_length
    slot = network.new_slot(_PROMPT + length)
    network.encode([torch.arange(_PROMPT) * 7 % vocabulary], [slot])
    hidden = network.denoise([torch.arange(length) * 11 % vocabulary], [slot])
    even = torch.linspace(0.5, 1, length, device=network.device)  # temperatures, and draws
    return hidden, network.head(hidden, even, 1 - even.double()).soft


def network_of(network: Network, layers: Sequence[int]) -> Network:
    """The network with these layers alone. Shares all weights."""
    config = replace(network.config, layers=tuple(network.config.layers[at] for at in layers))
    transformer, part = network.transformer, skeleton(config)
    for name in ("embed_tokens", "norm", "self_conditioning", "lm_head"):
        setattr(part, name, getattr(transformer, name))
    part.blocks = [transformer.blocks[at] for at in layers]
    part.layers = nn.ModuleList(part.blocks)
    return Network(part, network.device, network.dtype, network.cache_dtype, network.head.output)


def _calls(small: Path) -> list[Call]:
    """What a reply on a CPU calls, with other arguments each time."""
    checkpoint = open_checkpoint(small)
    network = load_network(checkpoint, _CPU, torch.float32)
    config = SamplerConfig(max_steps=2).over(checkpoint_defaults(checkpoint))
    prompt = torch.arange(_PROMPT) % network.config.vocab_size
    kept: dict[tuple[str, Any], Call] = {}

    def keep(operation: str, form: str, arguments: tuple[Any, ...]) -> None:
        shapes = tuple(x.shape for x in arguments if isinstance(x, Tensor))
        count = sum(name == operation for name, _ in kept)
        # What is given functions computes nothing itself: they call operations.
        is_call = form != PANELS and not any(map(callable, arguments))
        if is_call and (operation, shapes) not in kept and count < _EACH:
            kept[operation, shapes] = Call(operation, copied(arguments))

    with watched(keep):
        for _ in generate(network, prompt, config, Limits(_TOKENS, ()), seed=0):
            pass
        _read(network, prompt)
    return list(kept.values())


def _read(network: Network, prompt: Tensor) -> None:
    """Two reads of one prefix, as decisions make them."""
    slot = network.new_slot(len(prompt))
    network.encode([prompt], [slot])
    suffixes = [Suffix(slot), Suffix(slot)]
    network.encode_beside([prompt[:9], prompt[:5]], suffixes)
    hidden = network.denoise_beside([prompt[:16]] * 2, suffixes, [[3, 4], [5]])
    label_mass(network.head, hidden, [[1, 2], [3, 4], [5, 6]])


def _dequantizations() -> list[Call]:
    """Blocks of every format, of zeros and of every byte, as floats."""
    calls = []
    for block in of_files("blocks").values():
        # Bytes below 0x7C make no float16 that is infinite or no number.
        data = torch.arange(4 * block.block_bytes).remainder(0x7B).to(torch.uint8).view(4, -1)
        weight = QuantizedTensor(data, block, (4, block.block_size))
        calls.append(Call("dense", (weight, torch.float32, None)))
    return calls
