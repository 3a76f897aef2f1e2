"""A loaded network: transformer, vocabulary head and cache slots behind a few calls.

`diffusion/` and the engine use a model through this alone.  Knows no text and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from sfumato import ops
from sfumato.model.cache import KVCache, KVPool, Slot, adapters_of, slot_bytes
from sfumato.model.devices import to_device
from sfumato.model.head import VocabularyHead
from sfumato.model.layer_devices import Placement, make_placement
from sfumato.model.segments import Keeps, PackedRows, PaddedRows, RowPart, Suffix
from sfumato.model.transformer import Transformer
from sfumato.model.vision.mask import ImageMask, SoftTokens, ahead_of_pictures
from sfumato.model.vision.tower import Encoding, VisionTower
from sfumato.ops.gpu import device_memory, is_gpu
from sfumato.refused import Refused
from sfumato.weights.files.tensorfile import FileSizes
from sfumato.weights.formats import Weight

PREFILL_CHUNK, GPU_CHUNK = 512, 2048
"""Tokens of a prompt encoded at once, on a CPU and on a GPU: they bound the working memory of a
prefill. A chunk reads nearly all experts, which a GPU does in the time of a thousand tokens'
arithmetic."""


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt that a network on this device encodes at once by default."""
    return GPU_CHUNK if is_gpu(device) else PREFILL_CHUNK


