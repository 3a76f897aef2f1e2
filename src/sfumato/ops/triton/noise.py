"""What a step is drawn with, where the state of the rows lives: temperatures, uniforms, new tokens.

The words are those of `diffusion.noise`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfumato.ops.triton.kernel import Kernel, launch, register
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


@triton.jit
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
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the next step of each row is drawn with: seeds int64 [rows, 2], canvas, attempt, step
    (done so far) and max_steps int64 [rows], temperatures float32 [rows, steps] → temperature
    float32, uniforms float64 in [0, 1) and new tokens int64, all [rows, width].

    The integers may be parts of one record for each row, with one stride; seeds are 32-bit words,
    the low one first; as `diffusion.noise.noise` of step + 1.
    """
    rows, stride = len(seeds), seeds.stride(0)
    columns = [each.reshape(rows, -1) for each in (canvas, attempt, step, max_steps)]
    if any(each.stride(0) != stride for each in columns):
        joined = torch.cat((seeds, *columns), dim=1)  # one stride for all
        seeds, columns = joined[:, :2], [joined[:, i : i + 1] for i in range(2, 6)]
        stride = joined.stride(0)
    temperature = temperatures.new_empty(rows, width)
    uniforms = temperatures.new_empty(rows, width, dtype=torch.float64)
    fresh = seeds.new_empty(rows, width)
    launch(
        STEP_NOISE,
        (rows,),
        tile_for("step_noise", seeds.device),
        seeds.device,
        seeds=seeds,
        **dict(zip(("canvas", "attempt", "step", "max_steps"), columns, strict=True)),
        temperatures=temperatures,
        temperature=temperature,
        uniforms=uniforms,
        fresh=fresh,
        width=width,
        vocab=vocab,
        stride=stride,
        temperature_stride=temperatures.stride(0),
        PLACES=triton.next_power_of_2(width),
    )
    return temperature, uniforms, fresh
