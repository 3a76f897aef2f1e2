"""A trial of a device without kernels of ours: what a small reply calls is computed there too.

Apple's and Intel's GPUs run torch's own operations, none of which has been seen there; one that is
wrong would make texts of noise.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults
from sfumato.diffusion.limits import Limits
from sfumato.diffusion.sampler_config import SamplerConfig
from sfumato.model.families import open_checkpoint
from sfumato.model.loading import load_network
from sfumato.model.network import Network
from sfumato.model.scores import label_mass
from sfumato.model.segments import Suffix
from sfumato.ops.device_check import Call, check, copied
from sfumato.ops.registry import PANELS, watched
from sfumato.tasks.alone import generate
from sfumato.weights.formats import QuantizedTensor, of_files

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_EACH = 3
"""Calls of an operation that are kept, each with shapes of its own."""
_PROMPT, _TOKENS = 48, 40
"""Tokens of the trial's prompt and reply: more than one canvas of the embedded model."""
_tried: dict[str, dict[str, str]] = {}


def try_device(device: torch.device, small: Path) -> dict[str, str]:
    """Checks the operations on a device, once for its kind; why the CPU serves some of them there,
    by operation. small: a checkpoint whose reply takes a moment on a CPU."""
    if device.type not in _tried:
        start = time.perf_counter()
        _tried[device.type] = check(device, [*_calls(small), *_dequantizations()])
        seconds = time.perf_counter() - start
        log.info("operations on %s: checked against a CPU in %.1f s", device, seconds)
    return _tried[device.type]


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
        if form != PANELS and (operation, shapes) not in kept and count < _EACH:
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
