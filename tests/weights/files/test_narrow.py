"""Which quantization configs are read, and the words in which others are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tests.support.narrow_files import LAYOUTS

from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.narrow import read_scheme


def config_of(name: str) -> dict[str, Any]:
    return deepcopy(dict(LAYOUTS[name].config or {}))


def read(folder: Path, config: Any, beside: Any = None) -> Any:
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return read_scheme({} if config is None else {"quantization_config": config}, folder)


@pytest.mark.parametrize(
    ("name", "text", "inverted"),
    [
        ("fp8", "FP8 of compressed-tensors", False),
        ("int8", "INT8 of compressed-tensors", False),
        ("int4", "INT4 of compressed-tensors, a scale for 32 columns", False),
        ("nvfp4", "NVFP4 of compressed-tensors, a scale for 16 columns", True),
        ("modelopt-nvfp4", "NVFP4 of modelopt, a scale for 16 columns", False),
        ("modelopt-fp8", "FP8 of modelopt", False),
    ],
)
def test_published_configs(tmp_path: Path, name: str, text: str, inverted: bool) -> None:
    scheme = read(tmp_path, LAYOUTS[name].config, LAYOUTS[name].beside)
    assert str(scheme) == text
    assert scheme.inverted == inverted
    assert read(tmp_path / "other", None) is None


def test_either_file_of_modelopt_is_enough(tmp_path: Path) -> None:
    layout = LAYOUTS["modelopt-nvfp4"]
    alone = read(tmp_path, layout.config)
    other = read(tmp_path, None, layout.beside)
    assert (alone.kind, alone.roles) == (other.kind, other.roles)
    assert alone.ignored.patterns == other.ignored.patterns


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 8}, "weights: 8 bits of type 'int' are not read in 'pack-quantized'"),
        ({"num_bits": True}, "weights: True bits"),
        ({"type": "float"}, "4 bits of type 'float' are not read in 'pack-quantized'"),
        ({"symmetric": False}, "weights: symmetric is False, not True"),
        ({"dynamic": True}, "weights: dynamic is True, not False"),
        ({"actorder": "group"}, "weights: actorder is 'group': columns in another order"),
        ({"strategy": "channel"}, "weights: strategy is 'channel', which is not read for INT4"),
        ({"group_size": 24}, "weights: group_size is 24; INT4 is read with a multiple of 32"),
        ({"group_size": 10**9}, "weights: group_size is 1000000000"),
        ({"group_size": True}, "weights: group_size is True"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = config_of("int4")
    config["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, config)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq', which is not read; use a checkpoint of"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen'; only 'compressed'"),
        ({"transform_config": {"R1": 1}}, "transform_config: is {'R1': 1}, which is not read"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: is .*, which is not"),
        ({"config_groups": {}}, "config_groups: is no map of groups"),
        ({"config_groups": {"g": {"weights": None}}}, "config_groups: 'g': weights: is no object"),
        ({"quant_method": None}, "quant_method is None, which is not read"),
        ({"config_groups": {"FP8": ["Linear"]}}, "config_groups: 'FP8': weights: is no object"),
        ({"format": "marlin-24"}, "format is 'float-quantized', and 'marlin-24' above"),
        ({"ignore": "lm_head"}, "ignore: is no list of names"),
        ({"ignore": [3]}, "ignore: 3 is no name of a module"),
        ({"ignore": ["re:("]}, r"ignore: 're:\(' is no regular expression"),
        ({"ignore": ["re:(a+)+$"]}, "ignore: .* could take too long to match"),
        ({"ignore": ["re:.*a.*b.*c.*d"]}, "ignore: .* could take too long to match"),
    ],
)
def test_other_configs_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, config_of("fp8") | changes)


def test_mixed_configs_are_refused(tmp_path: Path) -> None:
    config = config_of("fp8")
    config["config_groups"]["group_1"] = deepcopy(config["config_groups"]["group_0"])
    assert read(tmp_path, config).kind == "FP8"  # two groups of one format
    other = config_of("nvfp4")["config_groups"]["group_0"]
    config["config_groups"]["group_1"], config["format"] = other, "mixed-precision"
    with pytest.raises(CheckpointError, match=r"mixed formats .*'group_0' is FP8, 'group_1' is NV"):
        read(tmp_path, config)
    with pytest.raises(CheckpointError, match="FP8 of compressed-tensors, and hf_quant_config"):
        read(tmp_path, config_of("fp8"), LAYOUTS["modelopt-nvfp4"].beside)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo is 'MIXED_PRECISION'; only FP8 and NVFP4"),
        ({"quant_algo": None}, "quant_algo is None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; NVFP4 has 16"),
        (None, "quantization: is no object"),
    ],
)
def test_other_forms_of_modelopt_are_refused(tmp_path: Path, values: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"hf_quant_config.json: {words}"):
        read(tmp_path, None, {"quantization": values})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fp8", {"strategy": "block"}, "strategy is 'block', which is not read for FP8"),
        ("fp8", {"group_size": 128}, "group_size is 128, and the strategy 'channel' has no groups"),
        ("int8", {"strategy": "token"}, "strategy is 'token', which is not read for INT8"),
        ("int8", {"num_bits": 6}, "6 bits of type 'int' are not read"),
        ("nvfp4", {"group_size": 32}, "group_size is 32; NVFP4 is read with 16"),
        ("nvfp4", {"type": "int"}, "4 bits of type 'int' are not read in 'nvfp4-pack-quantized'"),
    ],
)
def test_weights_of_each_kind(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    config = config_of(name)
    config["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, config)
