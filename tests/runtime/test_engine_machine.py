"""Random life of an engine with little memory: nothing leaks, nothing is lost, every answer is right, tenants stay
apart, and the limits on conversations hold."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_engine import SlowWorker, drain, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime import maintenance
from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.errors import CommitKVError, UnknownConversationError
from runtime.request import ErrorEvent, Event, Request, SamplingParams, TextEvent

TENANTS = ("", "t1", "t2")
NAMES = ("a", "b", "c", "d", "e", "f")
MAX_IDLE_S = 60
SECOND = 1_000_000_000


class EngineMachine(RuleBasedStateMachine):
    """Where nothing is dropped the text must not change either: each token is recomputed from those before it."""

    @initialize(
        pages=st.integers(9, 60),
        lossless=st.booleans(),
        batch=st.integers(2, 40),
        places=st.sampled_from([0, 1, 2]),
        step_ms=st.sampled_from([0.0, 0.01]),
        work=st.tuples(st.sampled_from([None, 0, 3, 12, 60]), st.sampled_from([1, 2, maintenance.MOST_COMMITS])),
    )
    def start(
        self, pages: int, lossless: bool, batch: int, places: int, step_ms: float, work: tuple[int | None, int]
    ) -> None:
        looks, most_commits = work
        self.patch = contextlib.ExitStack()
        self.patch.enter_context(mock.patch.dict(registry.ALL_POLICIES, policies_for_tests()))
        self.patch.enter_context(mock.patch.object(maintenance, "MOST_COMMITS", most_commits))
        _, _, probe = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
        total = probe.budget.headroom_bytes + pages * probe.page_layout.page_bytes
        config = RuntimeConfig(
            kv_memory_bytes=total, tokens_per_step=batch, probe_tokens_per_step=10, max_conversations=5, max_waiting=6,
            max_tenant_conversations=3, max_tenant_waiting=4, max_tenant_running=places, max_idle_s=MAX_IDLE_S,
            max_step_ms=step_ms,
        )  # fmt: skip
        self.lossless = lossless
        self.now_ns = 0
        self.engine, self.executor, self.manager = make_engine(
            config, lossless=lossless, clock_ns=self.clock_ns, worker=None if looks is None else SlowWorker(looks)
        )
        self.open: dict[str, Conversation] = {}
        self.asked: dict[str, Request] = {}
        self.told: dict[str, str] = {}  # text so far, by request
        self.taken: dict[tuple[str, str], str] = {}  # request that was answered last, by conversation
        self.expected: dict[str, str] = {}  # answers that are to be told again, by request
        self.count = 0

    def clock_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    @rule(seconds=st.integers(1, 2 * MAX_IDLE_S))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND

    @rule(
        who=st.tuples(st.sampled_from(TENANTS), st.sampled_from([*NAMES, None])),
        priority=st.sampled_from([-1, 0, 0, 2]),
        length=st.integers(1, 90),
        max_tokens=st.integers(0, 25),
        policy=st.sampled_from([None, *registry.ALL_POLICIES, "exact"]),
        ends=st.booleans(),
    )
    def submit(
        self, who: tuple[str, str | None], priority: int, length: int, max_tokens: int, policy: str | None, ends: bool
    ) -> None:
        tenant, name = who
        self.count += 1
        request = Request(
            f"r{self.count}",
            "ab cd"[self.count % 5] * length,
            SamplingParams(max_tokens=max_tokens),
            name,
            policy=policy,
            end_conversation=ends and self.count % 3 == 0,
            tenant=tenant,
            priority=priority,
            turn_id=f"t{self.count}" if name is not None and self.count % 4 else None,
        )
        held = set(self.engine._table.by_handle)
        try:
            self.engine.submit(request)
        except UnknownConversationError as error:
            assert "was ended" in str(error) and name is not None
            assert self.engine._table.find(tenant, name) is None
        except CommitKVError as error:
            assert len(str(error)) > 20
        else:
            conversation = self.engine._table.of_request(request.request_id)
            assert conversation is not None and conversation.tenant == tenant
            assert conversation.handle not in held or conversation.conversation_id == name is not None
            self.open[request.request_id] = conversation
            self.asked[request.request_id] = request

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The last answer of a conversation was lost on the way."""
        if not self.taken:
            return
        tenant, name = data.draw(st.sampled_from(sorted(self.taken)))
        before = self.taken[tenant, name]
        self.count += 1
        request = dataclasses.replace(self.asked[before], request_id=f"r{self.count}")
        held = self.engine._table.find(tenant, name)
        tokens = None if held is None else list(held.tokens)
        with contextlib.suppress(CommitKVError):
            self.engine.submit(request)
            begun = self.engine._table.of_request(request.request_id)
            if begun is not None:
                assert begun.taken is None or begun.taken.turn_id != request.turn_id or request.turn_id is None
                self.open[request.request_id] = begun
                self.asked[request.request_id] = request
            else:
                assert held is not None and held.tokens == tokens
                self.expected[request.request_id] = self.told[before]

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            events, _ = self.engine.step()
            self.note(events)
            self.check_memory()
            longest = max((self.now_ns - c.last_used_ns for c in self.engine._table.idle.values()), default=0)
            assert longest < (MAX_IDLE_S + 1) * SECOND, "an idle conversation was forgotten"

    @rule()
    def rest(self) -> None:
        self.note(drain(self.engine))
        assert not self.open and not self.expected, "a turn was forgotten"

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))))

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from(NAMES))
    def end(self, tenant: str, name: str) -> None:
        before = self.ending_of_others(tenant)
        try:
            self.engine.end_conversation(name, tenant)
        except CommitKVError as error:
            assert name in str(error)
        self.engine._table.check_not_ended(tenant, name)
        assert self.ending_of_others(tenant) == before

    def ending_of_others(self, tenant: str) -> list[int]:
        return [c.handle for c in self.engine._table if c.tenant != tenant and c.end_requested]

    @rule()
    def break_device(self) -> None:
        self.executor.fail_next = True
        try:
            self.note(self.engine.step()[0])
        except RuntimeError as error:
            self.note(self.engine.abort(error))
        self.executor.fail_next = False

    def note(self, events: list[Event]) -> None:
        for event in events:
            self.told.setdefault(event.request_id, "")
            if isinstance(event, TextEvent):
                self.told[event.request_id] += event.text
                continue
            if event.request_id in self.expected:
                assert self.told[event.request_id] == self.expected.pop(event.request_id)
                continue
            conversation = self.open.pop(event.request_id)
            if isinstance(event, ErrorEvent):
                # What its policy leaves of a turn is a guess; what it takes in pages is known before it is taken.
                broken = "the simulated device broke" in str(event.error)
                assert broken or conversation.policy.compresses, event.error
            else:
                assert bool(event.stats.recomputed_tokens) == bool(event.stats.recomputed_reason)
                assert event.stats.kv.kv_bytes <= self.manager.budget.total_bytes
                if event.reason != "cancelled":
                    if conversation.conversation_id is not None:
                        self.taken[conversation.tenant, conversation.conversation_id] = event.request_id
                    self.check_text(conversation, event.stats.generated_tokens)

    def check_text(self, conversation: Conversation, num_generated: int) -> None:
        """Every generated token follows from the tokens before it, whatever was dropped, chunked or preempted."""
        if not (conversation.policy.name == "full" or self.lossless):
            return
        tokens = [(0, position, token) for position, token in enumerate(conversation.tokens)]
        for i in range(len(tokens) - num_generated, len(tokens)):
            assert tokens[i][2] == self.executor._next(tokens[:i], ()), f"token {i} is wrong"

    def check_memory(self) -> None:
        """They hold while nothing is under way."""
        if not self.engine._upkeep.is_committing:
            self.manager.check_invariants()

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "manager"):
            self.check_memory()
            assert self.manager.budget.used_bytes <= self.manager.budget.total_bytes

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "engine"):
            return
        held = [c for c in self.engine._table if not c.end_requested]
        assert len(held) <= 5
        for tenant in TENANTS:
            assert sum(c.tenant == tenant for c in held) <= 3
            assert self.engine._scheduler.waiting.of_tenant(tenant) <= 4 + 4, "4 that wait, 4 that were put back"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for tenant, name in itertools.product(TENANTS, NAMES):
            with contextlib.suppress(CommitKVError):
                self.engine.end_conversation(name, tenant)
        self.note(drain(self.engine))
        self.manager.check_invariants()
        assert self.manager.budget.used_bytes == 0, "memory is not back to zero after the last conversation"
        assert not self.executor.slots.keys() - {s for s in self.executor.slots if self.executor.slots[s][1] < 0}
        assert not self.executor.entries
        self.patch.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
