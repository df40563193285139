"""Opens, undoes and ends conversations, and gives back the memory that they held."""

from __future__ import annotations

from collections.abc import Callable

from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.errors import OutOfMemoryError
from runtime.eviction import Evictor
from runtime.kv_manager import Freed, KvManager
from runtime.scheduler import Scheduler
from runtime.step import Executor


class Keeper:
    """The engine's hand on its table of conversations; called with the engine's lock held."""

    def __init__(
        self,
        table: ConversationTable,
        manager: KvManager,
        scheduler: Scheduler,
        executor: Executor,
        config: RuntimeConfig,
        clock_ns: Callable[[], int],
    ) -> None:
        self._table = table
        self._manager = manager
        self._scheduler = scheduler
        self._evictor: Evictor = scheduler.evictor
        self._executor = executor
        self._config = config
        self._clock_ns = clock_ns

    def open(self, conversation: Conversation) -> None:
        """Holds a new conversation; the oldest idle one makes room. Raises OutOfMemoryError with nothing changed."""
        if len(self._table) >= self._config.max_conversations:
            self._end_oldest_idle()
        self._manager.open(conversation.handle, conversation.policy)
        self._table.add(conversation)

    def _end_oldest_idle(self) -> None:
        oldest = next(iter(self._table.idle.values()), None)
        if oldest is None:
            raise OutOfMemoryError(
                f"conversations: all {self._config.max_conversations} places are taken by running turns; "
                f"try again later or raise max_conversations"
            )
        self.retire(oldest)

    def retire(self, conversation: Conversation) -> None:
        """From now on unknown to clients; freed at a step boundary, since a probe may be reading it."""
        self._table.forget_id(conversation)
        conversation.end_requested = True

    def close_turn(self, conversation: Conversation) -> None:
        """The turn has ended well; the conversation goes on or is freed, as its client asked."""
        turn = conversation.turn
        assert turn is not None
        goes_on = (
            conversation.conversation_id is not None
            and not turn.request.end_conversation
            and not conversation.end_requested
        )
        self._close_turn(conversation, goes_on=goes_on)
        if not goes_on:
            self.remove(conversation)

    def undo_turn(self, conversation: Conversation) -> None:
        """As if the turn had never come: its tokens go, and all of a conversation that began with it."""
        turn = conversation.turn
        assert turn is not None
        first = turn.first_token
        goes_on = first > 0 and not conversation.end_requested
        self._close_turn(conversation, goes_on=goes_on)
        if not goes_on:
            self.remove(conversation)
            return
        del conversation.tokens[first:]
        self._manager[conversation.handle].unprotect_from(first)
        freed = self._manager.truncate(conversation.handle, first)
        if freed is None:
            self._evictor.drop(conversation)
            self.release_dropped()
        else:
            self.release(freed)
        conversation.ended = turn.ended_before

    def _close_turn(self, conversation: Conversation, *, goes_on: bool) -> None:
        self._scheduler.finish(conversation)
        self._table.turn_ended(conversation, self._clock_ns(), goes_on=goes_on)

    def remove(self, conversation: Conversation) -> None:
        """Frees everything it holds."""
        self._table.remove(conversation)
        self.release(self._manager.release(conversation.handle))

    def release(self, freed: Freed) -> None:
        """Tells the device what nobody owns any more."""
        self._executor.release(freed.page_ids, freed.blocks)

    def release_dropped(self) -> None:
        """The same for caches that were dropped while planning."""
        while self._evictor.dropped:
            self.release(self._evictor.dropped.pop())
