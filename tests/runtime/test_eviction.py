"""In which order conversations give way."""

from __future__ import annotations

from simulated_engine import LIMITS, SPEC

from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.eviction import LOST_TO_MEMORY, Evictor
from runtime.figures import Figures
from runtime.kv_manager import KvManager
from runtime.policy.registry import get_policy


class Holders:
    """Conversations in the order in which they became idle."""

    def __init__(self) -> None:
        self.manager = KvManager(SPEC, LIMITS, 1 << 20)
        self.table = ConversationTable()
        self.figures = Figures()
        self.evictor = Evictor(self.manager, self.table, self.figures)

    def hold(self, tenant: str, priority: int, pages: int, *, idle: bool = True) -> Conversation:
        handle = self.table.take_handle()
        conversation = Conversation(handle, f"c{handle}", get_policy("full"), tenant, priority)
        self.manager.open(handle, conversation.policy)
        self.table.add(conversation)
        if pages:
            self.manager.settle_rows(self.manager.reserve_rows(handle, pages * LIMITS.page_tokens))
        if idle:
            self.table.idle[handle] = conversation
        return conversation

    def order(self) -> list[int]:
        """Handles in the order in which all of them give up their cache."""
        before, order = self._caches(), []
        while self.evictor.drop_one([]):
            after = self._caches()
            order += before - after
            before = after
        self.manager.check_invariants()
        return order

    def _caches(self) -> set[int]:
        return {handle for handle in self.table.by_handle if self.manager[handle].pages}


def test_the_lower_priority_first_then_the_longest_idle() -> None:
    holders = Holders()
    first, high, low, second = (holders.hold("", priority, 2).handle for priority in (0, 3, -1, 0))
    assert holders.order() == [low, first, second, high]
    assert holders.figures.evictions["memory"] == 4


def test_tenants_over_an_equal_share_first_whatever_their_priorities() -> None:
    holders = Holders()
    modest = holders.hold("modest", 0, 2)
    greedy = [holders.hold("greedy", 9, 2) for _ in range(4)]
    assert holders.order()[:3] == [g.handle for g in greedy[:3]], "until both hold 2 pages"
    assert modest.loss == LOST_TO_MEMORY


def test_running_conversations_count_in_a_share_and_are_not_dropped() -> None:
    holders = Holders()
    holders.hold("greedy", 0, 8, idle=False)
    theirs, mine = holders.hold("greedy", 5, 1), holders.hold("modest", 0, 1)
    assert holders.order() == [theirs.handle, mine.handle]


def test_waiting_turns_give_way_last_the_end_of_the_queue_first() -> None:
    holders = Holders()
    idle, empty = holders.hold("", 0, 1), holders.hold("", 0, 0)
    waiting = [holders.hold("", 0, 1, idle=False) for _ in range(2)]
    for expected in (idle, waiting[1], waiting[0]):
        assert holders.evictor.drop_one(waiting) and not holders.manager[expected.handle].pages
    assert not holders.evictor.drop_one(waiting)
    assert empty.loss == ""
