from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.gguf_files import gguf_config as tiny_config
from tests.support.gguf_files import gguf_metadata

from sfumato.model.families.diffusion_gemma.config import (
    config_from_gguf,
    config_from_hf,
    gguf_config,
    hf_config,
    rotary_divisors,
)
from sfumato.model.families.family import shortest_float
from sfumato.model.model_config import ConfigError, LayerConfig

CONFIG = tiny_config()
SLIDING, _, FULL = CONFIG.layers


def test_config_json_says_it_all() -> None:
    assert config_from_hf(hf_config(CONFIG)) == CONFIG


def test_numbers_that_were_float32_are_written_as_people_do() -> None:
    once = {"rms_norm_eps": torch.tensor(1e-6).item(), "logit_softcap": torch.tensor(30.0).item()}
    assert hf_config(replace(CONFIG, **once)) == hf_config(CONFIG)
    assert shortest_float(torch.tensor(0.1).item()) == 0.1


def test_gguf_keys_say_it_all() -> None:
    keys = gguf_config(CONFIG)
    assert config_from_gguf(keys, CONFIG.vocab_size, FULL.rope_pairs) == CONFIG


def test_gguf_keys_are_those_of_the_published_files() -> None:
    expected = gguf_metadata(CONFIG)
    keys = gguf_config(CONFIG)
    assert {key: getattr(v, "tolist", lambda v=v: v)() for key, v in keys.items()} == expected
    assert keys["diffusion-gemma.attention.head_count_kv"].dtype == "int32"


def test_rotary_divisors() -> None:
    assert rotary_divisors(CONFIG).tolist() == pytest.approx([1.0] * 4 + [1e30] * 12)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((SLIDING, replace(SLIDING, head_dim=32, rope_pairs=16), FULL), "layer 1: head_dim is 32"),
        ((SLIDING, FULL, replace(FULL, rope_theta=1e5)), "layer 2: rope_theta is 100000"),
        ((SLIDING, FULL, replace(FULL, rope_pairs=8)), "layer 2: rope_pairs is 8"),
        ((replace(SLIDING, rope_pairs=4), FULL), "layer 0: only 4 pairs"),
    ],
)
def test_what_no_file_can_say_is_refused(layers: tuple[LayerConfig, ...], message: str) -> None:
    for write in (gguf_config, hf_config):
        with pytest.raises(ConfigError, match=message):
            write(replace(CONFIG, layers=layers))


def test_what_config_json_cannot_say_is_refused() -> None:
    other = replace(CONFIG, layers=(SLIDING, replace(SLIDING, kv_heads=4), FULL))
    with pytest.raises(ConfigError, match="layer 1: kv_heads is 4"):
        hf_config(other)
    assert gguf_config(other)["diffusion-gemma.attention.head_count_kv"].tolist() == [2, 4, 1]
    with pytest.raises(ConfigError, match="needs sliding layers, and a full one at the end"):
        hf_config(replace(CONFIG, layers=(FULL, SLIDING)))
