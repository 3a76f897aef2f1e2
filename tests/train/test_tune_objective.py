"""The objective of tuning against a plain loop of `transformers`: one adapter, which changes both
of its stacks, has the same losses and the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracle import ENCODER, network_of, random_oracle, tiny_config
from torch import Tensor
from torch.func import functional_call

from sfumato.model.adapter_files import adaptable
from sfumato.model.adapters import Adapted, LowRank
from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasRow, collate
from sfumato.train.objective import loss, noised

transformers = pytest.importorskip("transformers")

CANVAS, PAD = 8, 0


def adapter_of(network, generator) -> dict[str, LowRank]:
    """Changes of every matrix but those of experts and routers, of which none is zero."""

    def half(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).requires_grad_(True)

    shapes = adaptable(network.config).items()
    chosen = {path: shape for path, shape in shapes if path.endswith("_proj") and len(shape) == 2}
    return {
        path: LowRank(half(3, width), half(out, 3), 2.0) for path, (out, width) in chosen.items()
    }


def changed_weights(oracle, adapter) -> dict[str, Tensor]:
    """The oracle's weights with the changes, in both stacks."""
    state = dict(oracle.named_parameters(remove_duplicate=False))
    for path, change in adapter.items():
        for stack in ("model.decoder.", ENCODER):
            if (name := f"{stack}{path}.weight") in state:
                state[name] = state[name] + change.up @ change.down * change.scale
    return state


def plain_losses(oracle, adapter, rows, generator, prompts) -> dict[str, Tensor]:
    """Google's objective, row by row, with `transformers` alone."""
    weights = changed_weights(oracle, adapter)
    targets = torch.tensor([row.target for row in rows])
    canvases = noised(targets, oracle.config.text_config.vocab_size, generator)
    conditioned = torch.rand(len(rows), 1, 1, generator=generator) < 0.5
    of_canvas, of_encoder = [], []
    for row, canvas, again in zip(rows, canvases, conditioned.flatten().tolist(), strict=True):
        context = torch.tensor([*row.prefix, *row.text])

        prefix = context[None, : len(row.prefix)]

        def call(canvas, logits, prefix=prefix):
            given = {"decoder_input_ids": canvas[None], "self_conditioning_logits": logits}
            return functional_call(oracle, weights, (prefix,), given, tie_weights=False).logits

        logits = None
        if again:
            with torch.no_grad():
                logits = call(canvas, None)
        of_canvas.append(F.cross_entropy(call(canvas, logits)[0].float(), torch.tensor(row.target)))
        encoder = {
            name.removeprefix("model.encoder."): value
            for name, value in weights.items()
            if name.startswith("model.encoder.")
        }
        hidden = functional_call(
            oracle.model.encoder, encoder, (context[None],), tie_weights=False
        ).last_hidden_state[0]
        scores = F.linear(hidden, weights["model.decoder.embed_tokens.weight"])
        cap = oracle.config.text_config.final_logit_softcapping
        scores = (scores / cap).tanh() * cap
        first = 1 if prompts else row.prompt
        of_encoder.append(
            F.cross_entropy(scores[first - 1 : -1], context[first:], reduction="none")
        )
    return {"canvas": torch.stack(of_canvas).mean(), "encoder": torch.cat(of_encoder).mean()}


def rows_of(generator) -> list[CanvasRow]:
    """A reply of two canvases whose second one is drawn, and one whose canvas ends with filler;
    both prompts are longer than the window of eight."""

    def ids(count: int) -> list[int]:
        return torch.randint(1, 97, (count,), generator=generator).tolist()

    prompt, first, second = ids(11), ids(CANVAS), ids(5)
    filled = [*second, PAD, PAD, PAD]
    one = CanvasRow("chat", prompt + first, filled, prompt=len(prompt), behind=second)
    prompt, reply = ids(9), ids(12)
    other = CanvasRow("chat", prompt, reply[:CANVAS], prompt=len(prompt), behind=reply)
    return [one, other]


@pytest.mark.parametrize("prompts", [True, False])
def test_losses_and_gradients_are_those_of_a_plain_loop(prompts, monkeypatch):
    oracle = random_oracle(tiny_config(canvas_length=CANVAS), 5)
    network, generator = network_of(oracle).transformer, torch.Generator().manual_seed(2)
    adapter = adapter_of(network, generator)
    network.attach(1, adapter)
    rows = rows_of(generator)
    halves = [half for change in adapter.values() for half in (change.down, change.up)]
    seed = next(  # of which the first row alone has a first pass
        seed for seed in range(99) if conditioned(seed) == [True, False]
    )
    expected = plain_losses(oracle, adapter, rows, torch.Generator().manual_seed(seed), prompts)
    theirs = torch.autograd.grad(sum(expected.values()), halves)
    if prompts:  # chunks of a few positions
        monkeypatch.setattr(objective, "MOST_SCORES", 5 * 97)
    ours = loss(
        network,
        collate(rows),
        torch.Generator().manual_seed(seed),
        each_row=True,
        prompts=prompts,
        adapted=(Adapted(1),),
    )
    for name, value in expected.items():
        assert ours[name].item() == pytest.approx(value.item(), rel=1e-4)
    gradients = torch.autograd.grad(sum(ours.values()), halves)
    for gradient, reference in zip(gradients, theirs, strict=True):
        assert reference.abs().max() > 0
        assert (gradient - reference).abs().max() <= 1e-4 * reference.abs().max()


def conditioned(seed: int) -> list[bool]:
    generator = torch.Generator().manual_seed(seed)
    noised(torch.zeros(2, CANVAS, dtype=torch.int64), 97, generator)
    return (torch.rand(2, 1, 1, generator=generator) < 0.5).flatten().tolist()
