"""Which tokens would complete a text that must not appear in the answer.

A word can be written in many ways as tokens, so words are looked for in the text: a token is forbidden while the answer
so far, followed by the token, would hold a word that neither holds alone, and always where the token itself holds one.
Everything is done on UTF-8 bytes, as Latin-1 text, since a token may end inside a character.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

# Above every Latin-1 character: never part of a token or a word.
_AFTER_ALL = "\uffff"
_MAX_REMEMBERED_IDS = 2_000_000


class TokenTexts:
    """An index over the vocabulary. token_bytes: what each token id adds to the answer; b"" for special tokens."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        texts = [piece.decode("latin-1") for piece in token_bytes]
        order = sorted((text, token_id) for token_id, text in enumerate(texts) if text)
        self._texts = [text for text, _ in order]
        self._ids = [token_id for _, token_id in order]
        self._joined = _AFTER_ALL.join(self._texts)
        self._starts: list[int] = []  # of each text in `_joined`
        at = 0
        for text in self._texts:
            self._starts.append(at)
            at += len(text) + 1
        self._by_id = texts
        self._holding: dict[str, tuple[int, ...]] = {}
        self._remembered_ids = 0

    def text(self, token_id: int) -> str:
        """The bytes of a token as Latin-1 text; '' for ids past the tokenizer's, which only pad a model's rows."""
        return self._by_id[token_id] if token_id < len(self._by_id) else ""

    def starting_with(self, part: str) -> Sequence[int]:
        """Ids of the tokens whose text begins with `part`."""
        return self._ids[bisect_left(self._texts, part) : bisect_left(self._texts, part + _AFTER_ALL)]

    def holding(self, part: str) -> tuple[int, ...]:
        """Ids of the tokens whose text holds `part`."""
        known = self._holding.get(part)
        if known is None:
            known = tuple(self._search(part))
            self._remembered_ids += len(known)
            if self._remembered_ids > _MAX_REMEMBERED_IDS:
                self._holding.clear()
                self._remembered_ids = len(known)
            self._holding[part] = known
        return known

    def _search(self, part: str) -> list[int]:
        found, at = [], self._joined.find(part)
        while at >= 0:
            row = bisect_right(self._starts, at) - 1
            found.append(self._ids[row])
            if row + 1 == len(self._starts):
                break
            at = self._joined.find(part, self._starts[row + 1])
        return found


class BadWords:
    """What one answer may not go on with. words: non-empty."""

    def __init__(self, words: Sequence[str], texts: TokenTexts) -> None:
        self._texts = texts
        self._words = tuple(word.encode("utf-8").decode("latin-1") for word in words)
        self._tail_chars = max(map(len, self._words), default=1) - 1
        self._tail = ""
        self._always = frozenset(token for word in self._words for token in texts.holding(word))
        self._known: dict[frozenset[str], tuple[int, ...]] = {}

    def push(self, token_id: int) -> None:
        """The answer went on with a token."""
        tail = self._tail + self._texts.text(token_id)
        self._tail = tail[max(0, len(tail) - self._tail_chars) :]

    def forbidden(self) -> tuple[int, ...]:
        """Token ids that would complete a word now, in ascending order."""
        endings = frozenset(
            word[size:]
            for word in self._words
            for size in range(1, min(len(word), len(self._tail) + 1))
            if self._tail.endswith(word[:size])
        )
        known = self._known.get(endings)
        if known is None:
            completing = (token for ending in endings for token in self._texts.starting_with(ending))
            known = self._known[endings] = tuple(sorted(self._always.union(completing)))
        return known
