"""300 fuzzed requests against the serving code, and what makes and judges them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from fuzz_engine import FuzzedServer, input_tensors

from perf.load.fuzz import FuzzReport, Reply, conversations_of, end_request, is_unnamed_chat, main, message_of
from perf.load.fuzz_cases import (
    FuzzBody,
    FuzzRequest,
    FuzzTensor,
    batches,
    grpc_requests,
    http_bodies,
    pack,
)

COUNT = 300


@pytest.fixture(scope="module")
def requests() -> list[FuzzRequest]:
    return [request for batch in batches(grpc_requests(), COUNT, seed=7) for request in batch]


@pytest.fixture
def server() -> Iterator[FuzzedServer]:
    made = FuzzedServer()
    yield made
    made.turns.close(0.0)


def test_every_fuzzed_request_is_answered_once_and_nothing_is_left(
    server: FuzzedServer, requests: list[FuzzRequest]
) -> None:
    sent = [(request, sink) for request in requests if (sink := server.send(request)) is not None]
    for request, sink in sent:
        assert sink.final.wait(20), f"no answer to {request!r}"
    codes = Counter(sink.code for _, sink in sent)
    assert codes["INTERNAL"] == 0, [(r, s.message) for r, s in sent if s.code == "INTERNAL"]
    assert codes[""] > 30 and codes["INVALID_ARG"] > 30, codes
    assert not any(sink.after_final for _, sink in sent)
    assert server.logged == []
    assert server.conversations_after(20) == 0
    assert server.engine.stats().kv.used_bytes == 0
    server.manager.check_invariants()


def test_the_same_seed_makes_the_same_requests(requests: list[FuzzRequest]) -> None:
    [again] = batches(grpc_requests(), 40, seed=3)
    [twice] = batches(grpc_requests(), 40, seed=3)
    [other] = batches(grpc_requests(), 40, seed=4)
    assert repr(again) == repr(twice) != repr(other)
    assert len({repr(request) for request in requests}) > COUNT / 2


def test_requests_reach_every_part_of_the_contract(requests: list[FuzzRequest]) -> None:
    tensors = [tensor for request in requests for tensor in request.tensors]
    names = Counter(tensor.name for tensor in tensors)
    assert {"text_input", "messages", "conversation_id", "stop", "stats", "kv_policy", "protect"} <= set(names)
    through = sum(input_tensors(request) is not None for request in requests)
    assert COUNT * 0.3 < through < COUNT


def test_bodies_are_json_or_nearly() -> None:
    [bodies] = batches(http_bodies(), 50, seed=1)
    assert {body.path for body in bodies} == {"generate", "generate_stream"}
    assert any(body.body.startswith(b"{") for body in bodies)


def test_a_message_carries_what_the_case_says() -> None:
    text = FuzzTensor("text_input", "BYTES", (1,), pack("BYTES", [b"hi"]))
    limit = FuzzTensor("sampling_param_max_tokens", "INT32", (1,), pack("INT32", [3]))
    request = FuzzRequest((text, limit), "a\ud800", "1", {"flag": True, "n": 5, "x": 0.5, "s": "t"}, ("kv_bytes",))
    message = message_of(request)
    assert [i.name for i in message.inputs] == ["text_input", "sampling_param_max_tokens"]
    assert list(message.raw_input_contents) == [b"\x02\x00\x00\x00hi", b"\x03\x00\x00\x00"]
    assert message.id == "a?" and message.parameters["n"].int64_param == 5 and message.parameters["flag"].bool_param
    assert len(message_of(replace(request, surplus=b"x")).raw_input_contents) == 3
    assert len(message_of(replace(request, lacks_last=True)).raw_input_contents) == 1


def test_conversations_are_ended_within_their_tenant() -> None:
    named = FuzzTensor("conversation_id", "BYTES", (1,), pack("BYTES", [b"ada"]))
    body = FuzzBody("generate", b'{"conversation_id": "bob"}')
    cases = [FuzzRequest((named,), parameters={"commitkv_tenant": "red"}), FuzzRequest(()), body, FuzzBody("x", b"[1]")]
    replies = [Reply("error"), Reply("result", conversation="drawn"), Reply("result"), Reply("error")]
    assert conversations_of(cases, replies) == {("ada", "red"), ("drawn", ""), ("bob", "")}
    assert end_request("ada", "red").parameters == {"commitkv_tenant": "red"}
    tensors = input_tensors(end_request("ada", ""))
    assert tensors is not None and tensors[1].values == [b"ada"]


def test_whole_chats_without_an_id_are_told_apart() -> None:
    chat, named = (FuzzTensor(name, "BYTES", (1,), b"") for name in ("messages", "conversation_id"))
    assert is_unnamed_chat(FuzzRequest((chat,))) and not is_unnamed_chat(FuzzRequest((chat, named)))
    assert is_unnamed_chat(FuzzBody("generate", b'{"messages": "[]"}'))
    assert not is_unnamed_chat(FuzzBody("generate", b'{"messages": "[]", "conversation_id": "a"}'))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"replies": {"result": 9, "internal": 1}}, "1 requests: internal"),
        ({"replies": {"result": 9}}, "9 replies"),
        ({"same_answer": False}, "otherwise"),
        ({"same_processes": False}, "process"),
        ({"left_behind": {"KV bytes": 5, "conversations": 0}}, "left behind: 5 KV bytes"),
    ],
)
def test_a_report_fails_for_each_fault_alone(changes: dict[str, object], part: str) -> None:
    good = FuzzReport(10, 1.0, {"result": 4, "error": 6}, left_behind={"KV bytes": 0})
    assert good.failures == ()
    [failure] = replace(good, **changes).failures  # type: ignore[arg-type]
    assert part in failure


def test_no_requests_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--requests", "0", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: --requests")
