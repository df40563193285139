"""Who gives up its cache when pages run out. The text stays, so that the cache can be computed again."""

from __future__ import annotations

from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.kv_manager import Freed, KvManager


class Evictor:
    """Drops caches. `dropped`: what they held, to be released by the engine between two pieces of device work."""

    def __init__(self, manager: KvManager, table: ConversationTable) -> None:
        self._manager = manager
        self._table = table
        self.dropped: list[Freed] = []

    def drop(self, conversation: Conversation) -> None:
        """Empties a conversation's cache."""
        self.dropped.append(self._manager.reset(conversation.handle))

    def drop_idle(self) -> bool:
        """Takes the cache of the conversation that was idle longest; False if none has any."""
        for handle, conversation in self._table.idle.items():
            if self._manager[handle].pages or self._manager[handle].blocks.num_blocks:
                self.drop(conversation)
                return True
        return False
