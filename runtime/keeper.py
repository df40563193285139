"""Opens, undoes and ends conversations, and gives back the memory that they held."""

from __future__ import annotations

from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.conversation_table import ConversationTable
from runtime.errors import OutOfMemoryError
from runtime.eviction import LOST_TO_ROLLBACK, Evictor
from runtime.figures import EvictionReason, Figures
from runtime.history import HeldMessage
from runtime.kv_manager import KvManager
from runtime.reservations import Freed
from runtime.retelling import taken_turn
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
        figures: Figures,
    ) -> None:
        self._table = table
        self._manager = manager
        self._scheduler = scheduler
        self._evictor: Evictor = scheduler.evictor
        self._executor = executor
        self._config = config
        self._figures = figures

    def open(self, conversation: Conversation, now_ns: int) -> None:
        """Holds a new conversation; an idle one makes room. Raises OutOfMemoryError with nothing changed."""
        held = [other for other in self._table if not other.end_requested]
        of_tenant = [other for other in held if other.tenant == conversation.tenant]
        for holders, most, option in (
            (of_tenant, self._config.max_tenant_conversations, "max_tenant_conversations"),
            (held, self._config.max_conversations, "max_conversations"),
        ):
            if most and len(holders) >= most:
                self._make_place(holders, f"{option} {most}", now_ns)
        self._manager.open(conversation.handle, conversation.policy)
        self._table.add(conversation)

    def _make_place(self, holders: list[Conversation], limit: str, now_ns: int) -> None:
        idle = self._table.idle
        victim = self._evictor.first_to_go(sorted((c for c in holders if c.handle in idle), key=_last_used))
        if victim is None:
            raise OutOfMemoryError(
                f"conversations: all places are taken by running turns ({limit}); try again later or raise the limit"
            )
        idle_s = (now_ns - victim.last_used_ns) / 1e9
        self.end(victim, f"ended to make room for another one ({limit}), {idle_s:.0f} s idle", "count")

    def end_expired(self, now_ns: int) -> None:
        """Ends conversations that have been idle for longer than `max_idle_s`."""
        most_s = self._config.max_idle_s
        while most_s and self._table.idle:
            oldest = next(iter(self._table.idle.values()))
            if now_ns - oldest.last_used_ns < most_s * 1e9:
                return
            self.end(oldest, f"ended after {most_s:g} s idle", "idle")

    def end(self, conversation: Conversation, why: str, reason: EvictionReason) -> None:
        """Ends a conversation that nobody asked to end; its client is told `why` when it comes back."""
        self._table.ask_end(conversation, why)
        self._figures.count_eviction(reason)

    def retire(self, conversation: Conversation) -> None:
        """From now on unknown to clients; freed at a step boundary, since a probe may be reading it."""
        self._table.ask_end(conversation)

    def close_turn(self, conversation: Conversation, now_ns: int) -> None:
        """The turn has ended well; the conversation goes on or is freed, as its client asked."""
        turn = conversation.turn
        assert turn is not None
        goes_on = (
            conversation.conversation_id is not None
            and not turn.request.end_conversation
            and not conversation.end_requested
        )
        first, last = turn.prompt_end, len(conversation.tokens)
        answer = HeldMessage("assistant", "".join(turn.text), first, last, conversation.ended)
        conversation.messages += (answer,)
        conversation.taken = taken_turn(turn)
        self._leave_turn(conversation, now_ns, goes_on=goes_on)
        if not goes_on:
            self.remove(conversation)
        elif conversation.is_unnamed:
            self._table.chats.put(conversation.handle, conversation.tenant, conversation.messages)

    def begin_turn(self, conversation: Conversation) -> None:
        """The manager hears what the turn protects and what of its beginning it may share."""
        turn = conversation.turn
        assert turn is not None
        for start, end in turn.protect:
            self._manager[conversation.handle].protect(start, end)
        self._announce(conversation)

    def _announce(self, conversation: Conversation) -> None:
        system = conversation.tokens[: conversation.system_tokens]
        self._manager.announce_prefix(conversation.handle, conversation.tenant, system)

    def roll_back(self, conversation: Conversation) -> None:
        """Brings a cache back to where the chat that its client sent departs from it, at a step boundary."""
        turn = conversation.turn
        assert turn is not None and turn.rollback is not None
        rollback, turn.rollback = turn.rollback, None
        kv = self._manager[conversation.handle]
        turn.protected_before = kv.protected_ranges()
        was_whole = kv.num_tokens >= rollback.keep or not conversation.loss
        conversation.loss = rollback.departs if was_whole else f"{conversation.loss}; {rollback.departs}"
        self._roll_cache(conversation, rollback.keep)
        self.begin_turn(conversation)

    def _roll_cache(self, conversation: Conversation, keep: int) -> bool:
        """Tokens from `keep` on leave the cache; False if those before them had to go too."""
        whole = min(keep, self._manager[conversation.handle].num_tokens)
        self.release(self._manager.rollback(conversation.handle, keep))
        left = self._manager[conversation.handle].num_tokens
        if whole - left < self._manager.page_tokens:  # else nothing, or a part of a shared page
            return True
        self._figures.count_eviction("rollback")
        return False

    def undo_turn(self, conversation: Conversation, now_ns: int) -> None:
        """As if the turn had never come: its tokens go, and all of a conversation that began with it."""
        turn = conversation.turn
        assert turn is not None
        first = turn.first_token
        goes_on = (first > 0 or bool(turn.undo.tokens)) and not conversation.end_requested
        self._leave_turn(conversation, now_ns, goes_on=goes_on)
        if not goes_on:
            self.remove(conversation)
            return
        conversation.tokens[first:] = turn.undo.tokens
        conversation.messages = turn.undo.messages
        conversation.system_tokens = turn.undo.system_tokens
        conversation.ended = turn.ended_before
        if turn.rollback is not None:  # the cache does not know of the turn yet
            conversation.num_computed = turn.undo.num_computed
            return
        if not self._roll_cache(conversation, first):
            conversation.loss = LOST_TO_ROLLBACK
        for start, end in turn.protected_before:
            self._manager[conversation.handle].protect(max(start, first), max(end, first))
        self._announce(conversation)
        conversation.num_computed = max(min(conversation.num_computed, first), turn.undo.num_computed)

    def _leave_turn(self, conversation: Conversation, now_ns: int, *, goes_on: bool) -> None:
        self._scheduler.finish(conversation)
        self._table.turn_ended(conversation, now_ns, goes_on=goes_on)

    def remove(self, conversation: Conversation) -> None:
        """Frees everything it holds."""
        freed = self._manager.release(conversation.handle)
        self._table.remove(conversation)
        self.release(freed)

    def make_room(self) -> bool:
        """Gives up the cache of somebody who is not running, at once; False if nobody has any."""
        made = self._scheduler.make_room()
        self.release_dropped()
        return made

    def held(self, handle: int) -> Conversation:
        """The conversation of a handle that is in use."""
        return self._table.by_handle[handle]

    def release(self, freed: Freed) -> None:
        """Tells the device what nobody owns any more."""
        self._executor.release(freed.page_ids, freed.blocks)

    def release_dropped(self) -> None:
        """The same for caches that were dropped while planning."""
        while self._evictor.dropped:
            self.release(self._evictor.dropped.pop())


def _last_used(conversation: Conversation) -> int:
    return conversation.last_used_ns
