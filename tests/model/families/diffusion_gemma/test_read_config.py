"""Configurations: both kinds of metadata, both spellings, and every refusal by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import gguf_config, gguf_metadata
from tests.support.oracle import F, S, tiny_config
from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
)

from sfumato.model.families.diffusion_gemma.config import config_from_gguf, config_from_hf
from sfumato.model.model_config import ConfigError, LayerConfig

# The published model's numbers, from the reference table.
SLIDING = LayerConfig(True, 8, 256, 1e4, 128)
FULL = LayerConfig(False, 2, 512, 1e6, 64)


def published() -> dict[str, Any]:
    """Its config.json in the older spelling, as far as the text network reads it."""
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": 256,
        "text_config": {
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "sliding_window": 1024,
            "layer_types": [F if (i + 1) % 6 == 0 else S for i in range(30)],
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
            "eos_token_id": 1,
            "bos_token_id": 2,
            "pad_token_id": 0,
        },
    }


def newer() -> dict[str, Any]:
    """The same as newer `transformers` saves it: overrides under zero-padded layer numbers."""
    config = published()
    text = config["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    text["per_layer_config"] = {
        f"{i:02}": {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)
    }
    text["rope_parameters"] = {
        S: {"rope_type": "default", "rope_theta": 10000.0},
        F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    return config


@pytest.mark.parametrize("spelling", [published, newer])
def test_the_published_model(spelling: Any) -> None:
    config = config_from_hf(spelling(), {"eos_token_id": [1, 106, 50]})
    assert config.layers == ((SLIDING,) * 5 + (FULL,)) * 5
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (262144, 2816, 2112)
    assert (config.num_heads, config.sliding_window, config.canvas_length) == (16, 1024, 256)
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (128, 8, 704)
    assert (config.rms_norm_eps, config.logit_softcap) == (1e-6, 30.0)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (2, (1, 106, 50), 0)
    assert config.context_length == 262144


def test_both_spellings_and_gguf_agree() -> None:
    config = config_from_hf(published())
    assert config == config_from_hf(newer())
    assert config == config_from_gguf(gguf_metadata(config), 262144)
    assert config.eos_ids == (1,)


def test_rope_defaults() -> None:
    """As in `transformers`: a quarter turns where nothing is said, all where only that is not."""
    config = newer()
    del config["text_config"]["rope_parameters"]
    assert config_from_hf(config) == config_from_hf(newer())
    for rope in ({"rope_type": "proportional", "rope_theta": 50.0}, {"rope_theta": 50.0}):
        config = with_rope(F, rope)
        assert config_from_hf(config).layers[5] == LayerConfig(False, 2, 512, 50.0, 256)


def test_only_kinds_of_layer_that_occur_need_rotary_parameters() -> None:
    config = hf_with(layer_types=[F] * 30, rope_parameters={F: {"rope_theta": 50.0}})
    assert {layer.rope_theta for layer in config_from_hf(config).layers} == {50.0}


def test_layer_types_default_to_every_sixth_and_the_last() -> None:
    config = published()
    config["text_config"] |= {"num_hidden_layers": 8, "layer_types": None}
    layers = config_from_hf(config).layers
    assert [layer.sliding for layer in layers] == [True] * 5 + [False, True, False]
    assert layers == config_from_hf(copy.deepcopy(config)).layers
    assert [kind == S for kind in DiffusionGemmaConfig(**config).text_config.layer_types] == [
        layer.sliding for layer in layers
    ]


@settings(max_examples=30)
@given(
    heads=st.sampled_from(((4, 2, 1), (4, 1, 1), (2, 2, 2), (4, 1, 4), (1, 1, None))),
    dims=st.sampled_from(((16, 32), (8, 8), (16, 16), (32, 16))),
    kinds=st.lists(st.sampled_from((S, F)), min_size=1, max_size=13),
)
def test_what_transformers_saves(
    tmp_path_factory: pytest.TempPathFactory,
    heads: tuple[int, int, int | None],
    dims: tuple[int, int],
    kinds: list[str],
) -> None:
    """Its own config.json, also where the full layers differ in nothing."""
    theirs = tiny_config(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        num_global_key_value_heads=heads[2],
        head_dim=dims[0],
        global_head_dim=dims[1],
        layer_types=[*kinds, F],
    )
    folder = tmp_path_factory.mktemp("saved")
    theirs.save_pretrained(folder)
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    for index, layer in enumerate(config.layers):
        own = theirs.text_config.per_layer_config[index]
        assert layer.sliding == ((*kinds, F)[index] == S)
        assert (layer.head_dim, layer.kv_heads) == (own.head_dim, own.num_key_value_heads)
        assert layer.rope_pairs == layer.head_dim // (2 if layer.sliding else 8)
    assert config.canvas_length == 8 and config.vocab_size == 97


def hf_with(**changes: Any) -> dict[str, Any]:
    """The published config with other fields; those with a leading `_` are outside text_config."""
    config = newer()
    for name, value in changes.items():
        place = config if name.startswith("_") else config["text_config"]
        place[name.removeprefix("_")] = value
    return config


def with_rope(kind: str, rope: Any) -> dict[str, Any]:
    """The published config with other rotary parameters for one kind of layer."""
    config = newer()
    config["text_config"]["rope_parameters"][kind] = rope
    return config


ROTARY: list[tuple[str, Any, str]] = [
    (F, {"rope_type": "yarn", "rope_theta": 1e6}, "rope_type 'yarn'"),
    (F, {"rope_type": None, "rope_theta": 1e6}, "rope_type None"),
    (F, {"partial_rotary_factor": 0.25, "rope_theta": 1e6}, "'default' with partial"),
    (S, {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, "'default' with partial"),
    (F, {"rope_theta": 1e6, "partial_rotary_factor": 7}, "partial_rotary_factor 7"),
    (F, {"rope_theta": 1e6, "partial_rotary_factor": None}, "partial_rotary_factor is null"),
    (F, {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8}, "factor 8"),
    (F, {"rope_theta": "big"}, "full_attention: rope_theta is 'big'"),
    (S, {"rope_theta": None}, "rope_parameters.sliding_attention: rope_theta is null"),
    (S, {"rope_type": "default"}, "sliding_attention: rope_theta is missing"),
    (F, {}, "full_attention: rope_theta is missing"),
    (F, 3, "rope_parameters: full_attention is 3, not an object"),
    (F, None, "rope_parameters: full_attention is null, not an object"),
]


def test_refusals_of_rotary_parameters() -> None:
    for kind, rope, words in ROTARY:
        with pytest.raises(ConfigError, match="config.json: text_config.*" + words):
            config_from_hf(with_rope(kind, rope))


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"_text_config": None}, "text_config is missing"),
    ({"_tie_word_embeddings": False}, "tie_word_embeddings is False; only True"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is null"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"attention_bias": None}, "attention_bias is null"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"num_experts": None}, "num_experts is null, not a positive integer"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
    ({"hidden_size": 2816.0}, "hidden_size is 2816.0"),
    ({"_canvas_length": -1}, "canvas_length is -1"),
    ({"_canvas_length": None}, "config.json: canvas_length is null"),
    ({"max_position_embeddings": None}, "max_position_embeddings is null"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": 1e9}, "rms_norm_eps is 1000000000.0, not a number .* below 0.1"),
    ({"rms_norm_eps": None}, "rms_norm_eps is null"),
    ({"final_logit_softcapping": None}, "final_logit_softcapping is null"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
    ({"num_hidden_layers": 29}, "layer_types must list 29"),
    ({"layer_types": [S] * 29 + ["linear_attention"]}, r"layer_types\[29\] is 'linear"),
    ({"layer_types": "all"}, "layer_types must list"),
    ({"top_k_experts": 129}, "129 active experts of 128"),
    ({"num_key_value_heads": 3}, "16 query heads cannot share 3"),
    ({"head_dim": 255}, "head_dim 255 is not even"),
    ({"sliding_window": 1}, "sliding_window"),
    ({"per_layer_config": [1]}, r"per_layer_config is \[1\], not an object"),
    ({"per_layer_config": {"05": 512}}, "per_layer_config: 05 is 512, not an object"),
    (
        {"per_layer_config": {"05": {"head_dim": "512"}}},
        "05: head_dim is '512'",
    ),
    ({"per_layer_config": {"05": {"num_key_value_heads": 0}}}, "05: num_key_value_heads is 0"),
    ({"per_layer_config": None}, "per_layer_config is null, not an object"),
    ({"per_layer_config": {"30": {}}}, "per_layer_config: '30' is none of the 30 layers"),
    ({"per_layer_config": {"": {}}}, "per_layer_config: '' is none of the 30 layers"),
    ({"rope_parameters": None}, "rope_parameters is null, not an object"),
    ({"rope_parameters": {}}, "rope_parameters: sliding_attention is missing"),
    ({"rope_parameters": {S: {"rope_theta": 1e4}}}, "full_attention is missing"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"eos_token_id": []}, r"eos_token_id is \[\]"),
    ({"eos_token_id": 262144}, "eos_token_id is 262144, not .* below the vocab_size of 262144"),
    ({"bos_token_id": "<bos>"}, "bos_token_id"),
    ({"bos_token_id": [2, 3]}, r"bos_token_id is \(2, 3\), not one token id"),
    ({"pad_token_id": -1}, "pad_token_id"),
]


def test_refusals_name_the_field() -> None:
    for changes, words in FIELDS:
        with pytest.raises(ConfigError, match=words):
            config_from_hf(hf_with(**changes))
        with pytest.raises(ConfigError, match=words):  # whatever the other file says of the ends
            config_from_hf(hf_with(**changes), {"eos_token_id": [1]})


ENDS: list[Any] = ["x", -1, 1.0, True, [], [1, 262144], [[1]], {}]


def test_end_tokens_of_the_generation_config() -> None:
    for ends in ENDS:
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is "):
            config_from_hf(published(), {"eos_token_id": ends})


def test_null_where_transformers_writes_it() -> None:
    config = published()
    text = config["text_config"]
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "layer_types"))
    text |= dict.fromkeys(("num_global_key_value_heads", "use_bidirectional_attention"))
    read = config_from_hf(config, {"eos_token_id": None})
    assert (read.bos_id, read.eos_ids, read.pad_id) == (None, (), None)
    assert {layer.kv_heads for layer in read.layers} == {8}


PREFIX = "diffusion-gemma."


KEYS: list[tuple[str, Any, str]] = [
    (PREFIX + "block_count", ..., "block_count is missing"),
    (PREFIX + "block_count", 10**9, "layers; that is no real checkpoint"),
    (PREFIX + "block_count", 2, "must list 2 values"),
    (PREFIX + "attention.head_count_kv", "8", "head_count_kv must list"),
    (PREFIX + "attention.head_count_kv", [2, "x", 1], "head_count_kv"),
    (PREFIX + "attention.head_count_kv", [2, 2, 0], "layer 2"),
    (PREFIX + "attention.sliding_window_pattern", 6, "sliding_window_pattern must list"),
    (PREFIX + "attention.shared_kv_layers", 2, "shared KV layers"),
    (PREFIX + "attention.key_length", 31, "head_dim 31 is not even"),
    (PREFIX + "embedding_length", -4, "embedding_length is -4"),
    (PREFIX + "expert_used_count", 9, "9 active experts of 8"),
    (PREFIX + "rope.freq_base", float("nan"), "freq_base is nan"),
    (PREFIX + "attention.sliding_window", 1, "sliding_window"),
    ("diffusion.canvas_length", 0, "diffusion.canvas_length is 0"),
    (PREFIX + "attention.layer_norm_rms_epsilon", 1e9, "epsilon is 1000000000.0"),
    ("tokenizer.ggml.eos_token_id", "x", "eos_token_id"),
    ("tokenizer.ggml.eos_token_id", 97, "eos_token_id is 97, .* vocab_size of 97"),
    ("tokenizer.ggml.bos_token_id", 1.5, "bos_token_id"),
]


def test_gguf_refusals_name_the_key() -> None:
    for key, value, words in KEYS:
        metadata = gguf_metadata(gguf_config())
        metadata[key] = value
        if value is ...:
            del metadata[key]
        with pytest.raises(ConfigError, match=words):
            config_from_gguf(metadata, 97)


def test_gguf_round_trip_and_defaults() -> None:
    config = gguf_config(num_heads=2)
    metadata = gguf_metadata(config)
    assert config_from_gguf(metadata, 97) == config
    metadata[PREFIX + "attention.head_count_kv"] = 1  # one number stands for all layers
    assert {layer.kv_heads for layer in config_from_gguf(metadata, 97).layers} == {1}
    del metadata["diffusion.canvas_length"], metadata["tokenizer.ggml.eos_token_id"]
    again = config_from_gguf(metadata, 97)
    assert again.canvas_length == 256 and again.eos_ids == ()
    with pytest.raises(ConfigError, match="vocab_size"):
        config_from_gguf(metadata, 0)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-2, 40), st.none(), st.text(max_size=2)), max_size=4),
    st.dictionaries(
        st.sampled_from((S, F, "05", "5", "x", "")),
        st.one_of(st.none(), st.integers(-1, 9), st.text(max_size=2), st.just({"head_dim": None})),
        max_size=2,
    ),
)


def check_fuzzed(build: Any) -> None:
    """Whatever the metadata are: a sound config, or the one error, of readable length."""
    try:
        config = build()
    except ConfigError as error:
        assert len(str(error)) < 500
        return
    assert all(type(i) is int and i >= 0 for i in config.eos_ids)
    assert all(i is None or type(i) is int for i in (config.bos_id, config.pad_id))
    for layer in config.layers:
        assert type(layer.head_dim) is int and type(layer.kv_heads) is int
        assert 0 <= layer.rope_pairs <= layer.head_dim // 2 and layer.rope_theta > 0


@settings(max_examples=100)
@given(data=st.data())
def test_any_field_may_be_junk(data: st.DataObject) -> None:
    config = newer()
    names = [*config["text_config"], "attention_bias", "global_head_dim", "hidden_activation"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)):
        config["text_config"][name] = data.draw(JUNK)
    rope = config["text_config"]["rope_parameters"]
    if isinstance(rope, dict) and data.draw(st.booleans()):
        rope[F] = {"rope_type": "proportional", "rope_theta": data.draw(JUNK)}
    check_fuzzed(lambda: config_from_hf(config))


@settings(max_examples=70)
@given(data=st.data())
def test_any_gguf_key_may_be_junk(data: st.DataObject) -> None:
    metadata = gguf_metadata(gguf_config())
    for key in data.draw(st.lists(st.sampled_from(list(metadata)), min_size=1, max_size=2)):
        metadata[key] = data.draw(JUNK)
    check_fuzzed(lambda: config_from_gguf(metadata, 97))


def test_every_number_of_the_class_is_checked() -> None:
    for name in ("vocab_size", "rms_norm_eps", "canvas_length"):
        with pytest.raises(ConfigError, match=re.escape(name)):
            gguf_config(**{name: 0})
    with pytest.raises(ConfigError, match="at least one layer"):
        gguf_config(layers=())


def test_what_transformers_saves_by_default(tmp_path: Path) -> None:
    """Whatever it leaves out or writes as null; the experts' numbers have no default."""
    experts = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    theirs = DiffusionGemmaConfig(text_config=DiffusionGemmaTextConfig(**experts))
    theirs.save_pretrained(tmp_path)
    DiffusionGemmaGenerationConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["text_config"]["use_bidirectional_attention"] is None
    assert "final_logit_softcapping" not in saved["text_config"]
    config, text = config_from_hf(saved, generation), theirs.text_config
    assert (config.logit_softcap, config.canvas_length) == (30.0, 256)
    assert (config.vocab_size, config.hidden_size) == (text.vocab_size, text.hidden_size)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (2, (1,), 0)
    sliding, full = LayerConfig(True, 4, 256, 1e4, 128), LayerConfig(False, 4, 512, 1e6, 64)
    assert config.layers == ((sliding,) * 5 + (full,)) * 5


def test_the_last_layer_is_full_whatever_the_list_says() -> None:
    config = published()
    config["text_config"]["layer_types"] = ["sliding_attention"] * 30
    layers = config_from_hf(config).layers
    assert [layer.sliding for layer in layers] == [True] * 29 + [False]
