"""The table of metrics, and what of an engine's and a turn's figures reaches which metric."""

from __future__ import annotations

import re

import pytest
from metric_board import Board
from simulated_engine import drain, make_engine, policies_for_tests

import runtime.policy.registry as registry
from runtime import errors
from runtime.checkpoint_hook import CheckpointFigures
from runtime.config import RuntimeConfig
from runtime.errors import ConversationBusyError, OutOfMemoryError, PromptTooLongError, QueueFullError, RequestError
from runtime.request import FinishEvent, Request, SamplingParams, TurnStats
from runtime.serving.metric_table import (
    ALL_METRICS,
    ENGINE_METRICS,
    REFUSALS,
    TURN_METRICS,
    Reading,
    refusal_reason,
)
from runtime.serving.metrics import Metrics

CONFIG = RuntimeConfig(kv_memory_bytes=1 << 20, tokens_per_step=24, probe_tokens_per_step=16)


def reading(engine: object, checkpoints: CheckpointFigures | None = None) -> Reading:
    stats = engine.stats()  # type: ignore[attr-defined]
    return Reading(stats, checkpoints or CheckpointFigures(), 12345, True)


@pytest.fixture(autouse=True)
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in policies_for_tests().items():
        monkeypatch.setitem(registry.ALL_POLICIES, name, policy)


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [spec.name for spec in ALL_METRICS]
    assert len(set(names)) == len(names)
    for spec in ALL_METRICS:
        assert re.fullmatch(r"(nv_trt_llm|nv_llm|commitkv)_[a-z_]+", spec.name)
        assert spec.help and bool(spec.label) == (spec.values != ("",))
        if spec.name.startswith("commitkv_"):
            assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert (spec.kind == "histogram") == bool(spec.buckets) and list(spec.buckets) == sorted(spec.buckets)


def test_every_engine_metric_is_read_with_exactly_its_label_values() -> None:
    engine, _, _ = make_engine(CONFIG)
    for metric in ENGINE_METRICS:
        assert set(metric.read(reading(engine))) == set(metric.spec.values), metric.spec.name


def test_turn_metrics_never_name_a_label_value_that_is_not_there() -> None:
    event = FinishEvent("r", "stop", "", TurnStats(1, 2, 3, 4, 5, 6, 7))
    for metric in TURN_METRICS:
        read = metric.read(event)
        assert read and set(read) <= set(metric.spec.values), metric.spec.name


def test_the_engine_s_figures_arrive() -> None:
    engine, _, manager = make_engine(CONFIG, policy="commitkv")
    board = Board()
    metrics = Metrics(board)
    for number in range(8):
        text = f"turn number {number} says something of its own"
        engine.submit(Request(f"r{number}", text, SamplingParams(max_tokens=12), "c"))
        drain(engine)
        metrics.read_engine(reading(engine))
    stats = engine.stats()
    assert board["commitkv_commits_total", ""] == stats.commits > 0
    assert board["commitkv_probes_total", "done"] == stats.probes > 0
    assert board["commitkv_renewals_total", ""] == stats.renewals > 0
    assert board["commitkv_evicted_entries_total", ""] == stats.dropped > 0
    assert board["commitkv_steps_total", ""] == stats.steps
    assert board["nv_trt_llm_general_metrics", "iteration_counter"] == stats.steps
    assert board["commitkv_conversations", ""] == 1
    states = ("active", "staged", "committed", "evictable", "scratch")
    assert sum(board["commitkv_kv_bytes", state] for state in states) == manager.budget.used_bytes
    assert board["commitkv_compression_ratio", ""] == stats.total_kv_bytes / stats.full_kv_bytes
    fraction = board["nv_trt_llm_kv_cache_block_metrics", "fraction"]
    assert fraction == manager.budget.used_bytes / manager.budget.total_bytes > 0
    total = sum(board["commitkv_engine_seconds_total", part] for part in ("plan", "execute", "commit"))
    assert 1000 * total == pytest.approx(stats.manager_time_ms + stats.execute_time_ms + stats.commit_time_ms)
    assert board["nv_trt_llm_runtime_memory_metrics", "cpu"] == 12345
    assert board["commitkv_engine_up", ""] == 1


