"""Another process tries each grammar first: what it does there ends neither that nor this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.diffusion.constraints.test_depth import LINKS, chain
from tests.diffusion.constraints.test_grammar import TOKENS
from tests.support.hostile_sources import Unchecked, doing

from sfumato.diffusion.constraints import trials
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.diffusion.constraints.trials import (
    GrammarCache,
    TrialFailed,
    Trials,
    Tried,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork")
ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0


class Busy(RuntimeError):
    pass


@pytest.fixture
def tried() -> Iterator[Trials]:
    made = Trials(TOKENS, Busy, lambda source, outcome: None)
    yield made
    made.close(RuntimeError("the test is over"))


def regex(text: str) -> GrammarSource:
    return GrammarSource("regex", text)


def outcome(tried: Trials, source: Source, client: str = "") -> Any:
    """What comes of a source, errors too."""
    future = tried.start(source, client)
    return future.exception(PATIENCE_S) or future.result()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.01)


def test_the_process_loads_no_torch() -> None:
    code = f"import sys, {trials._PROGRAM}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    loaded = done.stdout.split()
    assert "sfumato.diffusion.constraints.grammar" in loaded
    assert not {"torch", "numpy", "fastapi"} & {*loaded}


def test_what_comes_of_a_trial(tried: Trials) -> None:
    good = outcome(tried, regex("a+"))
    assert isinstance(good, Tried) and good.field == "schema" and "a+" in good.text
    refused = outcome(tried, GrammarSource("regex", "(", "guided_regex"))
    assert isinstance(refused, ValueError) and str(refused).startswith("guided_regex: ")
    assert isinstance(outcome(tried, doing("print")), Tried)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (doing("spin"), "takes more than 1 s"),
        (doing("eat"), "needs more memory"),
        (doing("die"), "too deep a recursion"),
        (Unchecked("schema", schema_source(chain(1500, LINKS["items"])).text, "x"), "too deep"),
        (Unchecked("schema", schema_source(chain(2500, LINKS["required"])).text, "x"), "too deep"),
    ],
)
def test_what_a_trial_does_not_survive_is_refused(tried: Trials, source: Any, why: str) -> None:
    refused = outcome(tried, source)
    assert isinstance(refused, ValueError)
    assert str(refused).startswith(f"{source.field}: ") and why in str(refused)
    assert isinstance(outcome(tried, regex("a")), Tried)


def test_an_answer_that_is_none(tried: Trials) -> None:
    assert isinstance(outcome(tried, doing("leave")), ValueError)
    assert isinstance(outcome(tried, regex("a")), Tried)


def test_a_process_that_is_killed_is_replaced(tried: Trials) -> None:
    assert isinstance(outcome(tried, regex("a")), Tried)
    first = tried.process
    assert first is not None and first.pid is not None
    os.killpg(first.pid, signal.SIGKILL)
    assert isinstance(outcome(tried, regex("b")), Tried)
    assert tried.process is not first


def test_a_trial_whose_process_is_killed_is_begun_again_once(tried: Trials) -> None:
    future = tried.start(doing("sleep"))
    killed = set()
    for _ in range(2):
        eventually(lambda: tried.process is not None and tried.process.pid not in {None, *killed})
        assert tried.process is not None and tried.process.pid is not None
        killed.add(tried.process.pid)
        assert not future.done()
        os.killpg(tried.process.pid, signal.SIGKILL)
    with pytest.raises(TrialFailed):
        future.result(PATIENCE_S)
    assert isinstance(outcome(tried, regex("a")), Tried)


def test_a_program_that_does_not_start_fails_what_waits(
    tried: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trials, "_PROGRAM", "sfumato.no_such_module")
        with pytest.raises(TrialFailed):
            tried.start(regex("a")).result(PATIENCE_S)
    assert isinstance(outcome(tried, regex("a")), Tried)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are not listed here")
def test_the_process_keeps_no_file_of_a_turn_open(tried: Trials) -> None:
    def opened() -> int:
        outcome(tried, regex(f"a{next(numbers)}"))
        assert tried.process is not None
        return len(os.listdir(f"/proc/{tried.process.pid}/fd"))

    numbers = iter(range(9))
    counts = [opened() for _ in range(9)]
    assert max(counts[1:]) - min(counts[1:]) <= 2  # of the turn that ends just now


def test_small_grammars_pass_large_ones(tried: Trials) -> None:
    """Those of the same client too, since a first turn is short."""
    bombs = [tried.start(_spinning(number), "bomber") for number in range(4)]
    small = tried.start(regex("a"), "another")
    own = tried.start(regex("b"), "bomber")
    assert isinstance(small.result(PATIENCE_S), Tried)
    assert isinstance(own.result(PATIENCE_S), Tried)
    assert not any(bomb.done() for bomb in bombs)
    for bomb in bombs:
        assert "takes more than" in str(bomb.exception(PATIENCE_S))


def _spinning(number: int) -> GrammarSource:
    return type(doing("spin"))("regex", "spin", f"field{number}")


def test_clients_take_turns(tried: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_OF_ONE", 100)
    ended: list[str] = []
    blocks = tried.start(doing("sleep"), "many")
    futures = [tried.start(regex("a" * n), "many") for n in range(1, 20)]
    futures += [tried.start(regex("b" * n), "few") for n in range(1, 3)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda done, n=n: ended.append("many" if n < 19 else "few"))
    blocks.cancel()
    for future in futures:
        future.result(PATIENCE_S)
    assert ended[:4].count("few") == 2


def test_a_trial_ends_when_no_one_waits_for_it(tried: Trials) -> None:
    alone = tried.start(doing("sleep"))
    first, second = tried.start(doing("sleep more")), tried.start(doing("sleep more"))
    assert not alone.done() and alone.cancel()
    assert first.cancel()
    small = tried.start(regex("a"))
    eventually(lambda: tried._running[False].waiting == [second])
    assert not second.done() and not small.done()  # the other one still sleeps
    assert second.cancel()
    assert isinstance(small.result(PATIENCE_S), Tried)  # else it would wait for a minute
    assert not tried._open


def test_no_client_fills_the_queue(tried: Trials) -> None:
    going = [tried.start(doing(f"sleep {n}"), "many") for n in range(trials.MOST_OF_ONE + 1)]
    with pytest.raises(Busy, match="16 schemas and grammars of yours"):
        tried.start(regex("a"), "many")
    tried.start(doing("sleep 3"), "many").cancel()  # one that waits already needs no place
    for other in range(3):
        going += [
            tried.start(doing(f"sleep {other} {n}"), f"{other}") for n in range(trials.MOST_OF_ONE)
        ]
    with pytest.raises(Busy, match="64 schemas and grammars in all"):
        tried.start(regex("a"), "another")
    for future in going:
        future.cancel()
    assert isinstance(outcome(tried, regex("a"), "many"), Tried)


def test_closing_ends_what_waits_and_the_process(tried: Trials) -> None:
    assert isinstance(outcome(tried, regex("a")), Tried)
    assert (started := tried.process) is not None
    futures = [tried.start(doing("sleep")), tried.start(regex("b"))]
    tried.close(Busy("over"))
    for future in futures:
        with pytest.raises(Busy, match="over"):
            future.result(PATIENCE_S)
    assert started.wait(PATIENCE_S) == 0
    assert isinstance(outcome(tried, regex("c")), Tried)  # by another one


def test_the_process_ends_with_this_one() -> None:
    code = """
