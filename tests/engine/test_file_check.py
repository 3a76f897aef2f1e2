"""A file of the model that was truncated ends the engine between two steps, in words."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.scripted_engine import Script, engine, run

from sfumato.engine import EngineDead, Failed
from sfumato.engine.errors import Stops
from sfumato.weights.files.tensorfile import FileSizes, map_file

SIZE = 2 * mmap.PAGESIZE


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A mapped file, and a request to an engine whose weights are views of it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(SIZE))
    now = [0.0]
    script = Script(40, 5, [[50] * 4], hesitate=[8])
    serving, network = engine(script, clock=lambda: now[0])
    file: Any = SimpleNamespace(path=path, mapping=map_file(path))
    serving._files._files = network.files = FileSizes([file])
    return SimpleNamespace(path=path, now=now, engine=serving, script=script, file=file)


def test_requests_end_in_words_and_the_engine_is_not_ready(served: Any) -> None:
    handle = served.engine.submit(served.script.request())
    served.engine.step()
    os.truncate(served.path, SIZE - 1)
    served.engine.step()  # within the second
    served.now[0] = 1.5
    with pytest.raises(Stops):
        served.engine.step()
    assert isinstance(handle.terminal, Failed) and handle.terminal.kind == "internal"
    words = "the engine has stopped: model.gguf was made shorter while the model is in use"
    assert handle.terminal.message.startswith(words)
    assert str(served.path.parent) not in handle.terminal.message
    health = served.engine.health()
    assert not health.ok and health.reason == handle.terminal.message
    with pytest.raises(EngineDead, match=r"model\.gguf"):
        served.engine.submit(served.script.request())


def test_a_file_that_grows_or_of_which_nothing_is_in_use_is_no_matter(served: Any) -> None:
    served.engine.submit(served.script.request())
    os.truncate(served.path, SIZE + 1)
    served.now[0] = 1.5
    served.engine.step()
    os.truncate(served.path, 1)
    del served.file.mapping
    served.now[0] = 3.0
    run(served.engine)


def test_an_idle_engine_notices_too(served: Any) -> None:
    served.engine._clock = served.engine._files._clock = lambda: 5.0
    os.truncate(served.path, 1)
    served.engine.start()
    thread = served.engine._lifecycle.thread
    thread.join(60)
    assert not thread.is_alive() and not served.engine.health().ok
