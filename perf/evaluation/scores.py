"""From answers to scores: pure arithmetic over records of questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EQUIVALENT_KL = 0.1
AGES = (("oldest third", 2 / 3), ("middle third", 1 / 3), ("newest third", 0.0))


@dataclass(frozen=True)
class Answer:
    """One question under one policy, against the full cache.

    age: share of the conversation that came after what is asked for, 0 to 1.   choice: index of the preferred choice,
    0 is right.   nll: of the right word, nats.   kl: of the next-word distribution to the full cache's, nats.
    same_word, same_choice: whether both prefer the same word of the vocabulary, the same of the four choices.
    """

    kind: str
    age: float
    choice: int
    nll: float
    kl: float
    same_word: bool
    same_choice: bool

    @property
    def right(self) -> bool:
        return self.choice == 0

    @property
    def equivalent(self) -> bool:
        """The turn is as good as the full cache's: KL at most 0.1 and the same choice."""
        return self.kl <= EQUIVALENT_KL and self.same_choice


@dataclass(frozen=True)
class Held:
    """One conversation held under one policy. kv_full_bytes: of the full cache in fp16, for the same tokens."""

    policy: str
    num_tokens: int
    seed: int
    tokens: int
    kv_bytes: int
    kv_full_bytes: int
    seconds: float
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Mean:
    """value: over questions.   error: its standard error, conversations being the independent units."""

    value: float
    error: float


@dataclass(frozen=True)
class Score:
    """One policy at one context length.

    accuracy_change: paired with the full cache, question by question.   worst_kl: of any question.
    by_kind, by_age: accuracy and mean KL of a part of the questions.
    """

    policy: str
    num_tokens: int
    tokens: float
    conversations: int
    questions: int
    kv_share: float
    accuracy: Mean
    accuracy_change: Mean
    nll: Mean
    kl: Mean
    same_word: Mean
    equivalent: Mean
    worst_kl: float
    by_kind: dict[str, tuple[float, float]]
    by_age: dict[str, tuple[float, float]]
    seconds: float


def clustered_mean(groups: Sequence[Sequence[float]]) -> Mean:
    """Mean over all numbers; the error treats a group's numbers as dependent.

    Linearised ratio of sums over clusters (Cochran, Sampling Techniques, 1977, chapter 9A): questions of one
    conversation share its text, so they are no independent draws.
    """
    total = sum(len(group) for group in groups)
    mean = sum(sum(group) for group in groups) / total
    count = len(groups)
    if count < 2:
        return Mean(mean, math.nan)
    residuals = [sum(group) - mean * len(group) for group in groups]
    return Mean(mean, math.sqrt(count / (count - 1) * sum(r * r for r in residuals)) / total)


def score(held: Sequence[Held], full: Sequence[Held]) -> Score:
    """Scores of one policy at one length. `full` holds the full cache's answers to the same tasks in the same order."""
    assert [(h.num_tokens, h.seed) for h in held] == [(h.num_tokens, h.seed) for h in full]

    def mean(value: Callable[[Answer], float]) -> Mean:
        return clustered_mean([[float(value(a)) for a in h.answers] for h in held])

    change = [
        [float(a.right) - float(b.right) for a, b in zip(ours.answers, theirs.answers, strict=True)]
        for ours, theirs in zip(held, full, strict=True)
    ]
    answers = [a for h in held for a in h.answers]
    return Score(
        policy=held[0].policy,
        num_tokens=held[0].num_tokens,
        tokens=sum(h.tokens for h in held) / len(held),
        conversations=len(held),
        questions=len(answers),
        kv_share=sum(h.kv_bytes for h in held) / sum(h.kv_full_bytes for h in held),
        accuracy=mean(lambda a: a.right),
        accuracy_change=clustered_mean(change),
        nll=mean(lambda a: a.nll),
        kl=mean(lambda a: a.kl),
        same_word=mean(lambda a: a.same_word),
        equivalent=mean(lambda a: a.equivalent),
        worst_kl=max(a.kl for a in answers),
        by_kind={kind: _part([a for a in answers if a.kind == kind]) for kind in sorted({a.kind for a in answers})},
        by_age=_by_age(answers),
        seconds=sum(h.seconds for h in held),
    )


def _by_age(answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
    parts: dict[str, tuple[float, float]] = {}
    upper = math.inf
    for name, lower in AGES:
        some = [a for a in answers if lower <= a.age < upper]
        if some:
            parts[name] = _part(some)
        upper = lower
    return parts


def _part(answers: Sequence[Answer]) -> tuple[float, float]:
    """Accuracy and mean KL."""
    return sum(a.right for a in answers) / len(answers), sum(a.kl for a in answers) / len(answers)
