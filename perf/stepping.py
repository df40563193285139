"""Steps an engine in this process."""

from __future__ import annotations

from runtime.engine import Engine
from runtime.request import ErrorEvent, Event


def step(engine: Engine) -> tuple[list[Event], bool]:
    """As `Engine.step`; raises the error of a turn that could not go on."""
    events, worked = engine.step()
    for event in events:
        if isinstance(event, ErrorEvent):
            raise event.error
    return events, worked


def rest(engine: Engine) -> None:
    """Steps until nothing is left to do. Raises as `step`."""
    while step(engine)[1]:
        pass
