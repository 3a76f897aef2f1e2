from __future__ import annotations

from collections import Counter

import pytest

from sfumato.model.loading import expected_shapes
from sfumato.model.model_config import LayerConfig, ModelConfig
from sfumato.model.quantization import TARGETS, format_of, formats
from sfumato.weights.files.tensorfile import TensorStream

SLIDING = LayerConfig(True, 8, 256, 1e4, 128)
FULL = LayerConfig(False, 2, 512, 1e6, 64)
REAL = ModelConfig(
    vocab_size=262144,
    hidden_size=2816,
    intermediate_size=2112,
    num_heads=16,
    num_experts=128,
    experts_per_token=8,
    expert_size=704,
    sliding_window=1024,
    canvas_length=256,
    context_length=262144,
    rms_norm_eps=1e-6,
    logit_softcap=30.0,
    layers=(*[SLIDING] * 5, FULL) * 5,
)


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    return expected_shapes(REAL)


# The published files' sizes, and what `llama-quantize --dry-run` counts: tensor by tensor the
# same formats (checked by hand against llama.cpp c3fb972 for all of these).
@pytest.mark.parametrize(
    ("name", "gigabytes", "counts"),
    [
        ("q4_k_m", 16.8, {"Q4_K": 194, "Q6_K": 14, "Q8_0": 28, "Q5_0": 33}),
        ("q5_k_m", 19.1, {"Q5_K": 194, "Q6_K": 14, "Q8_0": 28, "Q5_1": 33}),
        ("q6_k", 22.6, {"Q6_K": 208, "Q8_0": 61}),
        ("q8_0", 26.9, {"Q8_0": 269}),
        ("q5_k", 18.0, {"Q5_K": 207, "Q6_K": 1, "Q5_1": 61}),
        ("q5_0", 17.5, {"Q5_0": 268, "Q6_K": 1}),
        ("q4_k", 15.4, {"Q4_K": 207, "Q6_K": 1, "Q5_0": 61}),
        ("bf16", 50.5, {"BF16": 269}),
    ],
)
def test_the_real_model(
    shapes: dict[str, tuple[int, ...]], name: str, gigabytes: float, counts: dict[str, int]
) -> None:
    chosen = formats(shapes, TARGETS[name])
    sized = [TensorStream(n, shapes[n], f, lambda: iter(())) for n, f in chosen.items()]
    assert sum(tensor.nbytes for tensor in sized) / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert Counter(chosen.values()) == counts | {"F32": 422}


def test_which_layers_the_mix_favours(shapes: dict[str, tuple[int, ...]]) -> None:
    """As `llama-quantize` lists them; V projections are counted by themselves, 25 of them."""
    chosen = formats(shapes, TARGETS["q4_k_m"])
    down = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    for name in ("experts.down_proj", "mlp.down_proj.weight"):
        chosen_formats = {i: chosen[f"layers.{i}.{name}"] for i in range(30)}
        assert chosen_formats == {i: "Q8_0" if i in down else "Q5_0" for i in range(30)}
    value = {i: chosen.get(f"layers.{i}.self_attn.v_proj.weight") for i in range(30)}
    assert [i for i, kind in value.items() if kind == "Q6_K"] == [
        *(0, 1, 2, 6, 9, 13, 16, 20, 24, 25, 26, 27, 28)
    ]
    assert [i for i, kind in value.items() if kind is None] == [5, 11, 17, 23, 29]
    assert chosen["embed_tokens.weight"] == "Q6_K"
    assert chosen["self_conditioning.down_proj.weight"] == "Q5_0"


@pytest.mark.parametrize("name", TARGETS)
def test_vectors_and_routers_stay_exact(shapes: dict[str, tuple[int, ...]], name: str) -> None:
    chosen = formats(shapes, TARGETS[name])
    exact = {n for n, shape in shapes.items() if len(shape) == 1 or ".router." in n}
    assert {chosen[n] for n in exact} == {"F32"}


@pytest.mark.parametrize(
    ("width", "expected"), [(256, "Q4_K"), (704, "Q5_0"), (48, "F16"), (8, "F16")]
)
def test_widths_that_do_not_divide_fall_back(width: int, expected: str) -> None:
    target = TARGETS["q4_k_m"]
    assert format_of("layers.0.mlp.up_proj.weight", (8, width), target) == expected
