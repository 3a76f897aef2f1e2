"""The last draft of a canvas some of whose tokens were chosen after its last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Draft


def written_draft(draft: Draft, ids: Sequence[int], scored: Mapping[int, Tensor]) -> Draft:
    """The draft with these tokens at its first places; the draft itself where it has them already.
    What closes a reply may go beyond the canvas: the draft is then so much longer, but for `noise`
    and `pinned`, which are of the canvas alone.

    scored: by place the scores float32 [vocabulary] that its token was chosen by. A token that was
    chosen by no scores has probability 1.
    """
    draft = _lengthened(draft, len(ids))
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


def _lengthened(draft: Draft, length: int) -> Draft:
    """The draft with at least so many places. The new ones, which no step has scored, have no
    token, and the alternatives of the last place."""
    more = length - len(draft.token_ids)
    if more <= 0:
        return draft

    def longer(column: Tensor, value: float) -> Tensor:
        return torch.cat([column, column.new_full((more, *column.shape[1:]), value)])

    return replace(
        draft,
        token_ids=longer(draft.token_ids, -1),
        entropy=longer(draft.entropy, 0.0),
        accepted=longer(draft.accepted, True),
        top_ids=torch.cat([draft.top_ids, draft.top_ids[-1:].expand(more, -1)]),
        top_probs=longer(draft.top_probs, 0.0),
        named=None if draft.named is None else longer(draft.named, float("-inf")),
        log_probs=None if draft.log_probs is None else longer(draft.log_probs, 0.0),
    )
