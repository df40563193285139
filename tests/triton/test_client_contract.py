"""The whole client contract against a real server: what fails elsewhere, and what clients of others already send."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import LONG, BackgroundTurn, Stream, events_of, post, wait_until_no_turn_runs

from perf.client import Chat, TurnError, TurnOptions, engine_stats, infer, tensor
from perf.server import TritonServer

pytestmark = pytest.mark.triton

GREEDY = TurnOptions(max_tokens=24)


def older(name: str, values: Sequence[Any], dtype: str) -> grpcclient.InferInput:
    """A tensor as clients of the older ensemble send it: [1, n]."""
    kinds = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}
    made = grpcclient.InferInput(name, [1, len(values)], dtype)
    made.set_data_from_numpy(np.array([values], dtype=kinds[dtype]))
    return made


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output").reshape(-1)[0].decode())


def test_the_documented_request_to_the_older_ensemble(server: TritonServer) -> None:
    body = {"text_input": "What is ML?", "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    status, text = post(server, "generate", body, "ensemble")
    answer = json.loads(text)
    assert status == 200 and set(answer) == {"model_name", "model_version", "text_output"}
    status, text = post(server, "generate_stream", body | {"stream": True}, "ensemble")
    events = events_of(text)
    assert len(events) > 3 and "".join(event["text_output"] for event in events) == answer["text_output"]
    unknown = {"lora_scale": 0.5, "commitkv_tenant": 1.5}  # to Triton a request's parameters
    assert json.loads(post(server, "generate", body | unknown, "ensemble")[1]) == answer
    newer = {"text_input": "What is ML?", "sampling_param_max_tokens": 20, "sampling_param_end_id": 2}
    assert json.loads(post(server, "generate", newer)[1])["text_output"] == answer["text_output"]
    status, text = post(server, "generate", body | {"top_k": 3, "top_p": 2.0}, "ensemble")
    assert status == 400 and json.loads(text)["error"].startswith("top_p: got 2.0")


def test_the_older_ensemble_over_grpc_with_its_shapes(url: str) -> None:
    stream = Stream(url)
    inputs = [
        older("text_input", ["once"], "BYTES"), older("max_tokens", [9], "INT32"), older("stream", [False], "BOOL"),
        older("beam_width", [1], "INT32"), older("temperature", [1.0], "FP32"),
        older("stop_words", ["\x00", "\x01"], "BYTES"), older("return_log_probs", [True], "BOOL"),
    ]  # fmt: skip
    for _ in range(2):  # a decoupled model must outlive its first request
        stream.send("ensemble", inputs)
        result = stream.next()
        assert result.as_numpy("text_output").shape == (1,)
        assert result.as_numpy("cum_log_probs").shape == (1, 1)
        assert result.as_numpy("output_log_probs").shape == (1, 1, 9)
    stream.close()
    with pytest.raises(TurnError, match=r"text_input.*\[.*-1.*\]|shape"):
        infer(url, [older("text_input", ["once"], "BYTES")])


def test_leaving_the_older_ensemble_cancels_its_turn(url: str) -> None:
    stream = Stream(url)
    inputs = [
        older("text_input", ["x"], "BYTES"),
        older("max_tokens", [3000], "INT32"),
        older("stream", [True], "BOOL"),
    ]
    stream.send("ensemble", inputs)
    stream.next()
    assert engine_stats(url)["engine"]["running"] == 1
    stream.close(cancel=True)
    wait_until_no_turn_runs(url)


def test_log_probabilities_and_a_stop_string_across_pieces(url: str) -> None:
    plain = infer(url, [tensor("text_input", "tell"), tensor("sampling_param_max_tokens", 60)])[0]
    text = text_of(plain)
    stop = text[20:24]
    names = ("return_log_probs", "return_cumulative_logprob", "return_finish_reason", "return_stop_reason", "streaming")
    asked = [*(tensor(name, True) for name in names), tensor("sampling_param_return_perf_metrics", True)]
    stops = tensor("sampling_param_stop", [*(f"{text}{number}" for number in range(200)), stop])
    pieces = infer(url, [tensor("text_input", "tell"), tensor("sampling_param_max_tokens", 60), stops, *asked])
    assert "".join(map(text_of, pieces)) == text[: text.index(stop)]
    last = pieces[-1]
    assert last.as_numpy("stop_reason")[0].decode() == stop
    per_token = np.concatenate([piece.as_numpy("output_log_probs") for piece in pieces])
    turn = json.loads(last.as_numpy("engine_stats")[0])["turn"]
    assert len(per_token) == turn["generated_tokens"]
    assert last.as_numpy("cumulative_logprob")[0] == pytest.approx(per_token.sum(), rel=1e-5)


def test_cancelling_with_log_probabilities_leaves_the_server_well(url: str) -> None:
    options = TurnOptions(max_tokens=1500, logprob=True)
    leaving, stopped = BackgroundTurn(Chat(url, "left"), options), BackgroundTurn(Chat(url, "stopped"), options)
    leaving.leave.set()
    with pytest.raises(ConnectionAbortedError):
        leaving.result()
    infer(url, [tensor("stop", True)], request_id="stopped/0")
    result = stopped.result()
    assert result.finish_reason == "cancelled" and len(result.log_probs) >= len(result.pieces)
    wait_until_no_turn_runs(url)
    assert Chat(url, "after").turn("x", TurnOptions(max_tokens=2, logprob=True, end=True)).generated_tokens == 2


def test_bad_words_never_appear(url: str) -> None:
    with Chat(url, "any") as chat:
        text = chat.turn("say it", GREEDY).text
    bad = tuple(re.findall("[!-~]{2}", text)[:2])
    with Chat(url, "clean") as chat:
        clean = chat.turn("say it", TurnOptions(max_tokens=24, bad=bad)).text
    first = min(text.index(word) for word in bad)
    assert clean[:first] == text[:first] and clean != text and not any(word in clean for word in bad)


def test_a_whole_chat_goes_on_and_is_edited(url: str) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "first question " * 4}]
    with Chat(url, "") as client:
        first = client.turn(chat, GREEDY)
        assert len(client.conversation_id) > 20
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
        second = client.turn(chat, GREEDY)
        assert second.stats["turn"]["reused_tokens"] > 60 and second.recomputed_tokens == 0
        edited = [chat[0], {"role": "user", "content": "another question"}]
        third = client.turn(edited, GREEDY)
        with Chat(url, "fresh") as other:
            assert other.turn(edited, GREEDY).text == third.text
    bad = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(TurnError, match=r"messages\[1\]\.role: got 'user' after 'user'"):
        Chat(url, "bad").turn(bad)


def test_a_tenant_sees_its_own_conversations_only(url: str) -> None:
    with Chat(url, "mine", tenant="a") as mine, Chat(url, "mine", tenant="b") as same_id:
        mine.turn("hello", TurnOptions(max_tokens=2))
        with pytest.raises(TurnError, match="conversation_id: got 'mine'"):
            same_id.state()
        same_id.turn("hello", TurnOptions(max_tokens=2))
        running = BackgroundTurn(mine, LONG)
        with pytest.raises(TurnError, match="stop: no request"):
            infer(url, [tensor("stop", True)], request_id="mine/1", tenant="b")
        infer(url, [tensor("stop", True)], request_id="mine/1", tenant="a")
        assert running.result().finish_reason == "cancelled"


def test_a_forwarded_header_is_stronger_than_the_clients_word(url: str) -> None:
    with Chat(url, "held", tenant="a") as chat:
        chat.turn("hello", TurnOptions(max_tokens=2))
        ask = [tensor("stats", True), tensor("conversation_id", "held")]
        for parameters in ({"commitkv-tenant": "a"}, {"commitkv_tenant": "a"}):
            stream = Stream(url, {"commitkv-tenant": "b"})
            stream.send("tensorrt_llm", ask, **parameters)
            with pytest.raises(Exception, match=r"conversation_id: got 'held'|commitkv_tenant: got 2"):
                stream.next()
            stream.close()
        stream = Stream(url, {"commitkv-tenant": "a"})
        stream.send("tensorrt_llm", ask)
        assert stream.next().as_numpy("kv_bytes")[0] > 0
        stream.close()


def test_a_clients_time_out_cancels_its_turn(url: str) -> None:
    stream = Stream(url, timeout_s=1.5)
    stream.send("tensorrt_llm", [tensor("text_input", "x"), tensor("sampling_param_max_tokens", 4000)])
    with pytest.raises(Exception, match="Deadline Exceeded"):
        stream.next()
    wait_until_no_turn_runs(url)
    stream.close()


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_hanging_up_over_http_cancels_the_turn(server: TritonServer, url: str, model: str) -> None:
    newer = {"text_input": "x", "sampling_param_max_tokens": 3000, "streaming": True}
    body = json.dumps(newer if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 3000, "stream": True})
    host, port = server.http_url.split(":")
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall((head + body).encode())
        assert b"text_output" in connection.recv(1 << 16) + connection.recv(1 << 16)
    wait_until_no_turn_runs(url)


def test_two_requests_with_one_id_get_their_own_answers(url: str) -> None:
    def ask(text: str) -> str:
        inputs = [tensor("text_input", text), tensor("sampling_param_max_tokens", 16)]
        return text_of(infer(url, inputs, request_id="same")[-1])

    alone = [ask("left"), ask("right")]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, ["left", "right"])) == alone
    assert alone[0] != alone[1]


def test_the_shortest_answers_and_the_longest_prompt(url: str) -> None:
    for max_tokens in (0, 1):
        with Chat(url, f"short-{max_tokens}") as chat:
            result = chat.turn("x", TurnOptions(max_tokens=max_tokens))
            assert (result.generated_tokens, result.finish_reason) == (max_tokens, "length")
    names = ("return_finish_reason", "sampling_param_return_perf_metrics")
    asked = [tensor("sampling_param_max_tokens", 9), *(tensor(name, True) for name in names)]
    [fits] = infer(url, [tensor("text_input", "x" * 4095), *asked])
    assert json.loads(fits.as_numpy("engine_stats")[0])["turn"]["generated_tokens"] == 1
    assert fits.as_numpy("finish_reason")[0] == b"length"
    with pytest.raises(TurnError, match="text_input: 4096 tokens"):
        infer(url, [tensor("text_input", "x" * 4096), *asked])


def test_the_figures_are_true(url: str) -> None:
    """Of this turn alone: what the warm-up and other turns did is not in them."""
    with Chat(url, "counted", policy="full") as chat:
        first = chat.turn("x" * 100, TurnOptions(max_tokens=30)).stats["turn"]
        inputs = [tensor("text_input", "y"), tensor("conversation_id", "counted")]
        asked = [tensor("sampling_param_max_tokens", 2), tensor("sampling_param_return_perf_metrics", True)]
        [answer] = infer(url, [*inputs, *asked])
        state, _ = chat.state()
    figures = {
        name: int(answer.as_numpy(name)[0])
        for name in (
            "kv_cache_reused_block", "kv_cache_missed_block", "kv_cache_alloc_new_blocks", "arrival_time_ns",
            "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "kv_recomputed_tokens",
        )
    }  # fmt: skip
    turn = json.loads(answer.as_numpy("engine_stats")[0])["turn"]
    assert first["reused_tokens"] == first["reused_blocks"] == 0
    assert first["prompt_tokens"] + first["generated_tokens"] - 1 == turn["reused_tokens"]
    assert turn["reused_tokens"] + 1 + turn["prompt_tokens"] + turn["generated_tokens"] - 1 == state.active
    reused, missed = figures["kv_cache_reused_block"], figures["kv_cache_missed_block"]
    assert reused > 0 and missed == figures["kv_cache_alloc_new_blocks"]
    assert answer.as_numpy("kv_cache_hit_rate")[0] == pytest.approx(reused / (reused + missed))
    times = [figures[name] for name in figures if name.endswith("_time_ns")]
    assert times == sorted(times) and 0 < times[-1] - times[0] < 60e9 and abs(time.monotonic_ns() - times[-1]) < 60e9
    assert figures["kv_recomputed_tokens"] == 0
