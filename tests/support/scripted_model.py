"""A network whose replies are written beforehand, and a small text side to read them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tests.support.scripted_pool import PackedCanvases, ScriptedPool, WithoutBlocks
from tokenizers import AddedToken, decoders, models, normalizers
from torch import Tensor

from sfumato.api import Model, TextSide
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.head import VocabularyHead
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import Tokenizer
from sfumato.train.recipe import EMBEDDED
from sfumato.weights.files.tensorfile import FileSizes

MARKERS = DIFFUSION_GEMMA.markers
MERGED = ("zq", "zq▁", "zq▁j")  # tokens of several characters, which few texts have
PIECES = (
    *(
        *MARKERS.tokens,
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *map(chr, range(0x21, 0x7F)),
        "\n",
    ),
    *MERGED,
)
VOCABULARY = {piece: i for i, piece in enumerate(PIECES)}
END, EOS = VOCABULARY["<turn|>"], VOCABULARY["<eos>"]
END_IDS = (EOS, END)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n"
    "{% endfor %}<|turn>model\n"
)


@cache
def tokenizer() -> Tokenizer:
    """One token for each marker, byte and ASCII character; other characters are their bytes.
    The same one for all: nothing of it changes."""
    merges = [(piece[:-1], piece[-1]) for piece in MERGED]
    inner = tokenizers.Tokenizer(models.BPE(vocab=VOCABULARY, merges=merges, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(
        [AddedToken(m, special=True, normalized=False) for m in MARKERS.tokens]
    )
    return Tokenizer(inner, bos_id=VOCABULARY["<bos>"], eos_id=EOS, pad_id=VOCABULARY["<pad>"])


class ScriptedSlot(WithoutBlocks):
    """Remembers what was encoded into it, and the denoising steps since."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.encoded, self.steps = capacity, [], 0  # type: tuple[int, list[list[int]], int]
        self.pool, self.index = ScriptedPool(self), 0


class ScriptedNetwork(PackedCanvases):
    """Says script[n] on the n-th canvas of a reply, with certainty.

    hesitate: steps of each canvas at whose end every token is still equally likely.
    """

    def __init__(self, script: Sequence[Sequence[int]], length: int, hesitate: int = 0) -> None:
        size = len(PIECES)
        self.config = replace(
            EMBEDDED, vocab_size=size, hidden_size=size, canvas_length=length, context_length=4096
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.head = VocabularyHead(torch.eye(size), 30.0)
        self.files = FileSizes(())
        self.script, self.hesitate = script, hesitate
        self.slots: list[ScriptedSlot] = []
        self.softs: list[Tensor | None] = []

    def new_slot(self, capacity: int) -> ScriptedSlot:
        self.slots.append(ScriptedSlot(capacity))
        return self.slots[-1]

    def synchronize(self) -> None:
        pass

    def encode(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[ScriptedSlot],
        cancelled: Callable[[], bool] = lambda: False,
        pictures: object = (),
    ) -> bool:
        if cancelled():
            return False
        for ids, slot in zip(rows, slots, strict=True):
            slot.encoded.append(ids.tolist())
            slot.steps = 0
            assert sum(map(len, slot.encoded)) <= slot.capacity
        return True

    def denoise(
        self,
        canvases: Sequence[Tensor],
        slots: Sequence[ScriptedSlot],
        softs: Sequence[Tensor | None],
    ) -> Tensor:
        self.softs += softs
        parts = []
        for canvas, slot in zip(canvases, slots, strict=True):
            tokens_said = self.script[len(slot.encoded) - 1]
            slot.steps += 1
            hidden = torch.zeros(len(canvas), self.config.hidden_size)
            if slot.steps > self.hesitate:
                hidden[torch.arange(len(canvas)), torch.tensor(tokens_said[: len(canvas)])] = 1e3
            parts.append(hidden)
        return torch.cat(parts)


def script(text: str | Sequence[int], length: int) -> list[list[int]]:
    """The canvases of a text, or of ids; the last is filled up with padding."""
    ids = tokenizer().encode(text) if isinstance(text, str) else list(text)
    ids += [VOCABULARY["<pad>"]] * (-len(ids) % length)
    return [ids[at : at + length] for at in range(0, len(ids), length)]


def scripted(
    text: str | Sequence[int],
    length: int = 8,
    hesitate: int = 0,
    defaults: SamplerConfig = REFERENCE,
    end_ids: tuple[int, ...] = END_IDS,
) -> Model:
    """A model that replies with `text`, which should hold its own end marker."""
    network: Any = ScriptedNetwork(script(text, length), length, hesitate)
    text_side = TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=MARKERS))
    return Model(network, text_side, defaults, end_ids, Path("scripted"), DIFFUSION_GEMMA)


def counted(answers: Sequence[bool]) -> Callable[[], bool]:
    """A `cancelled` that gives these answers, one a call."""
    left = iter(answers)
    return lambda: next(left)