def test_a_value_that_did_not_change_is_not_sent_again() -> None:
    engine, _, _ = make_engine(CONFIG)
    board = Board()
    metrics = Metrics(board)
    metrics.read_engine(reading(engine))
    before = {key: series.calls for key, series in board.series.items()}
    metrics.read_engine(reading(engine))
    changed = {key for key, series in board.series.items() if series.calls != before[key]}
    assert changed <= {("nv_trt_llm_general_metrics", "timestamp")}


def test_checkpoints_arrive() -> None:
    engine, _, _ = make_engine(CONFIG)
    board = Board()
    metrics = Metrics(board)
    metrics.read_engine(reading(engine, CheckpointFigures(written=1, written_bytes=500, failed=1, waiting=3)))
    metrics.read_engine(reading(engine, CheckpointFigures(written=2, written_bytes=520, failed=1, restored=4)))
    outcomes = {o: board["commitkv_checkpoints_total", o] for o in ("written", "failed", "restored", "refused")}
    assert outcomes == {"written": 2, "failed": 1, "restored": 4, "refused": 0}
    assert board["commitkv_checkpoint_bytes_total", ""] == 520
    assert board["commitkv_checkpoints_waiting", ""] == 0


def test_evictions_arrive_by_reason() -> None:
    engine, _, _ = make_engine(RuntimeConfig(kv_memory_bytes=1 << 20, max_conversations=1))
    for name in ("first", "second"):
        engine.submit(Request(name, "hello", SamplingParams(max_tokens=2), name))
        drain(engine)
    board = Board()
    Metrics(board).read_engine(reading(engine))
    assert board["commitkv_evictions_total", "count"] == 1
    assert board["commitkv_conversations", ""] == 1


def test_a_turn_counts_once_in_each_of_its_metrics() -> None:
    board = Board()
    metrics = Metrics(board)
    stats = TurnStats(1_000_000_000, 1_250_000_000, 2_000_000_000, 4_000_000_000, 30, 12, 9, recomputed_tokens=5)
    metrics.turn_ended(FinishEvent("r", "length", "", stats))
    metrics.turn_ended(FinishEvent("s", "cancelled", "", TurnStats(arrival_ns=1)))
    metrics.turn_failed()
    metrics.piece_gap(0.02)
    reasons = ("stop", "length", "cancelled", "error")
    assert [board["commitkv_turns_total", reason] for reason in reasons] == [0, 1, 1, 1]
    assert [board["commitkv_tokens_total", kind] for kind in ("prompt", "generated", "reused")] == [30, 9, 12]
    assert board["commitkv_recomputed_tokens_total", ""] == 5
    seen = {name: board.series[name, ""].seen for name, _ in board.series if name.endswith("_seconds")}
    assert seen == {
        "commitkv_queue_seconds": [0.25],
        "commitkv_time_to_first_token_seconds": [1.0],
        "commitkv_turn_seconds": [3.0],
        "commitkv_inter_token_seconds": [0.02],
    }
    assert board.series["nv_llm_output_token_len", "total_output_tokens"].seen == [9, 0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PromptTooLongError("x"), "prompt_too_long"),
        (ConversationBusyError("x"), "conversation_busy"),
        (OutOfMemoryError("x"), "no_room"),
        (QueueFullError("x", 1.0), "queue_full"),
        (RequestError("x"), "invalid"),
        (ValueError("x"), "internal"),
    ],
)
def test_refusals_have_reasons(error: Exception, reason: str) -> None:
    board = Board()
    Metrics(board).refused(error)
    assert board[REFUSALS.name, reason] == 1


def test_every_error_of_ours_has_a_reason() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
    assert len(kinds) > 5
    for kind in kinds:
        assert refusal_reason(kind.__new__(kind)) in set(REFUSALS.values) - {"internal"}, kind
