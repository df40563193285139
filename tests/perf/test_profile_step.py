"""The arithmetic of the step profile; what it measures is checked by looking at it."""

from __future__ import annotations

import sys
import time

import pytest

from perf.profile_step import Stopwatch, _TimedOps, main, medians, own_shares


def test_stopwatch_adds_up_by_name_and_starts_again() -> None:
    watch = Stopwatch()
    slow = watch.wrap(lambda seconds: f"sleep {seconds}", time.sleep)
    for _ in range(3):
        slow(0.002)
    slow(0.001)
    times = watch.take()
    assert set(times) == {"sleep 0.002", "sleep 0.001"}
    assert times["sleep 0.002"] >= 6.0 and times["sleep 0.001"] >= 1.0
    assert watch.take() == {}


def test_nested_times_become_shares_that_add_up() -> None:
    shares = own_shares({"append": 2.0, "attend": 3.0, "model": 7.0, "run": 8.5, "step": 9.0})
    assert shares.pop("total") == 9.0
    assert sum(shares.values()) == pytest.approx(9.0)
    assert shares["calls between operations"] == 2.0 and shares["scheduling, settling, text"] == 0.5


def test_medians_count_missing_as_nothing() -> None:
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}


def test_linears_are_told_apart_by_their_weight() -> None:
    class OneOp:
        def __getattr__(self, name: str) -> object:
            return lambda *args: (name, *args)

    watch = Stopwatch()
    ops = _TimedOps(OneOp(), watch)
    assert ops.linear("x", "layers.3.qkv.weight", None) == ("linear", "x", "layers.3.qkv.weight", None)  # type: ignore[attr-defined]
    ops.add("x", "y")  # type: ignore[attr-defined]
    assert set(watch.take()) == {"linear qkv", "add"}


@pytest.mark.parametrize(
    ("argument", "message"), [("--context=1", "--context: got 1"), ("--engine=nowhere", "nowhere")]
)
def test_bad_arguments_get_one_line(
    argument: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_step", argument])
    assert main() != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
