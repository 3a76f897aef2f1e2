"""A tiny random network of `transformers`, and Sfumato's with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.oracle import network_of, random_oracle, tiny_config


@pytest.fixture(scope="package")
def oracle() -> Any:
    return random_oracle(tiny_config(), seed=5)


@pytest.fixture(scope="package")
def network(oracle: Any) -> Any:
    return network_of(oracle)
