"""Random numbers that depend on (seed, canvas, step, position) alone.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a
function from a counter and a key to 128 random bits.  Nothing is carried from call to call, so a
row draws the same numbers alone, in any batch, and after any interruption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int, rounds: int = 10) -> Tensor:
    """Four 32-bit words for each counter.

    counter: four int64 tensors [n] of unsigned 32-bit values; key: 64 bits.
    Returns int64 [4, n], values in 0..2³²-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> 32 & _LOW
    for _ in range(rounds):
        # The products wrap around int64, but their 64 bits are right, and the masks drop the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack((c0, c1, c2, c3))


@dataclass(frozen=True)
class Noise:
    """The randomness of one canvas of one row."""

    seed: int  # any integer; its low 64 bits count
    canvas: int  # 0, 1, … within the reply
    attempt: int = 0  # another draw of the same canvas

    def _words(self, step: int, length: int) -> Tensor:
        position = torch.arange(length)
        fixed = (torch.full_like(position, n) for n in (step, self.canvas, self.attempt))
        return philox((position, *fixed), self.seed & 0xFFFFFFFFFFFFFFFF)  # type: ignore[arg-type]

    def uniforms(self, step: int, length: int) -> Tensor:
        """float64 [length] in [0, 1) with 53 random bits: what the tokens are drawn with."""
        high, low, _, _ = self._words(step, length)
        return ((high >> 5) * 2**26 + (low >> 6)).double() / 2**53

    def tokens(self, step: int, length: int, vocab_size: int) -> Tensor:
        """int64 [length], uniform over the vocabulary (exactly so where its size is a power of
        two, else within 2⁻³² · size): what fresh positions are filled with. Step 0 is the
        first canvas."""
        _, _, word, _ = self._words(step, length)
        return word * vocab_size >> 32
