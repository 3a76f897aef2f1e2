"""From questions to ids: labels that are single tokens, orders, canvases and their noise."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sfumato.diffusion.constraints.decision_plan import DecisionSettings, NoiseKey, plan_decision
from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    Sample,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.diffusion.constraints.read_template import (
    NOISE,
    Line,
    ReadTemplate,
    listing_orders,
    most_orders,
)
from sfumato.refused import TooLarge


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


def by_word(text: str) -> list[int]:
    """Words and runs of spaces are tokens, longer words than two letters but yes and no none."""
    pieces = re.findall(r" ?(?:yes|no|[A-Z]{2}|\S)|\s", text)
    return [sum(ord(c) << 7 * i for i, c in enumerate(piece)) for piece in pieces]


def template(encode: Callable[[str], list[int]] = by_character, canvas: int = 64) -> ReadTemplate:
    return ReadTemplate((1, 2), (3, 4), encode, 5, 0, canvas, 8)


def choice(count: int) -> ChoiceQuestion:
    return ChoiceQuestion("Which?", tuple(Option(f"o{i}") for i in range(count)))


def texts(question: Question, encode: Callable[[str], list[int]] = by_character) -> list[str]:
    return [label.text for label in Line(encode, "", "").labels(question)]


def test_labels_are_what_is_one_token() -> None:
    assert texts(YesNoQuestion("?"), by_word) == ["yes", "no"]
    assert texts(YesNoQuestion("?")) == ["A", "B"]
    assert texts(ScoreQuestion("?", ("a", "b", "c"))) == ["0", "1", "2"]
    assert texts(ScoreQuestion("?", tuple("abcdefghijk")))[-1] == "K"
    assert texts(choice(52)) == list(string.ascii_letters[26:] + string.ascii_letters[:26])
    assert texts(choice(255), by_word)[52:54] == ["AA", "AB"]
    assert len(set(texts(choice(94)))) == 94 and texts(choice(62))[-1] == "9"


def test_beyond_94_characters_labels_are_two_and_read_by_the_chain_rule() -> None:
    assert texts(choice(95))[:2] == ["AA", "AB"]
    plan = plan_decision(template(), "s", {"q": choice(95)}, DecisionSettings(), 9999)
    (read,) = plan.reads
    assert len(read.canvases) == 1 + 4 and read.canvas_tokens == 5 * 16
    first, second = read.canvases[:2]
    assert first.ids[:3] == (NOISE, NOISE, 5) and first.slots == (0,)
    assert first.labels == (tuple(map(ord, "ABCD")),)
    assert second.ids[:3] == (ord("A"), NOISE, 5) and second.slots == (1,)
    assert read.targets[0].options[27] == (1, 1)


def test_a_vocabulary_without_single_letters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^questions: this model's tokenizer makes no"):
        plan_decision(
            template(lambda text: [1] * len(text)), "s", {"q": choice(3)}, DecisionSettings(), 999
        )


@pytest.mark.parametrize("count", [95, 60, 2])
def test_labels_are_chosen_once_for_questions_of_a_kind_and_a_count(count: int) -> None:
    """And their canvases are the same objects, in each order."""
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return by_character(text)

    shape = template(encode)
    plan_decision(shape, "s", {"q": choice(count)}, DecisionSettings(), 9999)
    calls.clear()
    questions = {f"q{i}": choice(count) for i in range(5)}
    plan = plan_decision(shape, "s", questions, DecisionSettings(orders=2), 9999)
    assert len(calls) == 1 + 5 * 2  # the state, and each question in both orders
    assert len({id(read.canvases) for read in plan.reads}) == 2
    assert len({id(read.targets[0].options) for read in plan.reads}) == 2
    assert plan.reads[0].canvases[0].labels != plan.reads[1].canvases[0].labels


def levels(count: int) -> ScoreQuestion:
    return ScoreQuestion("?", tuple(map(str, range(count))))


@pytest.mark.parametrize("settings", [DecisionSettings(), DecisionSettings(joint=True)])
@pytest.mark.parametrize("question", [choice(255), levels(255)], ids=["choice", "score"])
def test_what_takes_long_to_tokenize_is_refused_before(
    question: Question, settings: DecisionSettings
) -> None:
    """Options without words count as well, and orders do."""
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return by_character(text)

    shape = template(encode)
    with pytest.raises(TooLarge, match=r"^questions: with labels and in all their orders .* have"):
        plan_decision(shape, "s", {f"{i}": question for i in range(1024)}, settings, 9999)
    ten = {f"{i}": question for i in range(10)}
    with pytest.raises(TooLarge, match=r"ask for fewer questions, options or orders$"):
        plan_decision(shape, "s", ten, replace(settings, orders=255), 9999)
    assert not calls


@pytest.mark.parametrize("wanted", [1, 2, 3, 9])
@pytest.mark.parametrize("question", [YesNoQuestion("?"), choice(3), levels(2), levels(4)])
def test_how_many_orders_there_are_at_most_is_known_before(question: Question, wanted: int) -> None:
    made = listing_orders(question, Line(by_character, "", "").labels(question), wanted)
    most = min(most_orders(question, wanted), 2 if len(question.options) == 2 else wanted)
    assert len(made) == len({each.listed for each in made}) == most


def test_hundreds_of_questions_of_255_options_are_planned_in_about_a_second() -> None:
    questions: dict[str, Question] = {f"q{i}": choice(255) for i in range(120)}
    questions |= {f"s{i}": levels(255) for i in range(120)}
    shape = template(by_character)
    plan_decision(shape, "s", {"q": choice(255)}, DecisionSettings(), 9999)
    began = time.process_time()
    plan = plan_decision(shape, "s", questions, DecisionSettings(), 9999)
    assert time.process_time() - began < 1 and plan.question_tokens > 450_000


def test_letters_move_with_the_list_and_words_and_levels_keep_their_meaning() -> None:
    def listed(question: Question, encode: Any = by_character) -> list[tuple[Any, ...]]:
        labels = Line(encode, "", "").labels(question)
        return [(each.listed, "".join(each.texts)) for each in listing_orders(question, labels, 3)]

    assert listed(YesNoQuestion("?")) == [((0, 1), "AB"), ((1, 0), "BA")]
    assert listed(YesNoQuestion("?"), by_word) == [((0, 1), "yesno"), ((1, 0), "yesno")]
    assert listed(choice(3)) == [((0, 1, 2), "ABC"), ((1, 2, 0), "CAB"), ((2, 0, 1), "BCA")]
    turned = [((0, 1, 2), "012"), ((2, 1, 0), "012"), ((1, 2, 0), "012")]
    assert listed(ScoreQuestion("?", ("a", "b", "c"))) == turned


def test_a_state_is_tokenized_by_itself_and_stripped() -> None:
    question = YesNoQuestion("?")
    plan = plan_decision(template(), "  state\n", {"q": question}, DecisionSettings(), 999)
    assert plan.prefix == [1, 2, *by_character("state")]
    body = by_character("\n\nQuestion: ?\nA: yes\nB: no\nAnswer A or B.")
    assert plan.reads[0].ids.tolist() == [*body, 3, 4]
    assert plan.reads[0].canvases[0].ids == (NOISE, 5, *[0] * 14)
    other = DecisionSettings(order="schema")
    first = plan_decision(template(), "  state\n", {"q": question}, other, 999)
    assert first.prefix == [1, 2]
    assert first.reads[0].ids.tolist() == [*body[2:], *by_character("\n\nstate"), 3, 4]


def test_a_second_reader_scores_whole_labels() -> None:
    """Also those of two tokens, which are read apart; each behind the whole question."""
    question, how = choice(99), DecisionSettings(orders=2, verify="abstain")
    plan = plan_decision(template(), "s", {"long": question}, how, 9999)
    assert plan.reads[0].labels != plan.reads[1].labels
    for read in plan.reads:
        text = "".join(chr(token) for token in read.ids)
        for label, option in zip(read.labels, question.options, strict=True):
            assert len(label) == 2 and f"\n{chr(label[0])}{chr(label[1])}: {option.name}\n" in text
        assert read.tokens == 100 * len(read.ids) + 2 * 99


def test_questions_share_canvases_in_even_parts() -> None:
    questions: dict[str, Question] = {f"q{i}": YesNoQuestion(f"{i}?") for i in range(7)}
    questions["long"] = choice(99)
    plan = plan_decision(
        template(canvas=32), "s", questions, DecisionSettings(joint=True, orders=2), 9999
    )
    names = [[target.question for target in read.targets] for read in plan.reads]
    assert names[0] == names[1] == ["long"]  # the labels of two tokens are read apart
    assert names[2] == names[3] == ["q0", "q1", "q2"]
    assert names[4] == names[5] == ["q3", "q4", "q5", "q6"]
    canvas = plan.reads[2].canvases[0]
    lines = "".join(chr(token) if token > 9 else f"<{token}>" for token in canvas.ids[:15])
    assert lines == "1: <-1>\n2: <-1>\n3: <-1><5>"
    assert canvas.slots == (3, 8, 13) and [canvas.ids[slot] for slot in canvas.slots] == [NOISE] * 3


def test_orders_that_joint_reads_repeat_weigh_no_more_than_others() -> None:
    """Five orders of five options: of two options each of both orders is read several times."""
    questions: dict[str, Question] = {"two": YesNoQuestion("?"), "five": choice(5)}
    settings = DecisionSettings(joint=True, orders=5)
    plan = plan_decision(template(), "s", questions, settings, 9999)
    five = Sample((0.2,) * 5, None, None)
    # 1 in the caller's order, 0 in the other one.
    results = [[(Sample((1.0 - i % 2, i % 2), None, None), five)] for i in range(5)]
    two = plan.answers(results)["two"]
    assert two.probabilities == (0.5, 0.5) and (two.orders, two.order_spread) == (2, 1.0)
    assert (two.samples, two.spread) == (3, 0.0)
    assert plan.answers(results)["five"].orders == 5


def test_noise_is_of_the_seed_the_sample_and_the_reads_own_tokens() -> None:
    def tokens(seed: int, ids: list[int], sample: int = 0) -> list[int]:
        key = NoiseKey(seed, ids[:2]).extended(ids[2:])
        return [key.token(sample, place, 50, frozenset((7, 8))) for place in range(40)]

    first = tokens(0, [1, 2, 3])
    assert first == tokens(0, [1, 2, 3]) and not {7, 8} & set(first) and len(set(first)) > 15
    assert first not in (tokens(1, [1, 2, 3]), tokens(0, [1, 2, 4]), tokens(0, [1, 2, 3], 1))
    key = NoiseKey(0, [1])
    uniforms = [key.uniform(0, step, 0) for step in range(1, 200)]
    assert all(0 <= u < 1 for u in uniforms) and 0.4 < sum(uniforms) / len(uniforms) < 0.6