class Network:
    """Encode, denoise, score; `dtype` is that of activations, `cache_dtype` (by default the same)
    that of stored keys and values."""

    def __init__(
        self,
        transformer: Transformer,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        output: Sequence[Weight] | None = None,
        placement: Placement | None = None,
        image_mask: ImageMask = "model",
    ) -> None:
        """output: the embedding's chunks as the head multiplies them, see `VocabularyHead`;
        placement: where the layers are, None: on `device` with all else; image_mask: which rule
        says what soft tokens see."""
        self.placement = placement or make_placement(device, len(transformer.config.layers))
        self.transformer, self.device, self.dtype = transformer, device, dtype
        self.config, self.cache_dtype = transformer.config, cache_dtype or dtype
        self.image_mask: ImageMask = image_mask
        self.tower: VisionTower | None = None  # None: the network reads no pictures
        self.files = FileSizes(())  # of which weights are views
        reads = transformer.self_conditioning
        by = () if reads is None else (reads.gate_proj, reads.up_proj)
        rounding = min((ops.rounding(p.weight, dtype) for p in by), default=0.0)
        self.head = VocabularyHead(
            *(transformer.output, self.config.logit_softcap),
            output=output,
            rounding=rounding,
        )

    @property
    def is_mixed(self) -> bool:
        """Whether some weights are on another device."""
        return self.placement.is_mixed

    def new_slots(self, count: int, capacity: int) -> list[Slot]:
        """Empty slots of one pool, for `capacity` positions each."""
        where = self.device, self.placement.layers
        return KVPool(self.config, count, capacity, self.cache_dtype, *where).slots()

    def new_slot(self, capacity: int) -> Slot:
        """An empty slot for `capacity` positions: a pool of one."""
        return self.new_slots(1, capacity)[0]

    def new_cache(self, rows: int = 1, capacity: int = 4096) -> KVCache:
        """`rows` empty slots of `capacity` positions each. Raises ValueError where one is no whole
        number from 1, and where they exceed the device's memory."""
        for name, value in (("rows", rows), ("capacity", capacity)):
            if type(value) is not int or value < 1:
                raise Refused(name, f"must be a whole number from 1, got {value!r}")
        needed = rows * slot_bytes(self.config, capacity, self.cache_dtype)
        available = device_memory(self.device)
        if available is not None and needed > available:
            raise Refused(
                ("rows", "capacity"),
                f"a cache of {rows} x {capacity} positions needs {needed:,} bytes, and "
                f"{self.device} has {available:,}",
                "lower one of them",
            )
        return KVCache(self.new_slots(rows, capacity))

    def synchronize(self) -> None:
        """Waits for the devices, so that a clock read afterwards includes their work."""
        for device in self.placement.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    @torch.no_grad()
    def encode(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[Slot],
        chunk: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        pictures: Sequence[Sequence[SoftTokens]] = (),
    ) -> bool:
        """Appends tokens to the slots' prefixes: rows[i] int64 [any length] goes to slots[i].

        chunk: tokens at once, of all rows together; None: as `prefill_chunk` has it. pictures:
        those of each row, in order, whose soft tokens take the place of ids; (): none. A chunk ends
        before a picture or after it, and may be longer than `chunk` for one. Where the network has
        blocks (`ModelConfig.block`, `Slot.offset`), a row's chunk ends at the end of a block, and
        may be longer for one; the last tokens of the row may be less than a block, and what is
        encoded later is a block of its own.

        Calls `cancelled` before every chunk; returns False where it returned True, with the
        chunks before that in the prefixes.  Raises ValueError, naming the row, where a slot has too
        few free positions or an id is out of range; then nothing was written.  Any other failure
        empties the slots that were being written, for their rings may be half overwritten.
        """
        checked, done = self._checked(rows, slots, pictures), [0] * len(rows)
        chunk = chunk or prefill_chunk(self.device)
        within = pictures or [()] * len(rows)
        while live := [i for i, ids in enumerate(checked) if done[i] < len(ids)]:
            if cancelled():
                return False
            share = max(1, chunk // len(live))
            ends = [done[i] + slots[i].whole_blocks(share, len(checked[i]) - done[i]) for i in live]
            ends = [
                ahead_of_pictures(end, done[i], within[i])
                for i, end in zip(live, ends, strict=True)
            ]
            pieces = [checked[i][done[i] : end] for i, end in zip(live, ends, strict=True)]
            own = [
                [picture.moved(-done[i]) for picture in within[i] if done[i] <= picture.start < end]
                for i, end in zip(live, ends, strict=True)
            ]
            self._encode_chunk(pieces, [slots[i] for i in live], own)
            for i, end in zip(live, ends, strict=True):
                done[i] = end
        return True

    @torch.no_grad()
    def soft_tokens(self, pixels: Tensor, columns: int) -> Tensor:
        """The soft tokens of one picture, [n, hidden]; see `Encoding`."""
        assert self.tower is not None, "a network without a tower"
        soft = Encoding(self.tower, pixels.to(self.device), columns).advance()
        assert soft is not None
        return soft

    @torch.no_grad()
    def encode_hidden(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[Slot],
        pictures: Sequence[Sequence[SoftTokens]] = (),
    ) -> list[Tensor]:
        """Encodes as `encode` does, in one forward, rows of one token at least; returns each row's
        hidden states [n, hidden], whose scores in the vocabulary head are those of the next
        token."""
        return self._encode_chunk(self._checked(rows, slots, pictures), slots, pictures)

    def _checked(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[Slot],
        pictures: Sequence[Sequence[SoftTokens]] = (),
    ) -> list[Tensor]:
        """The rows on the device. Raises ValueError as `encode` does."""
        for ids, own in zip(rows, pictures, strict=False):
            ends = [0, *(picture.end for picture in own)]
            starts = [*(picture.start for picture in own), len(ids)]
            assert all(end <= start for end, start in zip(ends, starts, strict=True))
        for index, (ids, slot) in enumerate(zip(rows, slots, strict=True)):
            if len(ids) > slot.room():
                raise ValueError(
                    f"row {index}: {len(ids)} tokens do not fit a cache slot of {slot.capacity} "
                    f"with {slot.length} filled; make the cache with a larger capacity"
                )
            self.check_ids(ids, f"row {index}")
        return [to_device(ids, self.device) for ids in rows]

    def _encode_chunk(
        self,
        pieces: Sequence[Tensor],
        slots: Sequence[Slot],
        pictures: Sequence[Sequence[SoftTokens]] = (),
    ) -> list[Tensor]:
        """Returns the hidden states of each piece."""
        try:
            return self._encode(pieces, [Suffix(slot) for slot in slots], "slots", pictures)
        except BaseException:
            for slot in slots:
                slot.reset()
            raise

    def _encode(
        self,
        pieces: Sequence[Tensor],
        suffixes: Sequence[Suffix],
        keeps: Keeps,
        pictures: Sequence[Sequence[SoftTokens]] = (),
    ) -> list[Tensor]:
        """One forward of the encode phase; returns the hidden states of each piece."""
        counts = [len(piece) for piece in pieces]
        places = [
            [(suffix.end + each.start, suffix.end + each.end) for each in own]
            for suffix, own in zip(suffixes, pictures, strict=False)
        ]
        attend = PackedRows(suffixes, counts, keeps, (), places, self.image_mask)
        ids, soft = to_device(torch.cat(list(pieces)), self.device), self._placed(counts, pictures)
        hidden = self.transformer.encode(ids, attend.positions(), attend, self.dtype, soft)
        attend.commit()
        return list(hidden.split(attend.counts))

    def _placed(
        self, counts: Sequence[int], pictures: Sequence[Sequence[SoftTokens]]
    ) -> tuple[Tensor, Tensor] | None:
        """Where among packed tokens of rows of these lengths their pictures are, and what is there,
        as `Transformer.encode` takes it."""
        starts = accumulate(counts, initial=0)
        placed = [
            each.moved(first) for first, own in zip(starts, pictures, strict=False) for each in own
        ]
        if not placed:
            return None
        where = torch.tensor([at for each in placed for at in range(each.start, each.end)])
        values = torch.cat([each.values.to(self.device, self.dtype) for each in placed])
        return to_device(where, self.device), values

    @torch.no_grad()
    def denoise(
        self,
        canvases: Sequence[Tensor],
        slots: Sequence[Slot],
        softs: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """One denoising forward: canvases[i] int64 [length] after the prefix of slots[i], with
        the soft embedding [length, hidden] of the step before (None: first step).

        Returns hidden states [all positions, hidden], rows one after another.
        """
        for index, canvas in enumerate(canvases):
            if not 0 < len(canvas) <= self.config.canvas_length:
                raise ValueError(
                    f"canvas {index}: must hold 1 to {self.config.canvas_length} tokens, as this "
                    f"checkpoint's canvases do, got {len(canvas)}"
                )
        tokens = torch.cat([canvas.to(self.device) for canvas in canvases])
        soft = self._soft(canvases, softs or [None] * len(canvases))
        parts = self._parts([len(canvas) for canvas in canvases], slots)
        return self.denoise_batch(tokens, soft, PaddedRows(parts))

    @torch.no_grad()
    def denoise_batch(self, tokens: Tensor, soft: Tensor | None, attend: PaddedRows) -> Tensor:
        """One denoising forward of packed canvases: tokens int64 [n] of the rows of `attend`, one
        after another, and their soft embeddings [n, hidden] (None: zeros) in `dtype`.

        Returns hidden states [n, hidden], of no meaning where a row commits: such a row's keys and
        values go into the cache beyond its slot's prefix, which stays as it is.  Reads nothing on
        the host and copies nothing to the device; the number of operations does not depend on the
        number of rows.
        """
        return self.transformer.denoise(
            tokens, soft, attend.positions(), attend, self.dtype, encoding=attend.encodes
        )

    @torch.no_grad()
    def encode_beside(self, rows: Sequence[Tensor], suffixes: Sequence[Suffix]) -> None:
        """One forward of the encode phase, which appends rows[i] int64 [any length] to suffixes[i]
        and leaves the slots as they are. A suffix whose forward fails is as it was."""
        attend = PackedRows(suffixes, [len(row) for row in rows], "suffixes")
        ids = to_device(torch.cat(list(rows)), self.device)
        self.transformer.encode_keys(ids, attend.positions(), attend, self.dtype)
        attend.commit()

    @torch.no_grad()
    def encode_beside_hidden(
        self, rows: Sequence[Tensor], suffixes: Sequence[Suffix]
    ) -> list[Tensor]:
        """Encodes as `encode_beside` does; returns each row's hidden states [n, hidden], as
        `encode_hidden`."""
        return self._encode(rows, suffixes, "suffixes")

    @torch.no_grad()
    def denoise_beside(
        self,
        canvases: Sequence[Tensor],
        suffixes: Sequence[Suffix],
        wanted: Sequence[Sequence[int]],
        soft: Tensor | None = None,
    ) -> Tensor:
        """One denoising forward: canvases[i] int64 [length] after suffixes[i], with their soft
        embeddings [all positions, hidden] in `dtype` (None: zeros).

        Returns hidden states of the positions wanted[i] of each canvas, one after another, [all
        wanted, hidden].
        """
        lengths = [len(canvas) for canvas in canvases]
        attend = PackedRows(suffixes, lengths, "nothing", [len(places) for places in wanted])
        starts = accumulate(lengths, initial=0)
        only = [a + at for a, own in zip(starts, wanted, strict=False) for at in own]
        ids = to_device(torch.cat(list(canvases)), self.device)
        places = to_device(torch.tensor(only), self.device)
        return self.transformer.denoise(ids, soft, attend.positions(), attend, self.dtype, places)

    def _parts(self, lengths: Sequence[int], slots: Sequence[Slot]) -> list[RowPart]:
        """One part for adjacent canvases of one length whose slots are of one pool."""
        rows = zip(lengths, slots, strict=True)
        parts = []
        for (_, length), group in groupby(rows, lambda row: (id(row[1].pool), row[0])):
            members = [slot for _, slot in group]
            index = torch.tensor([slot.index for slot in members], device=self.device)
            pool, adapters = members[0].pool, adapters_of(members)
            widths = torch.full_like(index, length)
            parts.append(RowPart(pool, index, length, widths, adapters=adapters))
        return parts

    def _soft(self, canvases: Sequence[Tensor], softs: Sequence[Tensor | None]) -> Tensor | None:
        if all(soft is None for soft in softs):
            return None
        hidden = self.config.hidden_size
        return torch.cat(
            [
                torch.zeros(len(canvas), hidden, device=self.device, dtype=self.dtype)
                if soft is None
                else soft.to(self.device, self.dtype)
                for canvas, soft in zip(canvases, softs, strict=True)
            ]
        )

    def check_ids(self, ids: Tensor, where: str) -> None:
        """Raises ValueError, naming `where`, for token ids that the embedding does not have: on a
        GPU they would end the process."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise Refused(
                where,
                f"token ids must lie in 0..{self.config.vocab_size - 1}, got "
                f"{int(ids.min())}..{int(ids.max())}",
            )
