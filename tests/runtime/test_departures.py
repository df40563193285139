"""Clients that leave and conversations that nobody speaks to cost nothing that stays.

The whole stack below Triton runs: `Turns`, the loop's thread, an engine with a tiny model on its torch executor.
"""

from __future__ import annotations

import gc
import mmap
import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kernel_engine import CONFIG, POLICIES, SPEC, make_engine
from simulated_engine import drain, last_of, text_of
from simulated_engine import make_engine as make_simulated_engine

from runtime.config import RuntimeConfig
from runtime.conversation import Conversation, Turn
from runtime.engine import Engine
from runtime.errors import UnknownConversationError
from runtime.executor_torch import TorchExecutor
from runtime.kv_manager import KvManager
from runtime.kv_storage import HOST
from runtime.loop import EngineLoop
from runtime.policy.registry import ALL_POLICIES
from runtime.request import FinishEvent, Request, SamplingParams
from runtime.serving.contract import INPUTS
from runtime.serving.responses import OutputTensor
from runtime.serving.tensors import InputTensor, Value
from runtime.serving.turns import Turns

WAIT_S = 60.0
AT_ONCE = 8


class LeavingSink:
    """A client that leaves after so many pieces of its answer.   leave_after 0: before the first."""

    def __init__(self, leave_after: int) -> None:
        self.left_to_read = leave_after
        self.num_pieces = 0
        self.error: tuple[str, str] | None = None
        self.done = threading.Event()

    def send(self, outputs: tuple[OutputTensor, ...], final: bool) -> None:
        self.num_pieces += 1
        self.left_to_read -= 1
        if final:
            self.done.set()

    def fail(self, code: str, message: str) -> None:
        self.error = (code, message)
        self.done.set()

    def is_cancelled(self) -> bool:
        return self.left_to_read <= 0


class Stack:
    """Turns over a loop over a real engine."""

    def __init__(self, engine: Engine, manager: KvManager) -> None:
        self.engine, self.manager = engine, manager
        self.loop = EngineLoop(engine)
        self.turns = Turns(self.loop, None, log=lambda _: None)
        self._numbers = iter(range(1_000_000))

    def send(self, text: str, sink: LeavingSink, max_tokens: int, conversation: str | None = None) -> None:
        values: dict[str, Value] = {
            "text_input": text.encode(),
            "streaming": True,
            "sampling_param_max_tokens": max_tokens,
            "kv_policy": b"tiny-k8v4",
        }
        if conversation is not None:
            values["conversation_id"] = conversation.encode()
        tensors = [InputTensor(name, INPUTS[name].dtype, (1,), [value]) for name, value in values.items()]
        self.turns.handle(tensors, f"client-{next(self._numbers)}", sink)

    def at_rest(self) -> None:
        assert self.loop.wait_idle(WAIT_S)
        self.manager.check_invariants()


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    for name, policy in POLICIES.items():
        monkeypatch.setitem(ALL_POLICIES, name, policy)
    engine, manager = make_engine(
        lambda model: TorchExecutor(model.decoder, SPEC, model.limits, model.storage), "fp32", HOST
    )
    made = Stack(engine, manager)
    yield made
    made.turns.close(0.0)


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def num_alive(kind: type) -> int:
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


def test_a_client_that_leaves_during_prefill_ends_it(stack: Stack) -> None:
    """Nothing of the prompt is computed in vain once it is gone, and who stays is not disturbed."""
    alone, beside, gone = LeavingSink(1 << 30), LeavingSink(1 << 30), LeavingSink(0)
    stack.send("stay with me", alone, 30)
    assert alone.done.wait(WAIT_S)
    before = stack.engine.stats()
    stack.send("a very long prompt " * 150, gone, 50, "leaver")  # 2,850 tokens: 45 steps of prefill
    stack.send("stay with me", beside, 30)
    assert gone.done.wait(WAIT_S) and beside.done.wait(WAIT_S)
    assert gone.error is not None and gone.error[0] == "CANCELLED" and gone.num_pieces == 0
    assert beside.error is None and beside.num_pieces == alone.num_pieces
    stack.at_rest()
    after = stack.engine.stats()
    assert after.tokens - before.tokens < 2850, "the prompt was read to its end"
    assert stack.manager.budget.used_bytes == 0
    with pytest.raises(UnknownConversationError):
        stack.engine.kv_stats("leaver")


