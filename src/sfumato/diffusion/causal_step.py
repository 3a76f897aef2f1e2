"""One step of the causal mode: the token that follows what the slots hold, for several rows.

A canvas of the causal mode has one position, whose scores come from the encode phase in place of a
denoising forward. All else is as for other canvases: rules of sampling, noise, pinned tokens. Knows
no slots; the caller has encoded what comes before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.diffusion.canvas import Canvas, Draft
from sfumato.diffusion.scoring import Scoring, score
from sfumato.model.head import HeadStats
from sfumato.model.network import Network
from sfumato.model.to_device import to_device
from sfumato.model.token_scores import TokenScores, token_scores


@torch.no_grad()
def draw_next(
    network: Network, canvases: Sequence[Canvas], hidden: Tensor
) -> list[Draft | Exception]:
    """The draft of each canvas, which is done then, or what failed in it alone: hidden [rows,
    hidden] of the token before it, from `Network.encode_hidden`. Raises what failed in all; then no
    canvas has changed.

    `token_ids` of a draft is the drawn token. Where the config names most probable tokens, these
    and the drawn token's log probability are the model's own: before temperature, biases and cuts.
    """
    device = hidden.device
    scoring = Scoring.of(canvases, network.head.vocab_size, device)
    temperature = to_device(torch.tensor([canvas.temperature() for canvas in canvases]), device)
    uniforms = torch.cat([canvas.uniforms() for canvas in canvases])
    uniforms = uniforms.float() if device.type == "mps" else uniforms
    drawn_with = temperature, to_device(uniforms, device)
    stats, extra = score(network.head, hidden, *drawn_with, scoring, canvases)
    cold = torch.tensor([canvas.config.temperature == 0 for canvas in canvases])
    drawn = torch.where(cold, stats.argmax.cpu(), stats.drawn.cpu())
    pinned = torch.cat([canvas.pinned for canvas in canvases])
    chosen = torch.where(pinned >= 0, pinned, drawn)
    scores = _own_scores(network, canvases, hidden, chosen)
    entropy = stats.entropy.cpu()
    results: list[Draft | Exception] = []
    for row, canvas in enumerate(canvases):
        try:
            canvas.check_entropy(entropy[row : row + 1], 1)
        except Exception as error:
            results.append(error)
            continue
        own = extra.get(row, stats[row : row + 1])
        results.append(_draft(canvas, chosen[row : row + 1], own, scores.get(row)))
    for canvas, result in zip(canvases, results, strict=True):
        if isinstance(result, Draft):
            canvas.learn(1, converged=True, done=True)
    return results


def _own_scores(
    network: Network, canvases: Sequence[Canvas], hidden: Tensor, chosen: Tensor
) -> dict[int, TokenScores]:
    """By row, on the host, where a row's config names most probable tokens."""
    counts = {
        row: canvas.config.top_tokens
        for row, canvas in enumerate(canvases)
        if canvas.config.top_tokens is not None
    }
    if not counts:
        return {}
    rows = torch.tensor(list(counts))
    on_device = to_device(rows, hidden.device)
    ids = to_device(chosen[rows], hidden.device)
    scores = token_scores(network.head, hidden[on_device], ids, top=max(counts.values())).to("cpu")
    return {row: scores[at : at + 1] for at, row in enumerate(counts)}


def _draft(canvas: Canvas, chosen: Tensor, stats: HeadStats, scores: TokenScores | None) -> Draft:
    named = None if stats.named is None else stats.named.cpu()
    if scores is None:
        top_ids, top_probs, log_probs = stats.top_ids.cpu(), stats.top_probs.cpu(), None
    else:
        top_ids, top_probs = scores.top_ids, scores.top_log_probs.exp()
        log_probs = scores.log_probs
    return Draft(
        canvas.noise.canvas,
        1,
        chosen,
        stats.entropy.cpu(),
        torch.ones(1, dtype=torch.bool),
        1,
        top_ids,
        top_probs,
        named=named,
        log_probs=log_probs,
    )
