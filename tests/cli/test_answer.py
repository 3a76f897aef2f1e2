"""Answers of the real engine: what a turn costs, what is drawn again, what fails and goes on."""

from __future__ import annotations

import itertools
import json
import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.scripted_engine import LENGTH, Script, ScriptedNetwork
from tests.support.scripted_engine import model as scripted_model
from tests.support.scripted_model import VOCABULARY, tokenizer

import sfumato
from sfumato import Engine, Request
from sfumato.cli import chat, generation
from sfumato.cli.display import Display
from sfumato.cli.generation import Answer
from sfumato.engine import EngineConfig, EngineError, TooLarge

BOS = VOCABULARY["<bos>"]  # what every prompt begins with


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Engine, Answer]]:
    """Every answer of a command, and the engine that gave it."""
    answers = []
    answer = generation.answer

    def watched(engine: Engine, *args: Any) -> Answer:
        answers.append((engine, answer(engine, *args)))
        return answers[-1][1]

    monkeypatch.setattr(generation, "answer", watched)
    return answers


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> ScriptedNetwork:
    """What says "Yes." to everything, and is what every command loads."""
    script = Script(BOS, 1, says=lambda reply: padded("Yes.<turn|>"))
    network = ScriptedNetwork([script])
    monkeypatch.setattr(generation, "load", lambda args: scripted_model(network))
    return network


def padded(text: str) -> list[int]:
    ids = tokenizer().encode(text)[:LENGTH]
    return ids + [VOCABULARY["<pad>"]] * (LENGTH - len(ids))


def once(what: str, happens: Callable[[], None]) -> Callable[[str, list[int]], None]:
    """Something that happens at the first forward of a kind."""
    left = [happens]

    def before(kind: str, keys: list[int]) -> None:
        if kind == what and left:
            left.pop()()

    return before


def test_a_turn_pays_for_its_new_tokens_alone(cli: Any, seen: Any) -> None:
    """With the embedded model, whose windows of 128 tokens the third prompt goes beyond."""
    done = cli("chat", stdin="Who are you?\nHow do you work?\nWhat is the capital of Japan?\n")
    assert (done.code, done.err) == (0, "")
    (engine, _), *_ = seen
    accounts = [answer.account for _, answer in seen]
    assert {id(each) for each, _ in seen} == {id(engine)}
    assert accounts[0].cached_tokens == 0
    for before, after in itertools.pairwise(accounts):
        assert before.prompt_tokens <= after.cached_tokens < after.prompt_tokens
    new = sum(account.prompt_tokens - account.cached_tokens for account in accounts)
    totals = engine.state().totals
    # The last canvas of a reply is never encoded; earlier ones are, and the next turn has them.
    assert new <= totals.encoded_tokens <= accounts[-1].prompt_tokens
    assert done.out.split("\n")[2] == "The capital is Tokyo."


def test_reuse_does_not_change_what_is_said(cli: Any) -> None:
    lines = ("Who are you?", "How do you work?")
    done = cli("chat", stdin="\n".join(lines) + "\n")
    first, second = done.out.splitlines()[:2]
    history = [{"role": "user", "content": lines[0]}, {"role": "assistant", "content": first}]
    cold = sfumato.load().generate(messages=[*history, {"role": "user", "content": lines[1]}])
    assert second == cold.text


def test_a_slot_is_as_large_as_one_request_needs(cli: Any, seen: Any) -> None:
    assert cli("run", "Who are you?", "--max-tokens", "64").code == 0
    ((engine, answer),) = seen
    (slot,) = engine.state().slots
    assert slot.context == answer.account.prompt_tokens + 63  # the last token is not kept
    assert engine.state().snapshot_bytes == 0


def test_a_conversation_that_grows_moves_into_one_larger_slot(
    cli: Any, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "CONTEXT", 1)
    cli("chat", "--max-tokens", "32", stdin="Who are you?\n" * 5)
    engine = seen[-1][0]
    assert seen[-1][1].account.cached_tokens > seen[0][1].account.prompt_tokens
    assert [slot.larger for slot in engine.state().slots] == [False, True]


def test_the_report_tells_what_was_not_encoded_again(network: ScriptedNetwork, cli: Any) -> None:
    stats = json.loads(cli("run", "Hi", "--json").out)["stats"]
    assert stats["cached_tokens"] == 0 < stats["prompt_tokens"]


def test_an_empty_answer_is_drawn_again(network: ScriptedNetwork, cli: Any) -> None:
    questions: list[str] = []

    def says(reply: list[int]) -> list[int]:
        questions.append("once more")
        return padded("<turn|>" if len(questions) <= 2 else "Yes.<turn|>")

    network.scripts[BOS].says = says
    done = cli("run", "Hi")
    assert (done.code, done.out) == (0, "Yes.\n")
    assert done.err == ("sfumato: note: canvas 0: the answer was empty and was drawn again\n")


