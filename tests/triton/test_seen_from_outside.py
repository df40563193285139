"""What a real server shows of itself: metrics, logs, traces of requests."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from perf.client import Chat, TurnError, TurnOptions, TurnResult, infer, tensor, wait_idle
from perf.request_trace import request_trace_arguments
from perf.server import ServerOptions, TritonServer
from runtime.serving.metric_table import ALL_METRICS

pytestmark = pytest.mark.triton

SECRET = "xyzzyplugh"
LABELS = re.compile(r'(\w+)="([^"]*)"')


def options(engine_dir: Path, trace: str, log: Path | None = None) -> ServerOptions:
    parameters = {
        "engine_dir": str(engine_dir),
        "kv_memory_bytes": str(64 << 20),
        "num_threads": "1",
        "log_level": "debug",
    }
    arguments = request_trace_arguments(trace, 1)
    return ServerOptions(parameters=parameters, grace_s=20.0, log_path=log, arguments=arguments)


def scrape(server: TritonServer) -> dict[tuple[str, str], float]:
    """Series by (name, value of the label that is ours); histograms without their buckets."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    series = {}
    for line in text.splitlines():
        match = re.fullmatch(r"((?:commitkv|nv_trt_llm|nv_llm)_\w+)\{(.*)\} (\S+)", line)
        if match is None:
            continue
        labels = dict(LABELS.findall(match[2]))
        assert (labels.pop("model"), labels.pop("version")) == ("tensorrt_llm", "1")
        if "le" not in labels:
            assert len(labels) <= 1
            series[match[1], next(iter(labels.values()), "")] = float(match[3])
    return series


