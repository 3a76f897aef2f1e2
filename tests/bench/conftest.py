"""A tiny network of random weights, made once."""

from __future__ import annotations

import pytest

from sfumato.bench.subject import Subject, random_subject


@pytest.fixture(scope="session")
def tiny() -> Subject:
    """Canvases of 32, a vocabulary of 512, two layers."""
    return random_subject("tiny", "f32", device="cpu")
