"""Chooses the rows of each step: decode rows first, then prefill chunks, within the token budget.

When pages run out, idle conversations lose their cache first (their text stays, so it can be recomputed), then
whoever cannot run waits. Only when nobody can run at all does the newest running turn give up its cache; a turn
that is alone and still does not fit is refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runtime.conversation import Conversation
from runtime.errors import OutOfMemoryError
from runtime.eviction import Evictor
from runtime.figures import EngineLoad
from runtime.kv_manager import KvManager, RowReservation
from runtime.policy.recording import recording_of, watch_of
from runtime.step import SampleSpec, SequencePlan, StepPlan


@dataclass(frozen=True, eq=False)
class StepWork:
    """A planned step and what was reserved for it."""

    plan: StepPlan
    conversations: tuple[Conversation, ...]
    reservations: tuple[RowReservation, ...]


@dataclass(frozen=True)
class Starved:
    """Nobody could run. `victim`: the newest running turn; it is alone if `alone`."""

    victim: Conversation
    alone: bool
    error: OutOfMemoryError


class Scheduler:
    """Waiting and running turns. Other conversations are known to the evictor only."""

    def __init__(self, manager: KvManager, evictor: Evictor, max_batch_size: int, tokens_per_step: int) -> None:
        self._manager = manager
        self.evictor = evictor
        self._max_batch_size = max_batch_size
        self._tokens_per_step = tokens_per_step
        self.waiting: deque[Conversation] = deque()
        self.running: list[Conversation] = []

    def add(self, conversation: Conversation) -> None:
        """A turn arrived."""
        self.waiting.append(conversation)

    def finish(self, conversation: Conversation) -> None:
        """A turn is over."""
        if conversation in self.running:
            self.running.remove(conversation)
        elif conversation in self.waiting:
            self.waiting.remove(conversation)

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
        sequences: list[SequencePlan] = []
        chosen: list[Conversation] = []
        reservations: list[RowReservation] = []
        budget = self._tokens_per_step
        error: OutOfMemoryError | None = None
        for conversation in sorted(self.running, key=self._is_prefill):
            num_tokens = min(self._num_pending(conversation), budget)
            if num_tokens == 0:
                continue
            try:
                reservation = self._reserve(conversation, num_tokens)
            except OutOfMemoryError as e:
                error = e
                continue
            budget -= num_tokens
            sequences.append(self._sequence(conversation, reservation, now_ns))
            chosen.append(conversation)
            reservations.append(reservation)
        if sequences:
            return StepWork(StepPlan(tuple(sequences)), tuple(chosen), tuple(reservations))
        if error is not None:
            return Starved(self.running[-1], len(self.running) == 1, error)
        return None

    def preempt(self, conversation: Conversation) -> None:
        """Gives up the cache of a running turn; it starts over from its tokens when there is room."""
        self.running.remove(conversation)
        self.evictor.drop(conversation)
        self.waiting.appendleft(conversation)

    def settle(self, work: StepWork) -> None:
        """The step ran; every reservation becomes part of its cache."""
        for reservation in work.reservations:
            self._manager.settle_rows(reservation)

    def cancel(self, work: StepWork) -> None:
        """The step failed; nothing of it happened."""
        for reservation in work.reservations:
            self._manager.cancel_rows(reservation)

    def _num_pending(self, conversation: Conversation) -> int:
        return conversation.num_pending(self._manager[conversation.handle].num_tokens)

    def _is_prefill(self, conversation: Conversation) -> bool:
        return self._num_pending(conversation) > 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch_size:
            conversation = self.waiting[0]
            if self.running and not self._has_room(conversation):
                return
            self.running.append(self.waiting.popleft())

    def _has_room(self, conversation: Conversation) -> bool:
        """Whether what is pending could be reserved now, idle caches given up."""
        manager = self._manager
        item = manager.page_layout.page_bytes
        needed = -(-self._num_pending(conversation) // manager.page_tokens) * item
        while not manager.budget.fits(needed):
            if not self.evictor.drop_idle():
                return False
        return True

    def _reserve(self, conversation: Conversation, num_tokens: int) -> RowReservation:
        while True:
            try:
                return self._manager.reserve_rows(conversation.handle, num_tokens)
            except OutOfMemoryError:
                if not self.evictor.drop_idle():
                    raise

    def _sequence(self, conversation: Conversation, reservation: RowReservation, now_ns: int) -> SequencePlan:
        turn = conversation.turn
        assert turn is not None
        turn.first_scheduled_ns = turn.first_scheduled_ns or now_ns
        turn.new_pages += len(reservation.new_page_ids)
        kv = self._manager[conversation.handle]
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
