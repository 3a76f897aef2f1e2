"""What a step is drawn with, where the state of the rows lives: temperatures, uniforms, new tokens.

The words are those of `diffusion.noise`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
from sfumato.ops.triton.self_test import KernelTwin
from sfumato.ops.triton.tiles import tile_for


@triton.jit
def philox_words(
    low: tl.tensor, high: tl.tensor, position: tl.tensor, step: tl.tensor, canvas: tl.tensor,
    attempt: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The first three 32-bit words of Philox4x32-10 of a counter, uint32; the words of the seed and
    of the counter are integers below 2³²."""
    nothing = position * 0
    first, second, third, _ = tl.philox_impl(
        position.to(tl.uint32),
        (nothing + step).to(tl.uint32),
        (nothing + canvas).to(tl.uint32),
        (nothing + attempt).to(tl.uint32),
        (nothing + low).to(tl.uint32),
        (nothing + high).to(tl.uint32),
    )
    return first, second, third


@triton.jit(
    do_not_specialize=[
        "seeds", "canvas", "attempt", "step", "max_steps", "temperatures", "temperature",
        "uniforms", "fresh", "width", "vocab", "stride", "temperature_stride"
    ]
)  # fmt: skip
def _step_noise(
    seeds: tl.tensor, canvas: tl.tensor, attempt: tl.tensor, step: tl.tensor,
    max_steps: tl.tensor, temperatures: tl.tensor, temperature: tl.tensor, uniforms: tl.tensor,
    fresh: tl.tensor, width: tl.tensor, vocab: tl.tensor, stride: tl.tensor,
    temperature_stride: tl.tensor,
    PLACES: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The noise of a row's next step.  Grid: (rows,).

    seeds, canvas, attempt, step, max_steps int64 and temperatures float32 of each row, rows
    `stride` and `temperature_stride` elements apart.  Writes temperature float32, uniforms float64
    and fresh int64 [rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    at, inside = row * width + place, place < width
    done = tl.load(step + row * stride)
    # A row that is done may have no next step in its table.
    now = tl.minimum(done, tl.load(max_steps + row * stride) - 1)
    value = tl.load(temperatures + row * temperature_stride + now)
    tl.store(temperature + at, tl.zeros((PLACES,), tl.float32) + value, mask=inside)
    high, low, word = philox_words(
        tl.load(seeds + row * stride),
        tl.load(seeds + row * stride + 1),
        place.to(tl.int64),
        done + 1,
        tl.load(canvas + row * stride),
        tl.load(attempt + row * stride),
    )
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    uniform = bits.to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    tl.store(uniforms + at, uniform, mask=inside)
    tl.store(fresh + at, (word.to(tl.int64) * vocab) >> 32, mask=inside)


STEP_NOISE = register(
    Kernel(
        "step_noise",
        _step_noise,
        {
            **dict.fromkeys(("seeds", "canvas", "attempt", "step", "max_steps"), "*i64"),
            "temperatures": "*fp32",
            "temperature": "*fp32",
            "uniforms": "*fp64",
            "fresh": "*i64",
            "width": "i32",
            "vocab": "i32",
            "stride": "i32",
            "temperature_stride": "i32",
        },
        {"PLACES": 256},
    )
)


def step_noise(
    seeds: Tensor,
    canvas: Tensor,
    attempt: Tensor,
    step: Tensor,
    max_steps: Tensor,
    temperatures: Tensor,
    width: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `step_noise`. The integers are parts of one record for each row."""
    rows = len(seeds)
    temperature = temperatures.new_empty(rows, width)
    uniforms = temperatures.new_empty(rows, width, dtype=torch.float64)
    fresh = seeds.new_empty(rows, width)
    launch(
        STEP_NOISE,
        (rows,),
        tile_for("step_noise", seeds.device),
        seeds.device,
        seeds=seeds,
        canvas=canvas,
        attempt=attempt,
        step=step,
        max_steps=max_steps,
        temperatures=temperatures,
        temperature=temperature,
        uniforms=uniforms,
        fresh=fresh,
        width=width,
        vocab=vocab_size,
        stride=seeds.stride(0),
        temperature_stride=temperatures.stride(0),
        PLACES=triton.next_power_of_2(width),
    )
    return temperature, uniforms, fresh


def _serves(
    seeds: Tensor,
    canvas: Tensor,
    attempt: Tensor,
    step: Tensor,
    max_steps: Tensor,
    temperatures: Tensor,
    width: int,
    vocab_size: int,
) -> bool:
    apart = {each.stride(0) for each in (seeds, canvas, attempt, step, max_steps)}
    return len(seeds) == 1 or len(apart) == 1  # of one row no next one is read


def _check(device: torch.device) -> None:
    """A row, and one that is done and has no next temperature."""
    first, second = [5, 7, 3, 1, 0, 2], [2**32 - 1, 2**31, 0, 0, 1, 1]
    record = torch.tensor([first, second], device=device)
    table = torch.tensor([[0.5, 1.0], [0.25, 1.0]], device=device)
    canvas, attempt, step, limits = record[:, 2:].unbind(1)
    temperature, uniforms, fresh = step_noise(
        record[:, :2], canvas, attempt, step, limits, table, 3, 1000
    )
    assert temperature.tolist() == [[0.5] * 3, [0.25] * 3], "another temperature"
    for row, numbers in enumerate((first, second)):
        for position in range(3):
            counter = position, numbers[4] + 1, numbers[2], numbers[3]
            words = _philox(counter, (numbers[0], numbers[1]))
            uniform = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
            assert float(uniforms[row, position]) == uniform, "another uniform"
            assert int(fresh[row, position]) == words[2] * 1000 >> 32, "another token"


def _philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's integers; see `diffusion.noise`."""
    most = 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        even = second >> 32 ^ counter[1] ^ key[0], first >> 32 ^ counter[3] ^ key[1]
        counter = even[0], second & most, even[1], first & most
        key = key[0] + 0x9E3779B9 & most, key[1] + 0xBB67AE85 & most
    return counter


TWINS = {"step_noise": KernelTwin("step_noise", step_noise, _serves, _check)}