def test_a_thought_leaves_room_for_an_answer(network: ScriptedNetwork, cli: Any) -> None:
    thought = tokenizer().encode("<|channel>thought\n" + 100 * "a")
    closes = VOCABULARY["<channel|>"]

    def says(ids: list[int]) -> list[int]:
        reply = (
            ids[ids.index(VOCABULARY["<|channel>"]) :] if VOCABULARY["<|channel>"] in ids else []
        )
        return padded("Yes.<turn|>") if closes in reply else thought[len(reply) :][:LENGTH]

    network.scripts[BOS].says = says
    done = cli("run", "Hi", "--thinking", "--max-tokens", "40")
    assert done.out == "Yes.\n"
    assert "the thought was ended to leave room to answer" in done.err


@pytest.mark.parametrize("what", ["encode", "denoise"])
def test_ctrl_c_ends_the_answer_before_the_next_step(
    network: ScriptedNetwork, cli: Any, what: str
) -> None:
    network.before = once(what, lambda: signal.raise_signal(signal.SIGINT))
    done = cli("chat", stdin="One?\nTwo?\n")
    draft = "Yes.\n" if what == "denoise" else ""
    assert (done.code, done.out, done.err) == (0, f"{draft}(interrupted)\nYes.\n\n", "")
    assert len(network.denoised()) == 2 + (what == "denoise")  # two are the second answer's


@pytest.mark.parametrize("what", ["encode", "denoise"])
def test_a_second_ctrl_c_ends_it_at_once_and_the_chat_goes_on(
    network: ScriptedNetwork, cli: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    network.before = once(what, twice)
    with caplog.at_level(logging.WARNING):
        done = cli("chat", stdin="One?\nTwo?\n")
    assert (done.code, done.out, done.err) == (0, "(interrupted)\nYes.\n\n", "")
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the sampler returned a list"), "the sampler returned a list"),
        (FloatingPointError("the scores are no numbers"), "the scores are no numbers"),
        (KeyError("x"), "an internal error (KeyError); the log has more"),
    ],
)
def test_what_fails_is_one_line_and_the_chat_goes_on(
    network: ScriptedNetwork, cli: Any, error: Exception, message: str
) -> None:
    def fails() -> None:
        raise error

    network.before = once("denoise", fails)
    done = cli("chat", stdin="One?\nTwo?\n")
    assert (done.code, done.out) == (0, "Yes.\n\n")
    assert done.err == f"sfumato: error: {message}\n"
    network.before = once("denoise", fails)
    assert cli("run", "Hi").err == f"sfumato: error: {message}\n"


def test_a_display_that_fails_takes_its_answer_along(network: ScriptedNetwork) -> None:
    class Broken(Display):
        def show(self, event: object) -> None:
            raise OSError("no space left")

    request = Request("Hi", seed=0, drafts=True)
    engine = generation.engine(scripted_model(network), request)
    with pytest.raises(OSError, match="no space"):
        generation.answer(engine, request, Broken())
    answer = generation.answer(engine, Request("Hi", seed=0), Display())
    assert answer.text == "Yes." and engine.state().totals.requests["cancelled"] == 1


def test_where_memory_lacks_the_advice_is_for_one_who_has_no_server(
    network: ScriptedNetwork, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        why, advice = "an engine needs 9 GB, and 1 GB is left", "lower --slots or --context"
        raise EngineError(None, why, advice)

    advice = "; lower --max-tokens, or free some memory"
    with monkeypatch.context() as patch:
        patch.setattr("sfumato.engine.engine.Engine", refuses)
        done = cli("run", "Hi")
    text = f"sfumato: error: an engine needs 9 GB, and 1 GB is left{advice}\n"
    assert (done.code, done.err) == (2, text)

    def too_large(*_: object) -> None:
        raise TooLarge(None, "it needs a context of 9 tokens", "lower --slots or ask for less")

    monkeypatch.setattr(Engine, "submit", too_large)
    text = f"sfumato: error: it needs a context of 9 tokens{advice}\n"
    assert cli("chat", stdin="Hi\n").err == text


def test_what_the_engine_says_ends_in_the_advice_that_is_replaced(
    network: ScriptedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own words, as `_advised` knows them."""
    engine = Engine(scripted_model(network), EngineConfig(slots=1, context=8))
    monkeypatch.setattr(engine._pool, "_lacks", lambda *_: "takes 9 bytes, and 1 are left")
    with pytest.raises(ValueError, match=r"left|no room") as caught:
        generation.answer(engine, Request("Hi", max_tokens=100), Display())
    assert str(caught.value).endswith("; lower --max-tokens, or free some memory")
    assert "--slots" not in str(caught.value)
