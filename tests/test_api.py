"""`load()` and what a `Model` is made of: files, devices, dtypes, defaults; replies of a model."""

from __future__ import annotations

import json
import pydoc
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from tests.support.gguf_files import gguf_config, random_state, write_gguf
from tests.support.pieces import MARKERS
from tests.support.scripted_model import PIECES, TEMPLATE
from tests.support.tiny_checkpoint import TINY, save_tiny_checkpoint

import sfumato
from sfumato import Draft, Model, SamplerConfig
from sfumato.diffusion.sampler import EntropyBound
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.engine import EngineDead
from sfumato.model.model_config import ConfigError
from sfumato.text.template import TemplateError
from sfumato.text.tokenizer import TokenizerError
from sfumato.train.vocabulary import END_OF_TURN, EOS, TOKENS
from sfumato.weights.errors import CheckpointError

TWO_STEPS = SamplerConfig(max_steps=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(tiny: Path) -> Model:
    return sfumato.load(tiny)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# Loading.


def test_a_folder_and_its_file_are_the_same_model(tiny: Path, model: Model) -> None:
    other = sfumato.load(str(tiny / "model.safetensors"))
    assert other.config == model.config == TINY["diffusion_gemma"].config
    one, two = (m.generate("Hi", sampler=TWO_STEPS, max_tokens=40) for m in (model, other))
    assert one.token_ids == two.token_ids and one.text == two.text
    assert (model.path, other.path) == (tiny, tiny / "model.safetensors")
    assert model.load_s > 0
    assert model.template.rewrites is None  # but of the packaged models


def test_no_path_is_the_embedded_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.catalog.EMBEDDED", tiny)
    assert sfumato.load().path == tiny


def test_progress_reaches_the_end(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    sfumato.load(tiny, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 100_000


def test_a_device_and_a_dtype_may_be_torchs_own(tiny: Path) -> None:
    model = sfumato.load(tiny, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert (model.network.device, model.network.dtype) == (torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("path", [5, b"", b"model.gguf", "", True, ["x"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match=r"^path: must name a checkpoint, .* got "):
        sfumato.load(path)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtypes(tiny: Path, name: str) -> None:
    model = sfumato.load(tiny, device="cpu", dtype=name)
    assert model.network.dtype == getattr(torch, name)
    cache = model.new_cache(1, 16)
    model.encode(torch.tensor([[2, 5, 6]]), cache)
    assert cache[0].read(0)[0].dtype == getattr(torch, name)
    logits = model.denoise_logits(torch.zeros(1, 4, dtype=torch.int64), cache)
    assert logits.dtype == torch.float32 and bool(logits.isfinite().all())
    assert model.soft_embedding(logits).dtype == getattr(torch, name)
    assert model.generate("Hi", sampler=TWO_STEPS, max_tokens=4).token_ids


def test_a_small_model_runs_in_float32_by_itself(model: Model) -> None:
    assert model.network.dtype == torch.float32  # though it is stored in bfloat16


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"device": "abacus"}, r"device: 'abacus' cannot be used here"),
        ({"dtype": "int8"}, r"dtype: 'int8' is none of auto, float32, bfloat16, float16"),
    ],
)
def test_unknown_places_are_refused(tiny: Path, where: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sfumato.load(tiny, **where)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device whose absence this tests")
def test_an_absent_device_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"device: 'cuda' cannot be used here"):
        sfumato.load(tiny, device="cuda")


def without_embedding(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = {k: v.clone() for k, v in load_file(path).items() if "embed_tokens" not in k}
    save_file(state, path)


Spoil = Callable[[Path], Any]
SPOILT: list[tuple[str, Spoil, type[Exception], str]] = [
    ("all", shutil.rmtree, CheckpointError, "does not exist"),
    ("weights", lambda f: (f / "model.safetensors").unlink(), CheckpointError, "holds no weights"),
    ("config", lambda f: (f / "config.json").unlink(), CheckpointError, r"config\.json.* exist"),
    ("tensor", without_embedding, CheckpointError, r"missing: embed_tokens\.weight"),
    (
        "tokenizer",
        lambda f: (f / "tokenizer.json").unlink(),
        TokenizerError,
        r"tokenizer\.json: no such file; a checkpoint needs",
    ),
    (
        "template",
        lambda f: (f / "chat_template.jinja").unlink(),
        TemplateError,
        r"chat_template\.jinja: does not exist",
    ),
    (
        "sampler",
        lambda f: edit(f / "generation_config.json", t_max="hot"),
        CheckpointError,
        r"generation_config\.json: t_max: must be a number, got 'hot'",
    ),
    (
        "canvas",
        lambda f: edit(f / "config.json", canvas_length=0),
        ConfigError,
        "canvas_length",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "kind", "message"), [row[1:] for row in SPOILT], ids=[row[0] for row in SPOILT]
)
def test_a_spoilt_checkpoint_says_what_is_wrong(
    copy: Path, spoil: Spoil, kind: type[Exception], message: str
) -> None:
    spoil(copy)
    with pytest.raises(kind, match=message):
        sfumato.load(copy)


def test_what_can_fail_fast_does_so_before_the_weights(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "tokenizer.json").unlink()
    monkeypatch.setattr("sfumato.api.load_network", lambda *_: pytest.fail("read the weights"))
    with pytest.raises(TokenizerError):
        sfumato.load(copy)


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda f: edit(f / "config.json", canvas_length=0), {}),
        (without_embedding, {}),
        (lambda f: None, {"device": "abacus"}),
        (lambda f: None, {"dtype": "int8"}),
    ],
    ids=["config", "tensors", "device", "dtype"],
)
def test_the_slow_tokenizer_comes_after_what_is_quick(
    copy: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, where: dict[str, str]
) -> None:
    spoil(copy)
    monkeypatch.setattr("sfumato.api.load_text", lambda *_: pytest.fail("built the tokenizer"))
    with pytest.raises(ValueError):
        sfumato.load(copy, **where)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy / "tokenizer.json"
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    size = len(vocabulary)
    vocabulary["another one"] = size
    path.write_text(json.dumps(written))
    monkeypatch.setattr("sfumato.api.load_network", lambda *_: pytest.fail("read the weights"))
    with pytest.raises(ValueError, match=f"tokenizer has {size + 1} tokens .* embedding {size};"):
        sfumato.load(copy)


# Defaults and end tokens.


def test_defaults_come_from_the_checkpoint(copy: Path, model: Model) -> None:
    assert model.sampler_defaults == REFERENCE
    edit(
        copy / "generation_config.json",
        max_denoising_steps=3,
        sampler_config={"entropy_bound": 0.5},
        max_new_tokens=1,
    )
    other = sfumato.load(copy)
    assert other.sampler_defaults == replace(REFERENCE, max_steps=3, sampler=EntropyBound(0.5))
    assert other.generate("Hi", max_tokens=33).stats.steps == [3, 3]  # nor is 1 the limit
    assert other.generate("Hi", max_tokens=33, sampler=TWO_STEPS).stats.steps == [2, 2]


def test_end_tokens(copy: Path, model: Model) -> None:
    assert model.end_ids == (EOS, END_OF_TURN)
    edit(copy / "generation_config.json", eos_token_id=[9, 4])
    assert sfumato.load(copy).end_ids == (9, 4)
    edit(copy / "generation_config.json", eos_token_id=9)  # no list: the markers end it too
    assert sfumato.load(copy).end_ids == (9, END_OF_TURN)
    (copy / "generation_config.json").unlink()
    assert sfumato.load(copy).end_ids == (EOS, END_OF_TURN)


def test_a_gguf_file(tmp_path: Path) -> None:
    """One file with everything: weights, tokenizer, template and defaults."""
    tokens = [*PIECES, "ab"]
    config = gguf_config(vocab_size=len(tokens))
    extra: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in MARKERS.tokens else 1 for token in tokens],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
        "diffusion.eb_max_steps": 2,
    }
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_state(config), config, {"*mlp*": "Q8_0"}, extra)
    model = sfumato.load(path)
    assert model.tokenizer.encode("ab<turn|>") == [tokens.index("ab"), tokens.index("<turn|>")]
    ends = ("<eos>", "<turn|>", "<|tool_response>")
    assert model.end_ids == tuple(tokens.index(text) for text in ends)
    assert model.sampler_defaults == replace(REFERENCE, max_steps=2)
    assert model.network.dtype == torch.float32
    reply = model.generate("ab", max_tokens=12, sampler=SamplerConfig(ignore_eos=True))
    assert len(reply.token_ids) == 12 and reply.stats.steps == [2, 2]
    assert sfumato.load(tmp_path).path == tmp_path  # a folder that holds one will do


