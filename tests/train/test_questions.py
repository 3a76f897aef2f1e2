from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest

from sfumato import embedded_questions
from sfumato.embedded_questions import all_questions
from sfumato.train import sudoku
from sfumato.train.embedded_data import about_nothing, wording
from sfumato.train.vocabulary import CHARACTERS


def plain(text: str) -> str:
    """A wording without what training varies: case, politeness, final mark."""
    text = text.lower().rstrip("?!.").removesuffix(", please")
    return text.removeprefix("please ")


def test_there_are_enough_questions_of_every_kind() -> None:
    questions = all_questions()
    assert 150 <= len(questions) <= 200
    text = [question.text for question in questions]
    assert sum("capital" in t for t in text) == 60
    assert {"Hello!", "Who are you?", "What is a canvas?", "Which continent is Peru in?"} <= {*text}
    answers = {question.text: question.answer for question in questions}
    assert answers["What is the capital of the Netherlands?"] == "The capital is Amsterdam."
    assert (
        answers["What is the currency of the United States?"]
        == "The United States uses the dollar."
    )


def test_answers_fit_two_canvases_and_some_need_both() -> None:
    lengths = [len(question.answer) for question in all_questions()]
    assert max(lengths) <= 63 and min(lengths) > 0
    assert sum(33 <= length <= 62 for length in lengths) >= 25


def test_texts_are_made_of_the_vocabulary_and_have_no_loose_spaces() -> None:
    for question in all_questions():
        for text in (question.text, question.answer, *question.also):
            assert text == text.strip() and set(text) <= set(CHARACTERS), text


def test_no_wording_belongs_to_two_questions() -> None:
    owner: dict[str, str] = {}
    for question in all_questions():
        for text in (question.text, *question.also):
            assert owner.setdefault(plain(text), question.text) == question.text, text
    assert len({question.text for question in all_questions()}) == len(all_questions())


def test_unanswerable_questions_share_one_honest_answer() -> None:
    refused = [q.text for q in all_questions() if q.answer.endswith("I do not know that.")]
    assert len(refused) >= 8 and "What time is it?" in refused


def test_the_sudoku_on_offer_has_one_solution_and_a_trained_grid() -> None:
    (offer,) = [q.answer for q in all_questions() if q.text == "Give me a Sudoku."]
    cells = sudoku.from_text(offer)
    assert cells is not None
    grids = sudoku.all_grids()
    (solution,) = np.flatnonzero(((cells == 0) | (grids == cells)).all(1))
    assert solution in sudoku.split()[0]


def test_wordings_vary_and_stay_recognisable() -> None:
    rng = np.random.default_rng(0)
    for question in all_questions():
        known = {plain(text) for text in (question.text, *question.also)}
        drawn = Counter(wording(question, rng) for _ in range(60))
        assert {plain(text) for text in drawn} <= known
        assert len(drawn) > 3
        assert all(text == text.strip() and set(text) <= set(CHARACTERS) for text in drawn)


def test_made_up_words_name_no_known_country_and_get_the_refusal() -> None:
    rng = np.random.default_rng(0)
    owners = {plain(question.text): question for question in all_questions()}
    drawn = [about_nothing(rng) for _ in range(2000)]
    assert not {plain(question.text) for question in drawn} & owners.keys()
    assert {question.answer for question in drawn} == {owners["what time is it"].answer}
    assert len({question.text for question in drawn}) > 1500


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Questions and their answers, and a last question."""
    *before, last = ({"role": "user", "content": text} for text in texts)
    return [*chain(*((each, {"role": "assistant", "content": "A."}) for each in before)), last]


@pytest.mark.parametrize(
    ("text", "before", "meant"),
    [
        ("And of Japan?", "What is the capital of France?", "What is the capital of Japan?"),
        ("and the Netherlands", "capital of France", "What is the capital of the Netherlands?"),
        ("And its currency?", "Where is Japan?", "What is the currency of Japan?"),
        ("And Kenya?", "What money does Japan use?", None),  # its currency is not known
        ("Where is Japan?", "What is the capital of France?", None),  # needs none before
        ("Where is Japan, please?", "What is the capital of France?", None),
        ("I like Japan.", "What is the capital of France?", None),
        ("And Japan?", "Who are you?", None),
        ("Who are you?", "What is the capital of France?", None),
    ],
)
def test_what_a_question_after_others_asks(text: str, before: str, meant: str | None) -> None:
    earlier = ["What is the currency of Peru?"] * (meant is not None) + [before]
    messages = conversation(*earlier, text)
    read, notes = embedded_questions.rewritten(messages)
    assert read[-1]["content"] == meant or (meant is None and read == messages)
    assert notes == (() if meant is None else (f'the question was read as "{meant}"',))
    parts = [{"type": "text", "text": text}]
    messages[-1] = {"role": "user", "content": parts}
    assert embedded_questions.rewritten(messages)[0][-1]["content"] == (meant or parts)


def test_two_turns_before_a_question_are_read_and_the_system_message() -> None:
    system = {"role": "system", "content": "S"}
    texts = ["What is the capital of France?", "And of Peru?", "And of Japan?", "And its currency?"]
    read, notes = embedded_questions.rewritten([system, *conversation(*texts)])
    capital, currency = "What is the capital of {}?", "What is the currency of Japan?"
    meant = [capital.format("Peru"), capital.format("Japan"), currency]
    assert read == [system, *conversation(*meant)]
    assert notes == (f'the question was read as "{currency}"',)
    assert embedded_questions.rewritten(read) == (read, ())
    far = conversation(texts[0], "Who are you?", "Hi.", "And of Japan?")  # its form is out of reach
    assert embedded_questions.rewritten(far) == (far[2:], ())
    strange = conversation("x" * 10**6, "\u017fpain?", "of \u212aenya?")
    strange[-1]["content"] = [{"type": "image"}, {"type": "text", "text": "And of Peru?"}]
    assert embedded_questions.rewritten(strange) == (strange, ())
