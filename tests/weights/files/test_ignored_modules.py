"""Lists of ignored modules match as compressed-tensors and ModelOpt say."""

from __future__ import annotations

import pytest
from compressed_tensors.utils.match import match_name

from sfumato.weights.files.narrow import IgnoreList

NAMES = [
    "lm_head",
    "model.decoder.layers.1.router.proj",
    "model.decoder.layers.11.mlp.up_proj",
    "model.decoder.layers.1.experts.3.up_proj",
    "model.encoder.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
    "router",
]


@pytest.mark.parametrize(
    "rule",
    [
        *("lm_head", "re:.*router", "re:.*router$", "re:model.decoder.layers.1", "router"),
        *(r"re:.*layers\.1\.", "re:.*vision_tower.*", r"re:.*experts\.\d+\.(up|gate)_proj", "re:"),
        *("re:lm", "layers", r"re:^(?!.*experts).*proj$", r"re:.*up_pro[jk]"),
    ],
)
def test_rules_of_compressed_tensors(rule: str) -> None:
    rules = IgnoreList.of([rule], "here")
    for name in NAMES:
        assert (rules.matching([(name,)]) is not None) == match_name(name, rule), name


def test_rules_of_modelopt() -> None:
    rules = IgnoreList.of(["lm_head", "model.decoder.layers.1.*"], "here", wildcards=True)
    matching = [name for name in NAMES if rules.matching([(name,)])]
    assert matching == [name for name in NAMES if name == "lm_head" or "decoder.layers.1." in name]
    assert rules.matching([("other", "lm_head"), ("x",)]) == "lm_head"
    # A star of compressed-tensors is a character.
    assert IgnoreList.of(["lm*"], "here").matching([("lm_head",)]) is None
