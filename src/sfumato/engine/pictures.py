"""The pictures of rows: the vision tower, a few layers in each step, and the soft tokens it gives.

A picture that comes holds up no other row: a slice of the tower takes as long as half a step of
one canvas, by the count of multiplications.  Soft tokens are kept by content, so that rows with the
same picture share one encoding, and a row holds those of the picture that it encodes next.  Decides
nothing about rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sfumato.engine.engine_config import KEPT_PICTURES
from sfumato.engine.memory.estimate import largest_picture
from sfumato.engine.recovery import BatchRecovery
from sfumato.engine.row import Row
from sfumato.media.patches import Patches
from sfumato.model.devices import to_device
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.vision.config import VisionConfig
from sfumato.model.vision.tower import Encoding


class Pictures:
    """Encodes the pictures that rows lack, one at a time."""

    def __init__(self, network: Network, free: Callable[[Exception], None]) -> None:
        """free: gives back unused memory, where an error was for want of it."""
        self._network = network
        # Bytes of soft tokens.
        self._most = KEPT_PICTURES * largest_picture(network.config, network.dtype)
        self._kept: dict[str, Tensor] = {}  # soft tokens by content; the last used at the end
        self._key: str | None = None  # of the picture under way
        self._encoding: Encoding | None = None  # once it has begun
        self._slices = BatchRecovery(self._advance, free, lambda patches: patches)

    def take_on(self, rows: Sequence[Row]) -> list[tuple[Row, Exception]]:
        """Gives rows what is kept of the pictures that they lack, and takes one of the others a
        slice on: the one under way, or else the first row's. Returns the rows whose picture has
        failed, with the error. rows: all that lack a picture, oldest first."""
        waiting: dict[str, list[tuple[Row, Patches]]] = {}
        for row in rows:
            if (picture := row.lacking) is None:
                continue
            content = picture.patches.key
            if (soft := self._kept.pop(content, None)) is not None:
                self._kept[content] = soft
                row.see(soft)
            else:
                waiting.setdefault(content, []).append((row, picture.patches))
        if self._key not in waiting:  # none is under way, or all who wanted it have ended
            self._key, self._encoding = next(iter(waiting), None), None
        if (key := self._key) is None:
            return []
        ((_, result),) = self._slices.run([waiting[key][0][1]])
        if result is None:
            return []
        self._key = self._encoding = None
        if isinstance(result, Exception):
            return [(row, result) for row, _ in waiting[key]]
        self._keep(key, result)
        for row, _ in waiting[key]:
            row.see(result)
        return []

    def forget(self) -> None:
        """Drops the soft tokens that no row holds."""
        self._kept.clear()

    @torch.no_grad()
    def _advance(self, items: Sequence[Patches]) -> list[Tensor | None]:
        """Runs the next layers for the picture under way; its soft tokens after the last ones."""
        (patches,), network = items, self._network
        assert network.tower is not None, "checked at the submission"
        if self._encoding is None:
            pixels = to_device(torch.from_numpy(patches.values()), network.device)
            self._encoding = Encoding(network.tower, pixels, patches.columns)
        sizes = network.config, network.tower.config, len(patches.levels)
        return [self._encoding.advance(layers_of_slice(*sizes))]

    def _keep(self, key: str, soft: Tensor) -> None:
        """Keeps soft tokens, and drops those that were not used for the longest time."""
        self._kept[key] = soft
        excess = sum(each.nbytes for each in self._kept.values()) - self._most
        for oldest in tuple(self._kept):
            if excess <= 0:
                break
            excess -= self._kept.pop(oldest).nbytes


def layers_of_slice(text: ModelConfig, tower: VisionConfig, patches: int) -> int:
    """How many layers of the tower take half as many multiplications as a step of one canvas, its
    prefix aside; one at least."""
    projected = sum(2 * each.head_dim * (text.num_heads + each.kv_heads) for each in text.layers)
    experts = 3 * (text.intermediate_size + text.experts_per_token * text.expert_size)
    vocabulary = 2 * text.vocab_size  # the scores, and the soft embedding of them
    position = text.hidden_size * (projected + len(text.layers) * experts + vocabulary)
    heads = 2 * tower.head_dim * (tower.num_heads + tower.kv_heads)
    patch = tower.hidden_size * (heads + 3 * tower.intermediate_size)
    patch += 2 * patches * tower.num_heads * tower.head_dim
    return max(1, text.canvas_length * position // (2 * patches * patch))