# Replies of a real, if untrained, network.


def test_what_a_draft_holds(model: Model) -> None:
    (draft,) = (
        event
        for event in model.stream("Hi", max_tokens=8, sampler=SamplerConfig(max_steps=1))
        if isinstance(event, Draft)
    )
    length = model.config.canvas_length
    assert draft.token_ids.shape == draft.entropy.shape == draft.accepted.shape == (length,)
    assert draft.token_ids.dtype == torch.int64 and draft.accepted.dtype == torch.bool
    assert draft.entropy.dtype == torch.float32 and bool((draft.entropy >= 0).all())
    assert {t.device.type for t in (draft.token_ids, draft.entropy, draft.accepted)} == {"cpu"}


def test_a_long_prefill_can_be_cancelled(model: Model) -> None:
    answers = iter([False, False, True])  # no fourth is asked for
    reply = model.generate("x" * 2000, sampler=TWO_STEPS, cancelled=lambda: next(answers))
    assert (reply.stop_reason, reply.token_ids) == ("cancelled", [])
    assert reply.stats.prompt_tokens > 2000 and reply.stats.steps == []
    assert reply.stats.prefill_s > 0 and reply.stats.first_draft_s is None


def test_a_prompt_is_a_users_message(model: Model) -> None:
    ids = model.prompt_ids("Hi")
    assert ids == model.prompt_ids(messages=[{"role": "user", "content": "Hi"}])
    assert "".join(TOKENS[i] for i in ids) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    reply = model.generate("Hi", sampler=TWO_STEPS, max_tokens=4)
    assert reply.stats.prompt_tokens == len(ids)


