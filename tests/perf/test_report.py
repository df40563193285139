import json

import pytest

from perf.client import KvState, TurnResult
from perf.report import DemoFacts, build_report, page, picture, summary, table
from perf.workload import Ask, Conversation, ManagerTimes, Run, TurnRecord, UserTurn

TURNS = tuple(
    UserTurn(f"turn {i} <b>", ask=Ask("tree", ("birch",)) if i in (2, 7) else None, max_tokens=4) for i in range(8)
)


def record(turn: UserTurn, text: str, kv_bytes: int, ms: float, generated: int = 5) -> TurnRecord:
    kv = KvState(kv_bytes, 1000, 1, 2, 3, 4)
    turn_stats = {
        "arrival_ns": 0, "first_token_ns": 10_000_000, "last_token_ns": int(10e6 + ms * 1e6 * (generated - 1)),
        "prompt_tokens": 20, "generated_tokens": generated,
    }  # fmt: skip
    result = TurnResult(text, (text,), (0.1,), "stop", "", kv, {"turn": turn_stats}, 1.0)
    return TurnRecord(turn, result, kv, kv_bytes + 5, 0.5, turn.ask.right(text) if turn.ask else None)


def run(policy: str, kv_bytes: int, ms: float, texts: list[str]) -> Run:
    records = [
        record(turn, text, kv_bytes * (i + 1), ms) for i, (turn, text) in enumerate(zip(TURNS, texts, strict=True))
    ]
    return Run(policy, tuple(records), ManagerTimes(10, 10, 180, 50), {"rss_bytes": 2**28, "peak_rss_bytes": 2**29})


FULL = run("full", 100, 40.0, ["a", "b", "Birch", "d", "e", "f", "g", "a birch"])
OURS = run("commitkv", 20, 30.0, ["a", "b", "birch", "d", "x", "f", "g", "an oak"])
FACTS = DemoFacts("tiny", "2.51.0", 20.0)


def test_report_holds_the_fields_of_the_contract() -> None:
    report = json.loads(json.dumps(build_report(FULL, OURS, FACTS)))
    assert {
        "model", "turns", "tokens", "full", "commitkv", "kv_bytes_ratio_end", "kv_bytes_ratio_peak",
        "ms_per_token_ratio_last_quarter", "same_answer_ratio", "server_version", "policy",
    } <= set(report)  # fmt: skip
    for name in ("full", "commitkv"):
        assert {
            "kv_bytes_end", "kv_bytes_peak", "kv_bytes_by_turn", "ms_per_token_by_turn", "facts_asked", "facts_right",
            "manager_time_ratio",
        } <= set(report[name])  # fmt: skip
    assert (report["turns"], report["tokens"]) == (8, 8 * 25)
    assert report["kv_bytes_ratio_end"] == pytest.approx(0.2)
    assert report["kv_bytes_ratio_peak"] == pytest.approx(165 / 805)
    assert report["ms_per_token_ratio_last_quarter"] == pytest.approx(0.75)
    assert report["same_answer_ratio"] == pytest.approx(5 / 8)
    assert (report["full"]["facts_right"], report["commitkv"]["facts_right"]) == (2, 1)
    assert report["commitkv"]["manager_time_ratio"] == pytest.approx(0.1)


def test_an_answer_of_one_token_has_no_speed() -> None:
    short = Run("full", (record(TURNS[0], "a", 10, 40.0, generated=1),), FULL.times, FULL.process)
    report = build_report(short, short, FACTS)
    assert report["full"]["ms_per_token_by_turn"] == [None]
    assert report["ms_per_token_ratio_last_quarter"] is None
    assert "too few tokens" in summary(report)
    assert " - " in table(short, short).splitlines()[1]


def test_table_picture_and_page() -> None:
    report = build_report(FULL, OURS, FACTS)
    lines = table(FULL, OURS).splitlines()
    assert len(lines) == 1 + len(TURNS)
    assert "20%" in lines[-1] and "[right]" in lines[-1] and "[wrong]" in lines[-1]
    png = picture(report)
    assert png.startswith(b"\x89PNG")
    text = page(report, [FULL, OURS], Conversation("demo", None, TURNS), png)
    assert "data:image/png;base64," in text and "http" not in text
    assert "turn 0 &lt;b&gt;" in text and "<b>" not in text
