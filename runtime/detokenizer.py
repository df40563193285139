"""From sampled tokens to text pieces: whole characters only, stop strings cut exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.bad_words import TokenTexts


class TokenStream(Protocol):
    """Incremental decoding; None while a character is still incomplete."""

    def step(self, token_id: int) -> str | None: ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def max_token_chars(self) -> int:
        """Characters that one token can stand for, at most."""
        ...

    def encode(self, text: str, literal: tuple[int, int] | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and their character spans in `text`. Inside the `literal` range, text that looks like a
        special token is only text."""
        ...

    def stream(self) -> TokenStream: ...

    def token_texts(self) -> TokenTexts:
        """What each token adds to an answer. Raises RequestError for a tokenizer that does not tell."""
        ...


class StopMatcher:
    """Holds back text that may be the start of a stop string, and cuts at the first one that completes.

    The stop string that ends first wins (of two that end together, the longer), so the answer does not depend
    on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = ""

    def push(self, text: str) -> str:
        """Text that is safe to send now; once `matched` is set, nothing more will come."""
        if self.matched:
            return ""
        held = self._held + text
        hits = [(held.find(stop) + len(stop), held.find(stop), stop) for stop in self._stops if stop in held]
        if hits:
            _, first, self.matched = min(hits)
            self._held = ""
            return held[:first]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, once the turn ends without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
