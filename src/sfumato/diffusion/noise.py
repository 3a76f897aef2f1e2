"""Random numbers that depend on (seed, canvas, attempt, step, position) alone.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a
function from a counter and a key to 128 random bits.  Nothing is carried from call to call, so a
row draws the same numbers alone, in any batch, and after any interruption.

The words are computed as int64 on the device of the inputs, for all rows of a batch at once.  A
device without float64 (Apple's GPUs) gets float32 uniforms, with 24 random bits in place of 53:
there, draws may differ from those of other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.ops.gpu import widest_float
from sfumato.ops.registry import operation

_MULTIPLIERS = 0xCD9E8D57, 0xD2511F53  # of the counter's words 2 and 0
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> Tensor:
    """Four 32-bit words for each counter.

    counter: four int64 tensors [...] of unsigned 32-bit values; key: int64 [..., 2], likewise, the
    low word first; their leading axes broadcast. Returns int64 [4, ...], values in 0..2³²-1.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    # Words 0 and 2 go through a round alike, and so do 1 and 3: one operation serves both.
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))
    keys = key.view(*[1] * (even.ndim - key.ndim), *key.shape).movedim(-1, 0)
    # Filled on the device: a tensor made of numbers would be copied to it from the host.
    multipliers, weyl = _pair(_MULTIPLIERS, even), _pair(_WEYL, even)
    rounds = torch.arange(ROUNDS, device=even.device).view(-1, *[1] * even.ndim)
    for round_keys in (keys + weyl * rounds).bitwise_and_(_LOW).unbind():
        # The products wrap around int64, but their 64 bits are right, and the mask drops the sign.
        product = even.flip(0) * multipliers
        even = (product >> 32).bitwise_and_(_LOW).bitwise_xor_(odd).bitwise_xor_(round_keys)
        odd = product.bitwise_and_(_LOW)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _pair(values: tuple[int, int], like: Tensor) -> Tensor:
    """int64 [2, 1, …] on the device of `like` [2, …]."""
    pair = like.new_empty(2, *[1] * (like.ndim - 1))
    for index, value in enumerate(values):
        pair[index].fill_(value)
    return pair


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high word of a seed's low 64 bits."""
    return seed & _LOW, seed >> 32 & _LOW


def noise(
    seeds: Tensor, canvas: Tensor, attempt: Tensor, step: Tensor, width: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """What one step of several rows is drawn with: seeds int64 [rows, 2], see `seed_words`; canvas,
    attempt and step int64 [rows] → uniforms [rows, width] in [0, 1) and fresh tokens int64 [rows,
    width].

    The uniforms are float64 with 53 random bits, or float32 with 24 where the device has no
    float64. The tokens are uniform over the vocabulary (exactly so where its size is a power of
    two, else within 2⁻³² · size).
    """
    position = torch.arange(width, device=seeds.device)
    counter = (position[None], step[:, None], canvas[:, None], attempt[:, None])
    high, low, word, _ = philox(counter, seeds[:, None])
    return _uniform(high, low), word * vocab_size >> 32


@operation
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
    """What the next step of each row is drawn with.

    seeds int64 [rows, 2], canvas, attempt, step (done so far) and max_steps int64 [rows],
    temperatures float32 [rows, steps] → temperature float32, uniforms float64 in [0, 1) and new
    tokens int64 of step + 1, all [rows, width].
    """
    # A row that is done may have no next step in its table.
    now = torch.minimum(step, max_steps - 1)
    temperature = temperatures.gather(1, now[:, None]).expand(-1, width)
    return temperature, *noise(seeds, canvas, attempt, step + 1, width, vocab_size)


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    if widest_float(high.device.type) == torch.float32:
        return (high >> 8).float() / 2**24
    return ((high >> 5) * 2**26 + (low >> 6)).double() / 2**53


@dataclass(frozen=True)
class Noise:
    """The randomness of one canvas of one row."""

    seed: int  # any integer; its low 64 bits count
    canvas: int  # 0, 1, … within the reply
    attempt: int = 0  # another draw of the same canvas

    def uniforms(self, step: int, length: int) -> Tensor:
        """float64 [length] in [0, 1), on the host: what the tokens are drawn with."""
        return _draw([self], step, length, 1)[0][0]

    def tokens(self, step: int, length: int, vocab_size: int) -> Tensor:
        """int64 [length], on the host: what fresh positions are filled with. Step 0 is the first
        canvas."""
        return _draw([self], step, length, vocab_size)[1][0]


def first_tokens(rows: Sequence[Noise], length: int, vocab_size: int) -> Tensor:
    """int64 [rows, length], on the host: the tokens of step 0 of several canvases, by as many
    operations as those of one."""
    return _draw(rows, 0, length, vocab_size)[1]


def _draw(rows: Sequence[Noise], step: int, length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Uniforms and tokens [rows, length] of one step, on the host."""
    words = [(*seed_words(row.seed), row.canvas, row.attempt, step) for row in rows]
    numbers = torch.tensor(words)
    canvas, attempt, steps = numbers[:, 2:].unbind(1)
    return noise(numbers[:, :2], canvas, attempt, steps, length, vocab_size)