import os
from tests.diffusion.constraints.test_trials import *
tried = Trials(TOKENS, Busy, lambda source, outcome: None)
assert isinstance(outcome(tried, regex("a")), Tried)
tried.start(doing("sleep"))
print(tried.process.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    pid = int(done.stdout)

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")  # a zombie, where no one waits for orphans
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"

    eventually(is_gone)


def test_a_guarded_cache_compiles_what_was_tried_and_remembers_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("only the other process takes sources")

    monkeypatch.setattr(GrammarSource, "compile", never)
    cache = GrammarCache(TOKENS)
    cache.guard(Busy)
    begun: list[Source] = []
    assert cache.trials is not None
    start = cache.trials.start
    monkeypatch.setattr(
        cache.trials, "start", lambda *args: (begun.append(args[0]), start(*args))[1]
    )
    try:
        source = schema_source({"enum": ["yes", "no"]})
        cache.tried(source, "me").result(PATIENCE_S)
        state = cache.grammar(source).begin()
        assert state.valid(TOKENS.encode('"yes"')) == len(TOKENS.encode('"yes"'))
        cache.tried(source, "me").result(PATIENCE_S)
        assert begun == [source]
        spins = doing("spin")
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^spin: takes more"):
                cache.tried(spins).result(PATIENCE_S)
            with pytest.raises(ValueError, match=r"^spin: takes more"):
                cache.grammar(spins)
        assert begun == [source, spins]
        cache.grammar(regex("ab"))  # which no one has tried before
        assert begun == [source, spins, regex("ab")]
    finally:
        cache.close(Busy("over"))


def test_a_cache_that_is_not_guarded_starts_no_process() -> None:
    cache = GrammarCache(TOKENS)
    cache.tried(regex("a")).result(0)
    assert cache.grammar(regex("a")).begin().mask().any() and cache.trials is None
    cache.close(Busy("over"))
