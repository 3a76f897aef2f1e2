"""The noise of a step, interpreted: bit for bit that of the CPU."""

from __future__ import annotations

import torch
from tests.support.kernels import interpreted

from sfumato.diffusion.canvas import RowStart
from sfumato.diffusion.noise import noise
from sfumato.diffusion.step.batch import StepBatch

pytestmark = interpreted
VOCAB = 262144


def test_noise_is_that_of_the_reference_bit_for_bit() -> None:
    from sfumato.ops.triton.noise import step_noise

    rows, width = 3, 40
    batch = StepBatch.allocate(rows, width, 1, 8, torch.float32, torch.device("cpu"))
    seeds = [0, -1, 0x0123456789ABCDEF]
    starts = [
        RowStart(
            torch.full((width,), -1), seed, 5 * row, row, [0.8, 0.6, 0.4][: 3 - row], False, True
        )
        for row, seed in enumerate(seeds)
    ]
    batch.begin(range(rows), starts, [torch.zeros(width, dtype=torch.int64)] * rows)
    batch.step.copy_(torch.tensor([0, 1, 1]))
    for vocab in (VOCAB, 1000):
        temperature, uniforms, fresh = step_noise(
            *(batch.seeds, batch.canvas, batch.attempt, batch.step, batch.max_steps),
            *(batch.temperatures, width, vocab),
        )
        words = batch.seeds, batch.canvas, batch.attempt, batch.step + 1
        expected = noise(*words, width, vocab)
        assert torch.equal(uniforms, expected[0]) and torch.equal(fresh, expected[1])
        # The third row is done: it has no second temperature.
        assert temperature[:, 0].tolist() == torch.tensor([0.8, 0.6, 0.8]).tolist()
        assert torch.equal(temperature, temperature[:, :1].expand(-1, width))


def test_noise_of_tensors_that_are_no_record() -> None:
    from sfumato.ops.triton.noise import step_noise

    seeds = torch.tensor([[2**32 - 1, 7], [3, 2**32 - 2]])
    canvas, attempt, step = torch.tensor([4, 2**31]), torch.tensor([1, 0]), torch.tensor([47, 0])
    limits, table = torch.tensor([48, 1]), torch.ones(2, 48)
    _, uniforms, fresh = step_noise(seeds, canvas, attempt, step, limits, table, 256, VOCAB)
    expected = noise(seeds, canvas, attempt, step + 1, 256, VOCAB)
    assert torch.equal(uniforms, expected[0]) and torch.equal(fresh, expected[1])
