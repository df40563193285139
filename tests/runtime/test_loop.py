"""The loop in its thread: what clients hear when steps fail, and when the loop itself cannot go on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from simulated_engine import make_engine

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import ServerStoppingError
from runtime.loop import MAX_FAILED_STEPS, EngineLoop
from runtime.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams, TextEvent

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20)


@dataclass
class Running:
    """An engine whose steps raise `broken` while it is set."""

    engine: Engine
    broken: type[BaseException] | None = None
    died: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        step = self.engine.step

        def may_break() -> tuple[list[Event], bool]:
            if self.broken is not None and self.engine.has_turns():
                raise self.broken("device lost")
            return step()

        self.engine.step = may_break  # type: ignore[method-assign]
        self.loop = EngineLoop(self.engine, self.died.set)

    def turn(self, number: int, max_tokens: int = 3) -> FinishEvent | ErrorEvent:
        heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.loop.submit(Request(f"r{number}", "hello", SamplingParams(max_tokens=max_tokens)), heard.put)
        while isinstance(event := heard.get(timeout=10), TextEvent):
            pass
        return event


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running(make_engine(CONFIG)[0])
    yield made
    made.broken = None
    made.loop.close(0.0)


def test_a_failed_step_fails_its_turns_and_the_loop_goes_on(running: Running) -> None:
    running.broken = RuntimeError
    for number in range(MAX_FAILED_STEPS - 1):
        event = running.turn(number)
        assert isinstance(event, ErrorEvent) and "device lost" in str(event.error)
    running.broken = None
    assert isinstance(running.turn(100), FinishEvent)
    assert running.loop.is_alive and not running.died.is_set()


def test_a_device_that_never_works_again_ends_the_loop(running: Running) -> None:
    running.broken = RuntimeError
    for number in range(MAX_FAILED_STEPS):
        assert isinstance(running.turn(number), ErrorEvent)
    assert running.died.wait(5) and not running.loop.is_alive
    with pytest.raises(ServerStoppingError, match="the engine has failed"):
        running.turn(100)


def test_running_turns_hear_that_the_loop_is_gone(running: Running) -> None:
    running.broken = KeyboardInterrupt  # nothing that a step may be expected to raise
    event = running.turn(0)
    assert isinstance(event, ErrorEvent) and "failed for good" in str(event.error)
    assert running.died.wait(5)
    begin = time.monotonic()
    running.loop.close(30.0)
    assert time.monotonic() - begin < 5, "a dead loop has nothing to wait for"


def test_a_stop_is_not_a_death(running: Running) -> None:
    assert isinstance(running.turn(0), FinishEvent)
    running.loop.close(1.0)
    assert not running.loop.is_alive and not running.died.is_set()
    with pytest.raises(ServerStoppingError, match="the server is stopping"):
        running.turn(1)
