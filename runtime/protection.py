"""Which characters of a user's text must never be merged or evicted, by rule."""

from __future__ import annotations

import re

from runtime.policy.base import Protection

# A sentence that asks to be remembered is protected whole.
_PHRASES = re.compile(
    r"remember\s+(?:this|that|these|my|the|it)\b|don'?t\s+forget|do\s+not\s+forget|keep\s+in\s+mind|"
    r"note\s+(?:this|that)\b|记住|记得|別忘|别忘|覚えて",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?。!?\n]*[^.!?。!?\n\s][^.!?。!?\n]*(?:[.!?](?!\s|$)[^.!?。!?\n]*)*[.!?。!?\n]?")
# Numbers with their units' digits and separators; capitalised words that do not open a sentence; ALL-CAPS codes.
_NUMBERS = re.compile(r"[+-]?\d[\d.,:/-]*\d|\d")
_NAMES = re.compile(r"(?<=[a-z,;:]\s)[A-Z][\w'-]+(?:\s[A-Z][\w'-]+)*|\b[A-Z]{2,}[\w-]*\b")


def protected_ranges(text: str, rules: Protection) -> list[tuple[int, int]]:
    """[start, end) character ranges of `text` that the rules protect, merged and in order."""
    ranges: list[tuple[int, int]] = []
    if rules.phrases:
        ranges += [m.span() for m in _SENTENCE.finditer(text) if _PHRASES.search(m.group())]
    if rules.names_and_numbers:
        ranges += [m.span() for pattern in (_NUMBERS, _NAMES) for m in pattern.finditer(text)]
    return merge_ranges(ranges)


def merge_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping and touching [start, end) ranges joined, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def token_ranges(char_ranges: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, end) token ranges that touch the given character ranges.

    offsets: [num_tokens] character span of each token.
    """
    found: list[tuple[int, int]] = []
    for start, end in char_ranges:
        touched = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
        if touched:
            found.append((touched[0], touched[-1] + 1))
    return merge_ranges(found)
