"""The last draft of a canvas some of whose tokens were chosen after its last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Draft


def written_draft(draft: Draft, ids: Sequence[int], scored: Mapping[int, Tensor]) -> Draft:
    """The draft with these tokens at its first places; the draft itself where it has them already.
    What closes a reply may go beyond the canvas: a draft does not show that.

    scored: by place the scores float32 [vocabulary] that its token was chosen by. A token that was
    chosen by no scores has probability 1.
    """
    before = draft.token_ids.tolist()
    pairs = enumerate(zip(ids, before, strict=False))
    changed = [at for at, (token, old) in pairs if token != old or at in scored]
    if not changed:
        return draft
    tokens, entropy = draft.token_ids.clone(), draft.entropy.clone()
    accepted = draft.accepted.clone()
    top_ids, top_probs = draft.top_ids.clone(), draft.top_probs.clone()
    for at in changed:
        tokens[at], accepted[at] = ids[at], True
        if at in scored:
            probs = scored[at].softmax(dim=0)
            top_probs[at], top_ids[at] = probs.topk(top_ids.shape[1])
            entropy[at] = torch.special.entr(probs).sum()
        else:
            others = [token for token in top_ids[at].tolist() if token != ids[at]]
            top_ids[at] = torch.tensor([ids[at], *others][: top_ids.shape[1]])
            top_probs[at], entropy[at] = 0.0, 0.0
            top_probs[at, 0] = 1.0
    return replace(
        draft,
        token_ids=tokens,
        entropy=entropy,
        accepted=accepted,
        top_ids=top_ids,
        top_probs=top_probs,
    )