def scrape_until(server: TritonServer, wanted: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """The metrics once they hold `wanted`, or as they are after some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        series = scrape(server)
        if all(series.get(key) == value for key, value in wanted.items()):
            break
        time.sleep(0.2)
    return series


@dataclass(frozen=True)
class Visit:
    """Metrics before and after two turns, a refusal and a conversation's end; what the log and the trace hold."""

    before: dict[tuple[str, str], float]
    held: dict[tuple[str, str], float]
    after: dict[tuple[str, str], float]
    turns: list[TurnResult]
    engine: dict[str, Any]
    log: str
    traced: list[dict[str, Any]]


@pytest.fixture(scope="module")
def visit(tiny_engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    directory = tmp_path_factory.mktemp("outside")
    with TritonServer(options(tiny_engine_dir, str(directory / "trace.json"), directory / "log")) as server:
        before = scrape(server)
        with Chat(server.grpc_url, "ada", policy="commitkv") as chat:
            turns = [chat.turn(f"{SECRET} {n} " + "some words " * 70, TurnOptions(max_tokens=20)) for n in range(2)]
            with pytest.raises(TurnError):
                infer(server.grpc_url, [tensor("text_input", SECRET), tensor("sampling_param_top_p", 3.0)])
            wait_idle(server.grpc_url, 20)
            engine = chat.state()[1]["engine"]
            settled = {"steps_total": engine["steps"], "commits_total": engine["commits"]}
            wanted = {(f"commitkv_{name}", ""): float(value) for name, value in settled.items()}
            held = scrape_until(server, {**wanted, ("commitkv_probes_total", "done"): engine["probes"]})
        after = scrape_until(server, {("commitkv_conversations", ""): 0, ("commitkv_kv_bytes", "active"): 0})
    log = (directory / "log").read_text(encoding="utf-8")
    traced = [record for path in directory.glob("trace.json*") for record in json.loads(path.read_text("utf-8"))]
    return Visit(before, held, after, turns, engine, log, traced)


def test_every_metric_is_there_from_the_start_and_warm_up_is_not_counted(visit: Visit) -> None:
    for spec in ALL_METRICS:
        names = [f"{spec.name}_count", f"{spec.name}_sum"] if spec.kind == "histogram" else [spec.name]
        for key in ((name, value) for name in names for value in spec.values):
            assert key in visit.before, key
            if key == ("commitkv_engine_seconds_total", "plan"):  # an idle loop looks for work now and then
                assert visit.before[key] < 0.1
            elif spec.kind != "gauge":
                assert visit.before[key] == 0, key
    assert visit.before["commitkv_engine_up", ""] == 1


def test_two_turns_count_as_the_client_was_told(visit: Visit) -> None:
    held, told = visit.held, [turn.stats["turn"] for turn in visit.turns]
    assert held["commitkv_turns_total", "length"] == 2
    for kind in ("prompt", "generated", "reused"):
        assert held["commitkv_tokens_total", kind] == sum(turn[f"{kind}_tokens"] for turn in told)
    assert held["nv_llm_output_token_len_sum", "total_output_tokens"] == 40
    assert held["commitkv_refusals_total", "invalid"] == 1
    first = sum(turn["first_token_ns"] - turn["arrival_ns"] for turn in told) / 1e9
    assert held["commitkv_time_to_first_token_seconds_sum", ""] == pytest.approx(first)
    assert held["commitkv_turn_seconds_count", ""] == held["commitkv_queue_seconds_count", ""] == 2
    pieces = sum(len(turn.pieces) for turn in visit.turns)
    assert 0 < held["commitkv_inter_token_seconds_count", ""] <= pieces


def test_engine_metrics_are_the_engine_s_figures(visit: Visit) -> None:
    held, engine = visit.held, visit.engine
    assert held["commitkv_steps_total", ""] == engine["steps"] > 40
    assert held["commitkv_commits_total", ""] == engine["commits"]
    assert held["commitkv_probes_total", "done"] == engine["probes"] > 0
    assert held["commitkv_conversations", ""] == 1 and held["commitkv_running_turns", ""] == 0
    states = ("active", "staged", "committed", "evictable", "tables")
    assert sum(held["commitkv_kv_bytes", state] for state in states) == engine["total_kv_bytes"] > 0
    ratio = engine["total_kv_bytes"] / engine["full_kv_bytes"]
    assert held["commitkv_compression_ratio", ""] == pytest.approx(ratio)
    assert 0 < held["nv_trt_llm_kv_cache_block_metrics", "fraction"] < 1
    assert visit.after["commitkv_kv_bytes", "active"] == visit.after["commitkv_conversations", ""] == 0


def test_the_log_is_json_with_ids_and_without_text(visit: Visit) -> None:
    assert SECRET not in visit.log
    lines = [json.loads(line) for line in visit.log.splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["event"] == "turn ended"]
    assert [line["conversation_id"] for line in ended] == ["ada", "ada"]
    assert [line["generated_tokens"] for line in ended] == [20, 20]
    assert all(re.fullmatch(r"ada/\d#\d+", line["request_id"]) for line in ended)
    [refused] = [line for line in lines if line["event"] == "request refused"]
    assert (refused["reason"], refused["about"]) == ("invalid", "sampling_param_top_p")
    assert {line["event"] for line in lines} >= {"turn arrived", "stopped"}


def test_triton_s_own_trace_has_the_model_s_times(visit: Visit) -> None:
    ours = {record["id"] for record in visit.traced if record.get("model_name") == "tensorrt_llm"}
    times: dict[int, dict[str, int]] = {number: {} for number in ours}
    for record in visit.traced:
        if record["id"] in ours:
            times[record["id"]].update({stamp["name"]: stamp["ns"] for stamp in record.get("timestamps", [])})
    assert len(ours) >= 3
    for stamps in times.values():
        assert stamps["REQUEST_START"] <= stamps["QUEUE_START"] <= stamps["COMPUTE_START"] <= stamps["REQUEST_END"]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a place that takes OTLP over HTTP, and the spans that it was sent."""
    spans: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in body["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    spans.extend({**span, "resource": resource["resource"]} for span in scope["spans"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    place = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=place.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{place.server_address[1]}/v1/traces", spans
    place.shutdown()
    thread.join()
    place.server_close()


def test_spans_join_the_caller_s_trace(tiny_engine_dir: Path, collector: tuple[str, list[dict[str, Any]]]) -> None:
    url, spans = collector
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with TritonServer(options(tiny_engine_dir, url)) as server:
        request = urllib.request.Request(
            f"http://{server.http_url}/v2/models/tensorrt_llm/generate",
            json.dumps({"text_input": "hello", "sampling_param_max_tokens": 3}).encode(),
            {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{parent}-01"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.status == 200
    by_name = {span["name"]: span for span in spans if span["traceId"] == trace_id}
    assert by_name["InferRequest"]["parentSpanId"] == parent
    assert by_name["tensorrt_llm"]["parentSpanId"] == by_name["InferRequest"]["spanId"]
    events = {event["name"] for event in by_name["compute"]["events"]}
    assert events >= {"COMPUTE_START", "COMPUTE_END"}
    assert {"key": "service.name", "value": {"stringValue": "commitkv"}} in by_name["compute"]["resource"]["attributes"]
