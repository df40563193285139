"""What a policy may choose for the line and for what falls below it. Pure records; the defaults are CommitKV's.

Forms of `draw_line` and `publish` that know the defaults only hand other choices over to the torch form; see
`LineParams.plain` and `Decision.pooling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScoreKind = Literal["recorded", "position", "gate"]
PoolKind = Literal["mean", "max", "weighted", "pca", "learned"]
PoolBias = Literal["mass", "root", "none"]


@dataclass(frozen=True)
class Tier:
    """From `min_age` tokens behind the newest on, a span of `size` tokens becomes `entries` super tokens.

    how: "mean" weighs by mass, "weighted" by score, "max" takes the largest of every channel, "learned" weighs by the
        trained network of `plugins.commit.merger`; "pca" parts the span along the principal components of its keys
        (see `plugins.commit.components`) and weighs each part by score.
    entries: more than 1 for "pca" only.
    """

    min_age: int
    size: int
    how: PoolKind = "mean"
    entries: int = 1

    @property
    def ratio(self) -> float:
        """Tokens that one super token stands for."""
        return self.size / self.entries


@dataclass(frozen=True)
class Pooling:
    """Super tokens for what falls below the line, instead of absorbing or dropping it.

    tiers: by rising `min_age`; the last that an entry's age reaches is its own.
    bias: "mass" gives a super token the log-mass of its members (ln n for n plain tokens), "root" multiplies its key,
        and with it every logit, by the square root of their number, "none" does neither.
    """

    tiers: tuple[Tier, ...]
    bias: PoolBias = "mass"

    def tier_of(self, age: int) -> int:
        """Index of the tier of an entry `age` tokens behind the newest; the first's where it reaches none."""
        return max([i for i, tier in enumerate(self.tiers) if age >= tier.min_age], default=0)


@dataclass(frozen=True)
class LineChoices:
    """How entries are ranked and which of them stay.

    score: what is stored with a staged token. "recorded": its largest attention weight; "position": its logical
        position + 1, exact to 2048 and then to 11 bits, which no weight ever raises; "gate": the trained scorer's p.
    smooth: odd width of a max filter over neighbouring staged tokens of recorded scores; 1: none.
    redundancy: lambda of  lambda * importance - (1 - lambda) * redundancy, by which entries are ranked; see
        `plugins.commit.redundancy`. None ranks by the score.
    threshold: everything that ranks above it stays and no budget is asked; None: the budget decides.
    redraw: old entries compete again. False keeps them all.
    pooling: None absorbs or drops what falls below.
    """

    score: ScoreKind = "recorded"
    smooth: int = 1
    redundancy: float | None = None
    threshold: float | None = None
    redraw: bool = True
    pooling: Pooling | None = None


PLAIN = LineChoices()
