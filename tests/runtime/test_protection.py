"""Protection rules find the text they should and leave the rest."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.base import Protection
from runtime.protection import merge_ranges, protected_ranges, token_ranges

PHRASES = Protection(phrases=True)
NAMES = Protection(phrases=False, names_and_numbers=True)


def found(text: str, rules: Protection) -> list[str]:
    return [text[start:end].strip() for start, end in protected_ranges(text, rules)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi. Remember this: the code is 7.5 today. Bye.", ["Remember this: the code is 7.5 today."]),
        ("好的。记住我的名字是小明。谢谢。", ["记住我的名字是小明。"]),
        ("Please don't forget the milk!\nThanks", ["Please don't forget the milk!"]),
        ("I remember when we met.", []),
        ("", []),
    ],
)
def test_phrases(text: str, expected: list[str]) -> None:
    assert found(text, PHRASES) == expected


def test_names_and_numbers() -> None:
    text = "Ask for Dana Whitfield at 10:45, ticket INC-4821, not the clerk. It costs 12.50."
    got = found(text, NAMES)
    assert {"Dana Whitfield", "10:45", "INC-4821", "12.50"} <= set(got)
    assert not any("clerk" in piece or piece == "It" for piece in got)


def test_rules_can_be_off() -> None:
    assert protected_ranges("Remember this: 42", Protection(phrases=False)) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_merge_covers_the_same_characters(ranges: list[tuple[int, int]]) -> None:
    covered = {i for start, end in ranges for i in range(start, end)}
    merged = merge_ranges(ranges)
    assert {i for start, end in merged for i in range(start, end)} == covered
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_token_ranges_take_every_token_that_touches() -> None:
    offsets = [(0, 2), (2, 5), (5, 6), (6, 9)]
    assert token_ranges([(4, 6)], offsets) == [(1, 3)]
    assert token_ranges([(0, 1), (8, 9)], offsets) == [(0, 1), (3, 4)]
    assert token_ranges([(9, 12)], offsets) == []
