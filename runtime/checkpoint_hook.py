"""What an engine asks of its checkpoints, see `runtime.checkpoints`; this one keeps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.checkpoint import Checkpoint
from runtime.conversation import Conversation
from runtime.policy.base import Policy
from runtime.request import Event, Request


@dataclass(frozen=True)
class CheckpointFigures:
    """Sums since start.   waiting: conversations not yet copied out.   failed: writes that the store refused.

    restored: caches taken up from the store.   recomputed: conversations of which only the text could be had.
    refused: turns whose conversation lay in the store and was of no use.   swept: removed by age or count.
    """

    written: int = 0
    written_bytes: int = 0
    deleted: int = 0
    failed: int = 0
    swept: int = 0
    waiting: int = 0
    restored: int = 0
    recomputed: int = 0
    refused: int = 0


@dataclass(frozen=True, eq=False)
class Revival:
    """A conversation found in the store.   policy: this engine's, by the name that the checkpoint gives."""

    checkpoint: Checkpoint
    policy: Policy

    def conversation(self, handle: int) -> Conversation:
        """The conversation with its text, its cache still empty."""
        found, text = self.checkpoint, self.checkpoint.text
        return Conversation(
            handle,
            found.conversation_id,
            self.policy,
            found.tenant,
            tokens=list(text.tokens),
            ended=text.ended,
            num_computed=text.num_computed,
            messages=text.messages,
            system_tokens=text.system_tokens,
            taken=text.taken,
        )


class CheckpointHook:
    """Keeps nothing. The engine's lock is held in calls that say so; the others may take time."""

    def find(self, request: Request) -> Revival | None:
        """The conversation that a request means and the engine does not hold. Lock free; reads from the store.

        Raises LostConversationError for one that is of no use here, StoreUnavailableError when nobody can say.
        """
        return None

    def is_superseded(self, conversation: Conversation) -> bool:
        """Whether another replica has gone on with one that this engine holds idle. Lock free; asks the store."""
        return False

    def give_up(self, conversation: Conversation) -> None:
        """This replica holds it no more, since another has gone on with it; nothing of it is written. Lock held."""

    def revived(self, conversation: Conversation, revival: Revival) -> None:
        """The engine holds it now, empty; its turn will wait. Lock held."""

    def between_steps(self, make_room: Callable[[], bool], drop: Callable[[Conversation], None]) -> list[Event]:
        """Fills caches of revived conversations and copies changed ones out. Lock held, from the engine's thread.

        make_room: gives up the cache of one idle conversation; False if none has any.   drop: empties a cache.
        Returns last events of turns that need not wait any more.
        """
        return []

    def changed(self, conversation: Conversation) -> None:
        """A turn ended, or a commit was settled. Lock held."""

    def hold(self, conversation: Conversation, event: Event) -> list[Event]:
        """What is told at once of a turn that ended: not its last event where that waits to be written. Lock held."""
        return [event]

    @property
    def holds(self) -> bool:
        """Whether events wait."""
        return False

    def attach(self, wake: Callable[[], None]) -> None:
        """wake: lets an idle engine take its next step; for any thread."""

    def forget(self, tenant: str, conversation_id: str) -> bool:
        """Its client ended it: no checkpoint may stay. Returns whether there may have been one. Lock free.

        Raises StoreUnavailableError.
        """
        return False

    def discard(self, conversation: Conversation) -> None:
        """The same for a conversation that the engine held. Lock held; waits for nothing."""

    def figures(self) -> CheckpointFigures:
        return CheckpointFigures()

    def close(self, timeout_s: float) -> None:
        """Writes what waits. Called once the engine has stopped, from its last caller."""
