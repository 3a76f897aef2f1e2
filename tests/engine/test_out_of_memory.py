"""Memory that runs out in a forward: fewer rows or tokens are tried; then the newest row ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.faults import LONG, no_slot_is_leaked, outcome, raising, three
from tests.support.scripted_engine import Script, engine, run

from sfumato.engine import (
    Failed,
)


def test_out_of_memory_once_is_tried_with_the_older_half() -> None:
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42, 43)]
    serving, network = engine(*scripts)
    handles = [serving.submit(script.request()) for script in scripts]
    network.before = raising(torch.OutOfMemoryError("CUDA out of memory"), "denoise", {43}, times=1)
    run(serving)
    assert [h.result().text for h in handles] == [LONG.removesuffix("<turn|>")] * 4
    assert network.denoised()[:3] == [[40, 41, 42, 43], [40, 41], [42, 43]]
    assert network.denoised()[3:5] == [[40, 41], [42, 43]], "the lesson is kept"


def test_out_of_memory_again_ends_the_newest() -> None:
    """Until what is left fits."""
    scripts = [Script(key, 5, LONG) for key in (40, 41, 42, 43)]
    serving, network = engine(*scripts)
    handles = [serving.submit(script.request()) for script in scripts]

    def before(what: str, keys: list[int]) -> None:
        if what == "denoise" and len(keys) > 1:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"
            )

    network.before = before
    run(serving)
    # Four and two do not fit, so 43 ends; of three, one fits and the others follow one by one.
    assert [outcome(h) for h in handles] == ["eos", "eos", "eos", "memory"]
    assert isinstance(handles[3].terminal, Failed)
    assert "memory" in handles[3].terminal.message
    assert no_slot_is_leaked(serving)


@pytest.mark.parametrize("what", ["encode", "denoise"])
def test_out_of_memory_always_ends_everyone_and_not_the_engine(what: str) -> None:
    """The newest first."""
    ended: list[str] = []
    serving, network, scripts, handles = three(
        on_finish=lambda ended_request, _: ended.append(ended_request.id)
    )
    network.before = raising(MemoryError(), what, {40, 41, 42})
    run(serving)
    assert [outcome(h) for h in handles] == ["memory"] * 3
    assert ended == [h.id for h in reversed(handles)]
    network.before = lambda what, keys: None
    assert serving.generate(scripts[0].request()).text == LONG.removesuffix("<turn|>")
    assert serving.health().ok and no_slot_is_leaked(serving)


def limit_encode_memory(network: Any, most: int, least: int = 0) -> list[int]:
    """Memory for `most` tokens of encode work at once, where more than `least` rows share it.
    Gives the sizes of what did not fit, as it comes."""
    failures: list[int] = []

    def encode(rows: Any, slots: Any, chunk: int, pictures: Any) -> bool:
        if sum(map(len, rows)) > most and len(rows) > least:
            for slot in slots:
                slot.reset()
            failures.append(sum(map(len, rows)))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return bool(type(network).encode(network, rows, slots, chunk))

    network.encode = encode
    return failures


def test_out_of_memory_in_an_encode_is_tried_in_smaller_chunks() -> None:
    """No request ends, all start over together, and afterwards the full chunk is used again."""
    scripts = [Script(key, 60, LONG) for key in (40, 41, 42)]
    last = Script(43, 60)
    serving, network = engine(*scripts, last, prefill_chunk=32)
    handles = [serving.submit(script.request()) for script in scripts]
    failures = limit_encode_memory(network, most=16)
    run(serving)
    assert len(failures) == 1, "the lesson is kept"
    assert [h.result().text for h in handles] == [LONG.removesuffix("<turn|>")] * 3
    assert max(len(who) for what, who in network.log if what == "encode") == 3
    del network.encode, network.log[:]
    assert serving.generate(last.request()).text == "Hello."
    assert network.log[0] == ("encode", {43: 32})


def test_out_of_memory_in_an_encode_again_ends_the_newest() -> None:
    serving, network, _, handles = three(prefill_chunk=32)
    limit_encode_memory(network, most=0, least=1)  # no two rows fit
    run(serving)
    assert [outcome(h) for h in handles] == ["eos", "memory", "memory"]
    assert handles[0].result().text == LONG.removesuffix("<turn|>")
    assert no_slot_is_leaked(serving)
