"""What a run was, turn by turn and moment by moment, and the figures that sum it up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "left", "refused", "unreachable", "unanswered", "unfinished"]
WAITED: tuple[Outcome, ...] = ("ok", "unanswered", "unfinished")
QUANTILES = (0.50, 0.95, 0.99)


@dataclass(frozen=True)
class TurnOutcome:
    """One turn. Times are seconds after the run's begin; due_s: when the plan wanted it sent.

    gaps_s: pauses between pieces of text; a piece is one token, unless a character or a stop string is split.
    first_s: None without text.   recomputed_tokens: of earlier turns, whose cache was lost.
    unfinished: still running when the run ended.
    """

    session_id: str
    number: int
    kind: str
    outcome: Outcome
    due_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    kv_bytes: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due: a driver that is late does not hide a wait."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def mean_gap_s(self) -> float:
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0


@dataclass(frozen=True)
class Sample:
    """The server at one moment. held: conversations whose whole history is in the cache; open: sessions begun.

    kv_bytes: of all conversations.   commits, probes: since the server's start.   rss_bytes: of the model's process.
    """

    at_s: float
    open: int
    held: int
    running: int
    waiting: int
    kv_bytes: int
    commits: int
    probes: int
    rss_bytes: int


@dataclass(frozen=True)
class Bound:
    """What a good turn keeps: time to first token, and the mean pause between tokens.

    The defaults are for two cores, where a tool's output of 600 tokens alone takes 2 s to read.
    """

    ttft_s: float = 10.0
    itl_s: float = 1.0

    def good(self, turn: TurnOutcome) -> bool:
        ttft = turn.ttft_s
        return turn.outcome == "ok" and ttft is not None and ttft <= self.ttft_s and turn.mean_gap_s <= self.itl_s


@dataclass(frozen=True)
class RunRecord:
    """One run of a plan. label: the policy, or whose server it was.

    ramp_s, duration_s: of the plan; figures are taken in the window [ramp_s, duration_s).
    """

    label: str
    digest: str
    ramp_s: float
    duration_s: float
    turns: tuple[TurnOutcome, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds; None without values."""

    p50: float | None
    p95: float | None
    p99: float | None
    count: int


@dataclass(frozen=True)
class Summary:
    """Figures of the window after the ramp.

    goodput: good turns per second.   held, kv_mib: means over the samples of the window.
    turns_due: turns that should have been sent in it; good_share: of those that their clients did not leave.
    """

    label: str
    digest: str
    window_s: float
    turns_due: int
    turns_good: int
    goodput: float
    good_share: float
    generated_tokens_per_s: float
    recomputed_tokens: int
    outcomes: dict[str, int]
    ttft_ms: Quantiles
    itl_ms: Quantiles
    turn_ms: Quantiles
    held: float
    held_most: int
    sessions_open: int
    kv_mib: float
    kv_mib_peak: float
    commits_per_s: float
    probes_per_s: float
    errors: tuple[str, ...]


def quantile(values: Sequence[float], q: float) -> float | None:
    """Linear between the two nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def quantiles_ms(seconds: Sequence[float]) -> Quantiles:
    p50, p95, p99 = (None if (v := quantile(seconds, q)) is None else 1e3 * v for q in QUANTILES)
    return Quantiles(p50, p95, p99, len(seconds))


def summarize(run: RunRecord, bound: Bound) -> Summary:
    """A turn belongs to the window in which it was due. A turn without a first token at the run's end counts with the
    time it had waited, so that an overloaded server does not look quick; a refused one counts as not good only."""
    window_s = run.duration_s - run.ramp_s
    due = [turn for turn in run.turns if run.ramp_s <= turn.due_s < run.duration_s]
    stayed = [turn for turn in due if turn.outcome != "left"]
    good = [turn for turn in stayed if bound.good(turn)]
    answered = [turn for turn in stayed if turn.outcome == "ok"]
    waited = [turn for turn in stayed if turn.outcome in WAITED]
    waits = [turn.latency_s if turn.ttft_s is None else turn.ttft_s for turn in waited]
    samples = [sample for sample in run.samples if run.ramp_s <= sample.at_s < run.duration_s]
    kinds = sorted({turn.outcome for turn in run.turns})
    return Summary(
        label=run.label,
        digest=run.digest,
        window_s=window_s,
        turns_due=len(due),
        turns_good=len(good),
        goodput=len(good) / window_s,
        good_share=len(good) / len(stayed) if stayed else 0.0,
        generated_tokens_per_s=sum(turn.generated_tokens for turn in answered) / window_s,
        recomputed_tokens=sum(turn.recomputed_tokens for turn in due),
        outcomes={kind: sum(turn.outcome == kind for turn in run.turns) for kind in kinds},
        ttft_ms=quantiles_ms(waits),
        itl_ms=quantiles_ms([gap for turn in answered for gap in turn.gaps_s]),
        turn_ms=quantiles_ms([turn.latency_s for turn in waited]),
        held=_mean([sample.held for sample in samples]),
        held_most=max((sample.held for sample in samples), default=0),
        sessions_open=max((sample.open for sample in run.samples), default=0),
        kv_mib=_mean([sample.kv_bytes for sample in samples]) / 2**20,
        kv_mib_peak=max((sample.kv_bytes for sample in run.samples), default=0) / 2**20,
        commits_per_s=_rate(samples, [sample.commits for sample in samples]),
        probes_per_s=_rate(samples, [sample.probes for sample in samples]),
        errors=tuple(sorted({turn.error for turn in run.turns if turn.outcome in ("refused", "unreachable")})),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _rate(samples: Sequence[Sample], counts: Sequence[int]) -> float:
    """Growth of a counter per second over the samples."""
    if len(samples) < 2:
        return 0.0
    return (counts[-1] - counts[0]) / (samples[-1].at_s - samples[0].at_s)
