from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sfumato.diffusion.constraints.questions import YesNoQuestion
from sfumato.train import decisions_data
from sfumato.train.decision_states import OPEN, SETTLED, choice, in_order, yes_no
from sfumato.train.vocabulary import END_OF_TURN, EOS, TOKENS


def text(ids):
    return "".join(TOKENS[i] for i in ids)


@pytest.mark.parametrize("family", [*dict.fromkeys(SETTLED), *dict.fromkeys(OPEN)])
def test_every_family_gives_probabilities_and_one_state_for_one_generator(family):
    rng = np.random.default_rng(0)
    for seed in range(60):
        first, second = (family(np.random.default_rng(seed), rng) for _ in range(2))
        assert first.state == second.state
        assert len(first.truth) == len(first.question.options) >= 2
        assert sum(first.truth) == pytest.approx(1)
        names = [option.name for option in first.question.options]
        assert len(set(names)) == len(names)
        assert first.open == (family in OPEN)
        assert first.state == first.state.strip() and "\n" not in first.state


def test_what_is_drawn_from_a_bag_has_the_probability_of_its_share():
    seen = 0
    for seed in range(40):
        case = OPEN[0](np.random.default_rng(seed), np.random.default_rng(seed))
        words = case.state.replace(",", "").split()
        counts = {b: int(a) for a, b in itertools.pairwise(words) if a.isdecimal()}
        if isinstance(case.question, YesNoQuestion):
            colour = case.question.instructions.removeprefix("Is it ").rstrip("?")
            assert case.truth[0] == pytest.approx(counts[colour] / sum(counts.values()))
            seen += 1
    assert seen > 5


def test_open_questions_lie_between_a_tenth_and_nine_and_no_state_is_in_both_parts():
    rng = np.random.default_rng(1)
    trained = {case.state for _ in range(300) for case in decisions_data.draw(rng, 2)}
    cases = decisions_data.held_out(seed=3, count=300)
    assert sum(case.open for case in cases) == pytest.approx(len(cases) / 3, abs=4)
    assert not trained & {case.state for case in cases}
    assert all(decisions_data.is_held_out(case.state) for case in cases)
    assert not any(decisions_data.is_held_out(state) for state in trained)
    for case in cases:
        assert not case.open or all(0.1 < p < 0.9 for p in case.truth)
        if isinstance(case.question, YesNoQuestion):
            assert case.question.instructions or case.question.yes


def test_the_same_seed_gives_the_same_rows_and_held_out_cases():
    first, second = (next(decisions_data.batches(np.random.default_rng(5), 3, 4)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert decisions_data.held_out(1, 20) == decisions_data.held_out(1, 20)
    assert decisions_data.held_out(1, 20) != decisions_data.held_out(2, 20)


def test_a_row_is_the_products_prompt_and_names_where_its_options_end():
    case = yes_no("A bag holds 3 red and 5 blue balls. One is drawn.", "Is it red?", 3 / 8)
    row = decisions_data.row(in_order(case, [1, 0]))
    assert text(row.state) == "<bos><|turn>user\n" + case.state
    assert text(row.question) == (
        "\n\nQuestion: Is it red?\nA: no\nB: yes\nAnswer A or B.<turn|>\n<|turn>model\n"
    )
    ends, starts = zip(*row.looks["labels"], strict=True)
    assert [text(row.question[: end + 1])[-6:] for end in ends] == ["\nA: no", "B: yes"]
    assert text([row.question[start] for start in starts]) == "AB"
    assert text(row.labels) == "AB" and row.truth == [5 / 8, 3 / 8]


def test_words_of_a_question_are_found_in_its_state():
    state = "Anna has 4 hats. Ben has 7."
    row = decisions_data.row(choice(state, "Who has more hats?", ("Carl", "Ben"), (0.0, 1.0)))
    ends = [
        (text(row.question[: end + 1]).split()[-1], text(row.state[: place + 1]).split()[-1])
        for end, place in row.looks["words"]
    ]
    # "has" is there twice, and says nothing; "A" and "B" are labels.
    assert ends == [
        *(("Who", "<bos>"), ("more", "<bos>"), ("hats", "hats")),
        *(("Carl", "<bos>"), ("Ben", "Ben")),
    ]


def test_a_batch_is_packed_with_noise_in_its_slots():
    rng = np.random.default_rng(2)
    groups = [decisions_data.sample(rng, 3) for _ in range(8)]
    batch = decisions_data.collate(groups, rng)
    rows = [row for group in groups for row in group]
    assert batch.owner.tolist() == [i for i in range(8) for _ in range(3)]
    start = int(batch.states.sum())
    packed = batch.ids[start:].split(batch.questions.tolist())
    for row, ids, canvas, truth in zip(rows, packed, batch.canvas, batch.truth, strict=True):
        assert ids.tolist() == row.question
        assert canvas[1:].tolist() == [END_OF_TURN] + [EOS] * (decisions_data.WIDTH - 2)
        assert int(canvas[0]) not in row.labels
        assert truth[row.labels].tolist() == pytest.approx(row.truth)
        assert float(truth.sum()) == pytest.approx(1)
    assert len(batch.looks["labels"]) == len(batch.fits) == sum(len(row.labels) for row in rows)


def test_options_come_in_every_order():
    case = yes_no("It is red.", "Is it red?", 1.0)
    rng = np.random.default_rng(0)
    truths = [decisions_data.shuffled(case, rng).truth for _ in range(200)]
    assert 60 < truths.count((1.0, 0.0)) < 140
