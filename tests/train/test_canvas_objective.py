from __future__ import annotations

import pytest
import torch

from sfumato.train import objective
from sfumato.train.canvas_rows import CanvasRow, collate
from sfumato.train.objective import canvas_losses
from sfumato.train.recipe import EMBEDDED, initialised
from sfumato.train.vocabulary import BOS, END_OF_TURN, EOS, encode_text


@pytest.fixture(scope="module")
def network():
    return initialised(EMBEDDED, torch.Generator().manual_seed(0))


def row(text, is_open=None, kind="fill", width=16, prefix=(BOS,), start=None):
    ids = [*encode_text(text), END_OF_TURN]
    ids += [EOS] * (width - len(ids))
    return CanvasRow(kind, list(prefix), ids, is_open, start)


def losses(network, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return {k: v.item() for k, v in canvas_losses(network, collate(rows), generator).items()}


def test_a_batch_has_the_texts_behind_their_prefixes_and_no_filler():
    batch = collate([row("abc", prefix=(BOS, 20, 21)), row("a", width=3)])
    assert batch.context.tolist() == [
        [BOS, 20, 21, *encode_text("abc"), END_OF_TURN],
        [BOS, *encode_text("a"), END_OF_TURN, 0, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [3, 1]
    assert batch.prompts.tolist() == [[True, True] + [False] * 4, [False] * 6]
    assert batch.replies.sum(1).tolist() == [4, 2]
    assert batch.filled.sum(1).tolist() == batch.open.sum(1).tolist() == [16, 3]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])  # with and without a first pass
def test_pinned_positions_keep_their_token_and_no_row_changes_another(network, seed, monkeypatch):
    """A short canvas gives the same loss by itself and beside a wider one; the canvases that go in
    have every pinned token."""
    seen = []
    denoise = type(network).denoise

    def watched(self, canvas, soft, *rest):
        seen.append((canvas, soft))
        return denoise(self, canvas, soft, *rest)

    monkeypatch.setattr(type(network), "denoise", watched)
    is_open = [i in (1, 2) for i in range(16)]
    rows = [row("abcd", is_open), row("efgh", is_open)]
    values = losses(network, rows, seed)
    assert values["canvas"] == pytest.approx(values["fill"])
    pinned = ~torch.tensor(is_open)
    for canvas, soft in seen:
        for one, tokens in zip(rows, canvas, strict=True):
            assert tokens[pinned].tolist() == torch.tensor(one.target)[pinned].tolist()
        assert soft is None or (soft[:, pinned] == 0).all()
    assert all(value > 0 for value in values.values() if value != values["prompt"])
    assert values["prompt"] == 0  # no row has a prompt


def test_a_canvas_begins_as_its_start_where_that_is_no_noise(network, monkeypatch):
    seen = []
    denoise = type(network).denoise

    def watched(self, canvas, *rest):
        seen.append(canvas)
        return denoise(self, canvas, *rest)

    monkeypatch.setattr(type(network), "denoise", watched)
    other = row("wxyzwxyzwxyz")
    rows = [row("abcdabcdabcd", kind="predicted", start=other.target) for _ in range(40)]
    losses(network, rows, 0)
    same = (seen[0] == torch.tensor(other.target)).float().mean()
    right = (seen[0][:, :12] == torch.tensor(rows[0].target)[:12]).float().mean()
    assert 0.3 < same < 0.7 and right < 0.1


def test_what_a_step_accepts_keeps_its_token(monkeypatch):
    batch = collate([row("abcd", [i < 4 for i in range(16)])])
    scores = torch.zeros(1, 16, EMBEDDED.vocab_size)
    scores[0, :2, 30] = 100.0  # sure
    monkeypatch.setattr(torch, "randint", lambda *given, **named: torch.full((1, 16), 50))
    stepped = objective._stepped(scores, batch, torch.Generator().manual_seed(0))
    assert stepped[0, :2].tolist() == [30, 30]
    assert stepped[0, 3] == 50
    assert stepped[0, 4:].tolist() == batch.target[0, 4:].tolist()
