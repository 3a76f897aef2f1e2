"""The noise of a step, interpreted: bit for bit that of the CPU."""

from __future__ import annotations

import torch
from tests.support.kernels import interpreted
from tests.support.row_start import row_start

from sfumato.diffusion import noise
from sfumato.diffusion.step.batch import StepBatch

pytestmark = interpreted
VOCAB = 262144


def test_noise_is_that_of_the_reference_bit_for_bit() -> None:
    from sfumato.ops.triton.step import step_noise

    rows, width = 3, 40
    batch = StepBatch.allocate(rows, width, 1, 8, torch.float32, torch.device("cpu"))
    seeds = [0, -1, 0x0123456789ABCDEF]
    free, begun = torch.full((width,), -1), torch.zeros(width, dtype=torch.int64)
    numbers = [noise.Noise(seed, 5 * row, row) for row, seed in enumerate(seeds)]
    starts = [
        row_start(free, each, [0.8, 0.6, 0.4][: 3 - row], False, True, begun)
        for row, each in enumerate(numbers)
    ]
    batch.begin(range(rows), starts)
    batch.step.copy_(torch.tensor([0, 1, 1]))
    for vocab in (VOCAB, 1000):
        words = batch.seeds, batch.canvas, batch.attempt, batch.step, batch.max_steps
        arguments = *words, batch.temperatures, width, vocab
        temperature, *drawn = step_noise(*arguments)
        expected = noise.step_noise(*arguments)
        assert all(map(torch.equal, (temperature, *drawn), expected))
        # The third row is done: it has no second temperature.
        assert temperature[:, 0].tolist() == torch.tensor([0.8, 0.6, 0.8]).tolist()


def test_tensors_that_are_no_record_are_left_to_torch() -> None:
    from sfumato.ops.triton.step import TWINS

    seeds, numbers = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert not TWINS["step_noise"].serves(seeds, *[numbers] * 4, torch.ones(2, 48), 256, VOCAB)
