"""Explaining a trace: what was left of which text when a turn began."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from perf.trace import explain, main, pieces, read_trace, report
from runtime.config import RuntimeConfig
from runtime.policy import registry
from runtime.request import Request, SamplingParams
from runtime.wiring import load_engine

HEADER = {"type": "header", "version": 3, "model": "m", "num_layers": 1, "num_kv_heads": 2}


def turn(number: int, first: int, tokens: list[int], conversation: str = "c", handle: int = 1) -> dict[str, Any]:
    return {
        "type": "turn", "handle": handle, "conversation": conversation, "turn": number, "first": first,
        "prompt_end": first + 1, "tokens": tokens,
    }  # fmt: skip


def row(fates: str, into: tuple[int, ...] = (), absorbed: tuple[Any, ...] = (), dropped: tuple[int, ...] = ()) -> Any:
    return {
        "scores": [0.5] * len(fates), "fates": fates, "into": list(into), "old_below": 0,
        "old_absorbed": [list(x) for x in absorbed], "old_dropped": list(dropped),
    }  # fmt: skip


def commit(number: int, after: int, positions: list[int], rows: list[Any]) -> dict[str, Any]:
    return {
        "type": "commit", "handle": 1, "commit": number, "turn": after, "line": 0.25, "keep_entries": 4,
        "positions": positions, "renewed": number == 2, "protected": [[0, 1]],
        "kept": sum(r["fates"].count("k") for r in rows), "absorbed": 1, "dropped": 2, "bytes_before": 2000,
        "bytes_after": 1000, "rows": rows,
    }  # fmt: skip


RECORDS = [
    HEADER,
    turn(1, 0, [10, 11, 12, 13, 14]),
    commit(1, 1, [1, 2, 3], [row("kad", into=(1,)), row("kkk")]),
    turn(2, 5, [15, 16, 17]),
    commit(2, 2, [4, 5], [row("kd", dropped=(1,)), row("kk", absorbed=((3, 2),))]),
    turn(3, 8, [18, 19]),
]


def test_what_is_left_before_a_turn() -> None:
    found = explain(RECORDS, 2)
    assert [(t.position, t.token_id, t.own, t.merged, t.gone) for t in found.tokens] == [
        (1, 11, 1.0, 0.0, 0.0), (2, 12, 0.5, 0.5, 0.0), (3, 13, 0.5, 0.0, 0.5),
    ]  # fmt: skip
    assert found.num_tokens == 5 and len(found.commits) == 1
    assert explain(RECORDS, 1).tokens == ()


def test_what_an_entry_took_in_goes_with_it() -> None:
    tokens = {t.position: t for t in explain(RECORDS, 3).tokens}
    assert (tokens[1].own, tokens[1].gone) == (0.5, 0.5)
    assert (tokens[2].own, tokens[2].merged, tokens[2].gone) == (0.5, 0.0, 0.5)  # merged into 1, which was dropped
    assert (tokens[3].merged, tokens[3].gone) == (0.5, 0.5)
    assert (tokens[4].commit, tokens[5].turn, tokens[5].gone) == (2, 2, 0.5)
    assert len(explain(RECORDS, 4).tokens) == 5  # the turn that would come next


def test_pieces_end_with_turns_and_commits() -> None:
    tokens = explain(RECORDS, 3).tokens
    assert [[t.position for t in run] for run in pieces(tokens)] == [[1, 2, 3], [4], [5]]
    long = [dataclasses.replace(tokens[0], position=i) for i in range(50)]
    assert [len(run) for run in pieces(long)] == [24, 24, 2]


def test_the_report_shows_the_worst_first() -> None:
    text = report(explain(RECORDS, 3), lambda ids: " ".join(map(str, ids)), worst=1)
    assert "commit 1, after turn 1: 3 tokens, 67% of their entries kept" in text
    assert "commit 2, after turn 2: 2 tokens computed anew, " in text
    assert "2,000 -> 1,000 bytes" in text
    assert text.splitlines()[-1].split() == ["[1,", "4)", "1", "1", "33%", "17%", "50%", "11", "12", "13"]
    assert "[5, 6)" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turn", "0"], "--turn: got 0, expected 1 to 4"),
        (["--turn", "9"], "--turn: got 9"),
        (["--turn", "2", "--conversation", "x"], "--conversation: got 'x'"),
        (["--turn", "2", "--worst", "0"], "--worst"),
        (["--turn", "2", "--engine", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    assert main(["explain", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ('{"role": "user", "content": "x"}\n', "line 1"),
        (json.dumps(HEADER) + "\nnot json\n", "line 2"),
        (json.dumps(HEADER | {"version": 7}) + "\n", "line 1"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_traces(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["explain", str(path), "--turn", "1"]) == 2
    assert message in capsys.readouterr().err


def test_a_record_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(RECORDS[1])[:20], encoding="utf-8")
    assert read_trace(path) == [HEADER]


def test_two_conversations_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [*RECORDS, turn(1, 0, [1, 2], "other", 2)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert main(["explain", str(path), "--turn", "1"]) == 2
    assert "c, other" in capsys.readouterr().err
    assert main(["explain", str(path), "--turn", "1", "--conversation", "other"]) == 0


def test_the_text_of_a_real_conversation(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = registry.ALL_POLICIES["commitkv"]
    schedule = dataclasses.replace(policy.schedule, min_tokens=100, recent_tokens=32)
    monkeypatch.setitem(registry.ALL_POLICIES, "commitkv", dataclasses.replace(policy, schedule=schedule))
    path = tmp_path / "trace.jsonl"
    config = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1, trace_file=str(path))
    engine = load_engine(tiny_engine_dir, config, verify=False)
    for number in range(4):
        text = f"Number {number}: the river was wide and the boat was small. " * 3
        engine.submit(Request(str(number), text, SamplingParams(max_tokens=4), "c"))
        busy = True
        while busy:
            _, busy = engine.step()
    assert main(["explain", str(path), "--turn", "4", "--engine", str(tiny_engine_dir)]) == 0
    shown = capsys.readouterr().out
    assert "conversation c: before turn 4" in shown and "the river was wide"[:10] in shown
    lines = [line for line in shown.splitlines() if line.lstrip().startswith("[")]
    assert len(lines) > 10 and any("boat was" in line for line in lines)
