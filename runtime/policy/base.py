"""A policy: score + share + transform + schedule, as one frozen record of choices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from plugins.commit.choices import PoolBias, Tier
from plugins.layout import STORABLE
from runtime.errors import ConfigError
from runtime.policy.check import check_policy
from runtime.policy.signals import NO_SIGNALS, Signals

Score = Literal["both", "seen", "probe", "norm", "window", "sum", "recency", "gate"]
Share = Literal["conversation", "layer", "head"]


@dataclass(frozen=True)
class Schedule:
    """When a conversation is managed.

    min_tokens: nothing is staged while a conversation holds fewer tokens.
    recent_tokens: the newest tokens stay active.
    span_tokens: staged tokens of which a busy engine's review probes and commits; twice as many are not probed first.
    at_turn_end, on_idle, every_steps (0: never), at_watermark: which commit transitions are on.
    reread_growth: once a conversation that probes is so many times as long as when its entries were last scored, all
        of it is re-read in idle time; 0: never.
    renew: compute that text anew first where memory has room, so that what was given up before competes again.
    warmup_tokens: tokens of a conversation up to which commits drop nothing; then the strength grows by 10 % for every
        `warmup_every` tokens more, until the policy's budget is reached. 0: full strength from the start.
    """

    min_tokens: int = 1000
    recent_tokens: int = 128
    span_tokens: int = 512
    at_turn_end: bool = True
    on_idle: bool = True
    every_steps: int = 8
    at_watermark: bool = True
    reread_growth: float = 0.0
    renew: bool = False
    warmup_tokens: int = 0
    warmup_every: int = 500

    def strength(self, num_tokens: int) -> float:
        """Share, 0 to 1, of what the policy would give up, for a conversation of `num_tokens`."""
        if self.warmup_tokens == 0:
            return 1.0
        return min(1.0, 0.1 * max(0, (num_tokens - self.warmup_tokens) // self.warmup_every))


@dataclass(frozen=True)
class Protection:
    """What is never merged or evicted, besides the ranges that a request names.

    sink_tokens: the first tokens of a conversation.   phrases: sentences asking to be remembered.
    names_and_numbers: tokens of numbers and capitalised names in user text.
    outlier_z: see `runtime.step.CommitRules.protect_outlier_z`.
    """

    sink_tokens: int = 4
    system_prompt: bool = True
    phrases: bool = True
    names_and_numbers: bool = False
    outlier_z: float | None = None


@dataclass(frozen=True)
class Thresholds:
    """Keeps what scores above `calm`, above `pressed` while more than `pressure` of the KV memory is in use."""

    calm: float = 0.4
    pressed: float = 0.7
    pressure: float = 0.8

    def at(self, pressure: float) -> float:
        """The threshold for a share of the KV memory in use."""
        return self.pressed if pressure > self.pressure else self.calm


@dataclass(frozen=True)
class Gate:
    """A trained scorer, or network that merges spans: `file` in runtime/policy/gates/.

    model: layers, KV heads, head dimension and name of the model it learned from, the quantization left out.
    """

    model: tuple[int, int, int, str]
    file: str


SMOLLM2_MERGER = Gate((30, 3, 64, "SmolLM2-135M-Instruct"), "SmolLM2-135M-Instruct.merge.safetensors")


@dataclass(frozen=True)
class Policy:
    """One way to keep a conversation small. `compresses=False` keeps every token in pages.

    Score
    score: what an entry is worth. "seen": the largest attention weight it received from more than the recent window
        away; "probe": the largest when spans are re-read in idle time; "norm": the root of the sum of squares of all
        that it received there; "both": the larger of the first two; "window": the largest from the last `window_rows`
        rows of every prompt, whatever the distance; "sum": the sum of all weights it received, over query heads
        averaged, over rows added; "recency": its position; "gate": the trained scorer.
    smooth: odd width of a max filter over the scores of neighbouring tokens; 1: none.
    redundancy: weight of importance against redundancy, as in `plugins.commit.choices.LineChoices`; None: no matter.

    Share
    budget_ratio: share of all (layer, KV head, token) entries of committed tokens that stay.
    share: what competes for it: everything in the conversation, the heads of a layer, or the entries of a head.
    layer_beta: layers get budgets that fall linearly from 2 - 1/beta to 1/beta of the mean; 1: all the same.
    floor_entries: least number of entries each (layer, KV head) keeps.   layer_scale: factors on a layer's scores.
    redraw: entries that stayed once compete again at every commit.
    thresholds: keep by the score alone, whatever the budget; `budget_ratio` is then what is expected of it.

    Transform
    absorb_gate: what falls below goes into the nearest kept entry if |k - k'| < absorb_gate * |k|; None drops it.
    tiers: what falls below becomes super tokens, by age; see `plugins.commit.choices.Tier`. Empty: none.
    tier_shares: shares of the stored entries that each tier gets; ages are then found from the conversation's
        length instead of `min_age`. Empty: `min_age` says it.
    pool_bias: see `plugins.commit.choices.Pooling`.   merger: what tiers that say "learned" merge with.
    block_format: how committed entries are stored: one of `plugins.layout.STORABLE`, or "kv" for unquantized, in
        the engine's KV dtype.
    exact_entries: the best entries of each (layer, KV head) that stay unquantized, in pages, and absorb nothing. They
        are chosen from what was never quantized: what is staged, and those that were exact before. Pages hold
        `page_tokens` of them.
    repack_ratio: a block is dissolved once the share of its entries above the line is under this.

    signals: what stages tokens while their turn runs, besides the schedule.

    alternate: the policy of every second commit, under this one's schedule, protection and
        signals.
    by_task: (task type, policy) to take instead of this one for a conversation whose first message is of that type,
        under this one's schedule, protection and signals.
    chosen_from: the policy that chose this one by task type, whose name goes on naming the conversation.
    """

    name: str
    compresses: bool = True
    score: Score = "both"
    window_rows: int = 32
    smooth: int = 1
    redundancy: float | None = None
    gate: Gate | None = None
    budget_ratio: float = 0.30
    share: Share = "conversation"
    layer_beta: float = 1.0
    floor_entries: int = 16
    layer_scale: tuple[float, ...] = ()
    redraw: bool = True
    thresholds: Thresholds | None = None
    absorb_gate: float | None = 0.35
    tiers: tuple[Tier, ...] = ()
    tier_shares: tuple[float, ...] = ()
    pool_bias: PoolBias = "mass"
    merger: Gate = SMOLLM2_MERGER
    block_format: str = "int4"
    exact_entries: int = 0
    repack_ratio: float = 0.75
    schedule: Schedule = Schedule()
    protection: Protection = Protection()
    signals: Signals = NO_SIGNALS
    alternate: Policy | None = None
    by_task: tuple[tuple[str, Policy], ...] = ()
    chosen_from: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_ratio <= 1.0:
            raise ConfigError(f"budget_ratio of {self.name}: got {self.budget_ratio}, expected a share in (0, 1]")
        if self.block_format not in (*STORABLE, "kv"):
            raise ConfigError(
                f"block_format of {self.name}: got {self.block_format!r}, expected one of {', '.join(STORABLE)} or "
                "kv (unquantized)"
            )
        check_policy(self)

    @property
    def has_budget(self) -> bool:
        """Whether `budget_ratio` decides what stays: not where a threshold, age alone, or nothing does."""
        by_age = bool(self.tiers) and not self.pools_by_score
        return self.compresses and self.budget_ratio < 1.0 and self.thresholds is None and not by_age

    @property
    def probe(self) -> bool:
        """Whether spans are re-read in idle time before they are committed."""
        return self.compresses and self.score in ("both", "probe", "norm")

    @property
    def records(self) -> bool:
        """Whether attention of ordinary steps raises scores."""
        by_redundancy = any(p is not None and p.redundancy is not None for p in (self, self.alternate))
        return self.compresses and (self.score in ("both", "seen", "window", "sum") or by_redundancy)

    @property
    def record_skip(self) -> int:
        """Tokens up to and including a row whose weights are not recorded for it."""
        return 0 if self.score in ("window", "sum") else self.schedule.recent_tokens

    def at_commit(self, num_commits: int) -> Policy:
        """The policy of a conversation's next commit after `num_commits` of them."""
        if self.alternate is None or num_commits % 2 == 0:
            return self
        return replace(self.alternate, **self._kept)

    def for_task(self, task_type: str) -> Policy:
        """The policy for a conversation of that type: this one where it makes no difference."""
        chosen = dict(self.by_task).get(task_type)
        if chosen is None:
            return self
        return replace(chosen, chosen_from=self.name, **self._kept)

    @property
    def _kept(self) -> dict[str, Any]:
        """What a policy that stands in for this one takes over."""
        return {"schedule": self.schedule, "protection": self.protection, "signals": self.signals}

    def budget_at(self, num_tokens: int) -> float:
        """Share of the entries to keep in a conversation of `num_tokens`, warm-up considered."""
        return 1.0 - self.schedule.strength(num_tokens) * (1.0 - self.budget_ratio)

    def layer_weight(self, layer: int, num_layers: int) -> float:
        """A layer's budget in units of the mean over layers."""
        if num_layers == 1:
            return 1.0
        most, least = 2.0 - 1.0 / self.layer_beta, 1.0 / self.layer_beta
        return most + (least - most) * layer / (num_layers - 1)

    def tiers_at(self, num_tokens: int) -> tuple[Tier, ...]:
        """The tiers with their ages for a conversation of `num_tokens`."""
        if not self.tier_shares:
            return self.tiers
        tokens_per_entry = sum(share * tier.ratio for share, tier in zip(self.tier_shares, self.tiers, strict=True))
        ages, age = [], 0.0
        for share, tier in zip(self.tier_shares, self.tiers, strict=True):
            ages.append(round(age))
            age += num_tokens * share * tier.ratio / tokens_per_entry
        return tuple(replace(tier, min_age=start) for tier, start in zip(self.tiers, ages, strict=True))

    def expected_entries(self, num_committed: int) -> int:
        """Entries of one row that are expected of so many committed tokens, for memory plans."""
        if not self.tiers:
            return min(num_committed, max(self.floor_entries, round(self.budget_ratio * num_committed)))
        kept = self.budget_ratio if self.pools_by_score else 0.0
        recent, pooled = self.schedule.recent_tokens, 0.0
        tiers = self.tiers_at(recent + num_committed)
        for tier, end in zip(tiers, [*(t.min_age for t in tiers[1:]), recent + num_committed], strict=True):
            pooled += max(0, end - max(recent, tier.min_age)) / tier.ratio
        return math.ceil(kept * num_committed + (1.0 - kept) * pooled)

    @property
    def learned(self) -> bool:
        """Whether a trained network merges some super tokens."""
        return any(tier.how == "learned" for tier in self.tiers)

    @property
    def trained(self) -> tuple[Gate, ...]:
        """What it needs that was trained for one model."""
        return (*((self.gate,) if self.gate is not None else ()), *((self.merger,) if self.learned else ()))

    @property
    def pools_by_score(self) -> bool:
        """Whether the best entries stay as they are beside the super tokens; else all old tokens become such."""
        return bool(self.tiers) and self.score != "recency"
