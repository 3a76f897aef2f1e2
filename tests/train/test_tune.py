"""Tuning: rows of conversations, the objective, and runs that end and go on."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sfumato
from sfumato.model.adapter_files import read_adapter
from sfumato.options.tuning import TUNING
from sfumato.refused import Refused
from sfumato.train.chats import Canvases, exchanges, read_chats, split
from sfumato.train.tune import NUMBER, Tuning, tune


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
    rate=1e-2,
    eval_every=2,
    samples=0,
    save_every=2,
    keep=1,
)


def learnt(model: sfumato.Model) -> list[torch.Tensor]:
    changes = model.network.transformer.get_submodule("layers.2.self_attn.q_proj").changes
    return [changes[NUMBER].down, changes[NUMBER].up]


def losses(out: Path) -> list[tuple[int, dict[str, float]]]:
    lines = (json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines())
    return [(line["step"], line["losses"]) for line in lines]


def test_a_killed_run_goes_on_with_the_numbers_of_one_that_was_not(data, tmp_path):
    model = sfumato.load(dtype="float32")
    tuned = tune(model, data, tmp_path / "whole", SHORT)
    uninterrupted = [each.detach().clone() for each in learnt(model)]
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
    tune(model, data, killed, SHORT, resume=True)
    assert losses(killed) == losses(tmp_path / "whole")
    for ours, theirs in zip(learnt(model), uninterrupted, strict=True):
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
    chats = read_chats(data)
    learnt, held = split(chats, 0.3, 7)
    assert (len(learnt), len(held)) == (4, 2) and split(chats, 0.3, 7) == (learnt, held)
    assert sorted(chat.where for chat in (*learnt, *held)) == [chat.where for chat in chats]
    assert split(chats, 0.3, 8)[1] != held
    with pytest.raises(Refused, match="held_out"):
        split(chats, 0.99, 7)


def test_choices_are_held_against_the_table():
    for wrong, field in ({"rank": 0}, "rank"), ({"rate": 2.0}, "rate"), ({"long": "x"}, "long"):
        with pytest.raises(Refused, match=field):
            Tuning(**wrong)
    with pytest.raises(Refused, match="at_once"):
        Tuning(batch=8, at_once=3)
    assert Tuning() == Tuning(**{each.name: each.default for each in TUNING})
