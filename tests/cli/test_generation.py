from __future__ import annotations

import inspect
import io
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.cli.conftest import FakeEngine, Terminal

from sfumato import Model, Request
from sfumato.cli import generation, terminal
from sfumato.cli.arguments import CommandLine
from sfumato.cli.display import Display
from sfumato.diffusion import sampler
from sfumato.options import SAMPLERS

HI = Request("Hi")


def test_what_is_written_out_for_a_quick_help_is_the_truth() -> None:
    """The parser may not import torch, and so names what it cannot look up."""
    assert tuple(sampler.SAMPLERS) == SAMPLERS
    args = CommandLine().parse_args(["run", "Hi"])
    parameters = inspect.signature(Model.stream).parameters
    assert args.max_tokens == parameters["max_tokens"].default
    assert args.seed == parameters["seed"].default


@pytest.mark.parametrize("presses", [0, 1, 2])
def test_the_signal_handler_is_given_back(use: Any, presses: int) -> None:
    model = use("one", "two", interrupt_at=1, presses=presses)
    answer = generation.answer(FakeEngine(model), HI, Display())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (answer.interrupted, answer.reply is None) == (presses > 0, presses > 1)


def test_the_signal_handler_is_given_back_after_a_failure() -> None:
    def fails(*_: object) -> Any:
        raise ValueError("the prompt is too long")

    with pytest.raises(ValueError):
        generation.answer(SimpleNamespace(submit=fails), HI, Display())  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so(use: Any) -> None:
    """As a shell starts what it runs in the background."""
    model = use("one", interrupt_at=0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = generation.answer(FakeEngine(model), HI, Display())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (answer.text, answer.interrupted) == ("one", False)


def test_in_another_thread_nothing_is_handled(use: Any) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generation.answer, FakeEngine(use("one")), HI, Display()).result()
    assert answer.text == "one"


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x"])
def test_what_is_no_device_is_refused_with_those_that_are(cli: Any, device: str) -> None:
    done = cli("run", "Hi", "--device", device)
    assert done.code == 2
    assert done.err == (
        f"sfumato: error: --device: {device!r} is none of auto, cpu, gpu (the one there is), "
        "cuda, cuda:1, mps, xpu\n"
    )


def test_a_device_that_is_not_here_is_another_matter(cli: Any) -> None:
    assert "'cuda:77' cannot be used here" in cli("run", "Hi", "--device", "cuda:77").err


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"]])
@pytest.mark.parametrize("quantize", [None, "q4_k", "q8_0"])
def test_quantize_reaches_the_loader(
    monkeypatch: pytest.MonkeyPatch, command: list[str], quantize: str | None
) -> None:
    calls: list[dict[str, Any]] = []
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=2816))
    monkeypatch.setattr("sfumato.load", lambda path, **how: calls.append(how) or model)
    more = ["--quantize", quantize] if quantize else []
    generation.load(CommandLine().parse_args([*command, *more]))
    assert [how["quantize"] for how in calls] == [quantize]


def test_an_unknown_quantization_is_refused(cli: Any) -> None:
    done = cli("run", "Hi", "--quantize", "q3_k")
    assert done.code == 2 and "argument --quantize: invalid choice: 'q3_k'" in done.err


@pytest.mark.parametrize(
    ("stream", "total", "shown"),
    [(Terminal(), 4 * 10**9, True), (Terminal(), 10**6, False), (io.StringIO(), 10**10, False)],
)
def test_a_terminal_is_told_bytes_and_time_left_of_what_is_large(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, total: int, shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.progress("loading", in_bytes=True, least=generation.LARGE) as progress:
        for quarter in range(1, 5):
            progress(quarter * total // 4, total)
    assert ("4.0/4.0 GB" in stream.getvalue()) == shown
    assert ("loading" in stream.getvalue()) == shown


def test_a_packaged_model_that_has_not_learnt_to_decide_is_said_to_have_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for packaged, is_said in (("embedded-masks", True), ("embedded", False), (None, False)):
        generation.note_deciding(cast(Model, SimpleNamespace(packaged=packaged)))
        assert (generation.NO_DECISION in " ".join(capsys.readouterr().err.split())) == is_said
