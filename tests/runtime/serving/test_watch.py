"""The reporter between turns and metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from metric_board import Board

from runtime.checkpoint_hook import CheckpointFigures
from runtime.errors import OutOfMemoryError, RequestError
from runtime.figures import EngineLoad, EngineStats, Figures
from runtime.kv_totals import KvTotals
from runtime.request import ErrorEvent, Event, FinishEvent, Request, TextEvent, TurnStats
from runtime.serving.metric_table import Reading
from runtime.serving.metrics import Metrics
from runtime.serving.watch import NoWatch, Reporter

REQUEST = Request("r", "hello", conversation_id="c")


def read() -> Reading:
    stats: EngineStats = Figures(steps=3).snapshot((), EngineLoad(), KvTotals())
    return Reading(stats, CheckpointFigures(), 1, True)


def make(clock: Callable[[], int] = time.monotonic_ns) -> tuple[Reporter, Board]:
    board = Board()
    return Reporter(Metrics(board), read, clock), board


def test_listeners_are_still_called_and_the_turn_is_counted() -> None:
    times = iter([0, 30_000_000, 50_000_000, 60_000_000])
    reporter, board = make(lambda: next(times))
    heard: list[Event] = []
    told = reporter.follow(REQUEST, heard.append)
    events: list[Event] = [TextEvent("r", "a"), TextEvent("r", "b"), TextEvent("r", "c")]
    events.append(FinishEvent("r", "length", "", TurnStats(generated_tokens=3)))
    for event in events:
        told(event)
    reporter.close()
    assert heard == events
    assert board.series["commitkv_inter_token_seconds", ""].seen == [0.03, 0.02]
    assert board["commitkv_turns_total", "length"] == 1
    assert board["commitkv_steps_total", ""] == 3


def test_gaps_do_not_span_two_turns_of_one_id() -> None:
    reporter, board = make()
    for _ in range(2):
        told = reporter.follow(REQUEST, lambda _: None)
        told(TextEvent("r", "a"))
        told(FinishEvent("r", "stop", "", TurnStats()))
    reporter.close()
    assert board.series["commitkv_inter_token_seconds", ""].seen == []
    assert board["commitkv_turns_total", "stop"] == 2


def test_refusals_and_failures_are_told_apart() -> None:
    reporter, board = make()
    reporter.refused("r", None, RequestError("x"))
    reporter.follow(REQUEST, lambda _: None)(ErrorEvent("r", OutOfMemoryError("x")))
    reporter.close()
    assert board["commitkv_refusals_total", "invalid"] == 1
    assert board["commitkv_refusals_total", "no_room"] == 0
    assert board["commitkv_turns_total", "error"] == 1


def test_a_slow_server_does_not_hold_up_the_engine() -> None:
    reporter, board = make()
    release = threading.Event()
    series = board.series["commitkv_turns_total", "stop"]
    count = series.increment
    series.increment = lambda value: (release.wait(10), count(value))[1]  # type: ignore[method-assign]
    begin = time.monotonic()
    for _ in range(100):
        reporter.follow(REQUEST, lambda _: None)(FinishEvent("r", "stop", "", TurnStats()))
    assert time.monotonic() - begin < 5
    release.set()
    reporter.close()
    assert board["commitkv_turns_total", "stop"] == 100


def test_a_reading_that_fails_does_not_end_the_reports() -> None:
    board = Board()

    def broken() -> Reading:
        raise RuntimeError("no figures")

    reporter = Reporter(Metrics(board), broken)
    reporter.refused("r", None, RequestError("x"))
    reporter.close()
    assert board["commitkv_refusals_total", "invalid"] == 1


def test_without_metrics_there_are_still_logs() -> None:
    reporter = Reporter(None, read)
    heard: list[Event] = []
    reporter.follow(REQUEST, heard.append)(FinishEvent("r", "stop", "", TurnStats()))
    reporter.refused("r", None, RequestError("x"))
    reporter.close()
    assert len(heard) == 1


def test_nobody_watching_changes_nothing() -> None:
    heard: list[Event] = []
    assert NoWatch().follow(REQUEST, heard.append) == heard.append
