"""Who gives up its cache, or its place, when there is not enough for all. The text stays with a dropped cache, so
that it can be computed again.

Order: conversations of tenants that hold more than an equal share; then the lower priority; then the longest idle. So
one tenant cannot push out what another keeps within its share, whatever priorities it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.figures import EvictionReason, Figures
from runtime.kv_manager import KvManager
from runtime.reservations import Freed

LOST_TO_MEMORY = "kv dropped (memory)"
LOST_TO_ROLLBACK = "kv dropped (a turn was undone after tokens of it had been compressed)"


class Evictor:
    """Drops caches. `dropped`: what they held, to be released by the engine between two pieces of device work."""

    def __init__(self, manager: KvManager, table: ConversationTable, figures: Figures) -> None:
        self._manager = manager
        self._table = table
        self._figures = figures
        self.dropped: list[Freed] = []

    def drop(self, conversation: Conversation, loss: str = LOST_TO_MEMORY, reason: EvictionReason = "memory") -> None:
        """Empties a conversation's cache. loss: what its client is told if it comes back."""
        self.dropped.append(self._manager.reset(conversation.handle))
        conversation.loss = loss
        self._figures.count_eviction(reason)

    def drop_twins(self) -> bool:
        """Gives up the caches that are being computed anew; False if there are none."""
        twins = self._manager.twins
        self.dropped += [self._manager.drop_twin(handle) for handle in twins]
        return bool(twins)

    def drop_one(self, waiting: Iterable[Conversation]) -> bool:
        """Takes twins first, then the cache of an idle conversation; where none has any, of one whose turn only waits,
        the last in the queue first. False if there is none."""
        if self.drop_twins():
            return True
        victim = self.first_to_go(filter(self._has_cache, self._table.idle.values()), self._bytes)
        if victim is None:
            victim = next(filter(self._has_cache, reversed(list(waiting))), None)
        if victim is None:
            return False
        self.drop(victim, LOST_TO_MEMORY, "memory")
        return True

    def first_to_go(
        self, idle: Iterable[Conversation], weight: Callable[[Conversation], int] = lambda _: 1
    ) -> Conversation | None:
        """The first of `idle` (longest idle first) that gives way; None if there is none.

        weight: what a conversation takes of that which is short. A tenant's share counts all it holds.
        """
        held: Counter[str] = Counter()
        for conversation in self._table:
            held[conversation.tenant] += weight(conversation)
        share = held.total() / len(held) if held else 0.0

        def rank(conversation: Conversation) -> tuple[bool, int]:
            return held[conversation.tenant] <= share, conversation.priority

        return min(idle, key=rank, default=None)

    def _has_cache(self, conversation: Conversation) -> bool:
        kv = self._manager[conversation.handle]
        return bool(kv.pages) or kv.blocks.num_blocks > 0

    def _bytes(self, conversation: Conversation) -> int:
        return self._manager.kv_bytes(conversation.handle)
