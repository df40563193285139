"""`Turns` against a loop that the test drives by hand: every request gets exactly one final response."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from runtime.errors import ConversationBusyError, OutOfMemoryError, UnknownConversationError
from runtime.request import ErrorEvent, Event, FinishEvent, KvStats, Request, TextEvent, TurnStats
from runtime.serving.contract import INPUTS
from runtime.serving.responses import OutputTensor
from runtime.serving.tensors import InputTensor, Value
from runtime.serving.turns import Turns, error_code, process_stats


@dataclass(frozen=True)
class Stats:
    idle: bool = True


class HandLoop:
    """Keeps what it was asked; the test emits events."""

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Event], None]] = {}
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.refuse: Exception | None = None
        self.closed_with: float | None = None

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if self.refuse:
            raise self.refuse
        self.requests.append(request)
        self.listeners[request.request_id] = on_event

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.emit(FinishEvent(request_id, "cancelled", "", TurnStats()))

    def end_conversation(self, conversation_id: str, tenant: str = "") -> None:
        if conversation_id == "unknown":
            raise UnknownConversationError("conversation_id: got 'unknown'")
        self.ended.append(tenant + conversation_id)

    def stats(self) -> Stats:
        return Stats()

    def kv_stats(self, conversation_id: str, tenant: str = "") -> KvStats:
        if conversation_id == "new":
            raise UnknownConversationError("conversation_id: got 'new'")
        return KvStats(kv_bytes=5)

    def close(self, grace_s: float) -> None:
        self.closed_with = grace_s

    def emit(self, event: Event) -> None:
        self.listeners[event.request_id](event)


class ListSink:
    """Responses in a list; checks that nothing follows the final one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[tuple[Value, ...]] = []
        self.outputs: dict[str, tuple[Value, ...]] = {}
        self.error: tuple[str, str] | None = None
        self.done = threading.Event()
        self.gone = False
        self.broken = False
        self.asked = 0

    def send(self, outputs: tuple[OutputTensor, ...], final: bool) -> None:
        assert not self.done.is_set(), "a response after the final one"
        if self.broken:
            raise ConnectionError("peer left")
        self.outputs = {o.name: o.values for o in outputs}
        text = self.outputs["text_output"][0]
        assert isinstance(text, bytes)
        self.texts.append(text.decode())
        self.logprobs.append(self.outputs.get("output_log_probs", ()))
        if final:
            self.done.set()

    def fail(self, code: str, message: str) -> None:
        assert not self.done.is_set(), "an error after the final response"
        self.error = (code, message)
        self.done.set()

    def is_cancelled(self) -> bool:
        assert not self.done.is_set(), "a question after the final response kills the server"
        self.asked += 1
        return self.gone


@pytest.fixture
def loop() -> HandLoop:
    return HandLoop()


@pytest.fixture
def turns(loop: HandLoop):
    made = Turns(loop, None, log=lambda _: None)
    yield made
    made.close(0.0)


def one(name: str, value: Value) -> InputTensor:
    return InputTensor(name, INPUTS[name].dtype, (1,), [value])


def start(turns: Turns, *tensors: InputTensor, client_id: str = "c", tenant: str = "") -> ListSink:
    sink = ListSink()
    parameters = {"commitkv-tenant": tenant} if tenant else {}
    turns.handle([one("text_input", b"hello"), *tensors], client_id, sink, parameters)
    return sink


def finish(loop: HandLoop, number: int = 0) -> None:
    loop.emit(FinishEvent(loop.requests[number].request_id, "stop", "", TurnStats(kv=KvStats(kv_bytes=9))))


def test_streaming_sends_a_response_per_piece(loop: HandLoop, turns: Turns) -> None:
    sink = start(turns, one("streaming", True))
    for piece in ("a", "b"):
        loop.emit(TextEvent(loop.requests[0].request_id, piece))
    finish(loop)
    assert sink.done.wait(5)
    assert sink.texts == ["a", "b", ""]
    assert sink.outputs["kv_bytes"] == (9,)


