"""The memory that the compiled operations keep for their next calls."""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence

import pytest
import torch

from sfumato import ops
from sfumato.ops.cpu import library
from sfumato.ops.cpu.panels import PackedTensor, panels
from sfumato.weights.formats import FORMATS, QuantizedTensor, quantize

pytestmark = pytest.mark.skipif(library.kernels is None, reason="no compiled operations")

LIMIT = 256 << 20
EXPERTS, HIDDEN, INNER = 4, 512, 32


def kept() -> int:
    """Bytes of the calling thread."""
    size: int = library.loaded().code.sf_workspace_bytes()
    return size


def packed(*shape: int) -> PackedTensor:
    return panels(quantize(torch.randn(shape), FORMATS["Q8_0"]).data, "Q8_0", shape, "int8")


GATE_UP, DOWN = packed(EXPERTS, 2 * INNER, HIDDEN), packed(EXPERTS, HIDDEN, INNER)


def mix(tokens: int) -> torch.Tensor:
    """A call that needs a hidden state in float32 for each of a token's two experts."""
    chosen = torch.tensor([[0, 2]]).expand(tokens, -1)
    return ops.experts(torch.ones(tokens, HIDDEN), chosen, torch.ones(tokens, 2), GATE_UP, DOWN)


def in_a_thread(calls: Sequence[int]) -> list[int]:
    """What a new thread keeps after each of some calls, by their tokens."""
    sizes: list[int] = []

    def run() -> None:
        torch.set_num_threads(1)
        for tokens in calls:
            mix(tokens)
            sizes.append(kept())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return sizes


def test_a_thread_keeps_what_its_largest_call_needed() -> None:
    sizes = in_a_thread([1000, 1000, 10, 1000, 2000, 2000, 2000])
    least = 2 * HIDDEN * 4
    assert sizes[0] == 0, "what is needed is known after the first call"
    assert 1000 * least < sizes[1] < 1200 * least + (1 << 20)
    assert sizes[1] == sizes[2] == sizes[3] == sizes[4]
    assert 2000 * least < sizes[5] < 2200 * least + (1 << 20) and sizes[6] == sizes[5]
    assert in_a_thread([1])[0] == 0, "another thread has its own"


def test_what_is_too_large_is_not_kept() -> None:
    tokens = LIMIT // (2 * HIDDEN * 4) + 1000
    sizes = in_a_thread([100, 100, tokens, 100])
    assert 0 < sizes[1] == sizes[3] < 10 << 20


def test_threads_at_once_have_memory_of_their_own() -> None:
    expected, results = mix(300), []
    threads = [threading.Thread(target=lambda: results.append(mix(300))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(result, expected) for result in results)


def test_buffers_cost_no_page_faults_again() -> None:
    """A call needs 24 MB, of 6,000 pages, and its result has 3,000."""
    torch.set_num_threads(1)
    for _ in range(3):
        mix(6000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        mix(6000)
    # The result is of torch's own memory.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4 * 4000


def test_scores_of_own_ids_are_the_same_in_any_piece() -> None:
    """Rows are gathered some at a time: the numbers do not depend on which of them."""
    torch.manual_seed(0)
    blocks = quantize(torch.randn(500, HIDDEN), FORMATS["Q6_K"])
    for weight in (torch.randn(500, HIDDEN), torch.randn(500, HIDDEN).bfloat16(), blocks):
        hidden, ids = torch.randn(256, HIDDEN), torch.randint(500, (256, 64))
        scores = ops.own_scores(hidden, weight, ids)
        for count in (2, 3, 17, 255):
            assert torch.equal(ops.own_scores(hidden[:count], weight, ids[:count]), scores[:count])
        rows = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.float()
        exact = torch.einsum("nmh,nh->nm", rows.double()[ids], hidden.double())
        torch.testing.assert_close(scores.double(), exact, atol=1e-3, rtol=1e-4)
