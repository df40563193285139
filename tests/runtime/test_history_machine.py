"""Random chats over an engine with little memory: edited, cut, branched, cancelled, with system prompts in common."""

from __future__ import annotations

from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_engine import CharTokenizer, PlainChat, drain, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime.config import RuntimeConfig
from runtime.conversation import Conversation
from runtime.errors import CommitKVError
from runtime.request import Event, FinishEvent, Message, Request, SamplingParams, TextEvent

SYSTEMS = (None, "s" * 30, "s" * 30 + "t" * 30, "u" * 21)
WHO = st.sampled_from([("a", "x"), ("b", "x"), ("a", "y")])  # conversation, tenant
STEPS = st.sampled_from([0, 1, 2, 4, 200])
Chat = tuple[Message, ...]


def chat_of(conversation: Conversation) -> Chat:
    return tuple(Message(m.role, m.content) for m in conversation.messages)


class HistoryMachine(RuleBasedStateMachine):
    """What the engine holds is always what its clients said and heard, and its text follows from it."""

    @initialize(pages=st.integers(30, 90), lossless=st.booleans(), batch=st.integers(2, 60))
    def start(self, pages: int, lossless: bool, batch: int) -> None:
        self.patch = mock.patch.dict(registry.ALL_POLICIES, policies_for_tests())
        self.patch.start()
        _, _, probe = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20))
        total = probe.budget.headroom_bytes + pages * probe.page_layout.page_bytes
        config = RuntimeConfig(
            kv_memory_bytes=total, tokens_per_step=batch, probe_tokens_per_step=10, max_conversations=6, max_waiting=6
        )
        self.lossless = lossless
        self.engine, self.executor, self.manager = make_engine(config, policy="commitkv", lossless=lossless)
        self.open: dict[str, tuple[Conversation, Chat, tuple[object, ...]]] = {}
        self.heard: dict[str, list[str]] = {}
        self.chats: list[Chat] = []
        self.count = 0

    def submit(self, request: Request, chat: Chat | None) -> None:
        table = self.engine._table
        before = {c.handle: (list(c.tokens), c.messages, c.ended) for c in table}
        try:
            self.engine.submit(request)
        except CommitKVError as error:
            assert len(str(error)) > 20
            assert {c.handle: (list(c.tokens), c.messages, c.ended) for c in table} == before, "a refusal left a trace"
            return
        conversation = table.of_request(request.request_id)
        assert conversation is not None and conversation.tenant == request.tenant
        if chat is None:
            chat = chat_of(conversation)
        assert chat_of(conversation) == chat
        self.check_tokens(conversation)
        self.open[request.request_id] = conversation, chat, before.get(conversation.handle, ([], (), True))
        self.heard[request.request_id] = []

    @rule(
        who=WHO,
        system=st.sampled_from(SYSTEMS),
        length=st.integers(1, 60),
        policy=st.sampled_from([None, "full", "streaming-llm"]),
        steps=STEPS,
    )
    def go_on(self, who: tuple[str, str], system: str | None, length: int, policy: str | None, steps: int) -> None:
        """The next user message alone."""
        name, tenant = who
        self.count += 1
        known = self.engine._table.find(tenant, name)
        request = Request(
            f"r{self.count}",
            "ab cd"[self.count % 5] * length,
            SamplingParams(max_tokens=self.count % 20),
            name,
            system_prompt=None if known is not None and known.tokens else system,
            policy=policy,
            tenant=tenant,
        )
        self.submit(request, None)
        self.step(steps)

    @rule(data=st.data(), who=WHO, named=st.booleans(), max_tokens=st.integers(0, 25), steps=STEPS)
    def send_chat(self, data: st.DataObject, who: tuple[str, str], named: bool, max_tokens: int, steps: int) -> None:
        """All of a chat: what was held under an id or somewhere else, changed at one place and cut at another."""
        self.count += 1
        name, tenant = who if named else (None, who[1])
        known = self.engine._table.find(*reversed(who))
        choices: list[Chat] = [(), *self.chats[-4:]]
        if known is not None:
            choices += [chat_of(known)] * 4
        chat = list(data.draw(st.sampled_from(choices)))
        change = data.draw(st.sampled_from(["nothing", "edit", "cut", "both"]))
        if chat and change in ("edit", "both"):
            place = data.draw(st.integers(0, len(chat) - 1))
            chat[place] = Message(chat[place].role, chat[place].content + data.draw(st.sampled_from(["!", "e" * 9])))
        if chat and change in ("cut", "both"):
            del chat[data.draw(st.integers(1, len(chat))) :]
        if not chat:
            system = data.draw(st.sampled_from(SYSTEMS))
            chat = [] if system is None else [Message("system", system)]
        if chat[-1:] == [] or chat[-1].role != "user":
            chat.append(Message("user", "fgh"[self.count % 3] * data.draw(st.integers(1, 50))))
        sampling = SamplingParams(max_tokens=max_tokens)
        self.submit(Request(f"r{self.count}", "", sampling, name, messages=tuple(chat), tenant=tenant), tuple(chat))
        self.step(steps)

    @rule(steps=STEPS)
    def step(self, steps: int) -> None:
        for _ in range(steps):
            events, worked = self.engine.step()
            self.note(events)
            self.manager.check_invariants()
            if not worked:
                return

    @rule()
    def rest(self) -> None:
        self.note(drain(self.engine))
        assert not self.open, "a turn was forgotten"

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))))

    @rule(who=WHO)
    def end(self, who: tuple[str, str]) -> None:
        try:
            self.engine.end_conversation(*who)
        except CommitKVError as error:
            assert who[0] in str(error)

    @rule(now=st.integers(0, 3))
    def break_device(self, now: int) -> None:
        if now:
            return
        self.executor.fail_next = True
        try:
            self.note(self.engine.step()[0])
        except RuntimeError as error:
            self.note(self.engine.abort(error))
        self.executor.fail_next = False

    def note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TextEvent):
                self.heard[event.request_id].append(event.text)
                continue
            conversation, chat, before = self.open.pop(event.request_id)
            heard = "".join(self.heard.pop(event.request_id))
            if isinstance(event, FinishEvent) and event.reason != "cancelled":
                self.chats.append((*chat, Message("assistant", heard)))
                assert chat_of(conversation) == self.chats[-1]
                self.check_tokens(conversation)
                self.check_text(conversation, event.stats.generated_tokens)
                stats = event.stats
                assert stats.reused_tokens < len(conversation.tokens)  # recomputed may be more, after preemptions
                assert bool(stats.recomputed_tokens) == bool(stats.recomputed_reason)
            elif conversation.handle in self.manager and conversation.turn is None:
                assert (list(conversation.tokens), conversation.messages, conversation.ended) == before, (
                    "undone by half"
                )

    def check_tokens(self, conversation: Conversation) -> None:
        """Each message's tokens are its text; an answer's may be those that were generated for it."""
        encode, chat = CharTokenizer().encode, PlainChat()
        messages = list(conversation.messages)
        system = messages.pop(0).content if messages[0].role == "system" else None
        end = 0
        for i, message in enumerate(messages):
            tokens = conversation.tokens[end : message.end]
            end = message.end
            if message.role == "user":
                turn = chat.first_turn(system, message.content) if i == 0 else chat.next_turn(message.content, False)
                assert tokens == encode(turn.text)[0]
            else:
                generated = "".join(chr(32 + t) for t in tokens if t)
                assert generated == message.content or tokens == encode(message.content)[0]
        assert end == len(conversation.tokens)

    def check_text(self, conversation: Conversation, num_generated: int) -> None:
        """Every generated token follows from those before it, whatever was shared, rolled back or recomputed."""
        if not (conversation.policy.name == "full" or self.lossless):
            return
        tokens = [(0, position, token) for position, token in enumerate(conversation.tokens)]
        for i in range(len(tokens) - num_generated, len(tokens)):
            assert tokens[i][2] == self.executor._next(tokens[:i], ()), f"token {i} is wrong"

    @invariant()
    def memory_adds_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        assert self.manager.budget.used_bytes <= self.manager.budget.total_bytes
        table = self.engine._table
        shared = self.manager.shared
        pages = sum(len(self.manager[handle].pages) - shared.num_borrowed(handle) for handle in table.by_handle)
        blocks = sum(self.manager[handle].blocks.num_blocks for handle in table.by_handle)
        if not blocks:
            assert pages * self.manager.page_layout.page_bytes == self.manager.budget.used_bytes, "a page counts twice"
        holders: dict[int, set[str]] = {}
        for handle, conversation in table.by_handle.items():
            for page in self.manager[handle].pages:
                holders.setdefault(page.page_id, set()).add(conversation.tenant)
        assert all(len(tenants) == 1 for tenants in holders.values()), "a page is shared across tenants"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for conversation in list(self.engine._table):
            if not conversation.end_requested:
                self.engine._keeper.retire(conversation)
        self.engine._wake()
        self.note(drain(self.engine))
        self.manager.check_invariants()
        assert self.manager.budget.used_bytes == 0, "memory is not back to zero after the last conversation"
        assert not self.manager.shared.page_ids and len(self.engine._table.chats) == 0
        assert not self.executor.slots.keys() - {s for s in self.executor.slots if self.executor.slots[s][1] < 0}
        assert not self.executor.entries
        self.patch.stop()


TestHistoryMachine = HistoryMachine.TestCase
TestHistoryMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
