"""What the tests of conversion share with those of text."""

from __future__ import annotations

from tests.text.conftest import gemma_metadata, tiny_json

__all__ = ["gemma_metadata", "tiny_json"]
