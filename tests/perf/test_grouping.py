"""The arithmetic of the grouping measurement, and one small run of it on a tiny engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import grouping
from perf.bench_engine import BenchEngine, BenchText
from perf.grouping import Row, group_of, main, markdown, step_ms
from runtime.config import RuntimeConfig
from runtime.errors import ConfigError

ROW = Row("full", 2, mixed_ms=(100.0, 1000.0, 90.0), short_ms=(50.0, 600.0, 40.0), long_ms=(70.0, 600.0, 68.0))


def test_the_price_is_a_median_over_rounds() -> None:
    assert ROW.cost == pytest.approx(1.2)


def test_the_table_tells_what_each_group_waits_for() -> None:
    head, rule, line = markdown([ROW], ((4, 512), (3, 4096))).split("\n")
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "4 x 512 alone" in head and "3 x 4096 alone" in head and "2 : 1" in head
    # Medians 100, 50 and 70: two steps of the short and one of the long take 170 ms.
    assert line == "| full | 100.0 | 50.0 | 70.0 | 1.20 | 85.0 | 170.0 |"


def test_groups_are_read_or_refused() -> None:
    assert group_of("short", "4x512") == (4, 512)
    for bad in ("4", "x512", "0x512", "4x", "4x5", "-1x512", "4x512x2", "fourx512"):
        with pytest.raises(ConfigError, match=r"--short: got .*COUNTxTOKENS"):
            group_of("short", bad)


def test_only_the_chosen_take_part_in_a_step(tiny_engine_dir: Path) -> None:
    config = RuntimeConfig(kv_memory_bytes=64 << 20, num_threads=1)
    engine = BenchEngine(tiny_engine_dir, config, BenchText(tiny_engine_dir, 300))
    names = ["a", "b", "c"]
    for name in names:
        engine.grow(name, "full", 100)
    ids, _, _ = engine.begin_turns(names, "Hello")
    turns = {name: engine._engine.conversation(name) for name in names}
    assert step_ms(engine, ["a", "c"]) > 0
    assert [turns[name].num_generated for name in names] == [2, 1, 2]
    step_ms(engine, ["b"])
    assert [turns[name].num_generated for name in names] == [2, 2, 2]
    assert turns["a"].generated == turns["b"].generated
    engine.choose(names)
    engine.undo(ids)
    assert all(turn.turn is None for turn in turns.values())


def test_a_small_run(
    tiny_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grouping, "ROUNDS", 2)
    monkeypatch.setattr(grouping, "KV_BYTES", 64 << 20)
    arguments = ["--engine", str(tiny_engine_dir), "--short", "2x100", "--long", "1x400", "--short-steps", "2"]
    assert main([*arguments, "--threads", "1", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "grouping.json").read_text(encoding="utf-8"))
    assert report["groups"] == [[2, 100], [1, 400]] and "threads: 1" in report["engine"]
    assert [row["policy"] for row in report["rows"]] == ["full", "commitkv"]
    for row in report["rows"]:
        assert all(len(row[name]) == 2 and min(row[name]) > 0 for name in ("mixed_ms", "short_ms", "long_ms"))
        price = sorted((s + n) / m for s, n, m in zip(row["short_ms"], row["long_ms"], row["mixed_ms"], strict=True))
        assert row["cost"] == pytest.approx(sum(price) / 2)
    assert "| 2 x 100 alone | 1 x 400 alone |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--short", "many"], "--short"),
        (["--short", "4x512", "--long", "4x512"], "--long"),
        (["--short-steps", "0"], "--short-steps"),
        (["--policies", "magic"], "magic"),
        (["--short", "1x100", "--long", "1x4000"], "at most"),
        (["--short", "900x100", "--long", "1x400"], "at most"),
    ],
)
def test_bad_arguments(
    tiny_engine_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(tiny_engine_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
