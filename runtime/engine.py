"""The engine: takes turns, runs one unit of work per `step`, tells what happened.

    work   = urgent commit, else a step of rows, else idle work (probe, commit)
    result = executor does it
             scheduler / maintenance / manager settle it

`submit`, `cancel`, `end_conversation` and the figures may be called from any thread; `step` from one only. The lock
is held while planning and settling, never while the executor runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from runtime.admission import Admission
from runtime.answer import accept_token, finish_event
from runtime.checkpoint_hook import CheckpointFigures, Revival
from runtime.conversation import Conversation, Turn
from runtime.conversation_table import ConversationTable
from runtime.engine_parts import EngineParts
from runtime.eviction import Evictor
from runtime.figures import EngineStats, Figures
from runtime.keeper import Keeper
from runtime.kv_totals import kv_totals
from runtime.maintenance import Maintenance
from runtime.probing import CommitWork, ProbeSettings, ProbeWork
from runtime.request import ErrorEvent, Event, KvStats, Request
from runtime.reservations import Freed
from runtime.retelling import Retelling, retelling
from runtime.scheduler import Scheduler, Starved, StepWork
from runtime.step import ProbePlan, StepResult
from runtime.upkeep import Upkeep

Peeked = TypeVar("Peeked")
Work = StepWork | Starved | ProbeWork | CommitWork

# An engine with nothing else to do looks so often whether a commit can go on, should nobody tell it.
COMMIT_WAIT_S = 0.2


class Engine:
    """Conversations over one executor."""

    def __init__(self, parts: EngineParts, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        manager = parts.manager
        self._executor = parts.executor
        self._intake = parts.intake
        self._observer = parts.observer
        self._checkpoints = parts.checkpoints
        self._eos = parts.spec.eos_token_ids
        self._max_seq_len = parts.limits.max_seq_len
        self._clock_ns = clock_ns
        self._manager = manager
        self._table = ConversationTable()
        self._retellings: list[Retelling] = []
        self._figures = Figures()
        self._admission = Admission(manager, parts.limits, parts.config)
        evictor = Evictor(manager, self._table, self._figures)
        self._scheduler = Scheduler(manager, evictor, self._admission, parts.limits.max_batch_size, parts.config)
        self._keeper = Keeper(self._table, manager, self._scheduler, parts.executor, parts.config, self._figures)
        probe = ProbeSettings(
            parts.probe_prompt, parts.config.probe_tokens_per_step, parts.limits.max_seq_len, parts.boundaries
        )
        self._maintenance = Maintenance(manager, self._table.by_handle, probe, parts.config.watermark)
        self._lock = threading.RLock()
        self._upkeep = Upkeep(parts, self._maintenance, self._keeper, self._figures, self._lock, clock_ns)
        self._scheduler.can_compress = lambda: self._upkeep.is_committing or self._maintenance.can_compress()
        self._arrivals = threading.Event()  # set by submit and cancel: a running probe gives way
        self._upkeep.told = self._arrivals.set
        self._idle = True
        self._checkpoints.attach(self._arrivals.set)

    # Any thread

    def prepare(self, request: Request) -> Revival | None:
        """Does beforehand, without any lock, what would hold up others in `submit`, which takes the result.

        Raises RequestError, and StoreUnavailableError where a conversation may lie in a store that does not answer.
        """
        self._intake.prepare(request)
        if request.conversation_id is None:
            return None
        with self._lock:
            held = self._table.find(request.tenant, request.conversation_id)
        if held is not None and (held.turn is not None or not self._checkpoints.is_superseded(held)):
            return None
        with self._lock:
            if held is not None and held.handle in self._table.idle:
                self._keeper.retire(held)
                self._checkpoints.give_up(held)
        return self._checkpoints.find(request)

    def submit(self, request: Request, revival: Revival | None = None) -> None:
        """Queues a turn. Raises RequestError and its kin, with nothing changed, if it can never run."""
        with self._lock:
            conversation = self._intake.find(request, self._table)
            waiting = self._scheduler.waiting
            self._admission.check_queue(len(waiting), request.tenant, waiting.of_tenant(request.tenant))
            is_new = conversation is None
            if conversation is None and revival is not None:
                conversation = revival.conversation(self._table.take_handle())
                self._intake.check_policy(request, conversation)
            elif conversation is None:
                self._check_not_ended(request)
                conversation = self._intake.start(request, self._table.take_handle())
            now_ns = self._clock_ns()
            again = retelling(request, conversation, now_ns)
            turn = None
            if again is None:
                turn = self._intake.make_turn(request, conversation, now_ns, self._admission.check_size)
            if is_new:
                self._keeper.open(conversation, now_ns)
                if revival is not None:
                    self._checkpoints.revived(conversation, revival)
            if again is not None:
                self._table.rest(conversation, now_ns)
                self._retellings.append(again)
            if turn is not None:
                self._begin(conversation, turn)
            self._wake()

    def _begin(self, conversation: Conversation, turn: Turn) -> None:
        conversation.turn = turn
        if turn.rollback is None:
            self._keeper.begin_turn(conversation)
        conversation.priority = turn.request.priority
        self._table.turn_began(conversation)
        self._scheduler.add(conversation)

    def _check_not_ended(self, request: Request) -> None:
        """A client that goes on with what the server ended is told so; one that sends all of the chat may."""
        if request.conversation_id is not None and not request.messages:
            self._table.check_not_ended(request.tenant, request.conversation_id)

    def cancel(self, request_id: str) -> None:
        """Undoes a turn at the next step boundary; unknown or finished requests are ignored."""
        with self._lock:
            conversation = self._table.of_request(request_id)
            if conversation is not None and conversation.turn is not None:
                conversation.turn.cancelled = True
                self._wake()

    def end_conversation(self, conversation_id: str, tenant: str = "") -> None:
        """Frees a conversation, after its turn if one is running. Raises UnknownConversationError."""
        with self._lock:
            conversation = self._table.find(tenant, conversation_id)
            if conversation is not None:
                self._keeper.retire(conversation)
                self._checkpoints.discard(conversation)
                self._wake()
                return
            ended = self._table.take_ending(tenant, conversation_id) is not None
        if not self._checkpoints.forget(tenant, conversation_id) and not ended:
            self._table.known(tenant, conversation_id)

    def conversation(self, conversation_id: str, tenant: str = "") -> Conversation:
        """The conversation itself, to be looked at between two steps. Raises UnknownConversationError."""
        with self._lock:
            return self._table.known(tenant, conversation_id)

    def abort(self, error: Exception) -> list[Event]:
        """Fails every turn after the executor broke; conversations go on from their last good turn."""
        with self._lock:
            turns = [c for c in self._table if c.turn is not None]
            return [event for conversation in turns for event in self._fail(conversation, error)]

    def wait_for_work(self, timeout_s: float) -> None:
        """Returns once something arrived, or after the time-out."""
        self._arrivals.wait(timeout_s)

    def _wake(self) -> None:
        self._idle = False
        self._arrivals.set()

    def kv_stats(self, conversation_id: str, tenant: str = "") -> KvStats:
        """Memory of one conversation. Raises UnknownConversationError."""
        with self._lock:
            return self._manager.stats(self._table.known(tenant, conversation_id).handle)

    def stats(self) -> EngineStats:
        with self._lock:
            kv = [self._manager.stats(handle) for handle in self._table.by_handle]
            totals = kv_totals(self._manager, self._table.by_handle)
            return self._figures.snapshot(kv, self._scheduler.load(idle=self._idle), totals)

    def clear_figures(self) -> None:
        """Counts from here on only: what was done for warm-up is nobody's work."""
        with self._lock:
            self._figures.clear()

    def checkpoint_figures(self) -> CheckpointFigures:
        return self._checkpoints.figures()

    def close(self, timeout_s: float) -> None:
        """Writes commits and checkpoints that wait. Called when nobody calls `step` any more."""
        self._upkeep.close()
        self._checkpoints.close(timeout_s)

    def has_turns(self) -> bool:
        """Whether a turn waits or runs, or has ended and its client was not told."""
        with self._lock:
            return self._table.has_turns or bool(self._retellings) or self._checkpoints.holds

    # The engine's thread

    def peek(self, conversation_id: str, user_text: str, answer: str, read: Callable[[ProbePlan], Peeked]) -> Peeked:
        """What the model would make of one more turn whose answer begins with `answer`; nothing of it stays.

        `read` gets the plan of those rows. For evaluation: only while no turn runs, from the engine's thread.
        """
        conversation = self._table.known("", conversation_id)
        assert conversation.turn is None
        kv = self._manager[conversation.handle]
        token_ids = tuple(conversation.tokens[kv.num_tokens :]) + self._intake.preview(conversation, user_text, answer)
        reservation = self._manager.reserve_scratch(conversation.handle, len(token_ids))
        plan = ProbePlan(
            handle=conversation.handle,
            token_ids=token_ids,
            first_position=kv.num_tokens,
            slots=reservation.slots,
            view=reservation.view,
            first_scored_row=len(token_ids),
            record_skip=0,
        )
        try:
            return read(plan)
        finally:
            self._manager.cancel_rows(reservation)
            self._keeper.release(Freed(reservation.new_page_ids))

    def step(self) -> tuple[list[Event], bool]:
        """One unit of work. Returns what happened, and whether anything was done (False: nothing to do)."""
        started = self._clock_ns()
        with self._lock:
            self._arrivals.clear()
            self._upkeep.advance()
            self._keeper.end_expired(started)
            written = self._checkpoints.between_steps(self._keeper.make_room, self._scheduler.evictor.drop)
            ended = [*written, *self._retell(), *self._reap()]
            work = None if ended else self._plan()
            self._keeper.release_dropped()
            self._idle = work is None and not ended and not self._upkeep.is_committing
        self._figures.manager_ns += self._clock_ns() - started
        match work:
            case StepWork():
                return self._run(work), True
            case ProbeWork():
                self._upkeep.probe(work, self._arrivals.is_set)
            case CommitWork():
                self._upkeep.commit(work)
            case Starved():
                return self._relieve(work), True
            case None if self._upkeep.is_committing and not ended:
                self._arrivals.wait(COMMIT_WAIT_S)
        return ended, not self._idle

    def _plan(self) -> Work | None:
        for conversation in self._scheduler.waiting:
            if conversation.turn is not None and conversation.turn.rollback is not None:
                self._keeper.roll_back(conversation)
        return self._maintenance.urgent() or self._scheduler.plan(self._clock_ns()) or self._maintenance.idle()

    def _run(self, work: StepWork) -> list[Event]:
        started = self._clock_ns()
        try:
            result = self._executor.run(work.plan)
        except BaseException:
            with self._lock:
                self._scheduler.cancel(work)
            raise
        ran = self._clock_ns()
        self._figures.execute_ns += ran - started
        with self._lock:
            self._scheduler.settle(work, ran - started)
            events = self._accept(work, result, ran)
            self._maintenance.step_done(work.conversations, result.signals, work.plan.num_tokens)
            self._keeper.release_dropped()
        self._figures.count_step(work.plan.num_tokens, len(result.tokens))
        self._figures.manager_ns += self._clock_ns() - ran
        return events

    def _accept(self, work: StepWork, result: StepResult, now_ns: int) -> list[Event]:
        events: list[Event] = []
        sampled = {token.handle: token for token in result.tokens}
        for conversation in work.conversations:
            turn = conversation.turn
            assert turn is not None
            token = sampled.get(conversation.handle)
            if token is not None:
                events += accept_token(conversation, token, self._eos, self._max_seq_len, now_ns)
            elif conversation.num_pending(self._manager[conversation.handle].num_tokens) == 0:
                turn.end_reason = "length"  # max_tokens 0: the prompt was all
            if turn.end_reason is not None:
                events += self._end_turn(conversation)
        return events

    def _end_turn(self, conversation: Conversation) -> list[Event]:
        turn = conversation.turn
        assert turn is not None
        self._maintenance.turn_ended(conversation)
        if self._observer is not None:
            self._observer.turn_ended(conversation)
        now_ns = self._clock_ns()
        self._admission.turn_took((now_ns - turn.first_scheduled_ns) / 1e9)
        event = finish_event(conversation, turn, self._manager.stats(conversation.handle))
        self._keeper.close_turn(conversation, now_ns)
        if conversation.handle in self._manager:
            self._checkpoints.changed(conversation)
        elif not conversation.end_requested:  # else that was said when it was asked for
            self._checkpoints.discard(conversation)
        return self._checkpoints.hold(conversation, event)

    def _retell(self) -> list[Event]:
        """Answers of turns that had been taken; the last word waits, like a turn's own, until it is written."""
        events: list[Event] = []
        for one in self._retellings:
            conversation = one.conversation
            if conversation.end_requested:  # since it was asked for
                events += one.events(KvStats())
                continue
            *text, end = one.events(self._manager.stats(conversation.handle))
            self._checkpoints.changed(conversation)
            events += [*text, *self._checkpoints.hold(conversation, end)]
        self._retellings.clear()
        return events

    def _relieve(self, starved: Starved) -> list[Event]:
        """Nobody could get pages: compress what can be, else an idle conversation gives up its cache, else the newest
        turn does or is refused."""
        if self._upkeep.finish():
            return []
        with self._lock:
            work = self._maintenance.compress() or self._maintenance.reclaim()
            if work is None and not self._keeper.make_room():
                if starved.alone:
                    return self._fail(starved.victim, starved.error)
                self._scheduler.preempt(starved.victim)
                self._keeper.release_dropped()
        if isinstance(work, ProbeWork):
            self._upkeep.probe(work, self._arrivals.is_set)
        elif work is not None:
            self._upkeep.commit(work)
        return []

    def _fail(self, conversation: Conversation, error: Exception) -> list[Event]:
        turn = conversation.turn
        assert turn is not None
        self._keeper.undo_turn(conversation, self._clock_ns())
        return [ErrorEvent(turn.request.request_id, error)]

    # Endings

    def _reap(self) -> list[Event]:
        """Cancelled turns and ended conversations, at a step boundary."""
        events: list[Event] = []
        for conversation in self._table.with_turn:
            turn = conversation.turn
            if turn is not None and turn.cancelled:
                turn.end_reason = "cancelled"
                events.append(finish_event(conversation, turn, self._manager.stats(conversation.handle)))
                self._keeper.undo_turn(conversation, self._clock_ns())
        for conversation in list(self._table.ending.values()):
            if conversation.turn is None:
                self._keeper.remove(conversation)
        return events
