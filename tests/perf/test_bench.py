"""The arithmetic of the benchmark, and one small run of it on a tiny engine with every peer that needs no set-up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import perf.bench as bench_module
import runtime.policy.registry as registry
from builder.model import EMBEDDING
from perf.bench import Grid, main
from perf.bench_engine import BenchEngine, BenchText, run_steps
from perf.bench_peers import LlamaCppSystem, TransformersSystem
from perf.bench_report import Row, decode_table, fits, line_slope, ratio_of_rounds, slopes
from perf.peer_model import PeerMissingError, PeerModel, transformers_model
from runtime.config import RuntimeConfig
from runtime.policy.base import Schedule

MIB = 1 << 20


def row(system: str, context: int, step_ms: float, batch: int = 1, kv_bytes: int = MIB) -> Row:
    return Row(system, context, batch, step_ms, None, None, kv_bytes, weight_bytes=10 * MIB)


def test_the_floor_reads_weights_once_and_every_history() -> None:
    point = row("full", 512, 44.0, batch=4, kv_bytes=3 * MIB)
    assert point.floor_ms(MIB * 1000.0) == pytest.approx(10 + 4 * 3)
    assert point.distance(MIB * 1000.0) == pytest.approx(2.0)
    assert point.tokens_per_s == pytest.approx(4 / 0.044)


def test_slope_is_that_of_least_squares() -> None:
    assert line_slope([0, 1000, 3000], [5.0, 7.0, 11.0]) == pytest.approx(0.002)
    assert line_slope([0, 1, 2], [0.0, 3.0, 0.0]) == pytest.approx(0.0)


def test_slopes_compare_with_the_full_cache_of_the_same_batch() -> None:
    rows = [row("ours", 1000, 10.0), row("ours", 3000, 11.0), row("full", 1000, 10.0), row("full", 3000, 20.0)]
    rows += [row("ours", 1000, 10.0, batch=8), row("ours", 2000, 12.0, batch=8), row("once", 1000, 1.0)]
    found = {(s.system, s.batch): s for s in slopes(rows, "full")}
    assert set(found) == {("full", 1), ("ours", 1), ("ours", 8)}
    assert found["ours", 1].to_full == pytest.approx(0.1) and found["full", 1].to_full == 1.0
    assert found["ours", 1].growth == pytest.approx(1.1)
    assert found["ours", 8].ms_per_1k == pytest.approx(2.0) and found["ours", 8].to_full is None


def test_a_ratio_is_the_median_of_rounds() -> None:
    assert ratio_of_rounds([1.0, 10.0, 3.0], [2.0, 20.0, 3.0]) == 0.5


def test_fits_count_measured_bytes() -> None:
    rows = [row("full", 4096, 1.0, kv_bytes=90 * MIB), row("ours", 4096, 1.0, kv_bytes=16 * MIB), row("ours", 512, 1.0)]
    attention = dataclasses.replace(row("torch", 4096, 1.0), only_attention=True)
    assert fits([*rows, attention]) == {"full": 2, "ours": 16}
    assert fits(rows[2:]) == {}


def test_table_leaves_cells_empty_where_nothing_was_measured() -> None:
    head, rule, first, second = decode_table([row("b", 2048, 8.0), row("a", 512, 4.0)], 1e9).split("\n")
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert first.startswith("| 512 | 1 | a | 4.0 |  | ") and second.startswith("| 2048 | 1 | b | 8.0 |")


def test_steps_stop_at_the_budget_but_not_before_two() -> None:
    calls: list[int] = []
    assert len(run_steps(lambda: calls.append(1), 5, 10.0)) == 5
    assert len(run_steps(lambda: calls.append(1), 5, 0.0)) == 2 and len(calls) == 7


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compresses the short conversations of these tests."""
    for name in ("commitkv", "quantize-int8"):
        policy = dataclasses.replace(registry.ALL_POLICIES[name], schedule=Schedule(min_tokens=200, recent_tokens=64))
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("policy", ["full", "commitkv"])
def test_a_copy_answers_as_its_original_and_undoing_leaves_no_trace(tiny_engine_dir: Path, policy: str) -> None:
    text = BenchText(tiny_engine_dir, 700)
    engine = BenchEngine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=64 * MIB, num_threads=1), text)
    engine.grow("a", policy, 500)
    held = engine.kv("a")
    assert abs(held.active + held.staged + held.committed + held.evicted - 500) <= 50
    assert (held.committed > 0) == (policy == "commitkv")
    engine.clone("a", "b")
    assert engine.kv("b") == held and not engine.step(), "a copy has nothing left to do"
    manager = engine._engine._manager
    manager.check_invariants()
    ids, _, _ = engine.begin_turns(["a", "b"], "Say something.")
    for _ in range(6):
        engine.step()
    first, second = (engine._engine.conversation(name) for name in ("a", "b"))
    assert first.num_generated == 7 and first.generated == second.generated
    engine.undo(ids)
    assert engine.kv("a").kv_bytes == engine.kv("b").kv_bytes == held.kv_bytes
    engine.end("b")
    engine.end("a")
    manager.check_invariants()
    assert manager.budget.used_bytes == 0


