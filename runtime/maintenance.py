"""Decides when spans are probed and committed. Commits of several conversations that are due together are one batch.

Urgent work runs before the next step: a crossed watermark, the review every N steps, and commits at turn end of
policies that need no probe. Tokens of a running turn are staged at the watermark, and where the policy has signals,
once they have cooled. Idle work runs when no turn can: probes first, then the commit they were for, and renewals
(`runtime.renewal`), for which younger text waits unread. A review that finds much staged does the same a piece at a
time, between steps; so does any while memory is short. Where that falls behind, and at the watermark, spans are
committed by what is known of them; they stay marked, and a later probe still raises the scores of what was kept. What
was kept whole until then gets its line in another commit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from runtime.conversation import Conversation
from runtime.cooling import Cooling
from runtime.kv_manager import KvManager
from runtime.lifecycle import Event, State
from runtime.probing import CommitWork, Prober, ProbeSettings, ProbeWork
from runtime.renewal import Renewal
from runtime.reservations import Freed
from runtime.step import LinePlan, SignalResult

OVERDUE_SPANS = 2
# A commit costs about a step; at the watermark it should free more than one page.
WATERMARK_MIN_PAGES = 4
# Share of the KV memory in use from which text is compressed beside the steps of others.
PRESSED = 0.5
# Tokens that a step allows to be re-read then, at least, and pieces that may add up.
LEAST_ALLOWED, MOST_PIECES = 32, 2
# Commits of one batch: planning one, and finding it room, takes milliseconds each in which no step runs.
MOST_COMMITS = 8


class Maintenance:
    """Looks at all conversations; `conversations` is the engine's own table, by handle."""

    def __init__(
        self, manager: KvManager, conversations: Mapping[int, Conversation], probe: ProbeSettings, watermark: float
    ) -> None:
        self._manager = manager
        self._conversations = conversations
        self._prober = Prober(manager, probe)
        self._renewal = Renewal(manager, self._prober, PRESSED)
        self._watermark = watermark
        self._cooling = Cooling(manager, conversations, probe.boundaries)
        self._num_steps = 0
        self._reviewed_step = 0  # at most one piece of work per review
        self._futile = False  # there was nothing to compress, or no room to do it in
        self._allowed_tokens = 0  # that may be re-read beside steps while memory is short
        self._blocked_at_bytes: int | None = None

    def step_done(
        self, ran: Iterable[Conversation] = (), signals: Sequence[SignalResult] = (), num_tokens: int = 0
    ) -> None:
        """Counts engine steps for the review every N of them, and stages what has cooled in the conversations that ran.

        signals: of those that were watched.   num_tokens: rows of the step.
        """
        self._num_steps += 1
        most = MOST_PIECES * self._prober.settings.max_tokens
        self._allowed_tokens = min(most, self._allowed_tokens + max(LEAST_ALLOWED, num_tokens))
        self._cooling.step_done(ran, signals)

    def commit_failed(self) -> None:
        """A commit found no room to write to: no more of them until somebody gives memory back."""
        self._blocked_at_bytes = self._manager.budget.used_bytes

    def turn_ended(self, conversation: Conversation) -> None:
        """Freezes what the turn left behind the recent window."""
        if conversation.policy.schedule.at_turn_end:
            self._manager.stage(conversation.handle, Event.TURN_ENDED)
        self._futile = False

    def urgent(self) -> ProbeWork | CommitWork | None:
        """A commit that should not wait for idle time, or the probe before it."""
        if self._manager.pressure >= self._watermark:
            work = self.reclaim(WATERMARK_MIN_PAGES)
            if work is not None:
                return work
        staged = self._staged()  # of hundreds that are held most have nothing staged
        work = self._commits(filter(_is_due_at_turn_end, staged)) if staged else None
        return work or self._compress_beside() or (self._review(staged) if staged else None)

    def _compress_beside(self) -> ProbeWork | CommitWork | None:
        """While memory is short, text is re-read and committed beside the steps of others, as many tokens as those
        have, of idle conversations first: else their caches are dropped one day, and all of it is computed again.
        """
        if self._manager.pressure < PRESSED or self._allowed_tokens < self._prober.settings.max_tokens:
            return None
        work = self.compress()
        if work is not None:
            self._allowed_tokens -= self._prober.settings.max_tokens
        return work

    def compress(self) -> ProbeWork | CommitWork | None:
        """Re-reads or commits what has been staged, of idle conversations first; None if nothing can be done."""
        by_idleness = sorted(self._at_rest(), key=lambda c: c.turn is not None)
        work = self._read_or_commit([c for c in by_idleness if c.policy.probe], self._unread)
        # Else more can be done once commits that are under way are settled.
        self._futile = work is None and not self._manager.open_commits
        return work

    def can_compress(self) -> bool:
        """Whether `compress` has something to do; not where it found no room for that when it was tried last."""
        if self._futile or self._blocked_at_bytes is not None:
            return False
        probing = (self._manager[c.handle] for c in self._conversations.values() if c.policy.probe)
        return any(kv.unprobed or kv.commit_due for kv in probing)

    def _review(self, conversations: list[Conversation]) -> ProbeWork | CommitWork | None:
        """For those of the conversations that have much staged and have not been idle: one piece of work every N steps.

        Text that arrives faster than it can be re-read is committed by what is known of it; whole, only quantized,
        where nothing is known but by re-reading.
        """
        if self._num_steps == self._reviewed_step:
            return None
        if all(conversation.turn is None for conversation in self._conversations.values()):
            return None  # nobody is held up: idle work reads first and commits then
        staged = [(c, self._staged_spans(c)) for c in conversations]
        work: ProbeWork | CommitWork | None = self._commits(c for c, spans in staged if spans >= OVERDUE_SPANS)
        if work is None:
            due = [c for c, spans in staged if 1 <= spans < OVERDUE_SPANS and self._is_review_step(c)]
            work = self._read_or_commit(due, lambda c: self._unread(c) and not self._renewal.awaits(c))
        if work is not None:
            self._reviewed_step = self._num_steps
        return work

    def _staged_spans(self, conversation: Conversation) -> int:
        """Spans' worth of staged text of a conversation that is reviewed."""
        schedule = conversation.policy.schedule
        return self._manager[conversation.handle].num_staged // schedule.span_tokens if schedule.every_steps else 0

    def _is_review_step(self, conversation: Conversation) -> bool:
        return self._num_steps % conversation.policy.schedule.every_steps == 0

    def _unread(self, conversation: Conversation) -> bool:
        """Whether a probe of staged text is due."""
        return conversation.policy.probe and bool(self._manager[conversation.handle].unprobed)

    def _read_or_commit(
        self, conversations: list[Conversation], unread: Callable[[Conversation], bool]
    ) -> ProbeWork | CommitWork | None:
        """Of the first of them that has something to do: re-reads its text, or commits it, and with it others that have
        nothing unread. What memory has no room to re-read is committed as it is."""
        for i, conversation in enumerate(conversations):
            work: ProbeWork | CommitWork | None = None
            if unread(conversation):
                work = self._next_probe(conversation, urgent=True)
            if work is None and self._manager[conversation.handle].commit_due:
                others = (c for c in conversations[i + 1 :] if not unread(c))
                work = self._commits(itertools.chain([conversation], others))
            if work is not None:
                return work
        return None

    def reclaim(self, min_pages: int = 1) -> CommitWork | None:
        """Stages what it may, and commits the conversations with most to give, as many as should bring memory below the
        watermark; None if none has `min_pages`."""
        manager = self._manager
        staged: list[tuple[int, Conversation]] = []
        for conversation in self._at_rest():
            if conversation.policy.schedule.at_watermark:
                manager.stage(conversation.handle, Event.WATERMARK, self._pages_to_commit(conversation))
                num_staged = manager[conversation.handle].num_staged
                if num_staged >= min_pages * manager.page_tokens:
                    staged.append((num_staged, conversation))
        above = manager.budget.used_bytes - self._watermark * manager.budget.total_bytes
        chosen: list[Conversation] = []
        for num_staged, conversation in sorted(staged, key=lambda one: -one[0]):
            if chosen and above <= 0:
                break
            chosen.append(conversation)
            above -= num_staged / manager.page_tokens * manager.page_layout.page_bytes
        return self._commits(chosen)

    def _pages_to_commit(self, conversation: Conversation) -> set[int]:
        """First positions of the oldest active pages: so many as a commit has room to write out before it frees them.

        All of their tokens may stay; room is left for exact entries and, two blocks per row, for old ones that move.
        """
        manager, kv = self._manager, self._manager[conversation.handle]
        row_bytes = kv.num_rows * manager.block_layouts[kv.blocks.format].stored_bytes
        exact_bytes = -(-kv.policy.exact_entries // manager.page_tokens) * manager.page_layout.page_bytes
        room = manager.budget.total_bytes - manager.budget.used_bytes - 2 * row_bytes - exact_bytes
        fitting = room * manager.block_entries // row_bytes
        left = max(WATERMARK_MIN_PAGES * manager.page_tokens, fitting) - kv.num_staged
        chosen = set()
        for page in kv.pages:
            if page.state is not State.ACTIVE or page.compacted:
                continue
            left -= len(kv.loose_positions(page))
            if left < 0:
                break
            chosen.add(page.positions[0])
        return chosen

    def idle(self) -> ProbeWork | CommitWork | None:
        """What to do with spare time. Conversations that run no turn, oldest first."""
        for conversation in self._at_rest():
            if conversation.turn is not None or not conversation.policy.compresses:
                continue
            work: ProbeWork | CommitWork | None = self._renewal.next_work(conversation)
            if work is None and not self._renewal.awaits(conversation):
                work = self._next_probe(conversation) or self._next_reread(conversation)
            if work is not None:
                return work
            if conversation.policy.schedule.on_idle and self._manager[conversation.handle].commit_due:
                commit = self._commits([conversation])
                if commit is not None:
                    return commit
        return None

    def settle_probe(self, work: ProbeWork, done: bool) -> Freed:
        """The piece was read, or gave way and stays to be done. Returns the pages that nobody needs any more."""
        if work.span is None and done:
            return self._manager.settle_rows(work.reservation)
        self._manager.cancel_rows(work.reservation)
        if work.span is not None and done:
            self._manager[work.plan.handle].probed(*work.span, again=work.again)
        return Freed(work.reservation.new_page_ids)

    def committed(self, handle: int) -> tuple[int, Freed | None]:
        """A commit of the cache `handle` was settled. Returns the conversation's handle and what more is free now."""
        return self._renewal.settle(handle)

    def _at_rest(self) -> Iterator[Conversation]:
        """Conversations of which no commit is under way."""
        under_way = self._manager.open_commits
        return (c for c in list(self._conversations.values()) if not under_way.concerns(c.handle))

    def _staged(self) -> list[Conversation]:
        """Those of them that have staged text."""
        under_way, table = self._manager.open_commits, self._conversations
        return [table[h] for h in self._manager.staged if h in table and not under_way.concerns(h)]

    def _commits(self, conversations: Iterable[Conversation]) -> CommitWork | None:
        """A batch of the first of them that have something to commit.

        Only as many as memory has room for together: one after the other they need less, since each gives some back.
        """
        if self._manager.open_commits:
            return None  # one batch at a time; nobody should wait for its end
        if self._blocked_at_bytes is not None:
            if self._manager.budget.used_bytes >= self._blocked_at_bytes:
                return None
            self._blocked_at_bytes = None
        plans: list[LinePlan] = []
        room = self._manager.budget.total_bytes - self._manager.budget.used_bytes
        for conversation in conversations:
            plan = self._manager.plan_commit(conversation.handle)
            if plan is None:
                continue
            room -= self._most_bytes(plan)
            if plans and room < 0:
                break
            plans.append(plan)
            if len(plans) >= MOST_COMMITS:
                break
        return CommitWork(tuple(plans)) if plans else None

    def _most_bytes(self, plan: LinePlan) -> int:
        """What a commit takes before it gives anything back where all tokens stay and two blocks of every row move."""
        manager, rows = self._manager, len(plan.blocks.starts) - 1
        row_blocks = -(-len(plan.staged_slots) // manager.block_entries) + 2
        exact_bytes = -(-plan.rules.exact_entries // manager.page_tokens) * manager.page_layout.page_bytes
        return rows * row_blocks * manager.block_layouts[plan.blocks.format].stored_bytes + exact_bytes

    def _next_probe(self, conversation: Conversation, *, urgent: bool = False) -> ProbeWork | None:
        """The next piece of what was staged and not re-read."""
        kv = self._manager[conversation.handle]
        if not conversation.policy.probe or not kv.unprobed:
            return None
        return self._prober.reread(conversation, kv.unprobed[0], urgent=urgent)

    def _next_reread(self, conversation: Conversation) -> ProbeWork | None:
        """The next piece of all the text, once the conversation has outgrown its entries' scores.

        How much of an entry is read depends on how far away it is: what a span scored when it was new says too much
        of heads that only look nearby. Its scores fade when this begins, and are raised again piece by piece.
        """
        kv, schedule = self._manager[conversation.handle], conversation.policy.schedule
        if not conversation.policy.probe:
            return None
        if not kv.reread:
            if kv.num_staged or not kv.outgrown(schedule.reread_growth):
                return None
            kv.begin_reread(kv.num_tokens - schedule.recent_tokens)
        return self._prober.reread(conversation, kv.reread[0], again=True)


def _is_due_at_turn_end(conversation: Conversation) -> bool:
    """Whether what it has staged need not wait for idle time."""
    policy = conversation.policy
    return policy.schedule.at_turn_end and not policy.probe and conversation.turn is None
