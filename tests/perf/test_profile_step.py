"""The arithmetic of the step profile; what it measures is checked by looking at it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest

from perf.profile_step import Stopwatch, _TimedOps, main, medians, own_shares, profile


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
    assert shares["rotary, calls between operations"] == 2.0 and shares["scheduling, settling, text"] == 0.5


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


def test_operations_of_recorded_steps_are_told_apart(tiny_engine_dir: Path) -> None:
    options = argparse.Namespace(
        engine=tiny_engine_dir, context=64, policy="full", chunk=32, steps=4, idle=1, threads=1
    )  # fmt: skip
    rows = {line[:34].strip(): line[34:].split() for line in profile(options).splitlines()}
    for name in ("linear qkv", "linear down", "append", "attend", "add_norm", "gated_silu", "logits"):
        decode, prefill = map(float, rows[name])
        assert decode > 0.0 and prefill > 0.0, (name, rows)


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
