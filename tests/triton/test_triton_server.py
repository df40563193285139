"""A real client talks to a real Triton server."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from served import BackgroundTurn, Stream, events_of, post, wait_until_no_turn_runs

from perf.client import (
    Chat,
    ServerUnreachableError,
    TurnError,
    TurnOptions,
    engine_stats,
    infer,
    server_version,
    tensor,
    wait_idle,
)
from perf.server import ServerOptions, ServerStartError, TritonServer

pytestmark = pytest.mark.triton


def options_for(engine_dir: Path, **changes: Any) -> ServerOptions:
    parameters = {"engine_dir": str(engine_dir), "kv_memory_bytes": str(64 << 20), "num_threads": "1"}
    return ServerOptions(parameters=parameters, **changes)


def test_streaming_gives_pieces_and_counts(url: str) -> None:
    with Chat(url, "streaming", policy="full") as chat:
        seen: list[str] = []
        result = chat.turn("hello", TurnOptions(max_tokens=20, logprob=True), seen.append)
        assert result.text == "".join(seen) and len(seen) > 1
        assert result.finish_reason == "length" and result.generated_tokens == 20
        assert result.kv.kv_bytes > 0 and result.kv.active > 20
        assert result.cumulative_logprob is not None and result.cumulative_logprob < 0
        assert result.ms_per_token is not None and result.ms_per_token > 0
        second = chat.turn("and again", TurnOptions(max_tokens=5))
        assert second.stats["turn"]["reused_tokens"] > 20
        assert second.kv.active > result.kv.active


def test_one_response_equals_the_stream(url: str) -> None:
    inputs = [tensor("text_input", "once upon a time"), tensor("sampling_param_max_tokens", 12)]
    whole = infer(url, inputs)
    pieces = infer(url, [*inputs, tensor("streaming", True)])
    assert len(whole) == 1 and len(pieces) > 2
    texts = [b"".join(r.as_numpy("text_output")).decode() for r in pieces]
    assert whole[0].as_numpy("text_output")[0].decode() == "".join(texts)


def test_input_is_part_of_the_output_on_request(url: str) -> None:
    shown = tensor("sampling_param_return_perf_metrics", False)
    inputs = [tensor("text_input", "once"), tensor("sampling_param_max_tokens", 3), shown]
    exclude = grpcclient.InferInput("sampling_param_exclude_input_from_output", [1], "BOOL")
    exclude.set_data_from_numpy(np.array([False]))
    [plain], [full] = infer(url, inputs), infer(url, [*inputs, exclude])
    assert full.as_numpy("text_output")[0] == b"once" + plain.as_numpy("text_output")[0]


def test_same_seed_same_text(url: str) -> None:
    def sample(seed: int) -> str:
        with Chat(url, f"seed-{seed}") as chat:
            return chat.turn("x", TurnOptions(max_tokens=16, temperature=1.0, seed=seed)).text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_two_conversations_at_once_answer_as_alone(url: str) -> None:
    def talk(name: str) -> list[str]:
        with Chat(url, name, policy="full") as chat:
            return [chat.turn(f"{name[0]} turn {i}", TurnOptions(max_tokens=24)).text for i in range(3)]

    alone = [talk("a-alone"), talk("b-alone")]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(talk, ["a-together", "b-together"]))
    assert together == alone


def test_commitkv_shrinks_a_long_conversation(url: str) -> None:
    with Chat(url, "shrinks", policy="commitkv") as chat:
        for number in range(3):
            result = chat.turn(f"{number} " + "some words to remember " * 25, TurnOptions(max_tokens=8))
        wait_idle(url, 60)
        kv, report = chat.state()
        assert result.kv.kv_full_bytes == kv.kv_full_bytes
        assert kv.committed > 0 and kv.evicted > 0 and kv.share < 0.8
        assert report["conversation"]["peak_kv_bytes"] >= kv.kv_bytes
        assert report["engine"]["commits"] >= 1


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ([tensor("text_input", "")], "text_input: got empty text"),
        ([], "text_input: got no tensor"),
        ([tensor("text_input", b"\xff\xfe")], "text_input: got bytes that are not UTF-8"),
        ([tensor("text_input", "x" * 5000)], "text_input: 5000 tokens"),
        ([tensor("text_input", ["a", "b"])], r"text_input: got shape \[2\]"),
        ([tensor("text_input", "x"), tensor("kv_policy", "nonsense")], "nonsense"),
        ([tensor("text_input", "x"), tensor("sampling_param_max_tokens", -1)], "sampling_param_max_tokens: got -1"),
        ([tensor("text_input", "x"), tensor("sampling_param_max_tokens", 1.0, "FP32")], "sampling_param_max_tokens"),
        ([tensor("text_input", "x"), tensor("sampling_param_temperature", -1.0)], "sampling_param_temperature"),
        ([tensor("text_input", "x"), tensor("protect", [[0, 2]])], r"protect: got \[0, 2\)"),
        ([tensor("conversation_id", "none"), tensor("conversation_end", True)], "conversation_id: got 'none'"),
        ([tensor("conversation_id", "none"), tensor("stats", True)], "conversation_id: got 'none'"),
    ],
)
def test_bad_requests_get_our_text(url: str, inputs: list[grpcclient.InferInput], part: str) -> None:
    with pytest.raises(TurnError, match=part):
        infer(url, inputs)
    [answer] = infer(url, [tensor("text_input", "still there"), tensor("sampling_param_max_tokens", 1)])
    assert answer.as_numpy("kv_bytes")[0] > 0


def test_a_second_turn_while_one_runs_is_refused(url: str) -> None:
    with Chat(url, "busy") as chat:
        running = BackgroundTurn(chat, TurnOptions(max_tokens=400))
        with pytest.raises(TurnError, match="still running a turn"):
            Chat(url, "busy").turn("me too")
        assert running.result().generated_tokens == 400


def test_a_client_that_leaves_frees_its_turn(url: str) -> None:
    chat = Chat(url, "leaver")
    running = BackgroundTurn(chat)
    assert engine_stats(url)["engine"]["running"] == 1
    running.leave.set()
    with pytest.raises(ConnectionAbortedError):
        running.result()
    wait_until_no_turn_runs(url)
    with pytest.raises(TurnError, match="leaver"):
        chat.state()


def test_stop_ends_a_turn_by_its_id(url: str) -> None:
    with Chat(url, "stopped") as chat:
        running = BackgroundTurn(chat)
        infer(url, [tensor("stop", True)], request_id="stopped/0")
        result = running.result()
    assert result.finish_reason == "cancelled" and 0 < len(result.pieces) < 1500
    with pytest.raises(TurnError, match="stop: no request"):
        infer(url, [tensor("stop", True)], request_id="stopped/0")


def test_many_short_turns_at_once(url: str) -> None:
    """Requests end while the server is asked whether their clients left."""

    def talk(number: int) -> int:
        options = TurnOptions(max_tokens=1 + number % 3)
        with Chat(url, f"short-{number}") as chat:
            return sum(chat.turn("x", options).generated_tokens for _ in range(25))

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(talk, range(12))) == 25 * 4 * (1 + 2 + 3)


def test_memory_goes_back_to_zero(url: str) -> None:
    with Chat(url, "short-lived") as chat:
        chat.turn("hello", TurnOptions(max_tokens=4))
        assert engine_stats(url)["engine"]["total_kv_bytes"] > 0
    wait_idle(url, 10)
    stats = engine_stats(url)["engine"]
    assert (stats["conversations"], stats["total_kv_bytes"]) == (0, 0)


def test_http_generate_answers_once(server: TritonServer) -> None:
    body = {"text_input": "hello", "sampling_param_max_tokens": 6, "return_finish_reason": True}
    status, text = post(server, "generate", body)
    answer = json.loads(text)
    assert status == 200 and answer["text_output"] and answer["finish_reason"] == "length"
    assert len(answer["kv_state_tokens"]) == 4
    status, text = post(server, "generate", {"text_input": "hello", "sampling_param_top_p": 2.0})
    assert status == 400 and "sampling_param_top_p: got 2.0" in json.loads(text)["error"]


def test_http_generate_stream_sends_events(server: TritonServer) -> None:
    body = {"text_input": "hello", "streaming": True, "sampling_param_max_tokens": 6}
    status, text = post(server, "generate_stream", body)
    events = events_of(text)
    assert status == 200 and len(events) > 2 and "kv_bytes" in events[-1]
    _, whole = post(server, "generate", body | {"streaming": False})
    assert "".join(event["text_output"] for event in events) == json.loads(whole)["text_output"]


def test_restart_and_sigterm(tiny_engine_dir: Path) -> None:
    """A stop lets the running turn finish; the next start serves again, on the same port."""
    first = TritonServer(options_for(tiny_engine_dir, grace_s=30.0)).start()
    try:
        running = BackgroundTurn(Chat(first.grpc_url, "last"), TurnOptions(max_tokens=300))
        first.stop()
        result = running.result()
    finally:
        first.stop(grace_s=0.0)
    assert first.returncode == 0
    assert (result.finish_reason, result.generated_tokens) == ("length", 300)
    with pytest.raises(ServerUnreachableError):
        Chat(first.grpc_url, "nobody").turn("x")
    with TritonServer(options_for(tiny_engine_dir, grace_s=1.0, grpc_port=first.ports["grpc"])) as second:
        assert second.grpc_url == first.grpc_url
        assert server_version(second.grpc_url) == "2.51.0"
        assert Chat(second.grpc_url, "again").turn("x", TurnOptions(max_tokens=3)).generated_tokens == 3
    assert not list(Path("/dev/shm").glob(f"{second._prefix}*"))


def test_a_killed_model_ends_the_server_and_the_turn(tiny_engine_dir: Path) -> None:
    """Triton itself would go on saying ready, and the client would wait until its own time-out."""
    with TritonServer(options_for(tiny_engine_dir, grace_s=1.0)) as server:
        running = BackgroundTurn(Chat(server.grpc_url, "orphan"))
        stubs = psutil.Process(server.pid).children()
        [model] = [stub for stub in stubs if "/tensorrt_llm/" in " ".join(stub.cmdline())]
        begin = time.monotonic()
        model.kill()
        with pytest.raises(ServerUnreachableError):
            running.result()
        assert time.monotonic() - begin < 20
        assert server.wait(10) not in (None, 0)  # killed by us, unless Triton aborted before
        with pytest.raises(ServerUnreachableError):
            Chat(server.grpc_url, "next").turn("x")


def test_a_damaged_engine_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ServerStartError, match="manifest"):
        TritonServer(options_for(tmp_path)).start()


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("kv_memory", "1", "model parameter kv_memory: unknown"),
        ("num_threads", "100000", "num_threads: got 100000, expected 0"),
        ("kv_memory_bytes", str(1 << 60), "kv_memory_bytes: the system has no"),
        ("tenant_parameter", "x-tenant", "model parameter tenant_parameter: got 'x-tenant'"),
        ("num_threads", "all", "model parameter num_threads: got 'all'"),
        ("default_policy", "nonsense", "nonsense"),
    ],
)
def test_wrong_model_parameters_are_refused(tiny_engine_dir: Path, name: str, value: str, part: str) -> None:
    options = ServerOptions(parameters={"engine_dir": str(tiny_engine_dir), name: value})
    with pytest.raises(ServerStartError, match=part) as caught:
        TritonServer(options).start()
    assert "TritonModelException" not in str(caught.value)


def test_parameters_of_the_server_hold_for_all_turns(tiny_engine_dir: Path) -> None:
    parameters = {
        "engine_dir": str(tiny_engine_dir), "default_policy": "full", "tenant_parameter": "commitkv_tenant_5ecret"
    }  # fmt: skip
    with TritonServer(ServerOptions(parameters=parameters, grace_s=1.0)) as server:
        with Chat(server.grpc_url, "ours", "commitkv") as chat:
            assert [chat.turn("x", TurnOptions(max_tokens=2)).generated_tokens for _ in range(2)] == [2, 2]
        with Chat(server.grpc_url, "default") as chat:
            for _ in range(3):
                result = chat.turn("word " * 100, TurnOptions(max_tokens=2))
            wait_idle(server.grpc_url, 20)
            assert (chat.state()[0].committed, chat.state()[0].active) == (0, result.kv.active)
        # A client's word for its tenant counts for nothing; the front end's does, by a name that only it knows.
        with Chat(server.grpc_url, "a", tenant="acme") as chat:
            chat.turn("x", TurnOptions(max_tokens=1))
            assert Chat(server.grpc_url, "a").state()[0].active > 0
            stream = Stream(server.grpc_url, {"commitkv-tenant-5ecret": "acme"})
            stream.send("tensorrt_llm", [tensor("stats", True), tensor("conversation_id", "a")])
            with pytest.raises(Exception, match="conversation_id: got 'a'"):
                stream.next()
            stream.close()
