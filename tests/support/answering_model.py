"""A model that answers each question as written beforehand, behind the real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.support.scripted_engine import LENGTH, ScriptedNetwork, ScriptedSlot
from tests.support.scripted_model import END_IDS, TEMPLATE, VOCABULARY, tokenizer
from torch import Tensor

from sfumato.api import Model, TextSide
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.text.template import ChatTemplate

PAD = VOCABULARY["<pad>"]
Answer = str | list[int]  # markers in a text are special tokens
OPENING = "<|turn>model"  # the template engine drops the last line end


class AnsweringNetwork(ScriptedNetwork):
    """Finds the last user's text in its answers; what is not there is answered by "Hello."."""

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        super().__init__([])
        self.answers = dict(answers or {})
        self._tokenizer = tokenizer()

    def encode(
        self,
        rows: Sequence[Tensor],
        slots: Sequence[ScriptedSlot],
        chunk: int = 512,
        cancelled: Callable[[], bool] = lambda: False,
        pictures: object = (),
    ) -> bool:
        self.before("encode", [])
        for ids, slot in zip(rows, slots, strict=True):
            slot.ids += ids.tolist()
        return True

    def encode_hidden(
        self, rows: Sequence[Tensor], slots: Sequence[ScriptedSlot], pictures: object = ()
    ) -> list[Tensor]:
        """Of no meaning: a prompt that is encoded alone is asked for its last one."""
        self.encode(rows, slots)
        return [torch.ones(len(ids), self.config.hidden_size) for ids in rows]

    def denoise(
        self, canvases: Sequence[Tensor], slots: Sequence[ScriptedSlot], softs: object
    ) -> Tensor:
        self.before("denoise", [])
        parts = []
        for slot in slots:
            hidden = torch.zeros(LENGTH, self.config.hidden_size)
            hidden[torch.arange(LENGTH), torch.tensor(self._canvas(slot))] = 1e3
            parts.append(hidden)
        return torch.cat(parts)

    def _canvas(self, slot: ScriptedSlot) -> list[int]:
        text = self._tokenizer.decode(slot.ids, skip_special=False)
        question, _, reply = text.rpartition(OPENING)
        last_question = question.rpartition("<|turn>user\n")[2].removesuffix("<turn|>\n")
        answer = self.answers.get(last_question, "Hello.<turn|>")
        answer_ids = self._tokenizer.encode(answer) if isinstance(answer, str) else answer
        ids = answer_ids[self._tokens_before(slot.ids, reply) :][:LENGTH]
        return ids + [PAD] * (LENGTH - len(ids))

    def _tokens_before(self, ids: list[int], reply: str) -> int:
        """Tokens of the reply. A canvas may have ended in the middle of a character, so they are
        counted as ids where the prompt is a chat's."""
        opening = self._tokenizer.encode(OPENING)
        ends = range(len(ids), len(opening) - 1, -1)
        lengths = (len(ids) - end for end in ends if ids[end - len(opening) : end] == opening)
        return next(lengths, len(self._tokenizer.encode(reply)))


def answering_model(answers: Mapping[str, Answer] | None = None) -> Model:
    stand_in: Any = AnsweringNetwork(answers)
    return Model(
        stand_in,
        TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=DIFFUSION_GEMMA.markers)),
        REFERENCE,
        END_IDS,
        Path("told"),
        DIFFUSION_GEMMA,
    )


def slow_down(model: Model, pause: Callable[[], None]) -> None:
    """Calls pause before every forward."""
    network: Any = model.network
    network.before = lambda what, keys: pause()
