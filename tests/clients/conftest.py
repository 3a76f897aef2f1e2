"""One server for all clients: a scripted model that calls a tool, and answers after its result."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.conftest import serving
from tests.support.answering_model import answering_model
from tests.support.pictures import file_of, picture
from tests.support.seeing_model import seeing_model

import sfumato
from sfumato.server.app import ServerSettings

os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = "any"  # some clients insist
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

QUESTION = "How is the weather in Paris?"
ANSWER = "It is sunny in Paris."
ASKED = "Which digit is this?"  # about a picture
SOFT = 25  # soft tokens of a picture
QUOTE = '<|"|>'
CALL = f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE}}}<tool_call|><turn|>"


class Script(dict[str, Any]):
    """The answer to the end of a conversation, whatever text a client adds around it."""

    def get(self, conversation: str, default: Any = None) -> Any:
        if "sunny" in conversation:  # the tool's result
            return f"{ANSWER}<turn|>"
        if "object" in conversation:
            return '{"city": "Paris"}<turn|>'
        return CALL if "weather" in conversation else "Hello.<turn|>"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    model = answering_model()
    network: Any = model.network
    network.answers = Script()
    with serving(model, ServerSettings(max_tokens=256), context=4096) as served:
        yield served.url


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    """The embedded model's: a scripted one has no vectors."""
    with serving(sfumato.load()) as served:
        yield served.url


@pytest.fixture(scope="session")
def seeing_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """That of a model that reads pictures; what it says of them depends on them, and on no more."""
    model = seeing_model(tmp_path_factory.mktemp("sees") / "model")
    with serving(model, ServerSettings(max_tokens=16)) as served:
        yield served.url


def png(seed: int = 0) -> bytes:
    """A picture of 40 × 40 pixels."""
    return file_of(picture(40, 40, seed), "PNG")


def data_url(seed: int = 0) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"
