"""A network for the engine's tests: what it says, how long it hesitates and where it fails is
written beforehand, and what it was asked is remembered.

Who asks is known by the first token of the prompt: `Script.key`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.support.scripted_model import END_IDS, PIECES, TEMPLATE, VOCABULARY, tokenizer
from tests.support.scripted_pool import PackedCanvases, ScriptedPool, WithoutBlocks
from torch import Tensor

from sfumato.api import Model, TextSide
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.engine import Engine, EngineConfig, Request
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.model.head import VocabularyHead
from sfumato.text.template import ChatTemplate
from sfumato.train.recipe import EMBEDDED
from sfumato.weights.files.tensorfile import FileSizes

LENGTH = 8  # of a canvas
RING = 12  # positions after which slots need snapshots
PAD = VOCABULARY["<pad>"]


@dataclass
class Script:
    """One request's reply. A canvas settles `hesitate` steps after the second, the fewest."""

    key: int
    prompt: int  # tokens
    text: str = "Hello.<turn|>"
    hesitate: Sequence[int] = (0,)  # of each canvas; the last counts for all that follow
    says: Callable[[list[int]], list[int]] | None = None  # reply so far → canvas

    def canvas(self, reply: list[int]) -> list[int]:
        if self.says is not None:
            ids = self.says(reply)
        else:
            ids = tokenizer().encode(self.text)[len(reply) :][:LENGTH]
        return ids + [PAD] * (LENGTH - len(ids))

    def request(self, **how: Any) -> Request:
        return Request(ids=[self.key] * self.prompt, seed=self.key, **how)


@dataclass(frozen=True)
class ScriptedSnapshot:
    ids: list[int]
    nbytes: int = 1


@dataclass(eq=False)
class ScriptedSlot(WithoutBlocks):
    """A slot that holds ids, for all that others can tell, with windows of RING positions."""

    capacity: int
    ids: list[int] = field(default_factory=list)
    steps: int = 0  # denoising steps since the last encode

    def __post_init__(self) -> None:
        self.pool, self.index = ScriptedPool(self), 0

    @property
    def length(self) -> int:
        return len(self.ids)

    def room(self) -> int:
        return self.capacity - len(self.ids)

    def reset(self) -> None:
        self.ids, self.steps = [], 0

    def holds(self, length: int) -> bool:
        return length == self.length or length < self.length <= RING

    def snapshot(self) -> Any:
        return ScriptedSnapshot(list(self.ids))

    def restore(self, source: ScriptedSlot, length: int, snapshot: Any = None) -> None:
        if snapshot is None:
            assert source.holds(length)
        else:
            assert snapshot.ids == source.ids[:length]
        self.ids, self.steps = source.ids[:length], 0

    def nbytes(self) -> int:
        return self.capacity


class ScriptedNetwork(PackedCanvases):
    """Says what its scripts say, with certainty once it has stopped hesitating."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        size = len(PIECES)
        self.config = replace(
            EMBEDDED, vocab_size=size, hidden_size=size, canvas_length=LENGTH, context_length=4096
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.cache_dtype = self.dtype
        self.head = VocabularyHead(torch.eye(size), 30.0)
        self.files = FileSizes(())
        self.transformer = torch.nn.Module()  # without weights
        self.scripts = {script.key: script for script in scripts}
        self.log: list[tuple[str, dict[int, int]]] = []
        """("encode", key → tokens) and ("denoise", key → canvas), one for each forward."""
        self.before: Callable[[str, list[int]], None] = lambda what, keys: None
        """Called with every forward's kind and keys; may raise."""

    def new_slot(self, capacity: int) -> Any:
        return ScriptedSlot(capacity)

    def new_slots(self, count: int, capacity: int) -> list[Any]:
        return [self.new_slot(capacity) for _ in range(count)]

    def synchronize(self) -> None:
        pass

    def check_ids(self, ids: Tensor, where: str) -> None:
        pass

    def encode(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[ScriptedSlot],
        chunk: int = 512,
        cancelled: Callable[[], bool] = lambda: False,
        pictures: object = (),
    ) -> bool:
        keys = [s.ids[0] if s.ids else int(ids[0]) for ids, s in zip(rows, slots, strict=True)]
        self.log.append(("encode", dict(zip(keys, map(len, rows), strict=True))))
        try:
            self.before("encode", keys)
        except BaseException:
            for slot in slots:
                slot.reset()
            raise
        for ids, slot in zip(rows, slots, strict=True):
            assert len(ids) <= slot.room()
            slot.ids += ids.tolist()
            slot.steps = 0
        return True

    def denoise(
        self, canvases: Sequence[Tensor], slots: Sequence[ScriptedSlot], softs: object
    ) -> Tensor:
        # The engine's own probe begins with bos, and may stand in no script.
        probe = Script(VOCABULARY["<bos>"], 1)
        scripts = [({probe.key: probe} | self.scripts)[slot.ids[0]] for slot in slots]
        replies = [s.ids[script.prompt :] for s, script in zip(slots, scripts, strict=True)]
        numbers = [len(reply) // LENGTH for reply in replies]
        keys = [script.key for script in scripts]
        self.log.append(("denoise", dict(zip(keys, numbers, strict=True))))
        self.before("denoise", keys)
        parts = []
        for slot, script, reply, number in zip(slots, scripts, replies, numbers, strict=True):
            assert len(slot.ids) >= script.prompt, "denoised before its prompt was there"
            slot.steps += 1
            hidden = torch.zeros(LENGTH, self.config.hidden_size)
            if slot.steps > script.hesitate[min(number, len(script.hesitate) - 1)]:
                hidden[torch.arange(LENGTH), torch.tensor(script.canvas(reply))] = 1e3
            parts.append(hidden)
        return torch.cat(parts)

    def denoised(self) -> list[list[int]]:
        """The keys of each denoising forward."""
        return [list(keys) for what, keys in self.log if what == "denoise"]


def model(network: ScriptedNetwork) -> Model:
    text = TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=DIFFUSION_GEMMA.markers))
    stand_in: Any = network
    return Model(stand_in, text, REFERENCE, END_IDS, Path("scripted"), DIFFUSION_GEMMA)


def engine(*scripts: Script, **config: Any) -> tuple[Engine, ScriptedNetwork]:
    """An engine without a thread on such a network; more keywords are its config's or its own."""
    network = ScriptedNetwork(scripts)
    own = {name: config.pop(name) for name in ("on_finish", "clock") if name in config}
    settings = {"slots": 4, "context": 512, "prefill_chunk": 32} | config
    return Engine(model(network), EngineConfig(**settings), **own), network


def run(engine: Engine, most: int = 1000) -> None:
    """Steps until there is nothing to do."""
    for _ in range(most):
        if not engine.step():
            return
    raise AssertionError(f"still busy after {most} steps")