def test_without_streaming_there_is_one_response(loop: HandLoop, turns: Turns) -> None:
    sink = start(turns)
    for piece in ("a", "b"):
        loop.emit(TextEvent(loop.requests[0].request_id, piece))
    finish(loop)
    assert sink.done.wait(5)
    assert sink.texts == ["ab"]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_input_comes_first_when_it_is_not_excluded(loop: HandLoop, turns: Turns, streaming: bool) -> None:
    sink = start(turns, one("sampling_param_exclude_input_from_output", False), one("streaming", streaming))
    loop.emit(TextEvent(loop.requests[0].request_id, "!"))
    finish(loop)
    assert sink.done.wait(5)
    assert "".join(sink.texts) == "hello!"


def test_two_requests_with_one_client_id_do_not_mix(loop: HandLoop, turns: Turns) -> None:
    first, second = start(turns), start(turns)
    assert loop.requests[0].request_id != loop.requests[1].request_id
    loop.emit(TextEvent(loop.requests[1].request_id, "second"))
    finish(loop, 1)
    finish(loop, 0)
    assert first.done.wait(5) and second.done.wait(5)
    assert (first.texts, second.texts) == ([""], ["second"])


def test_a_client_that_leaves_cancels_its_turn(loop: HandLoop, turns: Turns) -> None:
    sink = start(turns, one("streaming", True))
    sink.gone = True
    assert sink.done.wait(5)
    assert loop.cancelled == [loop.requests[0].request_id]
    assert sink.error is not None and sink.error[0] == "CANCELLED"


def test_a_client_that_leaves_before_its_turn_is_queued_cancels_it_too(loop: HandLoop, turns: Turns) -> None:
    sink, submit = ListSink(), loop.submit

    def slow_submit(request: Request, on_event: Callable[[Event], None]) -> None:
        sink.gone = True
        time.sleep(0.3)  # the question whether the client has left comes in between
        loop.cancelled.clear()
        submit(request, on_event)

    def cancel(request_id: str) -> None:
        loop.cancelled.append(request_id)
        if request_id in loop.listeners:
            loop.emit(FinishEvent(request_id, "cancelled", "", TurnStats()))

    loop.submit, loop.cancel = slow_submit, cancel  # type: ignore[method-assign]
    turns.handle([one("text_input", b"hello")], "c", sink)
    assert sink.done.wait(5) and sink.error is not None and sink.error[0] == "CANCELLED"
    assert loop.cancelled == [loop.requests[0].request_id]


def test_a_fault_of_ours_is_told_and_leaves_nothing_behind(loop: HandLoop) -> None:
    log: list[str] = []
    turns = Turns(loop, None, log.append)
    loop.refuse = ZeroDivisionError("engine")
    sink = start(turns)
    assert sink.error is not None and sink.error[0] == "INTERNAL" and "ZeroDivisionError" in sink.error[1]
    time.sleep(0.2)  # a question for cancellation now would kill a server
    turns.close(0.0)
    assert "ZeroDivisionError" in log[0]


def test_cancellation_is_asked_until_the_last_response_and_never_beside_it(loop: HandLoop, turns: Turns) -> None:
    class SlowSink(ListSink):
        inside = 0
        overlaps = 0

        def send(self, outputs: tuple[OutputTensor, ...], final: bool) -> None:
            self.inside += 1
            time.sleep(0.2)
            self.overlaps += self.inside > 1
            self.inside -= 1
            super().send(outputs, final)

        def is_cancelled(self) -> bool:
            self.inside += 1
            time.sleep(0.02)
            self.overlaps += self.inside > 1
            self.inside -= 1
            return super().is_cancelled()

    sink = SlowSink()
    turns.handle([one("text_input", b"hello")], "c", sink)
    time.sleep(0.3)
    finish(loop)
    assert sink.done.wait(5)
    asked = sink.asked
    time.sleep(0.2)
    assert asked > 1 and sink.asked == asked and sink.overlaps == 0


