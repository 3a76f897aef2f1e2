from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from sfumato.train.tune import Tuned


def test_train_runs_the_recipe(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("sfumato.train.recipe.run", lambda *a, **k: calls.append((a, k)))
    done = cli("train", "--recipe", "embedded", "--out", str(tmp_path), "--steps", "7")
    ((names, options),) = calls
    options["progress"](1, 7)  # and nothing is shown: standard error is no terminal
    assert (done.code, done.err, names) == (0, "", ("embedded", tmp_path))
    assert (options["steps"], options["seed"], options["begin_with"]) == (7, 0, None)
    cli("train", "--out", str(tmp_path), "--from", "talks")
    cli("train", "--out", str(tmp_path), "--from", "decides", "--stage", "3")
    begun = [(options["begin_with"], options["stage"]) for _, options in calls[1:]]
    assert begun == [(Path("talks"), 2), (Path("decides"), 3)]


def test_train_replaces_a_checkpoint_with_force_alone(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("sfumato.train.recipe.run", lambda *a, **k: calls.append(a[1]))
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "diffusion_gemma"}')
    done = cli("train", "--out", str(out))
    assert done.code == 2 and "exists already" in done.err
    assert cli("train", "--out", str(out), "--force").code == 0
    (out / "thesis.txt").touch()
    done = cli("train", "--out", str(out), "--force")
    assert done.code == 2 and "holds 'thesis.txt', which is no part of a checkpoint" in done.err
    assert cli("train", "--out", str(tmp_path / "new" / "folder")).code == 0
    assert calls == [out, tmp_path / "new" / "folder"]
    (tmp_path / "file").touch()
    done = cli("train", "--out", str(tmp_path / "file" / "folder"))
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert len(calls) == 2  # found before the training, which takes hours


def test_an_unknown_recipe_is_one_line(cli: Any, tmp_path: Path) -> None:
    done = cli("train", "--recipe", "magic", "--out", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith("sfumato: error: ")


def test_tune_passes_its_options_on_and_ends_when_it_is_interrupted(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []

    def tuned(*given: Any, **options: Any) -> Tuned:
        calls.append((given, options))
        before = options["stopped"]()
        signal.raise_signal(signal.SIGINT)
        assert (before, options["stopped"]()) == (False, True)
        return Tuned(tmp_path / "run" / "adapter", 3, 0.5, 0.25, "stopped")

    monkeypatch.setattr("sfumato.train.tune.tune", tuned)
    out, words = tmp_path / "run", ("--targets", "mlp,router", "--rank", "4", "--held-out", "0.2")
    done = cli("tune", "--data", "chats.jsonl", "--out", str(out), *words, "--resume")
    ((model, data, folder, tuning), options) = calls[0]
    assert (data, folder, options["held_out"]) == ("chats.jsonl", str(out), 0.2)
    assert (tuning.targets, tuning.rank, tuning.alpha) == (("mlp", "router"), 4, 32.0)
    assert options["resume"] and not options["force"] and model.packaged == "embedded"
    assert done.code == 130 and "held-out loss 0.2500, interrupted" in done.out
    assert "--resume" in done.err and "with a checkpoint" in done.err
    out.mkdir()
    (out / "tuning.json").touch()
    done = cli("tune", "--data", "chats.jsonl", "--out", str(out))
    assert done.code == 2 and "--out: " in done.err and len(calls) == 1
