"""What an engine tells somebody who watches it, see `runtime.trace`. Called with the engine's lock held or between
two steps, so that the manager's tables are whole; an observer must not call back."""

from __future__ import annotations

from typing import Protocol

from runtime.conversation import Conversation
from runtime.step import PublishResult


class Observer(Protocol):
    """Watches turns and commits of all conversations."""

    def turn_ended(self, conversation: Conversation) -> None:
        """The turn's tokens are final; what it left was staged."""
        ...

    def committed(self, handle: int, result: PublishResult) -> None:
        """A commit was settled: tables and byte counts are those after it."""
        ...
