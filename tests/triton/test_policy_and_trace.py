"""The server takes a policy file for the conversations that name none, and writes a trace of their commits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.client import Chat, TurnOptions
from perf.serve import server_options
from perf.server import ServerOptions, ServerStartError, TritonServer
from perf.trace import explain, read_trace
from runtime import manifest as manifests
from runtime.policy.policy_file import make_policy_file, write_policy_file

pytestmark = pytest.mark.triton


def write_policy(path: Path, engine_dir: Path) -> Path:
    changes = {"budget_ratio": 0.2, "schedule": {"min_tokens": 100, "recent_tokens": 32}}
    model = manifests.load(engine_dir, verify=False).model
    write_policy_file(path, make_policy_file("mine", model, "commitkv", changes), {})
    return path


def test_a_server_with_a_policy_file_and_a_trace(tiny_engine_dir: Path, tmp_path: Path) -> None:
    path = write_policy(tmp_path / "policy.json", tiny_engine_dir)
    trace = tmp_path / "trace.jsonl"
    base = server_options(tiny_engine_dir, kv_mib=64, threads=1, policy=str(path))
    with TritonServer(ServerOptions(parameters={**base.parameters, "trace_file": str(trace)}, grace_s=2.0)) as server:
        with Chat(server.grpc_url, "ada") as chat:
            for number in range(3):
                chat.turn(f"Number {number}: the river was wide. " * 6, TurnOptions(max_tokens=4))
                chat.wait_idle(30)
            kv, _ = chat.state()
        with Chat(server.grpc_url, "eve", policy="mine") as named:
            named.turn("Hello", TurnOptions(max_tokens=2))
    assert kv.evicted > 200 and kv.active < 100
    found = explain(read_trace(trace), 3, "ada")
    assert len(found.commits) == 2 and sum(token.gone for token in found.tokens) > 50


def test_a_policy_file_of_another_model_stops_the_start(tiny_engine_dir: Path, tmp_path: Path) -> None:
    path = write_policy(tmp_path / "policy.json", tiny_engine_dir)
    record = json.loads(path.read_text(encoding="utf-8"))
    record["model"]["num_layers"] = 80
    path.write_text(json.dumps(record), encoding="utf-8")
    base = server_options(tiny_engine_dir, kv_mib=64, threads=1, policy=str(path))
    with pytest.raises(ServerStartError, match=r"model\.num_layers is 80, expected 2"):
        TritonServer(ServerOptions(parameters=base.parameters)).start()
