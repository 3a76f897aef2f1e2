"""The vocabulary head: all that a denoising step needs to know of 262144 scores per position.

One pass over chunks of the tied embedding gives the argmax, the top few, one drawn token, the
entropy and the soft embedding, exactly unless the caller lets some of the mass go
(`approximate.py`).  The draws' uniforms, and all policy, come from `diffusion/`.
"""

from __future__ import annotations

from torch import Tensor

from sfumato.model.approximate import Skip
from sfumato.model.head_stats import HeadStats
from sfumato.model.output_embedding import CHUNK, OutputEmbedding
from sfumato.model.vocabulary_pass import Adjust, PassSettings, VocabularyPass, vocabulary_pass
from sfumato.ops.online_softmax import Bans

__all__ = ["CHUNK", "Adjust", "HeadStats", "VocabularyHead"]


class VocabularyHead(OutputEmbedding):
    """The tied embedding, and one pass over it."""

    def __call__(
        self,
        hidden: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        adjust: Adjust | None = None,
        keep_logits: bool | Tensor = False,
        skip: Skip | None = None,
        soft_top_k: Tensor | None = None,
        bans: Bans | None = None,
        top: Tensor | None = None,
        done: Tensor | None = None,
        embeds: bool | Tensor = True,
    ) -> HeadStats:
        """One pass over the vocabulary.

        hidden [positions, hidden]; temperature float32 [positions], > 0; uniform float64
        [positions] in [0, 1); adjust acts on softcapped logits before the temperature; keep_logits:
        whether of all positions or, bool [positions], of which; skip touches the soft embedding
        alone; soft_top_k int64 [positions]: the draw and the soft embedding are of so many most
        probable tokens, 0 for all; bans: never beside an adjust or kept logits; top int64
        [positions]: how many most probable tokens are named, TOP at least; done bool
        [positions]: those of rows that are done, which kernels may leave out; embeds: False, or
        False in bool [positions], for zeros in place of soft embeddings, where no step comes that
        reads them.
        What is asked for at one position changes no bit at another.
        """
        settings = PassSettings(
            temperature, uniform, adjust, keep_logits, skip, soft_top_k, bans, top, embeds
        )
        if not settings.plain:
            return VocabularyPass(self, hidden, settings).run()
        inputs = hidden, self.embedding, temperature, uniform, self.softcap, bans
        return HeadStats(*vocabulary_pass(*inputs, self.chunk, self.output, done))