def test_stop_cancels_by_client_id_and_keeps_the_text(loop: HandLoop, turns: Turns) -> None:
    sink, other, stop = start(turns, one("return_finish_reason", True)), start(turns, client_id="other"), ListSink()
    loop.emit(TextEvent(loop.requests[0].request_id, "half"))
    turns.handle([one("stop", True)], "c", stop)
    assert sink.done.wait(5) and stop.done.is_set() and not other.done.is_set()
    assert sink.texts == ["half"] and sink.outputs["finish_reason"] == (b"cancelled",)
    finish(loop, 1)
    assert other.done.wait(5)
    late = ListSink()
    turns.handle([one("stop", True)], "c", late)
    assert late.error is not None and late.error[0] == "NOT_FOUND"


def test_stop_reaches_every_request_of_that_id_and_no_other_tenants(loop: HandLoop, turns: Turns) -> None:
    first, second = start(turns, tenant="a"), start(turns, tenant="a")
    others = start(turns, tenant="b")
    stop, nobody = ListSink(), ListSink()
    turns.handle([one("stop", True)], "c", nobody)
    assert nobody.error is not None and nobody.error[0] == "NOT_FOUND"
    turns.handle([one("stop", True)], "c", stop, {"commitkv_tenant": "a"})
    assert first.done.wait(5) and second.done.wait(5) and not others.done.is_set()
    finish(loop, 2)
    assert others.done.wait(5) and others.error is None


def test_log_probabilities_are_one_per_token_however_the_text_comes(loop: HandLoop, turns: Turns) -> None:
    asked = (one("return_log_probs", True), one("return_cumulative_logprob", True))
    streamed, whole = start(turns, one("streaming", True), *asked), start(turns, *asked)
    for request in loop.requests:
        loop.emit(TextEvent(request.request_id, "a", -0.5, (-0.5,)))
        loop.emit(TextEvent(request.request_id, "b", -2.0, (-0.5, -1.0)))
        loop.emit(FinishEvent(request.request_id, "stop", "", TurnStats(), -2.25, (-0.25,)))
    assert streamed.done.wait(5) and whole.done.wait(5)
    assert streamed.logprobs == [(-0.5,), (-0.5, -1.0), (-0.25,)]
    assert whole.logprobs == [(-0.5, -0.5, -1.0, -0.25)]
    assert whole.outputs["cumulative_logprob"] == streamed.outputs["cumulative_logprob"] == (-2.25,)


@pytest.mark.parametrize("streaming", [True, False])
def test_cancelling_with_log_probabilities_answers_once(loop: HandLoop, turns: Turns, streaming: bool) -> None:
    sink = start(turns, one("streaming", streaming), one("return_log_probs", True), one("return_finish_reason", True))
    loop.emit(TextEvent(loop.requests[0].request_id, "half", -1.0, (-1.0,)))
    stop = ListSink()
    turns.handle([one("stop", True)], "c", stop)
    assert sink.done.wait(5) and sink.outputs["finish_reason"] == (b"cancelled",)
    assert [p for part in sink.logprobs for p in part] == [-1.0]


def test_a_new_conversation_gets_an_id_that_every_response_tells(loop: HandLoop, turns: Turns) -> None:
    sinks = [start(turns, one("conversation_id", b""), one("streaming", True)) for _ in range(2)]
    ids = [request.conversation_id for request in loop.requests]
    assert None not in ids and len(set(ids)) == 2 and all(len(drawn or "") > 20 for drawn in ids)
    for number, sink in enumerate(sinks):
        finish(loop, number)
        assert sink.done.wait(5) and sink.outputs["conversation_id"] == ((ids[number] or "").encode(),)
    named = start(turns, one("conversation_id", b"mine"))
    finish(loop, 2)
    assert named.done.wait(5) and "conversation_id" not in named.outputs


