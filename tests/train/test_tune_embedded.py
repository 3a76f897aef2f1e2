"""The embedded model learns a task by an adapter, which is then used."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import tune_embedded
from benchmarks.tune_embedded import TASKS, cases, chats, is_held_out

from sfumato.train.embedded_data import evaluation_sets


def test_no_held_out_word_is_learnt_and_old_conversations_are_among_the_new() -> None:
    task = TASKS["reverse"]
    learnt = chats(task, 200, 0.5, 0)
    new = [each for each in learnt if each[0]["content"].startswith("Reverse ")]
    assert 70 < len(new) < 130
    words = [each[0]["content"].removeprefix("Reverse ").rstrip(".") for each in new]
    assert [each[-1]["content"] for each in new] == [word[::-1] for word in words]
    assert not any(map(is_held_out, words))
    held_out = cases(task, 20, 0)
    assert all(is_held_out(each.expected[::-1]) for each in held_out)
    assert len({each.expected for each in held_out}) == 20


@pytest.mark.slow
def test_an_adapter_learns_letters_in_reverse_and_is_served_and_merged(tmp_path: Path) -> None:
    """Half of the steps of the figures in docs/tuning.md: what is learnt by then is right more
    often than not, and the model beside it is as it was."""
    tune_embedded.main([str(tmp_path), "--ways", "adapter", "--steps", "200", "--count", "40"])
    task, sets = TASKS["reverse"], evaluation_sets(0, 40)
    used = tune_embedded.accepted(tmp_path / "adapter", cases(task, 40, 0), sets["questions"][:40])
    assert used["new with it"] > 0.5
    assert used["old without it"] == 1
    assert used["same texts when merged"] == 1
    size = sum(file.stat().st_size for file in (tmp_path / "adapter" / "adapter").iterdir())
    assert size < 1e6
