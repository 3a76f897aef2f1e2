"""What is refused before it waits in line: who hears of it, and how little it costs."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from tests.support.scripted_engine import Script, engine, run

import sfumato
from sfumato.api import Model
from sfumato.diffusion.sampler_config import REFERENCE, SamplerConfig
from sfumato.engine import Engine, EngineConfig, EngineDead, Failed, QueueFull, Request, TooLarge
from sfumato.model.families import DIFFUSION_GEMMA
from sfumato.server.settings import ServerSettings
from sfumato.text.tokenizer import Tokenizer


def recording_engine(**config: Any) -> tuple[Engine, list[tuple[str, Any]]]:
    """An engine, and what on_finish has been told."""
    ended: list[tuple[str, Any]] = []
    script = Script(40, 5)
    serving, _ = engine(script, on_finish=lambda r, end: ended.append((r.id, end)), **config)
    return serving, ended


def test_each_refusal_is_told_once_and_raised() -> None:
    serving, ended = recording_engine(strict=True, context=64, slots=1, queue=1)
    good = Script(40, 5).request(max_tokens=16)
    cases = [
        (Request(ids=[40], max_tokens=0, id="a"), ValueError, "invalid"),
        (Request(ids=[40] * 5, max_tokens=500, id="b"), TooLarge, "too_large"),
    ]
    for request, kind, _ in cases:
        with pytest.raises(kind):
            serving.submit(request)
    handle = serving.submit(good)
    waits = serving.submit(Script(40, 5).request(max_tokens=16))
    with pytest.raises(QueueFull):
        serving.submit(Request(ids=[40], max_tokens=8, id="c"))
    run(serving)
    serving.close()
    with pytest.raises(EngineDead):
        serving.submit(Request(ids=[40], max_tokens=8, id="d"))
    names = [name for name, _ in ended]
    assert names == ["a", "b", "c", good.id, waits.id, "d"]
    refused = [end for name, end in ended if name in "abcd"]
    assert [end.kind for end in refused] == ["invalid", "too_large", "queue_full", "shutdown"]
    assert all(isinstance(end, Failed) and end.account is None for end in refused)
    assert refused[0].message.startswith("max_tokens: ")
    assert ended[3][1] is handle.terminal


def test_after_its_death_an_engine_tells_so() -> None:
    serving, ended = recording_engine()
    serving._scheduler.encode = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        serving.step()
    with pytest.raises(EngineDead):
        serving.submit(Script(40, 5).request())
    assert [end.kind for _, end in ended] == ["internal"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampler": SamplerConfig(max_steps=257)}, "max_steps: must be at most 256, got 257"),
        ({"timeout_s": 1e308}, "timeout_s: must be a number over 0 to"),
        ({"timeout_s": 2**2000}, "timeout_s: must be a number over 0 to"),
        ({"max_thinking_tokens": 2**63}, "max_thinking_tokens: must be a whole number from 0 to"),
    ],
)
def test_every_number_has_an_upper_bound(fields: dict[str, Any], message: str) -> None:
    serving, ended = recording_engine()
    with pytest.raises(ValueError, match=f"^{message}"):
        serving.submit(Script(40, 5).request(**fields))
    assert [end.kind for _, end in ended] == ["invalid"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 4097}, "max_steps: must be at most 4096, got 4097"),
        ({"max_steps": 0}, "max_steps: must be a whole number from 1, got 0"),
        ({"request_timeout_s": 1e10}, "request_timeout_s: must be over 0 and at most"),
        ({"request_timeout_s": 0}, "request_timeout_s: .* None for no limit"),
    ],
)
def test_so_have_the_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineConfig(**fields)


def test_the_default_time_limit_is_what_its_comment_derives() -> None:
    limit = EngineConfig().request_timeout_s
    canvases = ServerSettings().max_tokens / 256
    slots, steps, seconds = EngineConfig().slots, REFERENCE.max_steps or 0, 6.0
    assert limit is not None and canvases * steps * seconds * slots <= limit <= 6 * 3600


def test_a_prompt_is_made_once_and_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sfumato.load()
    serving = Engine(model, EngineConfig(slots=1, context=256))
    submitted = Request("Who are you?", seed=1, max_tokens=64)
    made = serving.prompt(submitted)
    assert made.ids == model.prompt_ids("Who are you?")
    expected = serving.generate(submitted).text
    markers = {DIFFUSION_GEMMA.markers.thought_header: [1]}
    # No text is tokenized again.
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text, special=True: markers[text])
    again = serving.submit(Request("Who are you?", made=made, seed=1, max_tokens=64))
    run(serving)
    assert again.result().text == expected


@pytest.fixture(scope="module")
def embedded() -> Model:
    return sfumato.load()


@pytest.mark.parametrize("text", ["many words " * 400_000, "x" * 4_000_000])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(embedded: Model, text: str) -> None:
    ended: list[Any] = []
    serving = Engine(embedded, EngineConfig(slots=1, context=256), lambda r, e: ended.append(e))
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(TooLarge, match=r"prompt: .* tokens or more.* has 16,384; shorten it$"):
        serving.submit(Request(text))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - began < 10
    assert peak < 16 * len(text)
    assert [end.kind for end in ended] == ["too_large"]


def test_a_strict_context_is_the_limit(embedded: Model) -> None:
    serving = Engine(embedded, EngineConfig(slots=1, context=256, strict=True))
    with pytest.raises(TooLarge, match=r"has 256; shorten it, or change --context or --slots"):
        serving.prompt(Request("x" * 3000))
    with pytest.raises(TooLarge, match=r"^opening: "):
        serving.submit(Request("Hi", opening="x" * 3000))


def test_what_is_refused_by_its_length_would_not_have_fitted(embedded: Model) -> None:
    tokenizer = embedded.tokenizer
    longest = max((tokenizer.token_text(i) for i in range(tokenizer.vocab_size)), key=len)
    assert tokenizer.longest_token == len(longest)
    for text in ("Hello, world! " * 50, " " * 200, longest * 20, "\U0001f600" * 30):
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text)
