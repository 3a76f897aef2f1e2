"""One step of some canvases, each of which stays with the denoiser of its first step."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.step import Denoiser
from sfumato.model.cache import Slot
from sfumato.model.network import Network

DENOISERS: WeakKeyDictionary[Canvas, Denoiser] = WeakKeyDictionary()


def denoise_step(
    network: Network, canvases: Sequence[Canvas], slots: Sequence[Slot]
) -> list[Draft]:
    """Moves each canvas one step on; canvases[i] follows the prefix that slots[i] holds. Raises
    what fails in one of them."""
    known = (DENOISERS.get(canvas) for canvas in canvases)
    denoiser = next((d for d in known if d is not None and d.network is network), None)
    if denoiser is None:
        denoiser = Denoiser(network, len(canvases))
    for canvas in canvases:
        DENOISERS[canvas] = denoiser
    return denoiser.step(canvases, slots)