@pytest.mark.parametrize("call", ["generate", "stream", "prompt_ids"])
def test_prompt_and_messages_exclude_one_another(model: Model, call: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for arguments in ({}, {"prompt": "Hi", "messages": messages}):
        with pytest.raises(ValueError, match="prompt, messages: give exactly one of them"):
            getattr(model, call)(**arguments)


def test_what_cannot_be_done_is_refused_by_name(model: Model) -> None:
    for options, message in (
        ({"max_tokens": 0}, "max_tokens: must be a whole number from 1"),
        ({"max_tokens": 20_000}, "max_tokens: .* context of 16384"),
        ({"stop": [""]}, "stop: must be non-empty strings"),
        ({"stop": 5}, "stop: must be non-empty strings, .* got 5"),
        ({"sampler": "threshold"}, r"sampler: .* SamplerConfig\(temperature=.* got 'threshold'"),
        ({"sampler": {"temperature": 0.5}}, r"sampler: must be a SamplerConfig"),
        ({"sampler": {}}, r"sampler: must be a SamplerConfig"),
        ({"cancelled": True}, "cancelled: must be a function .* got True"),
        ({"sampler": SamplerConfig(canvas_length=33)}, "canvas_length: 33 is longer than the 32"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate("Hi", **options)
    with pytest.raises(ValueError, match=r"^prompt: the prompt is .* tokens and the context holds"):
        model.generate("x" * 20_000, max_tokens=1)
    with pytest.raises(ValueError, match="role"):
        model.generate(messages=[{"role": "unknown", "content": "Hi"}])


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_unknown_argument_is_told_where_to_go(model: Model, call: str) -> None:
    for field in fields(SamplerConfig):
        if field.name not in ("sampler", "mode"):  # arguments, too
            hint = rf"is no argument of .* see sampler=SamplerConfig\({field.name}=\.\.\.\)$"
            with pytest.raises(TypeError, match=f"^{field.name}: {hint}"):
                getattr(model, call)("Hi", **{field.name: 0.5})
    with pytest.raises(TypeError, match=r"^max_token: is no argument .* see help\(Model\.stream\)"):
        getattr(model, call)("Hi", max_token=5)


def test_no_stop_and_one_stop(model: Model) -> None:
    plain = model.generate("Hi", sampler=TWO_STEPS, max_tokens=4)
    assert (
        model.generate("Hi", sampler=TWO_STEPS, max_tokens=4, stop=None).token_ids
        == plain.token_ids
    )
    cut = model.generate("Hi", sampler=TWO_STEPS, max_tokens=4, stop=plain.text[0])
    assert cut.stop_reason == "stop" and cut.text == ""


def test_a_refusal_comes_with_the_call_and_not_with_the_first_event(model: Model) -> None:
    for options in ({"max_tokens": 0}, {"max_tokens": 1.5}, {"seed": "x"}, {"stop": [""]}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: must be"):
            model.stream("Hello!", **options)


# What people see of it.


def test_the_package_says_what_it_has_without_loading_torch() -> None:
    program = "import sys, sfumato; print(*dir(sfumato), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *names, has_torch = done.stdout.split()
    assert has_torch == "False"
    assert {*sfumato.__all__} == {name for name in names if not name.startswith("__")}


def test_help_of_generate_has_the_options(model: Model) -> None:
    text = pydoc.plain(pydoc.render_doc(model.generate))
    for name in signature(Model.stream).parameters.keys() - {"self", "unknown"}:
        assert f"{name}: '" in text or f'{name}: "' in text, name
    assert "max_tokens: visible tokens at most" in text and "-> 'Reply'" in text


def test_models_and_replies_are_shown_for_people(model: Model) -> None:
    assert repr(model).startswith(f"Model({model.path.name}, DiffusionGemma: 3 layers of 128, ")
    messages = [{"role": "user", "content": "Hi"}]
    reply = model.generate(messages, sampler=TWO_STEPS, max_tokens=40)
    assert str(reply) == reply.text == model.generate("Hi", sampler=TWO_STEPS, max_tokens=40).text
    assert repr(reply).startswith(f"Reply({reply.text!r}, {reply.stop_reason}, ")
    assert len(repr(reply)) < len(reply.text) + 100
    with pytest.raises(ValueError, match="give exactly one of them"):
        model.generate(messages, messages=messages)


class City(BaseModel):
    name: str
    population: int = Field(ge=0)


def test_a_reply_is_read_by_its_schema(model: Model) -> None:
    held = {"schema": City, "max_tokens": 64}
    reply = model.generate("A city.", **held)
    done = replace(reply, text='{"name": "Rome", "population": 3}', stop_reason="eos")
    assert done.parsed == City(name="Rome", population=3)
    assert replace(done, schema=City.model_json_schema()).parsed == {
        "name": "Rome",
        "population": 3,
    }
    with pytest.raises(ValueError, match="greater_than_equal"):
        _ = replace(done, text='{"name": "Rome", "population": -3}').parsed
    with pytest.raises(ValueError, match="ended by max_tokens; raise max_tokens"):
        _ = replace(done, text='{"name": "Ro', stop_reason="max_tokens").parsed
    with pytest.raises(ValueError, match="asked with no schema"):
        _ = replace(done, schema=None).parsed


def test_an_engine_serves_within_a_with_statement(model: Model) -> None:
    """What was submitted is served at the end; after an exception it is not."""
    request = sfumato.Request("Hi", sampler=TWO_STEPS, max_tokens=40)
    with sfumato.Engine(model, sfumato.EngineConfig(1, 256)) as engine:
        handle = engine.submit(request)
    assert handle.result().stop_reason in ("eos", "max_tokens")
    with pytest.raises(EngineDead):
        engine.submit(request)
    with pytest.raises(KeyError), sfumato.Engine(model, sfumato.EngineConfig(1, 256)) as engine:
        raise KeyError
    with pytest.raises(EngineDead):
        engine.submit(request)
