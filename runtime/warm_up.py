"""Runs one turn before the engine takes any: what is ready has answered once, so no client is the first."""

from __future__ import annotations

import logging
import time

from runtime.engine import Engine
from runtime.errors import CommitKVError
from runtime.request import ErrorEvent, FinishEvent, Request, SamplingParams

log = logging.getLogger(__name__)

WARM_UP_ID = "warm-up"
# Short enough for the smallest engine that can be built.
TEXT = "Hello"
MAX_TOKENS = 2


def warm_up(engine: Engine) -> float:
    """Seconds that it took. Leaves no conversation, no pages and no counts behind.

    For an engine that no loop runs yet. Raises CommitKVError with the reason if the turn cannot be run to its end.
    """
    started = time.monotonic()
    engine.submit(Request(WARM_UP_ID, TEXT, SamplingParams(max_tokens=MAX_TOKENS)))
    while engine.has_turns():
        try:
            events, worked = engine.step()
        except Exception as error:
            log.exception("the warm-up turn failed")
            raise CommitKVError(f"warm-up: the engine's first turn failed: {error!r}") from error
        for event in events:
            if isinstance(event, ErrorEvent):
                raise CommitKVError(f"warm-up: the engine's first turn failed: {event.error}") from event.error
            if isinstance(event, FinishEvent) and event.reason not in ("stop", "length"):
                raise CommitKVError(f"warm-up: got a first turn that ended by {event.reason!r}, expected an answer")
        assert worked or not engine.has_turns(), "a turn waits and nothing can be done"
    engine.clear_figures()
    return time.monotonic() - started
