from __future__ import annotations

import inspect
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfumato import Model
from sfumato.cli import generation
from sfumato.cli.arguments import SAMPLERS, build_parser
from sfumato.cli.view.display import Silent
from sfumato.diffusion import sampler


def test_what_is_written_out_for_a_quick_help_is_the_truth() -> None:
    """The parser may not import torch, and so names what it cannot look up."""
    assert tuple(sampler.SAMPLERS) == SAMPLERS
    args = build_parser().parse_args(["run", "Hi"])
    parameters = inspect.signature(Model.stream).parameters
    assert args.max_tokens == parameters["max_tokens"].default
    assert args.seed == parameters["seed"].default


@pytest.mark.parametrize("presses", [0, 1, 2])
def test_the_signal_handler_is_given_back(use: Any, presses: int) -> None:
    model = use("one", "two", interrupt_at=1, presses=presses)
    answer = generation.answer(model, [], Silent())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (answer.interrupted, answer.reply is None) == (presses > 0, presses > 1)


def test_the_signal_handler_is_given_back_after_a_failure() -> None:
    def fails(**request: Any) -> Any:
        raise ValueError("the prompt is too long")

    with pytest.raises(ValueError):
        generation.answer(SimpleNamespace(stream=fails), [], Silent())  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so(use: Any) -> None:
    """As a shell starts what it runs in the background."""
    model = use("one", interrupt_at=0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = generation.answer(model, [], Silent())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (answer.text, answer.interrupted) == ("one", False)


def test_in_another_thread_nothing_is_handled(use: Any) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generation.answer, use("one"), [], Silent()).result()
    assert answer.text == "one"


@pytest.mark.parametrize(("hidden_size", "threads"), [(128, 1), (2816, 3)])
def test_only_a_tiny_model_is_kept_to_one_thread(hidden_size, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        generation.spare_threads(SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size)))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x"])
def test_what_is_no_device_is_refused_with_those_that_are(cli: Any, device: str) -> None:
    done = cli("run", "Hi", "--device", device)
    assert done.code == 2
    assert done.err == (
        f"sfumato: error: --device: {device!r} is none of auto, cpu, cuda, cuda:1, mps, xpu\n"
    )


def test_a_device_that_is_not_here_is_another_matter(cli: Any) -> None:
    assert "'cuda:77' cannot be used here" in cli("run", "Hi", "--device", "cuda:77").err
