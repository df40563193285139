"""Exactly the tokens that would complete a word are forbidden, however the word is cut into tokens."""

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime.bad_words import BadWords, TokenTexts

VOCABULARY = [b"", b"a", b"b", b"c", b"ab", b"bc", b"cab", b"abc", b"aa", b"\xc3", b"\xa9", b"\xc3\xa9", b" a"]
TEXTS = TokenTexts(VOCABULARY)


def walk(words: list[str], seed: int, num_tokens: int = 40) -> bytes:
    """A random answer that keeps to the rules; checks at each step that the rule is exact."""
    bad, choose, answer = BadWords(words, TEXTS), random.Random(seed), b""
    needles = [word.encode() for word in words]
    for _ in range(num_tokens):
        forbidden = set(bad.forbidden())
        completing = {
            token for token, piece in enumerate(VOCABULARY) if any(needle in answer + piece for needle in needles)
        }
        assert forbidden == completing
        token = choose.choice([token for token in range(len(VOCABULARY)) if token not in forbidden])
        answer += VOCABULARY[token]
        bad.push(token)
    return answer


@given(st.lists(st.text("abc\u00e9 ", min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_no_word_ever_appears_and_nothing_else_is_forbidden(words: list[str], seed: int) -> None:
    answer = walk(words, seed)
    assert not any(word.encode() in answer for word in words)


def test_a_word_inside_one_token_is_always_forbidden() -> None:
    assert set(BadWords(["ab"], TEXTS).forbidden()) == {4, 6, 7}


def test_special_tokens_and_padding_ids_are_free() -> None:
    bad = BadWords(["abc"], TEXTS)
    bad.push(4)
    bad.push(0)
    bad.push(len(VOCABULARY) + 5)  # a row of the model past the tokenizer
    assert 3 in bad.forbidden() and 0 not in bad.forbidden()


def test_half_a_character_counts() -> None:
    bad = BadWords(["\u00e9"], TEXTS)
    assert set(bad.forbidden()) == {11}
    bad.push(9)
    assert set(bad.forbidden()) == {10, 11}


def test_memory_of_looked_up_words_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("runtime.bad_words._MAX_REMEMBERED_IDS", 4)
    texts = TokenTexts(VOCABULARY)
    assert [texts.holding(part) for part in ("a", "b", "a", "c")] == [texts.holding(p) for p in ("a", "b", "a", "c")]
    assert len(texts._holding) == 1