def test_memory_does_not_grow_with_cancelled_streams(stack: Stack) -> None:
    """Clients leave while they wait, during prefill and anywhere in an answer; some within a conversation."""
    random_ = random.Random(7)
    stay = LeavingSink(1 << 30)
    stack.send("we shall speak again", stay, 8, "goes-on")
    assert stay.done.wait(WAIT_S)
    stack.at_rest()
    held = stack.manager.budget.used_bytes

    def cancel(count: int) -> None:
        for _ in range(0, count, AT_ONCE):
            sinks = [LeavingSink(random_.choice((0, 0, 1, 2, 4))) for _ in range(AT_ONCE)]
            for number, sink in enumerate(sinks):
                name = ("goes-on", f"begins-{number}", None)[min(number, 2)]
                stack.send("words to be read " * random_.randrange(1, 8), sink, 200, name)
            assert all(sink.done.wait(WAIT_S) for sink in sinks)
            assert all(sink.error is not None and sink.error[0] == "CANCELLED" for sink in sinks)
        stack.at_rest()

    cancel(10 * AT_ONCE)
    turns, conversations = num_alive(Turn), num_alive(Conversation)
    grown = []
    for _ in range(3):  # a leak shows in every round; what other tests of this process left behind does not
        early = resident_bytes()
        cancel(30 * AT_ONCE)
        assert stack.manager.budget.used_bytes == held, "pages of cancelled turns stay"
        assert (num_alive(Turn), num_alive(Conversation)) == (turns, conversations) and conversations == 1
        grown.append(resident_bytes() - early)
        if grown[-1] < 4 << 20:
            break
    assert min(grown) < 4 << 20, f"resident memory grew by {grown} bytes with 240 cancelled streams each"


def test_two_hundred_idle_conversations_and_one_new() -> None:
    """The new one runs, the idle ones give up caches but not their text, and each can be gone on with."""
    config = replace(CONFIG, kv_memory_bytes=1 << 17, max_conversations=400)
    engine, _, manager = make_simulated_engine(config)
    for number in range(200):
        engine.submit(Request(f"first-{number}", f"hello {number}", SamplingParams(max_tokens=4), f"idle-{number}"))
        drain(engine)
    assert engine.stats().conversations == 200
    engine.submit(Request("new", "x" * 200, SamplingParams(max_tokens=20), "new"))
    events = drain(engine)
    assert isinstance(last_of(events, "new"), FinishEvent) and len(text_of(events, "new")) > 0
    manager.check_invariants()
    assert manager.budget.used_bytes <= manager.budget.total_bytes
    fresh, _, _ = make_simulated_engine(CONFIG)
    recomputed = []
    for number in (0, 100, 199):
        turns = ((f"first-{number}", f"hello {number}", 4), (f"again-{number}", "and now?", 12))
        for request_id, text, max_tokens in turns:
            fresh.submit(Request(request_id, text, SamplingParams(max_tokens=max_tokens), f"idle-{number}"))
            expected = text_of(drain(fresh), request_id)
        engine.submit(Request(f"again-{number}", "and now?", SamplingParams(max_tokens=12), f"idle-{number}"))
        events = drain(engine)
        assert text_of(events, f"again-{number}") == expected
        end = last_of(events, f"again-{number}")
        assert isinstance(end, FinishEvent)
        recomputed.append(end.stats.recomputed_tokens)
    assert max(recomputed) > 0, "the test is to give up caches"


def test_more_idle_conversations_than_places_end_the_oldest() -> None:
    engine, _, manager = make_simulated_engine(RuntimeConfig(kv_memory_bytes=1 << 20, max_conversations=200))
    for number in range(201):
        engine.submit(Request(f"r{number}", "hello", SamplingParams(max_tokens=2), f"c{number}"))
        drain(engine)
    assert engine.stats().conversations == 200
    with pytest.raises(UnknownConversationError, match=r"c0.*make room"):
        engine.submit(Request("back", "hello?", SamplingParams(max_tokens=2), "c0"))
    engine.submit(Request("second", "hello?", SamplingParams(max_tokens=2), "c1"))
    assert isinstance(last_of(drain(engine), "second"), FinishEvent)
    manager.check_invariants()
