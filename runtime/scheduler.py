"""Chooses the rows of each step: decode rows first, then prefill chunks, within the token budget and the pace.

Turns wait until `Admission` sees room for them to the end, tenants in the order of `TokenCounters`. Prompts are read
in that order too. When pages run out all the same, the engine compresses what it can; then idle conversations lose
their cache (their text stays, so it can be recomputed), then those that only wait; then whoever cannot run waits. Only
when nobody can run at all does the newest running turn of the lowest priority give up its cache; a turn that is alone
and still does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.admission import Admission
from runtime.config import RuntimeConfig
from runtime.conversation import Conversation, Turn
from runtime.errors import OutOfMemoryError
from runtime.eviction import LOST_TO_MEMORY, Evictor
from runtime.fairness import TokenCounters, WaitingTurns
from runtime.figures import EngineLoad
from runtime.kv_manager import KvManager
from runtime.pace import StepPace
from runtime.policy.recording import recording_of, watch_of
from runtime.reservations import RowReservation
from runtime.step import SampleSpec, SequencePlan, StepPlan


@dataclass(frozen=True, eq=False)
class StepWork:
    """A planned step and what was reserved for it. num_decode_rows: the first sequences, of one row each."""

    plan: StepPlan
    conversations: tuple[Conversation, ...]
    reservations: tuple[RowReservation, ...]
    num_decode_rows: int = 0


@dataclass(frozen=True)
class Starved:
    """Nobody could run. `victim`: who gives way; it is alone if `alone`."""

    victim: Conversation
    alone: bool
    error: OutOfMemoryError


@dataclass
class _Draft:
    """A step being put together. room: rows that may still be added.   error: why somebody got none."""

    room: int
    sequences: list[SequencePlan] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    reservations: list[RowReservation] = field(default_factory=list)
    error: OutOfMemoryError | None = None


class Scheduler:
    """Waiting and running turns. Other conversations are known to the evictor only."""

    def __init__(
        self, manager: KvManager, evictor: Evictor, admission: Admission, max_batch_size: int, config: RuntimeConfig
    ) -> None:
        self._manager = manager
        self._admission = admission
        self._max_batch_size = max_batch_size
        self._tokens_per_step = config.tokens_per_step
        self._pace = StepPace(config.max_step_ms)
        self._counters = TokenCounters()
        self.evictor = evictor
        # Whether something gives memory back without a loss; then no cache is dropped for a step.
        self.can_compress: Callable[[], bool] = lambda: False
        self.waiting = WaitingTurns(self._counters)
        self.running: list[Conversation] = []

    def add(self, conversation: Conversation) -> None:
        """A turn arrived."""
        self._counters.arrive(conversation.tenant)
        self.waiting.add(conversation)

    def finish(self, conversation: Conversation) -> None:
        """A turn is over."""
        if conversation in self.running:
            self.running.remove(conversation)
        else:
            self.waiting.remove(conversation)
        self._counters.leave(conversation.tenant)

    def load(self, *, idle: bool) -> EngineLoad:
        """Turns at this moment, for the figures."""
        unread = [n for n in map(self._num_pending, self.running) if n > 1]
        return EngineLoad(
            running=len(self.running),
            waiting=len(self.waiting),
            context=len(unread),
            context_tokens=sum(unread),
            max_running=self._max_batch_size,
            idle=idle,
        )

    def plan(self, now_ns: int) -> StepWork | Starved | None:
        """The next step; Starved when turns are there but none could get pages; None when there is none."""
        self._admit()
        self._adopt_prefixes()
        draft = _Draft(self._tokens_per_step)
        # Where there are more of them than room, those go first that have waited longest for a token.
        for conversation in sorted(filter(self._is_decode, self.running), key=_last_token_ns):
            self._add_rows(draft, conversation, 1, now_ns)
        num_decode_rows = len(draft.sequences)
        draft.room = self._pace.prompt_tokens(num_decode_rows, draft.room)
        for conversation in sorted(self.running, key=self._rank):
            if not self._is_decode(conversation):
                self._add_rows(draft, conversation, self._num_pending(conversation), now_ns)
        if draft.sequences:
            plan = StepPlan(tuple(draft.sequences))
            return StepWork(plan, tuple(draft.conversations), tuple(draft.reservations), num_decode_rows)
        if draft.error is not None:
            lowest = min(conversation.priority for conversation in self.running)
            victim = next(c for c in reversed(self.running) if c.priority == lowest)
            return Starved(victim, len(self.running) == 1, draft.error)
        return None

    def _add_rows(self, draft: _Draft, conversation: Conversation, num_tokens: int, now_ns: int) -> None:
        """As many of the tokens as there is room for, a part of a prompt where pages are short; else none."""
        num_tokens = min(num_tokens, draft.room)
        reservation = None
        while reservation is None and num_tokens > 0:
            try:
                reservation = self._reserve(conversation, num_tokens)
            except OutOfMemoryError as error:
                draft.error = error
                num_tokens //= 2
        if reservation is None:
            return
        draft.room -= num_tokens
        draft.sequences.append(self._sequence(conversation, reservation, now_ns))
        draft.conversations.append(conversation)
        draft.reservations.append(reservation)

    def _adopt_prefixes(self) -> None:
        """Pages of a system prompt that others of the tenant have computed by now are not computed again."""
        for conversation in self.running:
            before = len(self._manager[conversation.handle].pages)
            num_tokens = self._manager.adopt_prefix(conversation.handle)
            turn = conversation.turn
            if num_tokens and turn is not None and turn.first_scheduled_ns:  # else it is counted with the first rows
                turn.reused_tokens += num_tokens
                turn.reused_pages += len(self._manager[conversation.handle].pages) - before

    def preempt(self, conversation: Conversation) -> None:
        """Gives up the cache of a running turn; it starts over from its tokens when there is room."""
        assert conversation.turn is not None
        self.running.remove(conversation)
        self.evictor.drop(conversation, LOST_TO_MEMORY, "preempted")
        conversation.turn.reused_tokens = conversation.turn.reused_pages = 0
        self.waiting.put_back(conversation)

    def make_room(self) -> bool:
        """Takes the cache of somebody who is not running; False if nobody has any."""
        return self.evictor.drop_one(self.waiting)

    def settle(self, work: StepWork, duration_ns: int) -> None:
        """The step ran; every reservation becomes part of its cache. Tenants are charged, losses are counted."""
        for conversation, reservation in zip(work.conversations, work.reservations, strict=True):
            turn = conversation.turn
            assert turn is not None
            first = self._manager[conversation.handle].num_tokens
            spare = self._manager.settle_rows(reservation)
            if spare.page_ids:
                self.evictor.dropped.append(spare)
            last = first + reservation.num_tokens
            again = min(last, turn.history_end, conversation.num_computed) - first
            if again > 0:
                turn.recomputed_tokens += again
                turn.recomputed_reason = turn.recomputed_reason or conversation.loss
            conversation.num_computed = max(conversation.num_computed, last)
            generated = int(first >= turn.prompt_end)
            self._counters.charge(conversation.tenant, reservation.num_tokens - generated, generated)
        self._pace.measure(work.num_decode_rows, work.plan.num_tokens - work.num_decode_rows, duration_ns)

    def cancel(self, work: StepWork) -> None:
        """The step failed; nothing of it happened."""
        for reservation in work.reservations:
            self._manager.cancel_rows(reservation)

    def _num_pending(self, conversation: Conversation) -> int:
        return conversation.num_pending(self._manager[conversation.handle].num_tokens)

    def _is_decode(self, conversation: Conversation) -> bool:
        return self._num_pending(conversation) == 1

    def _rank(self, conversation: Conversation) -> tuple[int, int]:
        """In which order prompts are read; of equals, those first that run longer."""
        return self._counters[conversation.tenant], -conversation.priority

    def _admit(self) -> None:
        while len(self.running) < self._max_batch_size:
            conversation = self._next_that_fits()
            if conversation is None:
                return
            self.waiting.remove(conversation)
            self.running.append(conversation)

    def _next_that_fits(self) -> Conversation | None:
        """The next turn, or one of another tenant while it finds no room; it lets only so many pass."""
        passed: list[Turn] = []
        for conversation in self.waiting.heads():
            assert conversation.turn is not None
            if self._admission.may_run(conversation, self.running):
                for turn in passed:
                    turn.passed += 1
                return conversation
            if self._admission.is_tenant_full(conversation.tenant, self.running):
                continue
            if conversation.turn.passed >= self._max_batch_size:
                return None
            passed.append(conversation.turn)
        return None

    def _reserve(self, conversation: Conversation, num_tokens: int) -> RowReservation:
        while True:
            try:
                return self._manager.reserve_rows(conversation.handle, num_tokens)
            except OutOfMemoryError:
                if not self.evictor.drop_twins() and (self.can_compress() or not self.make_room()):
                    raise

    def _sequence(self, conversation: Conversation, reservation: RowReservation, now_ns: int) -> SequencePlan:
        turn = conversation.turn
        assert turn is not None
        kv = self._manager[conversation.handle]
        if not turn.first_scheduled_ns:
            turn.first_scheduled_ns = now_ns
            turn.reused_tokens, turn.reused_pages = kv.num_tokens, len(kv.pages)
        turn.new_pages += len(reservation.new_page_ids)
        first, last = kv.num_tokens, kv.num_tokens + reservation.num_tokens
        recording = recording_of(conversation.policy, first, last, turn.prompt_end)
        sample: SampleSpec | None = None
        if last == len(conversation.tokens) and turn.request.sampling.max_tokens > 0:
            sample = turn.sample_spec(conversation.generated)
        return SequencePlan(
            handle=conversation.handle,
            token_ids=tuple(conversation.tokens[first:last]),
            first_position=first,
            slots=reservation.slots,
            view=reservation.view,
            record_seen=recording.on,
            record_skip=conversation.policy.record_skip,
            sample=sample,
            record_last=recording.last_rows,
            record_sum=recording.adds,
            watch=watch_of(conversation.policy, first, last),
        )


def _last_token_ns(conversation: Conversation) -> int:
    assert conversation.turn is not None
    return conversation.turn.last_token_ns