def test_transformers_peer_has_the_engines_weights_and_takes_steps_back(tiny_engine_dir: Path) -> None:
    text = BenchText(tiny_engine_dir, 200)
    engine = BenchEngine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=64 * MIB, num_threads=1), text)
    model = PeerModel(tiny_engine_dir, engine.spec, "fp32", text.tokens, 1)
    decoder = transformers_model(model)
    system = TransformersSystem(model, decoder)
    system.begin(100, 1)
    ours: Any = engine._engine._executor
    assert torch.equal(decoder.get_input_embeddings().weight, ours._decoder._weights.tables[EMBEDDING])
    engine.grow("a", "full", 100)
    plan_logits = engine._engine.peek("a", "Hello", "", ours.logits)
    conversation = engine._engine.conversation("a")
    whole = (*conversation.tokens, *engine._engine._intake.preview(conversation, "Hello", ""))
    with torch.inference_mode():
        expected = decoder(torch.tensor([whole]), logits_to_keep=1).logits[0, -1]
    assert torch.allclose(plan_logits, expected, rtol=1e-3, atol=2e-2 * expected.abs().max().item())
    assert len(system.decode(3, 10.0).step_ms) == 3 and (system.prefill(16) or 0.0) > 0
    assert system._first.get_seq_length() == 100
    assert system.kv_bytes == 100 * engine.spec.kv_token_bytes("fp32")
    system.begin(120, 3)
    assert system._cache.get_seq_length() == 120 and system._cache.layers[0].keys.shape[0] == 3


def test_llama_cpp_without_its_environment_says_what_to_do(tiny_engine_dir: Path, tmp_path: Path) -> None:
    text = BenchText(tiny_engine_dir, 100)
    engine = BenchEngine(tiny_engine_dir, RuntimeConfig(kv_memory_bytes=64 * MIB, num_threads=1), text)
    model = PeerModel(tiny_engine_dir, engine.spec, "fp32", text.tokens, 1)
    with pytest.raises(PeerMissingError, match="run make peers"):
        LlamaCppSystem(model, tmp_path / "bin" / "python", tmp_path / "x.gguf", "f16")


@pytest.mark.usefixtures("early")
def test_a_small_run(tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid((256, 512), (1, 2), rounds=1, steps=3, budget_s=0.5, prefill_rounds=1)
    monkeypatch.setattr(bench_module, "QUICK", grid)
    monkeypatch.setattr(bench_module, "PEERS_PYTHON", tmp_path / "none" / "python")
    arguments = ["--engine", str(tiny_engine_dir), "--quick", "--kv-mib", "64", "--threads", "1"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    rows = {(r["system"], r["context"], r["batch"]): r for r in report["rows"]}
    assert len(rows) == 5 * 2 * 2
    assert rows["commitkv", 512, 2]["kv_bytes"] < rows["quantize-int8", 512, 2]["kv_bytes"]
    assert rows["quantize-int8", 512, 2]["kv_bytes"] < rows["full", 512, 2]["kv_bytes"]
    assert all(r["step_ms"] > 0 and r["distance"] > 0 for r in rows.values())
    assert rows["full", 256, 1]["to_full"] == 1.0 and 0 < rows["full", 256, 1]["manager_ratio"] < 1
    assert any("make peers" in text for text in report["skipped"])
    assert (tmp_path / "decode.png").stat().st_size > 1000 and (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "8"], "--contexts"),
        (["--batches", "two"], "--batches"),
        (["--policies", "magic"], "magic"),
        (["--contexts", "4000", "--no-peers"], "--contexts"),
    ],
)
def test_bad_arguments(
    tiny_engine_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(tiny_engine_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
