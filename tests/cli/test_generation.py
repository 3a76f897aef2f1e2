from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sfumato.cli import generation


@pytest.mark.parametrize(("hidden_size", "threads"), [(128, 1), (2816, 3)])
def test_only_a_tiny_model_is_kept_to_one_thread(hidden_size, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        generation.spare_threads(SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size)))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
