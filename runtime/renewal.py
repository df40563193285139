"""Computes compressed caches anew in idle time, so that what was given up before competes again.

What a commit drops is gone: a later re-read, from farther away, can only choose among what was kept when the text was
near, and whatever was computed since has read the compressed text. So while memory is not short, text that came after
the last line is kept whole, only quantized, and once the conversation has outgrown its scores all of its text is
computed into a *twin*, with nothing given up; the twin is re-read, compressed at once, and takes the place of the
cache, which has served turns until then. A turn that comes in between only makes the twin longer. Twins are the first
to go when memory is asked for; then what is there is re-read and compressed as it is.
"""

from __future__ import annotations

from runtime.conversation import Conversation
from runtime.errors import OutOfMemoryError
from runtime.kv_manager import KvManager
from runtime.kv_state import twin_of
from runtime.probing import CommitWork, Prober, ProbeWork
from runtime.reservations import Freed
from runtime.step import ProbePlan


class Renewal:
    """share: of the KV memory that caches and twins may take up together; beyond it no twin is begun."""

    def __init__(self, manager: KvManager, prober: Prober, share: float) -> None:
        self._manager = manager
        self._prober = prober
        self._share = share

    def next_work(self, conversation: Conversation) -> ProbeWork | CommitWork | None:
        """The next piece for a conversation that runs no turn; None where nothing is due, or there is no room."""
        policy, twin_handle = conversation.policy, twin_of(conversation.handle)
        if not policy.probe or not policy.schedule.renew:
            return None
        kv = self._manager[conversation.handle]
        if twin_handle not in self._manager:
            if not kv.outgrown(policy.schedule.reread_growth) or not self.awaits(conversation):
                return None
            self._manager.open_twin(conversation.handle)
        twin = self._manager[twin_handle]
        if twin.num_tokens < kv.num_tokens:
            return self._compute(conversation, twin_handle)
        self._manager.stage_twin(conversation.handle)
        if twin.unprobed:
            return self._prober.reread(conversation, twin.unprobed[0], twin_handle)
        if self._manager.open_commits:
            return None
        plan = self._manager.plan_commit(twin_handle)
        return None if plan is None else CommitWork((plan,))

    def awaits(self, conversation: Conversation) -> bool:
        """Whether its compressed text will be computed anew, or is now: until then nothing of it need be re-read."""
        handle, policy = conversation.handle, conversation.policy
        if not policy.probe or not policy.schedule.renew:
            return False
        kv = self._manager[handle]
        if kv.reread or not kv.blocks.num_blocks:
            return False
        return twin_of(handle) in self._manager or self._has_room(kv.num_tokens)

    def settle(self, handle: int) -> tuple[int, Freed | None]:
        """A commit of the cache `handle` was settled: a twin takes the place of the conversation's cache.

        Returns the conversation's handle and what that frees.
        """
        return (handle, None) if handle >= 0 else (twin_of(handle), self._manager.replace(twin_of(handle)))

    def _has_room(self, num_tokens: int) -> bool:
        manager, budget = self._manager, self._manager.budget
        needed = -(-num_tokens // manager.page_tokens) * manager.page_layout.page_bytes
        return budget.used_bytes + needed <= self._share * budget.total_bytes

    def _compute(self, conversation: Conversation, twin_handle: int) -> ProbeWork | None:
        """The next tokens of the twin, as rows of which none is scored."""
        self._manager.adopt_prefix(twin_handle)
        first = self._manager[twin_handle].num_tokens
        last = min(first + self._prober.settings.max_tokens, self._manager[conversation.handle].num_tokens)
        try:
            reservation = self._manager.reserve_rows(twin_handle, last - first)
        except OutOfMemoryError:
            return None  # whoever takes the memory takes the twin's too
        plan = ProbePlan(
            handle=twin_handle,
            token_ids=tuple(conversation.tokens[first:last]),
            first_position=first,
            slots=reservation.slots,
            view=reservation.view,
            first_scored_row=last - first,
            record_skip=0,
        )
        return ProbeWork(plan, reservation, span=None)
