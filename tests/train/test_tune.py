"""Tuning: rows of conversations, the objective, and runs that end and go on."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.support.seeing_model import seeing_model, with_markers

import sfumato
from sfumato.convert import convert
from sfumato.engine.memory.device_memory import Budget
from sfumato.model.adapter_files import read_adapter
from sfumato.model.vision.mask import SoftTokens
from sfumato.options.tuning import TUNING
from sfumato.refused import Refused
from sfumato.train import chats
from sfumato.train.canvas_rows import collate
from sfumato.train.chats import Canvases, exchanges, read_chats, split
from sfumato.train.objective import loss
from sfumato.train.run_folder import RunFolder
from sfumato.train.trainer import Trainer
from sfumato.train.tune import Rows, Tuning, pictures_of, tune
from sfumato.weights.errors import CheckpointError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"Say {i}", "completion": str(i)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SHORT = Tuning(
    *(False, ("attention", "self-conditioning"), 2),
    steps=4,
    batch=2,
    at_once=2,
    rate=1e-2,
    eval_every=2,
    samples=0,
    save_every=2,
    keep=1,
)


def learnt(model: sfumato.Model, out: Path) -> list[torch.Tensor]:
    written = read_adapter(out / "adapter", model.family, model.config).changes
    return [half for change in written.values() for half in (change.down, change.up)]


def losses(out: Path) -> list[tuple[int, dict[str, float]]]:
    lines = (json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines())
    return [(line["step"], line["losses"]) for line in lines]


def test_a_killed_run_goes_on_with_the_numbers_of_one_that_was_not(data, tmp_path):
    model = sfumato.load(dtype="float32")
    tuned = tune(model, data, tmp_path / "whole", SHORT)
    uninterrupted = learnt(model, tmp_path / "whole")
    assert not model.network.transformer.get_submodule("layers.2.self_attn.q_proj").changes
    assert tuned.steps == 4 and tuned.ended == "steps" and tuned.held_out is not None
    killed = tmp_path / "killed"
    count = 0

    def kill() -> bool:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        tune(model, data, killed, SHORT, stopped=kill)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-000000002.pt"]
    assert len(losses(killed)) == 4  # three steps and an evaluation
    with pytest.raises(Refused, match="--resume"):
        tune(model, data, killed, SHORT)
    with pytest.raises(Refused, match="rate: the run"):
        tune(model, data, killed, replace(SHORT, rate=2e-2), resume=True)
    # What a kill within a write leaves is no obstacle, and goes.
    (killed / ".adapter.1234.part").mkdir()
    for name in (".curves.svg.1234.part", "checkpoints/.step-000000004.pt.1234.part"):
        (killed / name).touch()
    tune(model, data, killed, replace(SHORT, recompute=True), resume=True)
    assert not list(killed.rglob(".*"))
    assert losses(killed) == losses(tmp_path / "whole")
    # A result that was not written is written by a run with nothing left to do.
    (killed / "adapter" / "adapter_model.safetensors").unlink()
    (killed / "adapter").rename(killed / ".adapter.99.old")
    again = tune(model, data, killed, SHORT, resume=True)
    assert (again.steps, again.ended) == (4, "steps") and again.loss == tuned.loss
    for ours, theirs in zip(learnt(model, killed), uninterrupted, strict=True):
        assert torch.equal(ours, theirs)
    written = read_adapter(killed / "adapter", model.family, model.config)
    assert (written.rank, written.alpha) == (2, 32.0)
    assert set(written.changes) >= {"layers.2.self_attn.q_proj", "self_conditioning.down_proj"}
    assert (killed / "curves.svg").read_text().count("<polyline") == 4


@pytest.fixture(scope="module")
def embedded() -> sfumato.Model:
    return sfumato.load(dtype="float32")


def ask(text: str, **more: object) -> dict[str, object]:
    return {"role": "user", "content": text, **more}


def answer(text: str | None, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def rows_of(model: sfumato.Model, path: Path, *rows: object, context: int = 400, long="refuse"):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return exchanges(read_chats(path), Canvases.of(model, context, long))


def test_a_row_is_a_reply_behind_the_prompt_that_is_served(embedded, tmp_path):
    talk = [ask("Hi"), answer("One"), ask("More"), answer("two <|turn>model")]
    made = rows_of(embedded, tmp_path / "a.jsonl", {"messages": talk})
    for row, end in zip(made, (1, 3), strict=True):
        assert list(row.prompt) == embedded.prompt_ids(messages=talk[:end])
    decode = embedded.tokenizer.token_text
    texts = ["".join(map(decode, row.reply)) for row in made]
    # What a message says is no marker: the end of the turn is the only one.
    assert texts == ["One<turn|>", "two <|turn>model<turn|>"]
    assert [sum(i in embedded.tokenizer.special_ids for i in row.reply) for row in made] == [1, 1]


def test_a_long_reply_has_several_canvases_which_end_with_filler(embedded, tmp_path):
    path, row = tmp_path / "a.jsonl", {"prompt": "Say it", "completion": "x" * 70}
    (made,) = rows_of(embedded, path, row)
    canvases = Canvases.of(embedded, 400, "refuse")
    rows = [canvases.row(made, number) for number in range(canvases.count(made))]
    assert [len(row.prefix) - len(made.prompt) for row in rows] == [0, 32, 64]
    assert [token for row in rows for token in row.target][:71] == list(made.reply)
    assert set(rows[2].target[7:]) == {canvases.filler}
    assert all(row.prefix + row.text == [*made.prompt, *made.reply] for row in rows)
    tokens = len(made.prompt) + 64
    with pytest.raises(Refused, match=r"a\.jsonl, line 1: a row of"):
        rows_of(embedded, path, row, context=tokens)
    assert not rows_of(embedded, path, row, context=tokens, long="skip")
    (cut,) = rows_of(embedded, path, row, context=tokens, long="cut")
    assert cut.reply == made.reply[:64]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.jsonl, line 2: is no JSON"),
        ("[]", "line 2: must be an object"),
        ('{"prompt": "x"}', "line 2: must have messages, or a prompt and a completion"),
        ('{"messages": "x"}', "line 2: messages: must be a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: messages: has no message of"),
        ('{"prompt": [], "completion": "x"}', r"line 2: messages\[0\].role: a reply needs"),
        ('{"prompt": 5, "completion": "x"}', "line 2: prompt: must be a text"),
        ('{"prompt": "x", "completion": [{"role": "assistant", "content": 5}]}',
         r"line 2: messages\[1\].content"),
        ('{"prompt": "x", "completion": "y", "tools": 5}', "line 2: tools: must be a list"),
        ('{"prompt": "x", "completion": "y", "tools": [{"type": "x"}]}', r"line 2: tools\[0\]"),
        ("[" * 200 + "]" * 200, "line 2: .*levels"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_by_its_line_and_field(embedded, tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n' + text + "\n")
    with pytest.raises(Refused, match=message):
        exchanges(read_chats(path), Canvases.of(embedded, 400, "refuse"))


def test_a_folder_is_read_by_datasets_and_refused_without_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refused, match=r"pip install 'sfumato\[datasets\]'"):
        read_chats(tmp_path)
    # A column that a row does not use is null there.
    rows = [{"prompt": [ask("x", tool_calls=None)], "completion": "y", "messages": None}]
    stand_in = SimpleNamespace(load_from_disk=lambda path: {"train": rows})
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    (chat,) = read_chats(tmp_path)
    assert chat.messages == [ask("x"), answer("y")] and chat.where.endswith(", row 0")


def test_a_share_is_held_out_and_always_the_same_one(data):
    every = read_chats(data)
    learnt, held = split(every, 0.3, 7)
    assert (len(learnt), len(held)) == (4, 2) and split(every, 0.3, 7) == (learnt, held)
    assert sorted(chat.where for chat in (*learnt, *held)) == [chat.where for chat in every]
    assert split(every, 0.3, 8)[1] != held
    with pytest.raises(Refused, match="held_out"):
        split(every, 0.99, 7)


def test_a_step_has_rows_of_all_lengths_and_a_part_of_it_similar_ones():
    rows = [SimpleNamespace(prompt=(0,) * (1 + at % 40), reply=(0,)) for at in range(80)]
    drawn = Rows(rows, size=4, parts=5, seed=3)
    steps = [[drawn.batch(step * 5 + part) for part in range(5)] for step in range(8)]
    lengths = [[[len(row.prompt) for row in part] for part in step] for step in steps]
    for step in lengths:
        every = list(chain.from_iterable(step))
        assert every == sorted(every)
        assert step[0][0] < 14 and step[-1][-1] > 26  # of 1 to 40
    for epoch in (steps[:4], steps[4:]):  # each row once before any comes again
        assert len({id(row) for step in epoch for part in step for row in part}) == 80
    assert lengths[:4] != lengths[4:]


def test_a_folder_that_is_no_run_is_kept_and_what_is_read_is_not_within(data, tmp_path, embedded):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").touch()
    for path in (tmp_path, data.parent):
        with pytest.raises(Refused, match="out:"):
            tune(embedded, data, path, SHORT, force=True)
    assert (tmp_path / "model" / "weights").exists() and data.exists()


def test_a_step_whose_rows_teach_nothing_changes_nothing(data, tmp_path, embedded):
    alone = replace(SHORT, targets=("self-conditioning",), at_once=1, seed=3)
    assert tune(embedded, data, tmp_path / "a", alone).steps == 4


def test_a_run_goes_on_with_its_own_data_alone(data, tmp_path, embedded):
    other = tmp_path / "other.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    other.write_text("".join(reversed(lines)))
    one = replace(SHORT, steps=1)
    tune(embedded, data, tmp_path / "a", one)
    with pytest.raises(Refused, match="data: the run"):
        tune(embedded, other, tmp_path / "a", one, resume=True)
    other.write_text("".join(lines))
    tune(embedded, other, tmp_path / "a", one, resume=True)


def test_choices_are_held_against_the_table():
    for wrong, field in ({"rank": 0}, "rank"), ({"rate": 2.0}, "rate"), ({"long": "x"}, "long"):
        with pytest.raises(Refused, match=field):
            Tuning(**wrong)
    with pytest.raises(Refused, match="at_once"):
        Tuning(batch=8, at_once=3)
    assert Tuning() == Tuning(**{each.name: each.default for each in TUNING})


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", {"rate": 0.5}, keep=2)
    folder.begin(False, False)
    for step in (1, 2, 3):
        folder.save({"done": step}, step)

    def full(state, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left.*step-000000004\.pt"):
        folder.save({"done": 4}, 4)
    files = sorted(path.name for path in (folder.path / "checkpoints").iterdir())
    assert files == ["step-000000002.pt", "step-000000003.pt"]
    assert folder.begin(True, False) == {"done": 3}
    folder.checkpoints()[-1].write_bytes(b"PK broken")
    with pytest.raises(CheckpointError, match=r"step-000000003\.pt: is damaged"):
        folder.begin(True, False)
    (folder.path / "thesis.txt").touch()
    with pytest.raises(Refused, match="no part of a run"):
        folder.begin(False, True)


def test_a_run_ends_without_progress_or_when_asked_and_writes_the_best(
    data, tmp_path, embedded, monkeypatch
):
    monkeypatch.setattr("sfumato.train.tune.MOST_ANSWER", 1)
    rising = replace(SHORT, rate=1.0, last_rate=0.1, eval_every=1, patience=1, samples=1)
    lines: list[str] = []
    sampler = replace(embedded.sampler_defaults, max_steps=2)
    monkeypatch.setattr(embedded, "sampler_defaults", sampler)
    ended = tune(embedded, data, tmp_path / "a", rising, held_out=data, report=lines.append)
    values = [each["held-out canvas"] for _, each in losses(tmp_path / "a") if len(each) == 2
              and "held-out canvas" in each]  # fmt: skip
    assert ended.ended == "patience" and ended.steps == len(values) < 4
    assert ended.held_out == min(values) < values[-1]
    (first, *_) = (tmp_path / "a" / "samples.jsonl").read_text().splitlines()
    assert json.loads(first)["row"] == "chats.jsonl, line 1" and "was said" in lines[2]
    again = tune(embedded, data, tmp_path / "a", rising, held_out=data, resume=True)
    assert (again.ended, again.steps) == ("patience", ended.steps)
    ended = tune(embedded, data, tmp_path / "b", SHORT, held_out=0.0, stopped=lambda: True)
    assert (ended.ended, ended.steps, ended.held_out) == ("stopped", 1, None)
    assert (tmp_path / "b" / "adapter" / "adapter_config.json").is_file()


def test_a_step_that_does_not_fit_is_refused_before_it_is_taken(data, tmp_path, monkeypatch):
    free = Budget(100_000, "a test")
    monkeypatch.setattr("sfumato.train.tune.budget", lambda device: free)
    model = sfumato.load(dtype="float32")
    with pytest.raises(Refused, match=r"context: a step .* 100 kB are free .*--recompute"):
        tune(model, data, tmp_path / "a", SHORT)
    with pytest.raises(Refused, match=r"lower --context, --at-once or --rank$"):
        tune(model, data, tmp_path / "b", replace(SHORT, recompute=True))


def test_what_cannot_be_tuned_is_refused_in_words(data, tmp_path, embedded, monkeypatch):
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "x", "completion": "y"}\n')
    full = replace(SHORT, full=True)
    for model, path, tuning, why in (
        (sfumato.load(dtype="float16"), data, SHORT, r"dtype: .*--dtype bfloat16 or float32"),
        (sfumato.load(quantize="q8_0", dtype="float32"), data, full, r"full: .*--dtype float32"),
        (embedded, one, SHORT, r"held_out: .*--held-out 0"),
    ):
        with pytest.raises(Refused, match=why):
            tune(model, path, tmp_path / "run", tuning)
    for bound, value, why in (
        ("MOST_FILE", 30, "has more than 30 bytes"),
        ("MOST_ALL", 9, "line 1: all rows have more than 9 tokens"),
    ):
        monkeypatch.setattr(chats, bound, value)
        with pytest.raises(Refused, match=why):
            rows_of(embedded, one, {"prompt": "x", "completion": "y" * 9})
        monkeypatch.undo()


def test_a_run_that_was_to_stop_in_its_last_step_has_ended_and_says_what_was_not_held_out(
    data, tmp_path, embedded
):
    long, lines = tmp_path / "long.jsonl", list[str]()
    long.write_text(json.dumps({"prompt": "x", "completion": "y" * 900}) + "\n")
    skips = replace(SHORT, steps=1, long="skip", context=300)
    more = {"held_out": long, "report": lines.append, "stopped": lambda: True}
    ended = tune(embedded, data, tmp_path / "run", skips, **more)
    assert (ended.ended, ended.steps, ended.held_out) == ("steps", 1, None)
    assert lines[0].startswith("no held-out row fits")


def test_all_weights_keep_the_tower_that_was_named_for_the_model(data, tmp_path):
    seeing_model(tmp_path / "whole")
    with_markers(tmp_path / "whole")
    for name in ("text", "elsewhere"):
        (tmp_path / name).mkdir()
    convert(tmp_path / "whole", tmp_path / "text" / "model.gguf", "f32")
    convert(tmp_path / "whole", tmp_path / "elsewhere" / "mmproj.gguf", "f32")
    named = tmp_path / "elsewhere" / "mmproj.gguf"
    model = sfumato.load(tmp_path / "text" / "model.gguf", dtype="float32", mmproj=named)
    one = replace(SHORT, steps=1, full=True)
    tuned = sfumato.load(tune(model, data, tmp_path / "run", one).out, dtype="float32")
    before, after = (each.network.tower.projection.weight for each in (model, tuned))
    assert torch.equal(before.bfloat16(), after.bfloat16())


def test_all_weights_and_other_canvases_are_tuned_by_the_same_run(data, tmp_path):
    one = replace(SHORT, steps=1, eval_every=1)
    model = sfumato.load(dtype="float32")
    before = model.network.transformer.get_parameter("layers.0.mlp.up_proj.weight").clone()
    full = tune(model, data, tmp_path / "full", replace(one, full=True))
    written = sfumato.load(full.out, dtype="float32").network.transformer
    after = written.get_parameter("layers.0.mlp.up_proj.weight")
    assert 0 < (after - before).abs().max() < 0.1
    with pytest.raises(Refused, match=r"full: .*--dtype float32"):
        tune(sfumato.load(dtype="bfloat16"), data, tmp_path / "x", replace(one, full=True))
    masks = sfumato.load("embedded-masks", dtype="float32")
    tuned = tune(masks, data, tmp_path / "masks", replace(one, targets=("attention",)))
    assert tuned.steps == 1
    assert set(losses(tmp_path / "masks")[0][1]) == {"canvas"}  # its encoder is not causal


def test_pictures_of_prompts_are_read_as_they_are_served(tmp_path, monkeypatch):
    model = seeing_model(tmp_path)
    Image.new("RGB", (40, 30), "teal").save(tmp_path / "a.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "path": "a.png"},
    ):
        row = {"prompt": [ask([part, {"type": "text", "text": "b"}])], "completion": "c"}
        (made,) = rows_of(model, tmp_path / "a.jsonl", row)
        (picture,) = made.pictures
        shape = torch.Size((1, len(made.prompt) + len(made.reply)))
        pictures = pictures_of(model.network, [made], shape)
        batch = collate([Canvases.of(model, 400, "refuse").row(made, 0)])
        transformer = model.network.transformer
        learnt = loss(transformer, batch, torch.Generator().manual_seed(0), pictures=pictures)
        ids = torch.tensor([*made.prompt, *made.reply])
        soft = SoftTokens(picture.start, pictures.values)
        slot = model.network.new_slot(400)
        (hidden,) = model.network.encode_hidden([ids], [slot], [[soft]])
        each = F.cross_entropy(model.network.head.logits(hidden[:-1]), ids[1:], reduction="none")
        text = torch.ones(len(each), dtype=torch.bool)
        text[picture.start - 1 : picture.end - 1] = False
        assert learnt["encoder"].item() == pytest.approx(each[text].mean().item(), rel=1e-3)
    monkeypatch.setattr(chats, "MOST_PATCHES", 1)
    with pytest.raises(Refused, match="line 2: messages: all rows have more than 1 bytes"):
        rows_of(model, tmp_path / "a.jsonl", row, row)


def test_the_encoders_loss_has_its_weight(data, tmp_path, monkeypatch):
    seen = []
    gradients = Trainer.gradients

    def watched(self, losses, weights, *more):
        seen.append(weights)
        return gradients(self, losses, weights, *more)

    monkeypatch.setattr(Trainer, "gradients", watched)
    tuning = replace(SHORT, steps=1, encoder_weight=0.25)
    tune(sfumato.load(dtype="float32"), data, tmp_path / "run", tuning, held_out=0.0)
    assert seen and all(each == {"canvas": 1.0, "encoder": 0.25} for each in seen)