def test_ids_are_checked_wherever_a_client_names_one(loop: HandLoop) -> None:
    class NoIds:
        def new_id(self, tenant: str) -> str:
            return f"{tenant}-1"

        def check(self, tenant: str, conversation_id: str) -> None:
            raise UnknownConversationError(f"conversation_id: got {conversation_id!r} of {tenant}")

    turns = Turns(loop, None, log=lambda _: None, ids=NoIds())
    start(turns, one("conversation_id", b""), tenant="acme")
    assert loop.requests[0].conversation_id == "acme-1"
    for extra in ([one("text_input", b"x")], [one("conversation_end", True)], [one("stats", True)]):
        sink = ListSink()
        turns.handle([*extra, one("conversation_id", b"guess")], "", sink, {"commitkv_tenant": "acme"})
        assert sink.error == ("NOT_FOUND", "conversation_id: got 'guess' of acme")
    turns.close(0.0)


def test_a_broken_connection_cancels_only_its_turn(loop: HandLoop, turns: Turns) -> None:
    broken, healthy = start(turns, one("streaming", True)), start(turns)
    broken.broken = True
    loop.emit(TextEvent(loop.requests[0].request_id, "x"))
    finish(loop, 1)
    assert healthy.done.wait(5)
    deadline = time.monotonic() + 5
    while not loop.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.cancelled == [loop.requests[0].request_id]
    assert broken.done.wait(5) and broken.error is not None and broken.error[0] == "INTERNAL"


def test_errors_reach_the_client_with_their_text(loop: HandLoop, turns: Turns) -> None:
    loop.refuse = ConversationBusyError("conversation_id: busy")
    assert start(turns).error == ("ALREADY_EXISTS", "conversation_id: busy")
    loop.refuse = None
    sink = start(turns)
    loop.emit(ErrorEvent(loop.requests[0].request_id, OutOfMemoryError("KV memory: full")))
    assert sink.done.wait(5)
    assert sink.error == ("UNAVAILABLE", "KV memory: full")
    bad = ListSink()
    turns.handle([one("text_input", b"")], "", bad)
    assert bad.error is not None and bad.error[0] == "INVALID_ARG"
    assert error_code(ValueError("x")) == "INTERNAL"


def test_the_default_policy_is_for_conversations_that_begin(loop: HandLoop) -> None:
    turns = Turns(loop, "commitkv", log=lambda _: None)
    start(turns)
    start(turns, one("conversation_id", b"new"))
    start(turns, one("conversation_id", b"held"))
    start(turns, one("conversation_id", b"new"), one("kv_policy", b"full"))
    turns.close(0.0)  # which of them begin is the engine's to say
    assert [request.policy for request in loop.requests] == [None, None, None, "full"]
    assert {request.default_policy for request in loop.requests} == {"commitkv"}


def test_ending_and_asking_run_no_turn(loop: HandLoop, turns: Turns) -> None:
    end, unknown, stats = ListSink(), ListSink(), ListSink()
    turns.handle([one("conversation_end", True), one("conversation_id", b"a")], "", end)
    turns.handle([one("conversation_end", True), one("conversation_id", b"unknown")], "", unknown)
    turns.handle([one("stats", True), one("conversation_id", b"a")], "", stats)
    named = [one("conversation_end", True), one("conversation_id", b"a")]
    turns.handle(named, "", ListSink(), {"commitkv_tenant": "t"})
    assert end.done.is_set() and loop.ended == ["a", "ta"]
    assert unknown.error is not None and unknown.error[0] == "NOT_FOUND"
    assert stats.outputs["kv_bytes"] == (5,) and not loop.requests


def test_close_answers_what_is_left(loop: HandLoop) -> None:
    turns = Turns(loop, None, log=lambda _: None)
    sink = start(turns)
    turns.close(3.0)
    assert loop.closed_with == 3.0
    assert sink.error is not None and sink.error[0] == "UNAVAILABLE"


def test_process_stats_are_plausible() -> None:
    stats = process_stats()
    assert 2**20 < stats["rss_bytes"] <= stats["peak_rss_bytes"] < 2**40
