"""Random life of an engine with little memory: nothing leaks, nothing is lost, every answer is right."""

from __future__ import annotations

from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_engine import drain, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.errors import CommitKVError
from runtime.request import Event, FinishEvent, Request, SamplingParams, TextEvent


class EngineMachine(RuleBasedStateMachine):
    """Where nothing is dropped the text must not change either: each token is recomputed from those before it."""

    @initialize(pages=st.integers(9, 60), lossless=st.booleans(), batch=st.integers(2, 40))
    def start(self, pages: int, lossless: bool, batch: int) -> None:
        self.patch = mock.patch.dict(registry.ALL_POLICIES, policies_for_tests())
        self.patch.start()
        _, _, probe = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
        total = probe.budget.headroom_bytes + pages * probe.page_layout.page_bytes
        config = RuntimeConfig(
            kv_memory_bytes=total, tokens_per_step=batch, probe_tokens_per_step=10, max_conversations=5, max_waiting=6
        )
        self.lossless = lossless
        self.engine, self.executor, self.manager = make_engine(config, lossless=lossless)
        self.open: dict[str, Conversation] = {}
        self.count = 0

    @rule(
        name=st.sampled_from(["a", "b", "c", "d", "e", "f", None]),
        length=st.integers(1, 90),
        max_tokens=st.integers(0, 25),
        policy=st.sampled_from([None, *registry.ALL_POLICIES]),
        ends=st.booleans(),
    )
    def submit(self, name: str | None, length: int, max_tokens: int, policy: str | None, ends: bool) -> None:
        self.count += 1
        request = Request(
            f"r{self.count}",
            "ab cd"[self.count % 5] * length,
            SamplingParams(max_tokens=max_tokens),
            name,
            policy=policy,
            end_conversation=ends and self.count % 3 == 0,
        )
        try:
            self.engine.submit(request)
        except CommitKVError as error:
            assert len(str(error)) > 20
        else:
            self.open[request.request_id] = self.engine._table.of_request(request.request_id)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            events, _ = self.engine.step()
            self.note(events)
            self.manager.check_invariants()

    @rule()
    def rest(self) -> None:
        self.note(drain(self.engine))
        assert not self.open, "a turn was forgotten"

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))))

    @rule(name=st.sampled_from(["a", "b", "c", "d"]))
    def end(self, name: str) -> None:
        try:
            self.engine.end_conversation(name)
        except CommitKVError as error:
            assert name in str(error)

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
            if isinstance(event, TextEvent):
                continue
            conversation = self.open.pop(event.request_id)
            if isinstance(event, FinishEvent):
                assert event.stats.kv.kv_bytes <= self.manager.budget.total_bytes
                if event.reason != "cancelled":
                    self.check_text(conversation, event.stats.generated_tokens)

    def check_text(self, conversation: Conversation, num_generated: int) -> None:
        """Every generated token follows from the tokens before it, whatever was dropped, chunked or preempted."""
        if not (conversation.policy.name == "full" or self.lossless):
            return
        tokens = [(0, position, token) for position, token in enumerate(conversation.tokens)]
        for i in range(len(tokens) - num_generated, len(tokens)):
            assert tokens[i][2] == self.executor._next(tokens[:i], ()), f"token {i} is wrong"

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants()
            assert self.manager.budget.used_bytes <= self.manager.budget.total_bytes

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in "abcdef":
            try:
                self.engine.end_conversation(name)
            except CommitKVError:
                continue
        self.note(drain(self.engine))
        self.manager.check_invariants()
        assert self.manager.budget.used_bytes == 0, "memory is not back to zero after the last conversation"
        assert not self.executor.slots.keys() - {s for s in self.executor.slots if self.executor.slots[s][1] < 0}
        assert not self.executor.entries
        self.patch.stop()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
