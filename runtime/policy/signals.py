"""Which tokens of a conversation have cooled: what its steps show, weighed into one number per page.

A page's *coldness*, from 0 (in use) to 1 (done with), is the weighted mean of up to four signals:
    attention  max(0, 1 - r): r is the attention that the page received, decayed with a half-life, in units of what its
               tokens would receive if attention were even over everything that can be read
    entropy    how far the entropy of attention has risen over its slow mean, 1 from `entropy_rise` on: the model reads
               broadly instead of looking something up. The same for every page
    boundary   1 once a token that separates messages came after the page
    jump       1 once neighbouring hidden states after the page differed by `jump_z` standard deviations more than usual
A page is cooled when its coldness reached `threshold` and has stayed at `release` or above for `patience` looks in a
row. Pure: numbers in, pages out; what a look is, and who reads it off the device, is told in `runtime.step.Watch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

SLOW = 8.0
"""Half-lives of the means that entropy and jumps are held against, in units of `half_life_tokens`."""
LEAST_JUMPS = 16
"""Neighbouring states to have seen before one of them can stand out."""


@dataclass(frozen=True)
class Signals:
    """What stages tokens besides the end of a turn and a watermark. All weights 0: nothing does.

    attention, entropy, boundary, jump: weights.   threshold, release, patience: see above; release 0: the threshold.
    every_tokens: a look is taken in each step that passes a multiple of so many tokens.
    half_life_tokens: of the decayed attention, in tokens of the conversation.
    entropy_rise: rise over the slow mean, as a share of it, that counts in full.
    jump_z: standard deviations over the mean from which two neighbouring states count as a jump.
    """

    attention: float = 0.0
    entropy: float = 0.0
    boundary: float = 0.0
    jump: float = 0.0
    threshold: float = 0.5
    release: float = 0.0
    patience: int = 2
    every_tokens: int = 8
    half_life_tokens: int = 64
    entropy_rise: float = 0.05
    jump_z: float = 3.0

    @property
    def on(self) -> bool:
        """Whether any signal has a weight."""
        return self.attention + self.entropy + self.boundary + self.jump > 0

    @property
    def need_attention(self) -> bool:
        """Whether looks read attention weights."""
        return self.attention + self.entropy > 0

    @property
    def need_hidden(self) -> bool:
        """Whether every step reads hidden states."""
        return self.jump > 0

    @property
    def need_device(self) -> bool:
        """Whether the executor has to report something; boundaries are known without it."""
        return self.need_attention or self.need_hidden

    def looks(self, first: int, last: int) -> bool:
        """Whether a step of the positions [first, last) is one in which to look."""
        return self.on and last // self.every_tokens > first // self.every_tokens


NO_SIGNALS = Signals()


@dataclass(frozen=True)
class PageAge:
    """One page that may be staged.   key: the position of its first token.   last: that of its last."""

    key: int
    last: int


class _Mean:
    """Exponential mean and variance with a half-life in tokens."""

    def __init__(self) -> None:
        self.mean = self.variance = 0.0
        self.count = 0

    def add(self, value: float, keep: float) -> None:
        """keep: weight of what was; the first value is the mean."""
        self.count += 1
        keep = min(keep, 1.0 - 1.0 / self.count)
        delta = value - self.mean
        self.mean += (1.0 - keep) * delta
        self.variance = keep * (self.variance + (1.0 - keep) * delta * delta)


class SignalTracker:
    """What the signals of one conversation have said so far.

    Positions that were undone are forgotten by `rewind`; decayed means are not, and soon follow what comes instead.
    """

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.num_tokens = 0  # read so far
        self._last_boundary = self._last_jump = -1
        self._attention: dict[int, float] = {}  # by page key, in units of even attention
        self._entropy, self._slow_entropy, self._jumps = _Mean(), _Mean(), _Mean()
        self._cold_looks: dict[int, int] = {}  # by page key: looks in a row
        self._looked_at = 0  # tokens at the last look

    def rewind(self, num_tokens: int) -> None:
        """The conversation has only its first `num_tokens` tokens any more."""
        self.num_tokens = min(self.num_tokens, num_tokens)
        self._looked_at = min(self._looked_at, num_tokens)
        self._last_boundary = -1 if self._last_boundary >= num_tokens else self._last_boundary
        self._last_jump = -1 if self._last_jump >= num_tokens else self._last_jump
        for pages in (self._attention, self._cold_looks):
            for key in [key for key in pages if key >= num_tokens]:
                del pages[key]

    def read_tokens(self, token_ids: Sequence[int], boundaries: Set[int]) -> None:
        """The next tokens of the conversation.   boundaries: ids that separate messages."""
        for i in range(len(token_ids) - 1, -1, -1):
            if token_ids[i] in boundaries:
                self._last_boundary = self.num_tokens + i
                break
        self.num_tokens += len(token_ids)

    def read_jumps(self, jumps: Sequence[float]) -> None:
        """1 - cosine of each state with the one before it; the last one is that of the newest token read."""
        keep = 0.5 ** (1.0 / (SLOW * self.signals.half_life_tokens))
        seen = self._jumps
        for position, jump in enumerate(jumps, self.num_tokens - len(jumps)):
            usual = math.sqrt(seen.variance)
            if seen.count >= LEAST_JUMPS and jump > seen.mean + self.signals.jump_z * usual:
                self._last_jump = position
            seen.add(jump, keep)

    def read_attention(self, by_page: Mapping[int, float], entropy: float) -> None:
        """by_page: key -> attention in units of even attention.   entropy: in units of ln(things read), 0 to 1."""
        half_life = self.signals.half_life_tokens
        passed = max(1, self.num_tokens - self._looked_at)
        keep = 0.5 ** (passed / half_life)
        old = self._attention
        self._attention = {
            key: keep * old[key] + (1.0 - keep) * even if key in old else even for key, even in by_page.items()
        }
        self._entropy.add(entropy, keep)
        self._slow_entropy.add(entropy, 0.5 ** (passed / (SLOW * half_life)))

    def coldness(self, page: PageAge) -> float:
        """Weighted mean of the signals for one page, 0 to 1; what was never told of counts as in use."""
        signals = self.signals
        parts = (
            (signals.attention, max(0.0, 1.0 - self._attention.get(page.key, 1.0))),
            (signals.entropy, self._risen()),
            (signals.boundary, float(self._last_boundary > page.last)),
            (signals.jump, float(self._last_jump > page.last)),
        )
        total = sum(weight for weight, _ in parts)
        return sum(weight * value for weight, value in parts) / total if total else 0.0

    def look(self, pages: Iterable[PageAge]) -> set[int]:
        """Keys of the pages that have cooled by now. Each call counts as one look."""
        signals, before = self.signals, self._cold_looks
        self._cold_looks = {}
        self._looked_at = self.num_tokens
        for page in pages:
            looks = before.get(page.key, 0)
            bar = signals.threshold if looks == 0 or signals.release == 0 else signals.release
            if self.coldness(page) >= bar:
                self._cold_looks[page.key] = looks + 1
        return {key for key, looks in self._cold_looks.items() if looks >= signals.patience}

    def _risen(self) -> float:
        slow = self._slow_entropy.mean
        if slow <= 0.0:
            return 0.0
        return min(1.0, max(0.0, (self._entropy.mean / slow - 1.0) / self.signals.entropy_rise))
