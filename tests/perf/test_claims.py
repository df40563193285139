"""The table of claims: what it is made from, and that it goes on where it was stopped. The whole run takes minutes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from perf import claims
from perf.claims import CLAIMS, Found, Parts, markdown, measure_times, of_conversation
from perf.evaluation.attention_share import AttentionShare
from runtime.errors import ConfigError

ATTENTION = AttentionShare(0.6, 0.8, (((1, 10), 0.7), ((11, 20), 0.2), ((21, 10**6), 0.1)), (1.5, 0.6, 0.4), 100)


def test_a_part_is_measured_once_and_of_one_engine(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> dict[str, tuple[float, float]]:
        measured.append("again")
        return {"full": (0.0, 0.1)}

    for _ in range(2):
        assert Parts(tmp_path / "out", "engine a").get("times", measure) == {"full": [0.0, 0.1]}
    assert measured == ["again"]
    Parts(tmp_path / "out", "engine b").get("times", measure)
    assert len(measured) == 2


def test_quality_without_a_policy_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        of_conversation(path, ["full"])
    scores = [{"policy": "full", "num_tokens": 1300}, {"policy": "full", "num_tokens": 4000}]
    path.write_text(json.dumps({"scores": [*scores, {"policy": "h2o", "num_tokens": 1300}]}), encoding="utf-8")
    assert of_conversation(path, ["full"])["full"]["num_tokens"] == 4000
    with pytest.raises(ConfigError, match="has no h2o at 4000 tokens"):
        of_conversation(path, ["full", "h2o"])


def test_every_policy_that_was_proposed_is_shipped_with_scores() -> None:
    shipped = Path(claims.__file__).parent / "results" / "quality.json"
    of_conversation(shipped, [policy for claim in CLAIMS for policy in claim.policies])


def test_time_is_compared_at_each_context(tiny_engine_dir: Path) -> None:
    args = argparse.Namespace(engine=tiny_engine_dir, kv_mib=64, rounds=1)
    times = measure_times(args, ["full", "quantize-int8"], (300, 500))
    assert set(times) == {"300", "500"}
    for of_context in times.values():
        assert of_context["full"][0] == 0.0 and of_context["quantize-int8"][0] < 1.0
        assert all(0 < share < 1 for _, share in of_context.values())


def test_each_claim_stands_beside_what_was_found() -> None:
    found = [Found("commitkv", "conversation", 3849, 0.815, 0.25, 0.985, 0.012, 0.97, 0.026)]
    table = markdown(found, ATTENTION)
    assert "| **CommitKV**, claimed | | | 40 to 60 | 30 | 95 of turns unharmed | | 5 to 8 |" in table
    assert "| commitkv | conversation, 3,849 tokens | 82 | 25 | 98 (97 of turns unharmed) | 0.012 | 2.6 |" in table
    assert "| of the weight on past turns, more than 20 turns back | 10 % (0.40 of an even share) |" in table
