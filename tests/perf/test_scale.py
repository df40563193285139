"""What the table of `make scale` counts; the run itself is in tests/triton/test_scale.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perf import scale
from perf.load.turn_stream import Answer, Status
from perf.scale import Plan, Report, TurnRecord, Way, markdown, must_retry, part_of, way_of
from runtime.retelling import NOTE


def answer(status: Status = "ok", error: str = "", reused: int = 0, recomputed: int = 0, reason: str = "") -> Answer:
    turn = {"reused_tokens": reused, "recomputed_tokens": recomputed, "recomputed_reason": reason}
    return Answer(status, error, "", 0.0, (), 1.0, {"turn": turn})


RESTORED = "kv restored from a checkpoint of 90 tokens"


@pytest.mark.parametrize(
    ("history", "found", "way"),
    [
        (0, answer(), "new"),
        (90, answer(reused=90), "kept"),
        (90, answer(reused=90, reason=RESTORED), "restored"),
        (90, answer(recomputed=90, reason="kv of its checkpoint not used: torn"), "recomputed"),
        (90, answer(reused=60, recomputed=30, reason=RESTORED), "recomputed"),
        (90, answer(reused=60, reason=RESTORED), "cut"),
        (90, answer(reused=110, reason=NOTE), "retold"),
        (90, answer(reused=60), "cut"),
        (90, answer(), "cut"),
    ],
)
def test_how_a_turn_found_its_conversation(history: int, found: Answer, way: Way) -> None:
    assert way_of(found, history) == way


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (answer(), False),
        (answer("refused", "sampling_param_top_p: got 2.0, expected at most 1"), False),
        (answer("refused", "INTERNAL: internal error: KeyError"), False),
        (answer("refused", "INTERNAL: Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"), True),
        (answer("unreachable", "UNAVAILABLE: no replica answers"), True),
        (answer("unanswered"), True),
        (answer("refused", "conversation_id: 'a' is still running a turn"), True),
    ],
)
def test_what_a_client_asks_again(given: Answer, again: bool) -> None:
    assert must_retry(given) == again


def record(conversation: int, way: Way, tries: int = 1, text: str | None = "x", seconds: float = 1.0) -> TurnRecord:
    return TurnRecord(conversation, 0, tries, text, way, seconds, 90)


def test_a_conversation_counts_once_by_its_worst_turn() -> None:
    records = [record(0, "new"), record(0, "kept"), record(1, "kept"), record(1, "restored", tries=3, seconds=4.0),
               record(2, "restored"), record(2, "cut", text=None)]  # fmt: skip
    part = part_of("killed", records)
    assert part.conversations == {"kept": 1, "retold": 0, "restored": 1, "recomputed": 0, "cut": 1}
    assert (part.turns, part.lost, part.retried, part.longest_s) == (6, 1, 1, 4.0)
    report = Report(Plan(conversations=3), "nginx", "full", (part, part), 5, 6)
    assert report.lost == 2 and report.found("cut") == 2 and report.found("kept") == 2
    table = markdown(report)
    assert "| turns lost after retry | 1 | 1 |" in table and "5 of 6 (policy full)" in table
    assert len({line.count("|") for line in table.splitlines()[:-2]}) == 1
    assert "compress" not in table and "compress" in markdown(replace(report, policy="commitkv"))


@pytest.mark.parametrize("arguments", [["--turns", "0"], ["--conversations", "0"], ["--engine", "/nowhere"]])
def test_wrong_arguments_end_with_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.main([*arguments, "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: --")
