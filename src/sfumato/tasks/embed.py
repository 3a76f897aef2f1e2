"""A prompt that is only encoded: its vector, or the scores of its own tokens."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from sfumato.diffusion.limits import Stats
from sfumato.tasks.works import Claim, Encode, Figures, Prompt, Want


class EmbedTask:
    """The outcome: what is wanted of the prompt's hidden states; None where it was stopped."""

    def __init__(self, prompt: Prompt, want: Want, family: str = "", seed: int = 0) -> None:
        self._want = want
        self.claim = Claim(prompt, len(prompt.ids), family, fresh=want.least)
        self.figures = Figures(seed)
        self.stats = Stats(prompt_tokens=len(prompt.ids))

    def run(self) -> Generator[Any, Any, Any]:
        return (yield Encode(self.claim.prompt.ids, self._want))

    def stopped(self) -> None:
        return None
