"""Runs a plan against a server: every session in a task of its own, the server's state sampled beside them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from perf.load.outcomes import Outcome, RunRecord, Sample, TurnOutcome
from perf.load.plan import Plan, PlannedTurn, Session
from perf.load.turn_stream import Answer, Patience, Requests, Target, turn_values

HELD_SHARE = 0.9


@dataclass(frozen=True)
class DriverOptions:
    """label: name of the run in reports.   policy: sent with the first turn of each session; None: the server's own.
    sample_s: pause between samples.   end_sessions: free every conversation on the server afterwards."""

    label: str
    policy: str | None = None
    sample_s: float = 2.0
    turn_timeout_s: float = 120.0
    end_sessions: bool = True


@dataclass
class _Open:
    """A session that has begun. left: its client left the turn before.

    full_bytes: a full cache of its history, as its last answer said.
    """

    conversation_id: str
    left: bool = False
    full_bytes: int = 0


class Driver:
    """One run of a plan. `on_turn` hears of every turn that ended."""

    def __init__(
        self, plan: Plan, options: DriverOptions, on_turn: Callable[[TurnOutcome], None] | None = None
    ) -> None:
        self._plan = plan
        self._options = options
        self._on_turn = on_turn
        self._begin_s = 0.0
        self._turns: list[TurnOutcome] = []
        self._samples: list[Sample] = []
        self._open: dict[str, _Open] = {}

    async def run(self, target: Target) -> RunRecord:
        """The whole plan. Turns still running at its end are broken off and recorded as unfinished."""
        workload = self._plan.workload
        async with Requests(target) as requests:
            self._begin_s = time.monotonic()
            tasks = [asyncio.create_task(self._hold(requests, session)) for session in self._plan.sessions]
            sampling = asyncio.create_task(self._sample_all(requests))
            done, running = await asyncio.wait(tasks, timeout=workload.duration_s)
            for task in (*running, sampling):
                task.cancel()
            await asyncio.gather(*running, sampling, return_exceptions=True)
            for task in done:
                task.result()  # a fault of the driver itself must not pass for a quiet session
            if self._options.end_sessions:
                await self._end_all(requests)
        return RunRecord(
            label=self._options.label,
            digest=self._plan.digest,
            ramp_s=workload.ramp_s,
            duration_s=workload.duration_s,
            turns=tuple(sorted(self._turns, key=lambda turn: turn.due_s)),
            samples=tuple(self._samples),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def _hold(self, requests: Requests, session: Session) -> None:
        state = _Open(session.session_id)
        due_s = session.arrival_s
        for number, turn in enumerate(session.turns):
            due_s += turn.think_s
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            self._open[session.session_id] = state
            answer = await self._take_turn(requests, session, (number, turn, due_s))
            if answer.kv:
                state.full_bytes = answer.kv["kv_full_bytes"]
            due_s = self._now_s()

    async def _take_turn(self, requests: Requests, session: Session, place: tuple[int, PlannedTurn, float]) -> Answer:
        """place: (number of the turn, the turn, when it is due)."""
        number, turn, due_s = place
        state = self._open[session.session_id]
        begins = state.full_bytes == 0
        values = turn_values(
            turn.text,
            session.session_id,
            turn.max_tokens,
            system_prompt=session.system_prompt if begins else None,
            kv_policy=self._options.policy if begins else None,
        )
        sent_s = self._now_s()
        try:
            patience = Patience(self._options.turn_timeout_s, leave_after_s=turn.cancel_after_s)
            ask = requests.ask_after_leaving if state.left else requests.ask
            answer = await ask(values, f"{session.session_id}/{number}", patience)
            state.left = answer.status == "left"
        except asyncio.CancelledError:
            self._record(TurnOutcome(
                session.session_id, number, session.kind, "unfinished", due_s, sent_s, None, self._now_s()
            ))  # fmt: skip
            raise
        self._record(self._outcome(session, (number, due_s), answer))
        return answer

    def _record(self, outcome: TurnOutcome) -> None:
        self._turns.append(outcome)
        if self._on_turn is not None:
            self._on_turn(outcome)

    def _outcome(self, session: Session, place: tuple[int, float], answer: Answer) -> TurnOutcome:
        """place: (number of the turn, when it was due)."""
        times = answer.piece_s
        outcome: Outcome = answer.status
        turn = answer.turn
        return TurnOutcome(
            session_id=session.session_id,
            number=place[0],
            kind=session.kind,
            outcome=outcome,
            due_s=place[1],
            sent_s=answer.sent_s - self._begin_s,
            first_s=times[0] - self._begin_s if times else None,
            end_s=answer.end_s - self._begin_s,
            gaps_s=tuple(b - a for a, b in itertools.pairwise(times)),
            prompt_tokens=int(turn.get("prompt_tokens", 0)),
            generated_tokens=int(turn.get("generated_tokens", 0)),
            reused_tokens=int(turn.get("reused_tokens", 0)),
            recomputed_tokens=int(turn.get("recomputed_tokens", 0)),
            kv_bytes=answer.kv.get("kv_bytes", 0),
            error=answer.error,
        )

    async def _sample_all(self, requests: Requests) -> None:
        """Until cancelled; a server that reports no statistics gives no samples."""
        while True:
            at_s = self._now_s()
            answer = await requests.stats()
            engine = answer.stats.get("engine")
            if engine is None:
                return
            held = await asyncio.gather(*(self._is_held(requests, state) for state in list(self._open.values())))
            process = answer.stats.get("process", {})
            self._samples.append(Sample(
                at_s=at_s, open=len(held), held=sum(held), running=int(engine["running"]),
                waiting=int(engine["waiting"]), kv_bytes=int(engine["total_kv_bytes"]),
                commits=int(engine["commits"]), probes=int(engine["probes"]),
                rss_bytes=int(process.get("rss_bytes", 0)),
            ))  # fmt: skip
            await asyncio.sleep(max(0.0, self._options.sample_s - (self._now_s() - at_s)))

    async def _is_held(self, requests: Requests, state: _Open) -> bool:
        """Whether the cache stands for the whole history, as far as answered turns made it."""
        if state.full_bytes == 0:
            return False
        kv = (await requests.stats(state.conversation_id)).kv
        return kv.get("kv_full_bytes", 0) >= HELD_SHARE * state.full_bytes

    async def _end_all(self, requests: Requests) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*(requests.end(name) for name in self._open))
