"""An engine whose quantized weights are multiplied by interpreted kernels gives the tokens of the
same file in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.kernels import counted_launches, interpreted, seen_as
from tests.support.scripted_engine import run
from tests.support.scripted_model import END_IDS, TEMPLATE, tokenizer

from sfumato import Engine, EngineConfig, Model, Request, SamplerConfig
from sfumato.api import TextSide
from sfumato.diffusion.sampler import Never
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.model.families import DIFFUSION_GEMMA, open_checkpoint
from sfumato.model.loading import load_network, loaded_bytes
from sfumato.model.model_config import LayerConfig
from sfumato.model.network import Network
from sfumato.ops import registry
from sfumato.ops.triton import self_test
from sfumato.ops.triton.planes import PlaneTensor
from sfumato.text.template import ChatTemplate
from sfumato.weights.checkpoint import Checkpoint
from sfumato.weights.formats import QuantizedTensor

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

CPU = torch.device("cpu")
FORMATS = {
    "embed_tokens.weight": "Q8_0",
    "*.experts.gate_up_proj": "Q4_0",
    "*.experts.down_proj": "Q5_0",
    "*.self_attn.q_proj.weight": "Q8_0",
}
PLANES = frozenset(("linear Q8_0", "experts Q4_0", "experts Q5_0", "vocabulary_pass Q8_0"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    layers = (LayerConfig(True, 2, 16, 1e4, 8), LayerConfig(False, 1, 32, 1e6, 4))
    sizes = {"num_heads": 2, "num_experts": 2, "experts_per_token": 1, "canvas_length": 4}
    config = gguf_config(layers=layers, **sizes)
    write_gguf(tmp_path / "model.gguf", random_state(config, 3), config, FORMATS)
    return open_checkpoint(tmp_path / "model.gguf")


def tokens_of(network: Network) -> tuple[int, ...]:
    text = TextSide(tokenizer(), ChatTemplate(TEMPLATE, markers=DIFFUSION_GEMMA.markers))
    model = Model(network, text, REFERENCE, END_IDS, Path("random"), DIFFUSION_GEMMA)
    engine = Engine(model, EngineConfig(slots=2, context=64))
    sampler = SamplerConfig(max_steps=2, stopping=Never())
    handle = engine.submit(Request(ids=[2, 21], seed=1, sampler=sampler, max_tokens=4))
    run(engine)
    return tuple(handle.result().token_ids)


def test_a_gguf_file_is_multiplied_in_planes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.ops.cpu.library.kernels", None)
    blocks = load_network(checkpoint, CPU, torch.float32)
    layer = blocks.transformer.layers[0]
    assert isinstance(layer.experts.gate_up_proj, QuantizedTensor)
    with registry.reference_only():
        expected = tokens_of(blocks)
    monkeypatch.setattr(self_test, "_failed", {})
    monkeypatch.setattr(self_test, "_passed", {CPU: PLANES})
    with seen_as("cpu", "cuda"), counted_launches() as launches:
        planes = load_network(checkpoint, CPU, torch.float32)
        foretold = {
            name: loaded_bytes(name, info, CPU, torch.float32)
            for name, info in checkpoint.tensors.items()
        }
        assert tokens_of(planes) == expected
    layer = planes.transformer.layers[0]
    embedding = planes.transformer.embed_tokens.weight
    assert isinstance(embedding, PlaneTensor) and planes.head.embedding is embedding
    assert embedding.nbytes == foretold["embed_tokens.weight"]
    for path in ("experts.gate_up_proj", "experts.down_proj", "self_attn.q_proj.weight"):
        held = layer.get_submodule(path.rpartition(".")[0])
        weight = getattr(held, path.rpartition(".")[2])
        assert isinstance(weight, PlaneTensor), path
        assert weight.nbytes == foretold[f"layers.0.{path}"]
    # Two layers in the prompt's forward and in two steps: each multiplies each weight.
    assert launches["experts_gate_up_planes"] == launches["experts_down_planes"] >= 6
    assert launches["linear_planes"] >= 6
    assert launches["score_chunk_planes"] == launches["finish_head_planes"] == 2
    assert set(launches) <= {
        *("linear_planes", "experts_gate_up_planes", "experts_down_planes"),
        *("experts_sort", "experts_combine"),
        *("score_chunk_planes", "embed_chunk_planes", "merge_top", "finish_head_planes"),
    }
