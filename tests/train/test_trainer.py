from __future__ import annotations

import itertools
import multiprocessing
import os
import signal

import pytest
import torch

from sfumato.train.trainer import part_processes


def _work(weight):
    def steps(part):
        for step in itertools.count():
            yield ((weight.detach() * (part + 1) + step).clone(),), {"loss": float(part + step)}

    return steps


def _two_steps(weight):
    """What two steps give; the weight doubles between them."""
    given = []
    with part_processes([weight], _work(weight), 2) as results:
        for _ in range(2):
            given += [(grads[0].clone(), losses) for grads, losses in results()]
            with torch.no_grad():
                weight.mul_(2)
    return given


def test_processes_see_the_weights_of_each_step_and_give_what_one_process_gives(monkeypatch):
    forked = _two_steps(torch.nn.Parameter(torch.arange(3.0)))
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    here = _two_steps(torch.nn.Parameter(torch.arange(3.0)))
    assert [losses for _, losses in forked] == [losses for _, losses in here]
    for (one, _), (other, _) in zip(forked, here, strict=True):
        assert torch.equal(one, other)
    assert forked[3][0].tolist() == [1.0, 5.0, 9.0]


def test_what_a_part_raises_is_raised():
    def steps(part):
        if part:
            raise ValueError("no rows")
        yield (torch.zeros(1),), {}

    with (
        part_processes([torch.nn.Parameter(torch.zeros(1))], steps, 2) as results,
        pytest.raises(ValueError, match="no rows"),
    ):
        results()


def test_a_process_that_dies_ends_the_step():
    def steps(part):
        os.kill(os.getpid(), signal.SIGKILL)
        yield (torch.zeros(1),), {}

    with (
        part_processes([torch.nn.Parameter(torch.zeros(1))], steps, 1) as results,
        pytest.raises(RuntimeError, match="has died"),
    ):
        results()
