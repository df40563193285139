"""Every output under its name, and only what was asked for."""

import json

from runtime.request import FinishEvent, KvStats, TurnStats
from runtime.serving.contract import OutputChoice
from runtime.serving.responses import OUTPUTS, Piece, finish_outputs, stats_outputs, text_outputs

KV = KvStats(kv_bytes=100, kv_full_bytes=400, active=1, staged=2, committed=3, evicted=4, peak_kv_bytes=150)
STATS = TurnStats(
    arrival_ns=11, first_scheduled_ns=12, first_token_ns=13, last_token_ns=14, prompt_tokens=5, reused_tokens=6,
    generated_tokens=7, reused_blocks=8, missed_blocks=2, alloc_new_blocks=3, alloc_total_blocks=10,
    recomputed_tokens=21, recomputed_reason="kv dropped", kv=KV,
)  # fmt: skip
EVENT = FinishEvent("r", "stop", "END", STATS, -1.5)
EVERYTHING = OutputChoice(False, True, True, True, True, True, "drawn")


def test_a_plain_finish_tells_the_text_and_the_kv() -> None:
    plain = {o.name: o.values for o in finish_outputs(Piece("x"), EVENT, OutputChoice(), {})}
    assert plain == {
        "text_output": (b"x",), "kv_bytes": (100,), "kv_full_bytes": (400,), "kv_state_tokens": (1, 2, 3, 4),
        "kv_recomputed_tokens": (21,), "kv_note": (b"kv dropped",),
    }  # fmt: skip


def test_a_finish_with_everything() -> None:
    outputs = finish_outputs(Piece("\u00fc", (-0.5, -1.0), -1.5), EVENT, EVERYTHING, {"engine": {}})
    by_name = {o.name: o.values for o in outputs}
    assert set(by_name) == set(OUTPUTS) and len(outputs) == len(OUTPUTS)
    assert by_name["text_output"] == ("\u00fc".encode(),)
    assert by_name["finish_reason"] == (b"stop",) and by_name["stop_reason"] == (b"END",)
    assert by_name["cumulative_logprob"] == (-1.5,) and by_name["output_log_probs"] == (-0.5, -1.0)
    assert by_name["kv_cache_reused_block"] == (8,) and by_name["kv_cache_missed_block"] == (2,)
    assert by_name["kv_cache_alloc_new_blocks"] == (3,) and by_name["kv_cache_alloc_total_blocks"] == (10,)
    assert by_name["kv_cache_hit_rate"] == (0.8,)
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    assert [by_name[name] for name in names] == [(11,), (12,), (13,), (14,)]
    assert by_name["conversation_id"] == (b"drawn",)
    stats = by_name["engine_stats"][0]
    assert isinstance(stats, bytes) and json.loads(stats)["turn"]["kv"]["peak_kv_bytes"] == 150


def test_no_lookup_is_no_hit() -> None:
    event = FinishEvent("r", "stop", "", TurnStats())
    by_name = {o.name: o.values for o in finish_outputs(Piece(""), event, OutputChoice(perf_metrics=True), {})}
    assert by_name["kv_cache_hit_rate"] == (0.0,)


def test_pieces_carry_what_was_asked_for() -> None:
    piece = Piece("a", (-0.25,), -1.0)
    assert [o.name for o in text_outputs(piece, OutputChoice())] == ["text_output"]
    named = {o.name: o.values for o in text_outputs(piece, OutputChoice(cumulative_logprob=True, log_probs=True))}
    assert named == {"text_output": (b"a",), "cumulative_logprob": (-1.0,), "output_log_probs": (-0.25,)}
    assert {o.name for o in text_outputs(piece, OutputChoice(conversation_id="x"))} == {
        "text_output", "conversation_id",
    }  # fmt: skip


def test_reports() -> None:
    by_name = {o.name: o for o in stats_outputs(None, {"engine": {"idle": True}})}
    assert by_name["kv_bytes"].values == (0,) and by_name["kv_bytes"].dtype == "INT64"
    report = by_name["engine_stats"].values[0]
    assert isinstance(report, bytes) and json.loads(report) == {"engine": {"idle": True}, "conversation": None}
