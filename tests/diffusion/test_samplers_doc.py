"""docs/samplers.md: its examples run, and its tables name every field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.scripted_model import scripted

from sfumato.diffusion.sampler import CanvasView, StepView
from sfumato.model.head import HeadStats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "samplers.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's code defines; the model answers at once."""
    model = scripted("Paris, of course.<turn|>")
    monkeypatch.setattr("sfumato.api.load", lambda: model)
    defined: dict[str, Any] = {"__name__": "samplers_page"}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), defined)
    return defined


def test_the_examples_run(names: dict[str, Any]) -> None:
    reply = names["model"].generate("?", sampler=names["config"])
    assert reply.text == names["reply"].text == "Paris, of course."
    assert reply.stats.convergence == ["converged"] * 3


def view(names: dict[str, Any], top: list[float], **changes: Any) -> StepView:
    length = len(top)
    values: dict[str, Any] = {field.name: None for field in fields(HeadStats)}
    values["top_probs"] = torch.tensor(top)[:, None]
    values["argmax"] = torch.arange(length)
    stats = HeadStats(**values | changes.pop("stats", {}))
    none = torch.zeros(length, dtype=torch.bool)
    history = torch.full((1, length), -1)
    zero = torch.tensor(0)
    given = {"pinned": none, "history": history, "unchanged": zero, "least": zero} | changes
    return StepView(torch.tensor(1), 8, torch.arange(length), stats, **given)


def test_the_sampler_does_what_it_says(names: dict[str, Any]) -> None:
    accept = names["LeftToRight"](0.9).accept
    top = [0.95, 0.5, 0.99, 0.2, 0.99]
    assert accept(view(names, top)).tolist() == [True, True, True, False, False]
    pinned = torch.tensor([False, True, False, False, False])
    assert accept(view(names, top, pinned=pinned)).tolist() == [True] * 5
    assert accept(view(names, [0.1, 0.1])).tolist() == [True, False]


def test_the_schedule_does_what_it_says(names: dict[str, Any]) -> None:
    temperatures = [names["CosineTemperature"]().temperature(step, 48) for step in range(1, 49)]
    assert temperatures == sorted(temperatures, reverse=True)
    assert 0.79 < temperatures[0] < 0.8 and temperatures[-1] == pytest.approx(0.4)
    assert temperatures[23] > 0.6  # above the straight line


def test_the_rule_does_what_it_says(names: dict[str, Any]) -> None:
    done = names["MostlyStable"](0.5).done
    assert not done(view(names, [0.5] * 4))
    assert done(view(names, [0.5] * 4, history=torch.tensor([[9, 9, 9, 9], [0, 1, 9, 9]])))
    assert not done(view(names, [0.5] * 4, history=torch.tensor([[0, 1, 2, 3], [0, 9, 9, 9]])))


def test_a_sampler_that_asks_sees_all_logits(names: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 0.0, -1e30], [5.0, 0.0, -1e30]])
    stats = {
        "logits": logits,
        "drawn": torch.tensor([1, 1]),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
    }
    assert names["Typical"]().accept(view(names, [0.5, 0.9], stats=stats)).tolist() == [True, False]


def test_the_processor_does_what_it_says(names: dict[str, Any]) -> None:
    none = torch.zeros(2, dtype=torch.int64)
    canvas = CanvasView(torch.tensor(1), none, none[None], torch.tensor([6, 4, 6, 40]))
    scores = names["Fresh"](0.5).process(torch.zeros(2, 3), 5, canvas)
    assert scores.tolist() == [[0.0, -0.5, 0.0]] * 2


def test_the_tables_name_every_field() -> None:
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", TEXT, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {field.name for kind in (StepView, HeadStats) for field in fields(kind)}


def test_each_example_has_under_15_lines() -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    for part in re.findall(r"(?:^@dataclass.*?)(?=\n\n\n)", code[1], re.DOTALL | re.M):
        assert part.count("\n") < 15
