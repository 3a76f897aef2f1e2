"""The step as a graph against the step without one, and against a graph on one stream: the same
bits, and the time of each. For `gpu_first.py`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu_step import canvases, filled_slots, timed_steps
from torch import Tensor

from sfumato.diffusion.canvas import Draft
from sfumato.model.network import Network
from sfumato.ops.torch_device import one_stream


def compare(network: Network, rows: int, prefix: int, steps: int) -> dict[str, Any]:
    """Runs the same canvases in each way, to the same drafts."""
    runs, device = [], network.transformer.norm.weight.device
    for graphs, why in ((False, ""), (True, ""), (True, "a comparison")):
        slots = filled_slots(network, rows, prefix)
        with patch.dict(one_stream, {device: why} if why else {}):
            runs.append(timed_steps(network, canvases(network, rows, steps), slots, steps, graphs))
    plain, captured, alone = runs
    pairs = [*zip(plain.drafts, captured.drafts, strict=True)]
    pairs += zip(plain.drafts, alone.drafts, strict=True)
    return {
        "rows": rows,
        "same": all(
            same_draft(one, other)
            for drafts, others in pairs
            for one, other in zip(drafts, others, strict=True)
        ),
        "captured": captured.captured,
        "eager_ms": plain.median_ms,
        "graph_ms": captured.median_ms,
        "one_stream_ms": alone.median_ms,
    }


def same_draft(a: object, b: object) -> bool:
    """Whether two drafts agree in every bit of their tensors; never what failed."""
    return isinstance(a, Draft) and all(
        torch.equal(value, getattr(b, name))
        for name, value in vars(a).items()
        if isinstance(value, Tensor)
    )
