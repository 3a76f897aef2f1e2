from __future__ import annotations

import time
from itertools import islice

import numpy as np
import torch
from tests.support.fixed_prompts import fixed_prompts

from sfumato.embedded_questions import first_asked
from sfumato.train import sudoku
from sfumato.train.embedded_data import (
    Evaluation,
    Example,
    Mixture,
    batches,
    canvases,
    evaluation_sets,
    sample,
)
from sfumato.train.vocabulary import END_OF_TURN, EOS, PAD, TOKENS, UNK, encode_chat, encode_text

CANVAS = 32


def text_of(ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in ids)


def samples(count: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [sample(rng) for _ in range(count)]


def test_samples_are_determined_by_the_seed() -> None:
    assert samples(50, seed=3) == samples(50, seed=3)
    assert samples(50, seed=3) != samples(50, seed=4)


def test_every_response_ends_its_turn_within_two_canvases() -> None:
    for prompt, response in samples(3000):
        assert response[-1] == END_OF_TURN and response.count(END_OF_TURN) == 1
        assert 2 <= len(response) <= 2 * CANVAS
        assert UNK not in prompt + response
        assert text_of(prompt).endswith("<turn|>\n<|turn>model\n")


def test_mixture_has_the_intended_shares() -> None:
    drawn = samples(4000)
    puzzles = sum(sudoku.from_text(text_of(r[:-1])) is not None for _, r in drawn) / len(drawn)
    turns = [text_of(prompt).count("<|turn>user") for prompt, _ in drawn]
    two_canvases = sum(len(response) > CANVAS for _, response in drawn) / len(drawn)
    assert 0.52 < puzzles < 0.58
    assert 0.13 < sum(n > 1 for n in turns) / len(drawn) < 0.17
    assert max(turns) == 3
    assert two_canvases > 0.1


def test_no_held_out_grid_is_trained_on_not_even_in_a_history() -> None:
    held_out = {sudoku.to_text(sudoku.all_grids()[i]) for i in sudoku.split()[1]}
    seen = set()
    for prompt, response in samples(6000):
        for turn in text_of(prompt + response).split("<turn|>"):
            seen.add(turn.partition("<|turn>model\n")[2])
    assert not seen & held_out
    assert len({turn for turn in seen if sudoku.from_text(turn) is not None}) >= 260


def test_sudoku_responses_solve_their_puzzles() -> None:
    solved = 0
    for prompt, response in samples(1000):
        puzzle = text_of(prompt).removesuffix("<turn|>\n<|turn>model\n")
        answer = text_of(response[:-1])
        if sudoku.from_text(answer) is not None and "." not in answer:
            assert sudoku.is_solution(puzzle[-19:], answer)
            solved += 1
    assert solved > 400


def test_canvases_of_a_response_join_up_and_are_filled_with_eos() -> None:
    response = [*range(10, 49), END_OF_TURN]
    first, second = canvases(Example([2, 5], response), CANVAS)
    assert first == ([2, 5], response[:32])
    assert second == ([2, 5, *response[:32]], response[32:] + [EOS] * 24)
    (only,) = canvases(Example([2], [9] * 31 + [END_OF_TURN]), CANVAS)
    assert only == ([2], [9] * 31 + [END_OF_TURN])


def test_batches_repeat_with_the_seed_and_waste_little() -> None:
    first = list(islice(batches(np.random.default_rng(5), 8, CANVAS), 40))
    again = islice(batches(np.random.default_rng(5), 8, CANVAS), 40)
    used = padded = 0
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert one.target.shape == (8, CANVAS)
        ends = (one.replies | one.prompts).sum(1) + 1
        assert one.context.shape == (8, int(ends.max()))
        past_the_end = torch.arange(one.context.shape[1]) >= ends[:, None]
        assert ((one.context == PAD) == past_the_end).all()
        used += int(one.lengths.sum())
        padded += 8 * int(one.lengths.max())
    assert used / padded > 0.85
    widths = [batch.context.shape[1] for batch in first[:16]]
    assert widths != sorted(widths), "batches come in random order of length"


def test_batches_cost_little_against_a_training_step() -> None:
    stream = batches(np.random.default_rng(0), 32, CANVAS)
    next(stream)
    start = time.process_time()
    for _ in range(64):
        next(stream)
    assert (time.process_time() - start) / 64 < 0.2


def test_evaluation_sets_are_fixed_and_as_described() -> None:
    sets = evaluation_sets()
    assert sets == evaluation_sets()
    assert sets["sudoku"] != evaluation_sets(seed=1)["sudoku"]
    assert {name: len(tasks) for name, tasks in sets.items()} == {
        "sudoku": 200,
        "sudoku_hard": 200,
        "questions": len(sets["questions"]),
        "chat": 50,
    }
    held_out = {sudoku.to_text(sudoku.all_grids()[i]) for i in sudoku.split()[1]}
    for name, blanks in (("sudoku", range(4, 13)), ("sudoku_hard", range(10, 13))):
        prompts = [messages[0]["content"] for messages, _ in sets[name]]
        assert len(set(prompts)) == 200
        assert {prompt.count(".") for prompt in prompts} == set(blanks)
        for messages, expected in sets[name]:
            assert expected in held_out
            assert sudoku.is_solution(messages[-1]["content"], expected)
    assert all(
        [m["role"] for m in messages] == ["user", "assistant", "user"]
        for messages, _ in sets["chat"]
    )


def test_evaluation_asks_only_what_the_vocabulary_spells() -> None:
    for tasks in evaluation_sets(count=20).values():
        for messages, expected in tasks:
            assert UNK not in encode_chat(messages)
            assert len(expected) < 2 * CANVAS


def test_fixed_prompts_mix_all_sets() -> None:
    prompts = fixed_prompts()
    assert len(prompts) == 200 and prompts == fixed_prompts()
    assert len(fixed_prompts(12)) == 12
    sets = evaluation_sets()
    for tasks in sets.values():
        assert sum(prompt in tasks for prompt in prompts) >= 50
    assert isinstance(prompts[0], Evaluation)


def test_the_mixture_may_change_from_pool_to_pool():
    def puzzles(batch):
        return sum(
            set(row.tolist()) <= set(encode_text("1234\n")) | {END_OF_TURN, EOS}
            for row in batch.target
        )

    made = batches(np.random.default_rng(0), 4, 32, lambda step: Mixture(float(step >= 16)))
    counts = [puzzles(next(made)) for _ in range(32)]
    assert sum(counts[:16]) < 16 and counts[16:] == [4] * 16


def test_what_people_ask_first_can_be_made_to_come_more_often():
    rng = np.random.default_rng(0)
    first = {q.answer for q in first_asked()}
    assert len(first) == 7

    def share(mixture):
        replies = (text_of(sample(rng, mixture).response_ids) for _ in range(600))
        return sum(reply.removesuffix("<turn|>") in first for reply in replies) / 600

    assert share(Mixture(0.0)) < 0.1 and share(Mixture(0.0, first_asked=0.5)) > 0.4
