"""A model that says what it is told to, with an engine, and an easy way to run the command line."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfumato import Done, Draft, Finished, Request, Settled
from sfumato.catalog import packaged_name
from sfumato.cli import main
from sfumato.diffusion.limits import Stats
from sfumato.engine import Event, Handle
from sfumato.media.patches import Cut
from sfumato.text.markers import NO_MARKERS

from .stand_in import StandIn, stand_in


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class FakeModel:
    """Answers with its canvases' texts, two drafts each, characters as tokens."""

    def __init__(
        self, *canvases: str, interrupt_at: int | None = None, presses: int = 1, held: str = ""
    ) -> None:
        self.canvases = canvases
        # The canvas in which the user presses Ctrl-C, how often, and what text was held back.
        self.interrupt_at, self.presses, self.held = interrupt_at, presses, held
        self.requests: list[dict[str, Any]] = []
        self.cut = Cut()
        self.warnings: tuple[str, ...] = ()
        self.convergence = "converged"
        self.path = Path("model.gguf")
        self.template = SimpleNamespace(markers=NO_MARKERS)
        self.config = SimpleNamespace(hidden_size=2816, context_length=8192)
        self.tokenizer = SimpleNamespace(
            decode=lambda ids: "".join(map(chr, ids)), token_text=chr, vocab_size=2**16
        )

    @property
    def packaged(self) -> str | None:
        return packaged_name(self.path)

    def stream(self, **request: Any) -> Iterator[Draft | Settled | Done]:
        self.requests.append(request)
        for number, text in enumerate(self.canvases):
            for step in (1, 2):
                if request["cancelled"]():
                    yield Done(self._reply(number, "cancelled"))
                    return
                ids = torch.tensor([ord(c) for c in text])
                accepted = torch.full(ids.shape, step == 2)
                sure = torch.ones(len(ids))
                top = ids[:, None], sure[:, None]
                decode = self.tokenizer.decode
                yield Draft(number, step, ids, 0 * sure, accepted, 48, *top, decode=decode)
                if (number, step) == (self.interrupt_at, 1):
                    for _ in range(self.presses):
                        signal.raise_signal(signal.SIGINT)
            yield Settled(number, text, "", [ord(c) for c in text], "converged")
        yield Done(self._reply(len(self.canvases), "eos"))

    def _reply(self, count: int, stop_reason: str) -> Any:
        text = "".join(self.canvases[:count])
        stats = Stats(
            3,
            len(text),
            count,
            [2] * count,
            [self.convergence] * count,
            prefill_s=0.1,
            denoise_s=0.2,
            commit_s=0.1,
        )
        return SimpleNamespace(
            text=text + (self.held if stop_reason == "cancelled" else ""),
            thought=None,
            tool_calls=(),
            stop_reason=stop_reason,
            warnings=self.warnings,
            verification=None,
            filled=None,
            stats=stats,
        )


class FakeEngine:
    """Does a step for each event of its model's stream."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def submit(self, request: Request, sink: Callable[[Event], None]) -> Handle:
        self._handle = handle = Handle(request.id, sink, lambda: None)
        given = {field.name: getattr(request, field.name) for field in fields(request)}
        self._events = self._model.stream(**given, cancelled=lambda: handle.cancelled)
        return handle

    def step(self) -> None:
        event: Any = next(self._events)
        if isinstance(event, Done):
            event = Finished(event.reply, SimpleNamespace(cached_tokens=2))  # type: ignore[arg-type]
        self._handle.deliver(event)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeModel]:
    """use("Hello", …) makes every load() return that fake model, and engines run on it."""

    def replace(*canvases: str, **how: Any) -> FakeModel:
        model = FakeModel(*canvases, **how)
        monkeypatch.setattr("sfumato.cli.generation.load", lambda args: model)
        monkeypatch.setattr("sfumato.cli.generation.engine", lambda model, *_: FakeEngine(model))
        return model

    return replace


@pytest.fixture(autouse=True)
def no_nohup() -> Iterator[None]:
    """Signals end a program, even if the tests were started by one that ignores them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are what a test says, whatever the shell that runs it has set."""
    for name in [name for name in os.environ if name.startswith("SFUMATO_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """cli("run", "Hi", stdin="…") → an object with code, out and err."""

    def run(*argv: str, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        before = signal.getsignal(signal.SIGINT)
        try:
            code = main(argv)
        except SystemExit as stop:  # argparse's way out
            code = stop.code
        finally:  # after Ctrl-C the program ignores any more of them
            signal.signal(signal.SIGINT, before)
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


REPO = "someone/tiny-GGUF"
Q4, Q8 = "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub with one repository; the local cache is empty."""
    constants = importlib.import_module("huggingface_hub.constants")
    with stand_in() as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        values: dict[str, Any] = {"ENDPOINT": served.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
        values |= {"HF_HUB_OFFLINE": False, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        served.repos[REPO] = {Q4: b"GGUF" * 1000, Q8: b"GGUF" * 2000}
        yield served
