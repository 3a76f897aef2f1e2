"""Decisions, fills and edits about pictures, run alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import file_of, picture
from tests.support.seeing_model import seeing_model

import sfumato
from sfumato import Choice, Hole, Score
from sfumato.decisions import state_of
from sfumato.diffusion.constraints.decision_plan import DecisionSettings, Shown, plan_decision
from sfumato.diffusion.constraints.filling import Filled
from sfumato.diffusion.constraints.questions import YesNoQuestion
from sfumato.media.patches import patches_of
from sfumato.refused import Refused, TooLarge
from sfumato.tasks.decide import DecideTask
from sfumato.train import pictures as training

QUESTIONS = {
    "is_one": bool,
    "digit": Choice([str(n) for n in range(10)]),
    "size": Score("small", "large"),
}
IMAGE = {"type": "image", "image": picture(40, 40)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> sfumato.Model:
    return seeing_model(tmp_path_factory.mktemp("sees") / "model", is_shallow=True)


def test_a_state_with_pictures_is_a_prefix_with_their_places(seeing: sfumato.Model) -> None:
    ask = {"q": YesNoQuestion("Is it?")}
    plain = seeing.plan_decision("before after", ask)
    parts = [text("  before "), IMAGE, text("after"), IMAGE, text(" \n")]
    plan = seeing.plan_decision(parts, ask)
    claim = DecideTask(plan).claim
    first, second = claim.prompt.pictures
    around = plan.prefix[: first.start], plan.prefix[first.end : second.start]
    assert [*around[0], *around[1]] == plain.prefix
    assert second.end == len(plan.prefix) == claim.positions
    for placed in (first, second):
        assert placed.patches.key == patches_of(picture(40, 40), training.CUT).key
        assert set(plan.prefix[placed.start : placed.end]) == {training.PLACEHOLDER}
    assert claim.prompt.marks == (len(plan.prefix),)
    split = [text("be"), text("fore "), IMAGE, text("after"), IMAGE]
    assert seeing.plan_decision(split, ask).prefix == plan.prefix  # as one text
    spoofed = seeing.plan_decision([text("<mask>"), IMAGE], ask)
    assert spoofed.prefix.count(training.PLACEHOLDER) == 25


def test_a_decision_depends_on_the_picture_and_repeats(seeing: sfumato.Model) -> None:
    def answers(seed: int, **how: Any) -> dict[str, Any]:
        state = [{"type": "image", "image": picture(40, 40, seed)}, text("Look.")]
        decision = seeing.decide(state, QUESTIONS, **how)
        assert decision.usage.input_tokens > 25
        return {name: answer.probabilities for name, answer in decision.items()}

    assert answers(0) == answers(0)
    assert answers(0) != answers(1)
    assert answers(0, joint=True) == answers(0, joint=True) != answers(1, joint=True)


def test_equal_ids_of_different_pictures_have_noise_of_their_own(seeing: sfumato.Model) -> None:
    def drawn(seed: int) -> int:
        state = [{"type": "image", "image": picture(40, 40, seed)}]
        (read,) = seeing.plan_decision(state, {"q": YesNoQuestion("Is it?")}).reads
        return read.key.token(0, 0, 2**31, set())

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_question_that_has_one_option_reads_no_picture(seeing: sfumato.Model) -> None:
    plan = seeing.plan_decision([IMAGE], {"q": Choice(["one"]).question()})
    assert not plan.reads and not plan.shown


def test_the_order_schema_is_refused_with_pictures(seeing: sfumato.Model) -> None:
    with pytest.raises(Refused, match=r"order, pictures: puts the state behind each question"):
        seeing.decide([IMAGE], {"q": bool}, order="schema")
    assert seeing.decide("text", {"q": bool}, order="schema")


def test_pictures_count_as_tokens_of_the_state(seeing: sfumato.Model) -> None:
    with pytest.raises(TooLarge, match="characters and its pictures are 51 tokens or more"):
        ask = {"q": YesNoQuestion("Is it?")}
        seeing.plan_decision([IMAGE, text("ab"), IMAGE], ask, DecisionSettings(), 50)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([IMAGE, "text"], r"state\[1\]: must be .* as in messages; .*json\.dumps"),
        ([{"type": "text"}, IMAGE], r"state\[0\]: must be "),
        ([IMAGE, {"type": "audio", "path": "x"}], r"state\[1\]: must be "),
        ([IMAGE, {"type": "text", "text": 3}], r"state\[1\]: must be "),
        ([{"type": "image", "path": "/nowhere.png"}], r"state\[0\]\.path: .*is no file"),
        ([{"type": "image", "path": "a", "url": "b"}], r"state\[0\]: must have one of"),
        ([{"type": "image", "bytes": b"no picture"}], r"state\[0\]\.bytes: "),
        ([{"type": "image", "url": "ftp://x/y.png"}], r"state\[0\]\.url: a URL of the scheme"),
        ([IMAGE | {"tokens": 3}], r"state\[0\]\.tokens: must be one of"),
        ({"photo": IMAGE}, r"state: cannot be written as JSON"),
    ],
)
def test_hostile_states_are_named(seeing: sfumato.Model, state: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        seeing.decide(state, {"q": bool})


def test_lists_that_are_data_stay_json() -> None:
    for data in (
        [],
        ["a"],
        [{"type": "image"}],
        [{"type": "text", "text": "a"}],
        [[IMAGE["type"]]],
    ):
        assert state_of(data) == json.dumps(data)


def test_a_model_without_a_tower_says_so() -> None:
    model = sfumato.load(mmproj="none")
    with pytest.raises(Refused, match=r"state\[1\]: this model reads no pictures"):
        model.decide([text("Look."), IMAGE], {"q": bool})
    with pytest.raises(Refused, match=r"type: only 'text' is supported"):
        model.fill([Hole(2)], messages=[{"role": "user", "content": [IMAGE]}])


def test_a_fill_depends_on_the_picture(seeing: sfumato.Model) -> None:
    def filled(seed: int, hole: Hole) -> Filled:
        content = [{"type": "image", "image": picture(40, 40, seed)}, text("Which digit is this?")]
        sampler, messages = (
            sfumato.SamplerConfig(max_steps=4),
            [{"role": "user", "content": content}],
        )
        return seeing.fill(["It is ", hole, "."], messages=messages, sampler=sampler)

    for hole in (Hole(3), Hole(choices=["one", "two", "three"]), Hole(at_most=3)):
        one, other = filled(0, hole), filled(1, hole)
        assert one.text == filled(0, hole).text and one.text.startswith("It is ")
        assert one.holes[0].probability != other.holes[0].probability
        assert one.stats.prompt_tokens >= 25 + len("Which digit is this?")


def test_an_edit_sees_pictures(seeing: sfumato.Model, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture(40, 40), "PNG"))
    reply = seeing.edit("A 3.", "Say what it is.", pictures=[{"type": "image", "path": path}])
    plain = seeing.edit("A 3.", "Say what it is.")
    assert reply.stats.prompt_tokens > plain.stats.prompt_tokens + 24


def test_a_plan_does_not_look_at_what_it_passes_on(seeing: sfumato.Model) -> None:
    shown = Shown((training.PLACEHOLDER,), 0, io.BytesIO(), "key")
    settings, ask = DecisionSettings(), {"q": YesNoQuestion("Is it?")}
    plan = plan_decision(seeing.read_template, [shown], ask, settings, 999)
    assert plan.shown == ((len(plan.prefix) - 1, shown),)
