"""Short generated states and questions about them, with the probability of every option.

Some states settle their question, and others leave it open with a known probability: a ball drawn
from a bag.  Knows no tokens, no labels' order and no split into training and held-out states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.diffusion.constraints.questions import (
    ChoiceQuestion,
    Option,
    Question,
    ScoreQuestion,
    YesNoQuestion,
)
from sfumato.embedded_questions import countries
from sfumato.train.embedded_data import pick

MOST_CHOICES = 8
MANY_SHARE = 0.03
"""Share of the choices that have up to MANY_CHOICES options."""
MANY_CHOICES = 12

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Greta", "Hugo", "Iris", "Jon")
ITEMS = ("apples", "books", "chairs", "lamps", "pens", "shoes", "plates", "hats", "keys", "cups")
COLOURS = ("red", "blue", "green", "yellow", "white", "pink")
STATUSES = ("open", "paid", "sent", "late")
MEANINGS = {
    "open": "not paid yet",
    "paid": "the money is here",
    "sent": "on its way",
    "late": "over its time",
    "positive": "a happy text",
    "neutral": "neither",
    "negative": "a complaint",
}
ADJECTIVES = (
    ("awful", "terrible", "horrible"),
    ("bad", "poor", "weak"),
    ("okay", "fair", "plain"),
    ("good", "nice", "fine"),
    ("great", "superb", "perfect"),
)
"""From the worst to the best."""
TONES = ("negative", "negative", "neutral", "positive", "positive")
"""The tone of each of these."""
NAMES_OF_TONES = ("positive", "neutral", "negative")
LEVELS_VOTED = (("low", "mid", "high"), ("bad", "okay", "good"))
THINGS = ("soup", "hotel", "film", "phone", "book", "room", "train", "song")
DOES_IT_HOLD = "Does this hold?"
"""What the product asks where a yes/no question has no instructions."""
WORDS = (
    "sun",
    "dog",
    "tree",
    "milk",
    "fish",
    "moon",
    "bird",
    "gold",
    "rain",
    "ship",
    "door",
    "king",
)


@dataclass(frozen=True)
class Case:
    """A question about a state, and the probability of each of its options in their order."""

    state: str
    question: Question
    truth: tuple[float, ...]

    @property
    def open(self) -> bool:
        """Whether the state leaves the question open."""
        return max(self.truth) < 1

    @property
    def kind(self) -> str:
        """ "score", "yes_no" in either order of its options, or "choice"."""
        if isinstance(self.question, ScoreQuestion):
            return "score"
        names = {option.name for option in self.question.options}
        return "yes_no" if names == {"yes", "no"} else "choice"


def in_order(case: Case, order: Sequence[int]) -> Case:
    """The case with its options in another order; levels keep theirs. Yes and no become a choice
    of these two, which reads the same."""
    question = case.question
    if isinstance(question, ScoreQuestion):
        return case
    text = question.instructions or DOES_IT_HOLD * isinstance(question, YesNoQuestion)
    options = tuple(question.options[i] for i in order)
    return Case(case.state, ChoiceQuestion(text, options), tuple(case.truth[i] for i in order))


def yes_no(state: str, text: str, probability: float) -> Case:
    return Case(state, YesNoQuestion(text), (probability, 1 - probability))


def choice(state: str, text: str, options: Sequence[str], truth: Sequence[float]) -> Case:
    return Case(state, ChoiceQuestion(text, tuple(map(Option, options))), tuple(truth))


def score(state: str, text: str, levels: Sequence[str], level: int) -> Case:
    truth = tuple(float(i == level) for i in range(len(levels)))
    return Case(state, ScoreQuestion(text, tuple(levels)), truth)


Forms = str | tuple[str, ...]
"""One wording, or several of which one is drawn; {} stands for a word."""


def _form(forms: Forms, rng: np.random.Generator) -> str:
    return forms if isinstance(forms, str) else pick(forms, rng)


def _whether(
    state: str, forms: Forms, right: str, among: Sequence[str], rng: np.random.Generator
) -> Case:
    """A yes/no question about the right word, or as often about another one."""
    is_right = rng.random() < 0.5
    word = right if is_right else pick([other for other in among if other != right], rng)
    return yes_no(state, _form(forms, rng).format(word), float(is_right))


def _which(
    state: str, forms: Forms, right: str, among: Sequence[str], rng: np.random.Generator
) -> Case:
    """A choice of `right` and some others; 2 to MOST_CHOICES options, or seldom more."""
    text = _form(forms, rng)
    most = MANY_CHOICES if rng.random() < MANY_SHARE else MOST_CHOICES
    others = [word for word in among if word != right]
    count = 1 + int(rng.random() ** 2 * min(most - 1, len(others)))
    drawn = [others[i] for i in rng.permutation(len(others))[:count]]
    return choice(state, text, [right, *drawn], [1.0] + [0.0] * count)


def _how_many(
    state: str,
    text: str,
    number: int,
    among: Sequence[tuple[str, ...]],
    rng: np.random.Generator,
) -> Case:
    """A score of a number 1 to 9, on some levels: 2, 3 or 9."""
    levels = pick(among, rng)
    level = {2: int(number > 5), 3: (number - 1) // 3, 9: number - 1}[len(levels)]
    return score(state, text, levels, level)


_LEVELS = (("1 to 3", "4 to 6", "7 to 9"), ("1 to 5", "6 to 9"), tuple(map(str, range(1, 10))))


def orders(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    number, count = 1 + int(facts.random() * 9), 10 + int(facts.random() * 90)
    name, item, status = pick(NAMES, facts), pick(ITEMS, facts), pick(STATUSES, facts)
    state = pick(
        (
            f"Order {count}: {number} {item} for {name}. It is {status}.",
            f"{name} ordered {number} {item}. The order is {status}.",
            f"Buyer: {name}. Goods: {number} {item}. Status: {status}.",
        ),
        facts,
    )
    questions: tuple[tuple[Callable[..., Case], Forms, object, Sequence[object]], ...] = (
        (_whether, ("Is the order {}?", "Is it {}?"), status, STATUSES),
        (_whether, ("Is it for {}?", "Is the buyer {}?"), name, NAMES),
        (_whether, "Were {} ordered?", item, ITEMS),
        (_which, ("What was ordered?", "Which goods?"), item, ITEMS),
        (_which, ("Who is the buyer?", "Who ordered?"), name, NAMES),
        (_which, ("What is the status?", "Which status?"), status, STATUSES),
        (_how_many, "How many were ordered?", number, _LEVELS),
    )
    make, forms, right, among = pick(questions, rng)
    return make(state, forms, right, among, rng)


def places(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    known = [c for c in countries() if "continent" in c]
    country = pick(known, facts)
    where, name, order = country["name"], pick(NAMES, facts), 10 + int(facts.random() * 90)
    state = pick(
        (f"{name} lives in {where}.", f"{name} is in {where}.", f"Order {order} goes to {where}."),
        facts,
    )
    field, form = pick((("continent", "Is it in {}?"), ("capital", "Is the capital {}?")), rng)
    values = sorted({c[field] for c in known})
    if rng.random() < 0.5:
        return _whether(state, form, country[field], values, rng)
    return _which(state, f"Which {field}?", country[field], values, rng)


def reviews(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    level = int(facts.random() * 5)
    thing, word, name = pick(THINGS, facts), pick(ADJECTIVES[level], facts), pick(NAMES, facts)
    state = pick(
        (f"{name}: the {thing} was {word}.", f"{name} says that the {thing} is {word}."), facts
    )
    kind = int(rng.random() * 3)
    if kind == 0 and level != 2:
        text, truth = pick(
            (
                (f"Is {name} happy?", level > 2),
                ("Is this positive?", level > 2),
                ("Is it a complaint?", level < 2),
            ),
            rng,
        )
        return yes_no(state, text, float(truth))
    if kind < 2:
        return _which(
            state, ("Which tone?", "What is the tone?"), TONES[level], NAMES_OF_TONES, rng
        )
    if level != 2 and rng.random() < 0.2:
        return score(state, "How good is it?", ("bad", "good"), int(level > 2))
    if rng.random() < 0.4:
        return score(state, "How good is it?", ("bad", "okay", "good"), (0, 0, 1, 2, 2)[level])
    return score(state, "How good is it?", ("awful", "bad", "okay", "good", "great"), level)


def stars(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    """A number of stars, read off with up to ten levels."""
    count = int(facts.random() * 10)
    thing, name = pick(THINGS, facts), pick(NAMES, facts)
    most = max(count, 2 + int(rng.random() * 8))
    state = f"{name} gives the {thing} {count} stars."
    return score(state, "How many stars?", tuple(map(str, range(most + 1))), count)


def counts(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    """Two persons, and how many things are for one of them."""
    first, second = (NAMES[i] for i in facts.permutation(len(NAMES))[:2])
    a, b = (int(n) + 2 for n in facts.permutation(8)[:2])
    item = pick(ITEMS, facts)
    state = f"{a} {item} are for {first} and {b} for {second}."
    name, number = pick(((first, a), (second, b)), rng)
    return _how_many(state, f"How many for {name}?", number, _LEVELS[:2], rng)


def words(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    order = [WORDS[i] for i in facts.permutation(len(WORDS))]
    count = 2 + int(facts.random() * 3)
    present, absent = order[:count], order[count:]
    state = f"Words: {', '.join(present)}."
    if rng.random() < 0.5:
        word, truth = pick(((present, 1.0), (absent, 0.0)), rng)
        return yes_no(state, f"Is {pick(word, rng)} there?", truth)
    return _which(state, "Which word is there?", pick(present, rng), absent, rng)


def _tenths(parts: int, facts: np.random.Generator) -> list[int]:
    """Numbers from 2 on that sum to ten, in any order."""
    numbers = [2] * parts
    for _ in range(10 - 2 * parts):
        numbers[int(facts.random() * parts)] += 1
    return numbers


def bags(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    """Ten balls of two or three colours, and one drawn from them."""
    kinds = 2 if facts.random() < 0.7 else 3
    order = [COLOURS[i] for i in facts.permutation(len(COLOURS))]
    colours, numbers = order[:kinds], _tenths(kinds, facts)
    if kinds == 2:  # as often 2 and 8 as 5 and 5
        numbers = [first := 2 + int(facts.random() * 7), 10 - first]
    parts = [f"{n} {colour}" for n, colour in zip(numbers, colours, strict=True)]
    content = f"{', '.join(parts[:-1])} and {parts[-1]}"
    state = pick((f"A bag holds {content} balls.", f"A box has {content} pens."), facts)
    state += " One is drawn."
    truth = [n / 10 for n in numbers]
    if rng.random() < 0.5:
        i = int(rng.random() * kinds)
        return yes_no(state, f"Is it {colours[i]}?", truth[i])
    text = pick(("Which colour is it?", "Which colour?"), rng)
    if rng.random() < 0.3:  # a colour that is not there
        return choice(state, text, [*colours, order[kinds]], [*truth, 0.0])
    return choice(state, text, colours, truth)


def shares(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    """Ten things of two kinds, one of which is picked."""
    part = 2 + int(facts.random() * 7)
    item, status, other = pick(ITEMS, facts), *(STATUSES[i] for i in facts.permutation(4)[:2])
    state = f"{part} {item} are {status} and {10 - part} are {other}. One is picked."
    truth = part / 10
    if rng.random() < 0.6:
        word, p = pick(((status, truth), (other, 1 - truth)), rng)
        return yes_no(state, f"Is it {word}?", p)
    return choice(state, "Which status?", (status, other), (truth, 1 - truth))


def chances(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    tenths, what = 2 + int(facts.random() * 7), pick(("rain", "snow"), facts)
    day = pick(("today", "tomorrow", "on Monday", "on Friday", "at night"), facts)
    chance = pick((f"{tenths}0 percent", f"{tenths} in 10"), facts)
    state = f"The chance of {what} {day} is {chance}."
    truth = tenths / 10
    questions = (
        yes_no(state, f"Will it {what}?", truth),
        yes_no(state, "Will it stay dry?", 1 - truth),
        choice(state, "Which weather?", (what, "dry"), (truth, 1 - truth)),
    )
    return pick(questions, rng)


def dice(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    sides = 3 + int(facts.random() * 6)
    state = f"{pick(NAMES, facts)} rolls a die with {sides} sides."
    kind = int(rng.random() * 3)
    if kind == 0:
        above = 1 + int(rng.random() * (sides - 1))
        return yes_no(state, f"Is it above {above}?", (sides - above) / sides)
    numbers, even = tuple(map(str, range(1, sides + 1))), (1 / sides,) * sides
    if kind == 1:
        return choice(state, "Which number?", numbers, even)
    return Case(state, ScoreQuestion("Which number?", numbers), even)


def polls(facts: np.random.Generator, rng: np.random.Generator) -> Case:
    """Votes for levels, and one voter: a score with a known distribution."""
    levels = pick(LEVELS_VOTED, facts)
    votes = _tenths(len(levels), facts)
    parts = [f"{n} {level}" for n, level in zip(votes, levels, strict=True)]
    state = f"Votes: {parts[0]}, {parts[1]}, {parts[2]}. One is picked."
    truth = tuple(n / 10 for n in votes)
    return Case(state, ScoreQuestion("Which vote is it?", levels), truth)


Family = Callable[[np.random.Generator, np.random.Generator], Case]
"""(draws the state, draws the question): the same state for the same first generator."""
SETTLED: tuple[Family, ...] = (orders, orders, places, places, reviews, stars, counts, words)
OPEN: tuple[Family, ...] = (bags, bags, shares, chances, dice, polls)
PRACTISED = (orders, *3 * (places,), reviews, stars, *2 * (counts,), words)
PRACTISED_OPEN = (bags, bags, shares, shares, chances, dice, polls)
"""What training draws from: more of what is learnt late."""
