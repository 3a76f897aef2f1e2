"""Labels' share of the vocabulary, and log probabilities of named tokens: all together have 1."""

from __future__ import annotations

import pytest
import torch
from tests.support.gguf_files import encode

from sfumato import ops
from sfumato.model.devices import fetch_together
from sfumato.model.head import VocabularyHead
from sfumato.model.scores import label_mass, label_scores, named_log_probs
from sfumato.weights.formats import FORMATS, QuantizedTensor

VOCAB, HIDDEN, CHUNK = 192, 256, 64


def head_of(kind: str) -> VocabularyHead:
    random = torch.Generator().manual_seed(4)
    values = torch.randn(VOCAB, HIDDEN, generator=random) * 0.3
    if kind in ("float32", "bfloat16"):
        return VocabularyHead(values.to(getattr(torch, kind)), 30.0, CHUNK)
    data = torch.from_numpy(encode(values, "Q8_0", seed=1))
    quantized = QuantizedTensor(data, FORMATS["Q8_0"], (VOCAB, HIDDEN))
    chunks = [quantized[start : start + CHUNK] for start in range(0, VOCAB, CHUNK)]
    return VocabularyHead(quantized, 30.0, CHUNK, [ops.pack(chunk, kind) for chunk in chunks])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "bf16"])
def test_all_tokens_together_have_the_mass_1(kind: str) -> None:
    """Whatever the products round to; the shares among some tokens are those of float32."""
    head = head_of(kind)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    hidden = hidden.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    everything, some = list(range(VOCAB)), [3, 70, 71, 190]
    (mass,) = fetch_together([label_mass(head, hidden, [everything, some, everything, some, [5]])])
    assert mass.labels[0] == pytest.approx(1, abs=1e-5)
    assert mass.labels[2] == pytest.approx(1, abs=1e-5)
    assert 0 < mass.labels[1] < 1 and mass.argmax == head.logits(hidden).argmax(1).tolist()
    ones = torch.ones(5)
    stats = head(hidden, ones, torch.full((5,), 0.5, dtype=torch.float64))
    logs = named_log_probs(head, hidden, ones, stats, everything)
    assert logs.exp().sum(dim=1).tolist() == pytest.approx([1] * 5, abs=1e-5)
    logs = named_log_probs(head, hidden, ones, stats, some)
    assert logs[1].exp().sum().item() == pytest.approx(mass.labels[1], abs=1e-5)
    (scores,) = fetch_together([label_scores(head, hidden, [some] * 5)])
    shares = torch.tensor(scores).softmax(1)
    torch.testing.assert_close(logs.softmax(1), shares)
    (alone,) = fetch_together([label_mass(head, hidden[1:2], [some])])
    assert alone.labels == mass.labels[1:2], "the other positions change no bit"
