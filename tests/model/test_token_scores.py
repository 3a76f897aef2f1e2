"""Log probabilities of given tokens, by a pass that never has all scores at a time."""

from __future__ import annotations

import pytest
import torch
from tests.model.test_label_scores import CHUNK, HIDDEN, VOCAB, head_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.model import scores as module
from sfumato.model.head import VocabularyHead
from sfumato.model.scores import token_scores


def case(kind: str, positions: int = 7) -> tuple[VocabularyHead, Tensor, Tensor]:
    random = torch.Generator().manual_seed(6)
    hidden = torch.randn(positions, HIDDEN, generator=random)
    hidden = hidden.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    return head_of(kind), hidden, torch.randint(VOCAB, (positions,), generator=random)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "bf16"])
def test_they_are_those_of_all_scores(kind: str) -> None:
    """Chunks of the vocabulary and groups of positions change nothing."""
    head, hidden, ids = case(kind)
    logs = head.logits(hidden).log_softmax(dim=1)
    ids[0] = logs[0].argmax()
    scores = token_scores(head, hidden, ids, ranks=True)
    torch.testing.assert_close(scores.log_probs, logs.gather(1, ids[:, None])[:, 0])
    assert scores.top_ids.shape == (7, 8)
    torch.testing.assert_close(scores.top_log_probs, logs.topk(8)[0])
    own = head.logits(hidden).gather(1, ids[:, None])
    assert scores.ranks.tolist() == ((head.logits(hidden) > own).sum(dim=1) + 1).tolist()
    assert scores.log_probs[0] == scores.top_log_probs[0, 0], "one token has one number, bitwise"
    assert token_scores(head, hidden, ids).ranks.tolist() == [0] * 7


def test_more_of_the_most_probable() -> None:
    head, hidden, ids = case("float32")
    logs = head.logits(hidden).log_softmax(dim=1)
    ids[3] = logs[3].argsort(descending=True)[15]
    scores = token_scores(head, hidden, ids, top=20)
    torch.testing.assert_close(scores.top_log_probs, logs.topk(20)[0], rtol=1e-5, atol=1e-5)
    assert scores.top_ids[3].tolist() == logs[3].topk(20)[1].tolist()
    assert scores.log_probs[3] == scores.top_log_probs[3, 15]


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_positions_are_scored_in_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, ids = case(kind)
    together = token_scores(head, hidden, ids, top=9, ranks=True)
    monkeypatch.setattr(module, "TOGETHER", 3)
    for name, value in vars(token_scores(head, hidden, ids, top=9, ranks=True)).items():
        assert value.equal(getattr(together, name)), name


def test_no_positions() -> None:
    head, hidden, ids = case("float32")
    scores = token_scores(head, hidden[:0], ids[:0])
    assert scores.log_probs.shape == (0,) and scores.top_ids.shape == (0, 8)


def test_no_tensor_has_all_scores() -> None:
    """Of so many positions a chunk's scores are a third of all; with alternatives and ranks."""
    sizes: list[int] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            results = result if isinstance(result, list | tuple) else [result]
            sizes.extend(each.numel() for each in results if isinstance(each, Tensor))
            return result

    head, hidden, ids = case("float32", positions=384)
    with Recorder():
        token_scores(head, hidden, ids, top=20, ranks=True, together=384)
    inputs = max(hidden.numel(), head.embedding.numel())
    assert 384 * CHUNK <= max(sizes) <= inputs
    assert 384 * VOCAB not in sizes
