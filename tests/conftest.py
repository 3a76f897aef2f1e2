"""What every test shares: reproducible Hypothesis, no network, and notes in pytest's summary."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

# The hub libraries that some tests use as oracles must never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where there is no GPU, the kernels of this process are interpreted: this must be known before
# Triton is imported. The tests that compile kernels do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The tests' tensors are tiny: more threads would mostly wait for each other.
torch.set_num_threads(1)

# "fast" finds the same examples in every run; "thorough" looks for new ones.
settings.register_profile("fast", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_configure() -> None:
    """Restore SIGINT where it is ignored, in the controller of pytest-xdist and in each worker.

    A shell without job control ignores SIGINT in the jobs that it starts in the background, as
    `make test &` in a script; every program that a test starts would ignore it too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Take what the test modules imported out of the garbage collector's reach: it would look
    through a million objects again and again, none of which ever dies."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line under "figures" at the end of the run, passing tests included."""
    # Properties reach the reports, from other processes too.
    return lambda line: request.node.user_properties.append(("figure", line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the tests noted; pytest's own summary line still comes last."""
    reports = [one for many in terminalreporter.stats.values() for one in many]
    calls = [one for one in reports if getattr(one, "when", None) == "call"]
    lines = [text for one in calls for name, text in one.user_properties if name == "figure"]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
