from dataclasses import replace

import pytest

from perf.load.outcomes import Bound, Outcome, RunRecord, Sample, TurnOutcome, quantile, quantiles_ms, summarize

BOUND = Bound(ttft_s=1.0, itl_s=0.1)


def turn(due_s: float, ttft_s: float | None = 0.5, outcome: Outcome = "ok", gaps_s: tuple[float, ...] = (0.05, 0.07)):
    first = None if ttft_s is None else due_s + ttft_s
    return TurnOutcome("a", 0, "chat", outcome, due_s, due_s + 0.01, first, due_s + 3.0, gaps_s, generated_tokens=10)


def sample(at_s: float, held: int, commits: int) -> Sample:
    return Sample(at_s, 4, held, 1, 0, kv_bytes=held << 20, commits=commits, probes=2 * commits, rss_bytes=1 << 30)


def run_of(*turns: TurnOutcome, samples: tuple[Sample, ...] = ()) -> RunRecord:
    return RunRecord("commitkv", "d", ramp_s=10.0, duration_s=30.0, turns=turns, samples=samples)


def test_quantiles_lie_between_ranks() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert quantile([], 0.5) is None
    assert quantiles_ms([0.1]).p99 == pytest.approx(100)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (turn(0, 1.0), True),
        (turn(0, 1.01), False),
        (turn(0, gaps_s=(0.05, 0.16)), False),
        (turn(0, gaps_s=()), True),
        (turn(0, None), False),
        (turn(0, outcome="left"), False),
        (turn(0, outcome="refused"), False),
    ],
)
def test_a_good_turn_keeps_both_bounds_to_its_end(one: TurnOutcome, good: bool) -> None:
    assert BOUND.good(one) is good


def test_figures_are_of_turns_due_after_the_ramp() -> None:
    summary = summarize(run_of(turn(9.9), turn(10.0), turn(29.0), turn(15.0, 2.0), turn(20.0, outcome="left")), BOUND)
    assert (summary.turns_due, summary.turns_good) == (4, 2)
    assert summary.goodput == pytest.approx(2 / 20)
    assert summary.good_share == pytest.approx(2 / 3)
    assert summary.outcomes == {"left": 1, "ok": 4}
    assert summary.itl_ms.count == 6 and summary.generated_tokens_per_s == pytest.approx(30 / 20)


def test_a_turn_that_never_began_counts_with_its_wait_and_a_refused_one_does_not() -> None:
    waiting, refused = turn(12.0, None, "unfinished", ()), replace(turn(12.0, None, "refused", ()), error="full")
    summary = summarize(run_of(waiting, refused), BOUND)
    assert summary.ttft_ms.count == 1 and summary.ttft_ms.p50 == pytest.approx(3000)
    assert summary.turns_due == 2 and summary.good_share == 0 and summary.errors == ("full",)


def test_the_time_to_first_token_counts_from_when_a_turn_was_due() -> None:
    assert replace(turn(5.0, 0.5), sent_s=5.4).ttft_s == pytest.approx(0.5)


def test_samples_are_averaged_over_the_window_and_counters_become_rates() -> None:
    samples = (sample(5.0, 9, 0), sample(10.0, 2, 10), sample(20.0, 4, 20), sample(30.0, 9, 99))
    summary = summarize(run_of(samples=samples), BOUND)
    assert (summary.held, summary.held_most, summary.kv_mib) == (3.0, 4, 3.0)
    assert (summary.commits_per_s, summary.probes_per_s) == (1.0, 2.0)
    assert summary.kv_mib_peak == 9.0 and summary.sessions_open == 4


def test_an_empty_run_has_figures() -> None:
    summary = summarize(run_of(), BOUND)
    assert summary.goodput == 0 and summary.ttft_ms.p95 is None and summary.commits_per_s == 0
