from __future__ import annotations

from typing import Any

import pytest

from sfumato.values import (
    Biases,
    Choice,
    CountOf,
    Each,
    Flag,
    Kind,
    Listed,
    Number,
    OneOrTwo,
    Path,
    Size,
    Text,
    Whole,
    WholeOr,
)

SHARE = Number(0, 1, (0, 1))


@pytest.mark.parametrize(
    ("kind", "text", "plain", "value"),
    [
        (Flag(), " Yes", True, True),
        (Flag(), "0", False, False),
        (Whole(0, 65535), "8080", 8080, 8080),
        (WholeOr(Whole(1), "auto"), "auto", "auto", "auto"),
        (WholeOr(Whole(1), "auto"), "3", 3, 3),
        (Number(0, 10), "2.5", 2.5, 2.5),
        (Number(0, 10), "2", 2, 2.0),
        (Size(), "8M", "8m", 8 * 2**20),
        (Size(), "4096", 4096, 4096),
        (CountOf("image"), "8", 8, 8),
        (CountOf("image"), "image=0", "image=0", 0),
        (Choice(("int8", "bf16")), "bf16", "bf16", "bf16"),
        (Path(), "a b", "a b", "a b"),
        (Text(), "ü", "ü", "ü"),
        (Each(Text()), "a, b,", ["a", "b"], ["a", "b"]),
        (Each(Text()), '["a, b", "\\n"]', ["a, b", "\n"], ["a, b", "\n"]),
        (Each(Text()), "a", "a", ["a"]),
        (Listed(Whole(1)), "256,512", [256, 512], [256, 512]),
        (Listed(Whole(1)), "256", 256, [256]),
        (OneOrTwo(Whole(1)), "64:8", [64, 8], (64, 8)),
        (OneOrTwo(Whole(1)), "64", 64, (64,)),
        (OneOrTwo(Whole(1)), "64:8", "64:8", (64, 8)),
    ],
)
def test_text_and_plain_values(kind: Kind, text: str, plain: Any, value: Any) -> None:
    assert kind.parse(text) == kind.accept(plain) == value
    assert kind.show(value) and kind.describe()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Flag(), "maybe", "'maybe' is neither true nor false"),
        (Whole(1), "x", "'x' is not a whole number from 1 on"),
        (Whole(0, 9), "10", "'10' is not a whole number from 0 to 9"),
        (Whole(0, 9), "9" * 5000, "… is not a whole number from 0 to 9"),
        (WholeOr(Whole(1), "auto"), "x", "whole number from 1 on, and not auto"),
        (SHARE, "1", "'1' is not a number over 0 to under 1"),
        (SHARE, "nan", "'nan' is not a number"),
        (Number(0), "inf", "'inf' is not a number from 0 on"),
        (Number(0, 10**9, unit="seconds"), "-1", "not a number of seconds from 0 to 1000000000"),
        (Size(), "8X", "'8X' is no size; write 4096, 512K, 8M or 1G"),
        (Size(), "9" * 16, "is no size"),
        (Path(), "", "the path is empty"),
        (Choice(("a", "b")), "c", "'c' is none of a, b"),
        (Each(Text()), "[a]", "must be a JSON array"),
        (Each(Text()), "[" * 100_000, "must be a JSON array"),
        (Each(Text()), "[1]", "1 is not text; write it in quotes"),
        (Listed(Whole(1)), "1,", "'' is not a whole number"),
        (OneOrTwo(Whole(1)), "1:2:3", "is more than two values"),
        (Biases(1, 100), "5:1", "in a request alone"),
    ],
)
def test_refused_texts(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        kind.parse(text)
    assert message in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Flag(), "true", "is neither true nor false (without quotes)"),
        (Whole(1), True, "true is not a whole number"),
        (Whole(1), 2.0, "2.0 is not a whole number"),
        (Whole(1), "2", "write it without quotes"),
        (Whole(1, 9), 10**400, "is not a whole number from 1 to 9"),
        (WholeOr(Whole(1), "auto"), True, "true is not a whole number"),
        (Number(0), False, "false is not a number"),
        (Number(0), 10**400, "is not a number from 0 on"),
        (Number(0), "1", "write it without quotes"),
        (Size(), 1.5, "1.5 is no size"),
        (Size(), -1, "'-1' is no size"),
        (Text(), 5, "5 is not text; write it in quotes"),
        (Each(Text()), {"a": 1}, "is not text"),
        (Listed(Whole(1)), [], "the array is empty"),
        (OneOrTwo(Whole(1)), [1, 2, 3], "is not one value or two"),
        (Biases(1, 100), {"5": 101}, "101 is not a number from -100 to 100"),
        (Biases(1, 100), {"-5": 1}, "'-5' is not a whole number from 0 on"),
        (Biases(1, 100), {"5": 1, "6": 1}, "from -100 to 100, 1 at most"),
    ],
)
def test_refused_plain_values(kind: Kind, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        kind.accept(value)
    assert message in str(error.value)
    assert len(str(error.value)) < 200
