"""Events that wait until something is written: each goes out once, in order, and never later than it may."""

from __future__ import annotations

import time

import pytest

from runtime.checkpoint_waiting import WaitingEvents
from runtime.request import TextEvent


def event(name: str) -> TextEvent:
    return TextEvent(name, "")


def test_without_a_wait_everything_goes_out_at_once() -> None:
    waiting = WaitingEvents(0.0)
    assert waiting.hold(1, event("a")) == [event("a")]
    assert not waiting and waiting.take() == [] and waiting.told_by(1) is None


def test_an_event_goes_out_when_its_copy_is_written() -> None:
    waiting, woken = WaitingEvents(60.0), list[bool]()
    waiting.wake = lambda: woken.append(True)
    assert waiting.hold(1, event("a")) == [] and waiting.hold(2, event("b")) == []
    told = waiting.told_by(1)
    assert told is not None and waiting and waiting.take() == []
    told()
    assert woken and waiting.take() == [event("a")] and waiting.take() == []
    waiting.release(2)  # nothing of it will be written
    assert waiting.take() == [event("b")] and not waiting


def test_a_copy_does_not_vouch_for_what_was_said_after_it() -> None:
    waiting = WaitingEvents(60.0)
    waiting.hold(1, event("first"))
    early = waiting.told_by(1)
    waiting.hold(1, event("second"))
    late = waiting.told_by(1)
    assert early is not None and late is not None
    early()
    assert waiting.take() == [event("first")]
    late()
    assert waiting.take() == [event("second")]


def test_nothing_waits_longer_than_it_may(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = time.monotonic()
    waiting = WaitingEvents(5.0)
    waiting.hold(1, event("a"))
    assert waiting.take() == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 6.0)
    assert waiting.take() == [event("a")] and "request a: told after 5 s, not yet written" in caplog.text
